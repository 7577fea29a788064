"""What configs say about each layer: every published kind, and what is refused, by file and key."""

from __future__ import annotations

import copy

import pytest

from finegrained_kernels.checkpoint import CheckpointError
from finegrained_kernels.checkpoint.quantization_config import read_quantization

L = "model.layers.3"
NVFP4_WEIGHTS = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "dynamic": False}
LOCAL = NVFP4_WEIGHTS | {"dynamic": "local"}
MIXED = {
    "quant_method": "modelopt",
    "quant_algo": "MIXED_PRECISION",
    "kv_cache_quant_algo": "FP8",
    "quantized_layers": {
        f"{L}.mlp.gate_proj": {"quant_algo": "NVFP4", "group_size": 16},
        f"{L}.mlp.experts": {"quant_algo": "W4A16_NVFP4", "group_size": 16},
        f"{L}.mlp.experts.0.up_proj": {"quant_algo": "NVFP4_AWQ", "group_size": 16, "pre_quant_scale": True},
        f"{L}.self_attn.q_proj": {"quant_algo": "FP8"},
        f"{L}.linear_attn.in_proj": {"quant_algo": "FP8_PB_WO"},
        "model.layers.*.shared_expert": {"quant_algo": "MXFP8"},
        "lm_head": {"quant_algo": "NVFP4", "group_size": 16},
    },
}


def group(target, weights, inputs=None):
    return {"targets": [target], "weights": weights, "input_activations": inputs}


def compressed_tensors(inputs=None, **more):
    groups = {"group_0": group("Linear", NVFP4_WEIGHTS, inputs)}
    return {
        "quant_method": "compressed-tensors",
        "format": "nvfp4-pack-quantized",
        "config_groups": groups,
    } | more


def algorithms(section, *modules, hf=None, config=None):
    """Algorithm and activations of each module; None where it is not quantized."""
    config = {"quantization_config": section} if config is None else config
    formats = [read_quantization(config, hf).layer_format(module) for module in modules]
    return [f and (f.algorithm, f.activations) for f in formats]


def test_modelopt_of_one_algorithm():
    section = {
        "quant_method": "modelopt",
        "quant_algo": "NVFP4",
        "ignore": ["lm_head", "model.layers.0*", f"{L}.mlp.gate", f"{L}.self_attn", "*.router"],
        # ModelOpt also writes this, but the algorithm takes precedence
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 4, "group_size": 16}}},
    }
    names = ["lm_head", "model.layers.0.mlp.up_proj", f"{L}.mlp.gate", f"{L}.self_attn.q_proj", f"{L}.router.proj"]
    assert algorithms(section, *names) == [None] * 5
    assert algorithms(section, f"{L}.mlp.gate_proj", "model.layers.1.mlp.up_proj") == [("NVFP4", "static")] * 2
    for name, activations in {"W4A16_NVFP4": None, "NVFP4A16": None, "NVFP4_AWQ": "static", "FP8": "static"}.items():
        assert algorithms(section | {"quant_algo": name}, f"{L}.mlp.gate_proj") == [(name, activations)]


def test_modelopt_of_several_algorithms():
    names = [
        "mlp.gate_proj",
        "mlp.experts.1.up_proj",
        "mlp.experts.0.up_proj",
        "self_attn.q_proj",
        "linear_attn.in_proj",
    ]
    assert algorithms(MIXED, *(f"{L}.{name}" for name in names), "lm_head") == [
        ("NVFP4", "static"),
        ("W4A16_NVFP4", None),
        ("NVFP4_AWQ", "static"),
        ("FP8", "static"),
        ("FP8_PB_WO", None),
        ("NVFP4", "static"),
    ]
    assert algorithms(MIXED, f"{L}.shared_expert.up_proj") == [("MXFP8", "dynamic")]
    assert (
        algorithms(MIXED, f"{L}.mlp.up_proj", f"{L}.self_attn.q_proj2", "model.layers.33.mlp.gate_proj") == [None] * 3
    )
    config = read_quantization({"quantization_config": MIXED})
    assert config.kv_cache == "FP8"
    assert config.layer_format(f"{L}.mlp.experts.0.up_proj").pre_quant_scale
    assert config.layer_format(f"{L}.linear_attn.in_proj").block_size == (128, 128)
    # a module's own entry precedes an exclusion, and an exclusion precedes the entry of a module that contains it
    section = MIXED | {"ignore": ["lm_head", f"{L}.mlp.experts.2.*"]}
    assert algorithms(section, "lm_head", f"{L}.mlp.experts.2.up_proj") == [("NVFP4", "static"), None]


def test_the_config_may_be_nested_or_elsewhere():
    hf = {"quantization": {"quant_algo": "NVFP4", "exclude_modules": ["lm_head"], "kv_cache_quant_algo": "FP8"}}
    assert algorithms(None, f"{L}.mlp.up_proj", "lm_head", hf=hf, config={}) == [("NVFP4", "static"), None]
    assert algorithms(None, f"{L}.mlp.up_proj", hf=hf, config={"quantization_config": None}) == [("NVFP4", "static")]
    assert read_quantization(None, hf).path == ()
    # the table in one file, the rest in the other
    table = {"quantization": {"quantized_layers": MIXED["quantized_layers"]}}
    section = {key: value for key, value in MIXED.items() if key != "quantized_layers"}
    assert algorithms(section, f"{L}.mlp.gate_proj", hf=table) == [("NVFP4", "static")]
    for path in (
        ("compression_config",),
        ("text_config", "quantization_config"),
        ("a_config", "text_config", "compression_config"),
    ):
        config = compressed_tensors(ignore=["lm_head"])
        for key in reversed(path):
            config = {key: config}
        names = [f"model.language_model.{L.removeprefix('model.')}.mlp.up_proj", "language_model.lm_head"]
        assert algorithms(None, *names, config=config) == [("NVFP4A16", None), None]
        assert read_quantization(config).path == path
    outer = {"quantization_config": MIXED, "text_config": {"quantization_config": compressed_tensors()}}
    assert read_quantization(outer).method == "modelopt"
    assert read_quantization({}) is read_quantization(None) is read_quantization({"text_config": {}}) is None


def test_names_may_lack_or_have_what_wraps_the_text_model():
    section = MIXED | {"ignore": []}
    for wrapped in (f"language_model.{L}", "model.language_model.layers.3"):
        assert algorithms(section, f"{wrapped}.mlp.gate_proj") == [("NVFP4", "static")]
    assert algorithms(section, "model.visual.layers.3.mlp.gate_proj") == [None]


def test_compressed_tensors():
    ignore = ["lm_head", f"{L}.mlp.gate", r"re:.*linear_attn.*", r"re:.*mlp\.shared_expert_gate$"]
    section = compressed_tensors(ignore=ignore)
    ignored = ["lm_head", f"{L}.mlp.gate", f"{L}.linear_attn.out_proj", f"{L}.mlp.shared_expert_gate"]
    assert algorithms(section, *ignored) == [None] * 4
    quantized = [f"{L}.mlp.experts.0.gate_proj", f"{L}.self_attn.q_proj", f"{L}.mlp.shared_expert_gate.up"]
    assert algorithms(section, *quantized) == [("NVFP4A16", None)] * 3
    form = read_quantization({"quantization_config": section}).layer_format(quantized[0])
    assert form.globals_divide and form.weight_only and form.group_size == 16
    assert algorithms(compressed_tensors(LOCAL), quantized[0]) == [("NVFP4", "static")]
    assert algorithms(compressed_tensors(LOCAL | {"dynamic": True}), quantized[0]) == [("NVFP4", "dynamic")]
    assert read_quantization({"quantization_config": section}).layer_format("x.proj", "Embedding") is None
    # compress wrote the table: it says which layers are compressed, not what they are
    table = {f"{L}.mlp.experts": {"quant_algo": "NVFP4", "group_size": 16, "weight_scale_encoding": "csf"}}
    assert algorithms(section | {"quantized_layers": table}, quantized[0]) == [("NVFP4A16", None)]


def test_compressed_tensors_of_several_formats():
    fp8 = {"num_bits": 8, "type": "float"}
    section = compressed_tensors(format="mixed-precision", kv_cache_scheme=fp8)
    section["config_groups"] |= {
        "channels": group(r"re:.*self_attn\..*", fp8 | {"strategy": "channel"}, {"dynamic": True}),
        "blocks": group("re:.*linear_attn.*", fp8 | {"strategy": "block", "block_structure": [128, 128]}),
        "one": group(f"{L}.self_attn.o_proj", fp8 | {"strategy": "tensor"}, fp8 | {"dynamic": False}),
        "mx": group(f"{L}.shared", fp8 | {"group_size": 32, "strategy": "group"}, {"dynamic": True}),
        "ints": group("model.layers.9", {"num_bits": 8, "type": "int", "strategy": "channel"}),
    }
    config = read_quantization({"quantization_config": section})
    forms = {
        name: config.layer_format(f"{L}.{name}")
        for name in ("self_attn.q_proj", "self_attn.o_proj", "linear_attn.a", "shared.up", "mlp.up")
    }
    assert [form.family for form in forms.values()] == ["fp8", "fp8", "fp8", "mxfp8", "nvfp4"]
    assert [form.activations for form in forms.values()] == ["dynamic", "static", None, "dynamic", None]
    assert [form.per_channel for form in forms.values()] == [True, False, False, False, False]
    assert [form.block_size for form in forms.values()] == [None, None, (128, 128), None, None]
    assert config.layer_format("model.layers.9.up").family == "other"
    assert config.kv_cache == "FP8"


def test_fp8_blocks_beside_nvfp4():
    fp8 = {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": ["lm_head", "mlp.gate"],
    }
    names = [f"{L}.mlp.experts.0.up_proj", f"{L}.self_attn.q_proj", f"{L}.mlp.gate", "lm_head"]
    assert algorithms(fp8, *names) == [("FP8", "dynamic"), ("FP8", "dynamic"), None, None]
    both = [("NVFP4", "static"), ("FP8", "dynamic"), None, None]
    ignore = [f"{L}.self_attn", f"{L}.mlp.gate", "lm_head"]
    groups = compressed_tensors(LOCAL)["config_groups"]
    assert algorithms(fp8 | {"config_groups": groups, "ignore": ignore}, *names) == both
    table = {"quantized_layers": {f"{L}.mlp.experts": {"quant_algo": "NVFP4"}}}
    assert algorithms(fp8 | table, *names) == both
    hf = {"quantization": {"quant_algo": "NVFP4", "exclude_modules": ignore}}
    assert algorithms(fp8, *names, hf=hf) == both
    form = read_quantization({"quantization_config": fp8}).layer_format(names[1])
    assert form.block_size == (128, 128)
    assert algorithms({"quant_method": "mxfp8"}, names[1]) == [("MXFP8", "dynamic")]


def test_only_the_kv_cache_is_quantized():
    hf = {"quantization": {"quant_algo": None, "kv_cache_quant_algo": "FP8"}}
    config = read_quantization({}, hf)
    assert (config.kv_cache, config.layer_format(f"{L}.mlp.up_proj")) == ("FP8", None)


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"quant_method": "awq"}, "quant_method"),
        ({"quant_method": 3}, "quant_method"),
        ({"quant_algo": "NVFP5"}, "quant_algo"),
        ({"quant_algo": ["NVFP4"]}, "quant_algo"),
        ({"quantized_layers": {}}, "quantized_layers"),
        ({"quantized_layers": None}, "quantized_layers"),
        ({"quantized_layers": []}, "quantized_layers"),
        ({"quantized_layers": {"a": "NVFP4"}}, "quantized_layers.a"),
        ({"quantized_layers": {"a": {"quant_algo": "X"}}}, "quantized_layers.a.quant_algo"),
        ({"quantized_layers": {"a": {"quant_algo": "NVFP4", "group_size": 32}}}, "quantized_layers.a.group_size"),
        ({"quantized_layers": {"a": {"quant_algo": "NVFP4", "group_size": "16"}}}, "quantized_layers.a.group_size"),
        ({"quantized_layers": {"re:(": {"quant_algo": "NVFP4"}}}, "quantized_layers"),
        ({"ignore": "lm_head"}, "ignore"),
        ({"ignore": [1]}, "ignore"),
        ({"ignore": ["re:["]}, "ignore"),
        ({"exclude_modules": {}}, "exclude_modules"),
        ({"kv_cache_quant_algo": 8}, "kv_cache_quant_algo"),
        ({"kv_cache_scheme": []}, "kv_cache_scheme"),
        ({"transform_config": []}, "transform_config"),
        ({"transform_config": {"config_groups": {"R": {}}}}, "transform_config.config_groups.R.apply"),
        ({"transform_config": {"config_groups": {"R": {"apply": [1]}}}}, "transform_config.config_groups.R.apply"),
        ({"config_groups": []}, "config_groups"),
        ({"config_groups": {"g": None}}, "config_groups.g"),
        ({"config_groups": {"g": {"targets": "Linear", "weights": {}}}}, "config_groups.g.targets"),
        ({"config_groups": {"g": {"weights": []}}}, "config_groups.g.weights"),
        ({"config_groups": {"g": {"weights": {}}}}, "config_groups.g.weights.num_bits"),
        ({"config_groups": {"g": {"weights": {"num_bits": "4"}}}}, "config_groups.g.weights.num_bits"),
        ({"config_groups": {"g": group("Linear", NVFP4_WEIGHTS, 4)}}, "config_groups.g.input_activations"),
        (
            {"config_groups": {"g": group("Linear", NVFP4_WEIGHTS, {"dynamic": "no"})}},
            "config_groups.g.input_activations.dynamic",
        ),
        (
            {"config_groups": {"g": group("Linear", {"num_bits": 8, "type": "float", "strategy": "block"})}},
            "config_groups.g.weights.block_structure",
        ),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "weight_block_size"),
        ({"quant_method": "fp8", "weight_block_size": [0, 128]}, "weight_block_size"),
        ({"quant_method": "fp8", "activation_scheme": "often"}, "activation_scheme"),
        ({"quant_method": "fp8", "modules_to_not_convert": "lm_head"}, "modules_to_not_convert"),
    ],
)  # fmt: skip
def test_what_makes_no_sense_is_refused_by_file_and_key(change, key):
    section = copy.deepcopy(MIXED) | change
    for path in (("quantization_config",), ("text_config", "quantization_config")):
        config = section
        for part in reversed(path):
            config = {part: config}
        with pytest.raises(CheckpointError) as caught:
            read_quantization(config)
        assert str(caught.value).startswith(f"config.json: {'.'.join(path)}.{key}")
        assert "\n" not in str(caught.value)


def test_other_faults_are_named_too():
    def message(config, hf=None):
        with pytest.raises(CheckpointError) as caught:
            read_quantization(config, hf)
        return str(caught.value)

    assert message({}, {"quantization": []}).startswith("hf_quant_config.json: quantization: expected an object")
    hf = {"quantization": {"quant_algo": "FP3"}}
    assert message({}, hf).startswith("hf_quant_config.json: quantization.quant_algo: 'FP3', expected one of")
    hf = {"quantization": {"quantized_layers": {"a": "NVFP4"}}}
    assert message({"quantization_config": MIXED}, hf).startswith(
        "hf_quant_config.json: quantization.quantized_layers.a: "
    )
    assert message({"quantization_config": "x"}).startswith("config.json: quantization_config: expected an object")
    nested = {"a_config": {"quantization_config": MIXED}, "b_config": {"quantization_config": compressed_tensors()}}
    assert message(nested).startswith("config.json: b_config.quantization_config: differs from a_config")
    empty = {"quantization_config": {"quant_method": "compressed-tensors"}}
    assert message(empty).startswith("config.json: quantization_config.config_groups: missing")


def test_activations_of_eight_bits_are_another_format():
    form = read_quantization({"quantization_config": compressed_tensors(LOCAL | {"num_bits": 8})})
    assert form.has_nvfp4 and form.layer_format("a").family == "other"
    assert algorithms(compressed_tensors({"dynamic": True}), "a") == [("NVFP4", "dynamic")]


def test_transforms_of_activations_are_not_supported_and_of_weights_are_done():
    def unsupported(*places):
        scheme = {"type": "hadamard", "apply": [{"targets": ["Linear"], "location": place} for place in places]}
        section = compressed_tensors(transform_config={"config_groups": {"R": scheme}})
        return [str(fault) for fault in read_quantization({"quantization_config": section}).unsupported]

    assert unsupported("weight_input", "weight_output") == []
    (fault,) = unsupported("input", "weight_input", "q_attn")
    assert fault.startswith("config.json: quantization_config.transform_config.config_groups.R: hadamard at input, ")
    for nothing in (None, {}, {"config_groups": {}}):
        section = compressed_tensors(transform_config=nothing)
        assert read_quantization({"quantization_config": section}).unsupported == ()


def test_known_formats_that_nothing_here_reads_have_a_name():
    section = {
        "quant_method": "modelopt",
        "quant_algo": "MIXED_PRECISION",
        "quantized_layers": {"a": {"quant_algo": "INT4_AWQ"}},
    }
    form = read_quantization({"quantization_config": section}).layer_format("a")
    assert (form.family, form.algorithm) == ("other", "INT4_AWQ")
