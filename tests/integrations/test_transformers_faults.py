"""Checkpoints that do not fit their model or their config: an error that says what and where, before anything runs."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("transformers", reason="needs transformers, the extra [transformers]")

from transformers import AutoConfig, AutoModelForCausalLM

from checkpoints import edit_json, read_tensors, write_checkpoint
from finegrained_kernels.checkpoint import CheckpointError
from moe_models import load, write_checkpoints
from replicas import small_config, store_nvfp4

EXPERT = "model.layers.1.mlp.experts.3"
SCALE = f"{EXPERT}.up_proj.weight_scale"


@pytest.fixture(scope="module")
def paths(bundle, tmp_path_factory) -> dict[str, Path]:
    return write_checkpoints(tmp_path_factory.mktemp("faults"), "qwen3_moe", input_scale=0.01)


@pytest.fixture
def damaged(paths, tmp_path) -> Callable[..., Path]:
    """The compressed checkpoint after a change to its tensors or its config."""

    def damage(tensors: Callable[[dict], object] | None = None, config: Callable[[dict], object] | None = None) -> Path:
        content = read_tensors(paths["csf"])
        if tensors is not None:
            tensors(content)
        root = write_checkpoint(tmp_path / "damaged", content, json.loads((paths["csf"] / "config.json").read_text()))
        if config is not None:
            edit_json(root / "config.json", config)
        return root

    return damage


def put(name: str, tensor: torch.Tensor) -> Callable[[dict], object]:
    return lambda tensors: tensors.update({name: tensor})


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (f"{SCALE}.nvfp4_csf_exceptions", rf"{SCALE}.nvfp4_csf_fixed: unpaired"),
        (f"{SCALE}.nvfp4_csf_fixed", rf"{SCALE}.nvfp4_csf_exceptions: unpaired"),
        (f"{EXPERT}.up_proj.weight", rf"{SCALE}.nvfp4_csf_fixed: no weight beside it"),
        (f"{EXPERT}.up_proj.weight_scale_2", rf"{SCALE}.nvfp4_csf_fixed: no second-level scale"),
        (f"{EXPERT}.down_proj.input_scale", rf"{EXPERT}.down_proj.input_scale: missing: quantized activations"),
        ("lm_head.weight", r"lm_head.weight: the model needs it, and no shard has it"),
        ("model.layers.1.mlp.gate.weight", r"model.layers.1.mlp.gate.weight: the model needs it"),
    ],
)
def test_something_missing(damaged, name, message):
    with pytest.raises(CheckpointError, match=message):
        load(damaged(lambda tensors: tensors.pop(name)))


def test_a_whole_expert_or_projection_missing(damaged):
    def remove(prefix: str) -> Callable[[dict], object]:
        return lambda tensors: [tensors.pop(name) for name in list(tensors) if name.startswith(prefix)]

    root = damaged(remove(f"{EXPERT}.up_proj."))
    with pytest.raises(
        CheckpointError, match=r"model.layers.1.mlp.experts: up_proj: no NVFP4 scales for experts \[3\]"
    ):
        load(root)


def test_a_layer_too_many(damaged):
    def copy_layer(tensors: dict) -> None:
        for name in [name for name in tensors if ".layers.1." in name]:
            tensors[name.replace(".layers.1.", ".layers.7.")] = tensors[name].clone()

    def mark(config: dict) -> None:
        layers = config["quantization_config"]["quantized_layers"]
        layers["model.layers.7.mlp.experts"] = layers["model.layers.1.mlp.experts"]

    with pytest.raises(CheckpointError, match=r"has no model.layers.7.mlp.experts.\w+_proj: only"):
        load(damaged(copy_layer, mark))


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        (f"{EXPERT}.up_proj.weight", torch.zeros(64, 32, dtype=torch.uint8), rf"{SCALE}.nvfp4_csf_fixed: expected U8"),
        (f"{EXPERT}.up_proj.weight", torch.zeros(64, 64), rf"{EXPERT}.up_proj.weight must be U8 or I8, got F32"),
        (
            f"{SCALE}.nvfp4_csf_fixed",
            torch.zeros(3, 80, dtype=torch.uint8),
            rf"{SCALE}.nvfp4_csf_fixed: expected U8 \[",
        ),
        (f"{EXPERT}.up_proj.weight_scale_2", torch.ones(2), r"up_proj.weight_scale_2: expected one F32 value"),
        (
            f"{EXPERT}.up_proj.weight_scale_2",
            torch.tensor(float("nan")),
            r"up_proj.weight_scale_2: is nan, which is no",
        ),
        (
            f"{EXPERT}.down_proj.weight_scale_2",
            torch.tensor(float("inf")),
            r"down_proj.weight_scale_2: is inf, which is",
        ),
        (f"{EXPERT}.up_proj.input_scale", torch.ones(2), r"up_proj.input_scale: expected one F32 value"),
        (f"{EXPERT}.up_proj.input_scale", torch.tensor(0.02), r"up_proj.input_scale: differs from gate's"),
        (
            f"{EXPERT}.down_proj.input_scale",
            torch.tensor(0.0),
            r"down_proj.input_scale: is 0.0, which is not a scale; load with activation_format='bf16' or",
        ),
        (f"{EXPERT}.up_proj.bias", torch.zeros(64), r"up_proj.bias: unknown, F32 \[64\]: NVFP4 experts have"),
        (
            f"{SCALE}.nvfp4_csf_exceptions",
            torch.tensor([5, 5], dtype=torch.int32).view(torch.uint32),
            rf"{SCALE}.nvfp4_csf_exceptions: exceptions are out of order",
        ),
        ("lm_head.weight", torch.zeros(120, 128, dtype=torch.bfloat16), r"lm_head.weight: expected shape \[128, 128\]"),
    ],
)
def test_a_wrong_tensor(damaged, name, tensor, message):
    with pytest.raises(CheckpointError, match=message):
        load(damaged(put(name, tensor)))


@pytest.mark.parametrize("activation_format", ["bf16", "nvfp4_dynamic"])
def test_a_wrong_input_scale_that_only_saving_reads(damaged, activation_format):
    name = f"{EXPERT}.up_proj.input_scale"
    with pytest.raises(CheckpointError, match=rf"{name}: expected one F32 value, got BF16 \[\]"):
        load(damaged(put(name, torch.tensor(0.01).bfloat16())), activation_format=activation_format)


def test_experts_of_another_size_than_the_config_says(damaged):
    root = damaged(config=lambda config: config.update(moe_intermediate_size=96))
    message = r"experts.0.gate_proj.weight: expected \[96, 64\] for the model.layers.0.mlp.experts of the model"
    with pytest.raises(CheckpointError, match=message):
        load(root)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda layers: layers.update({"model.layers.9.mlp.experts": {"weight_scale_encoding": "csf"}}),
            r"config.json: model.layers.9.mlp.experts: marked as compressed, but the checkpoint has no",
        ),
        (
            lambda layers: layers.update({"model.layers.9.mlp.experts": {"quant_algo": "NVFP4"}}),
            r"config.json: model.layers.9.mlp.experts: named as NVFP4, but the checkpoint has no such layer",
        ),
        (
            lambda layers: layers.update({"model.layers.0.self_attn.q_proj": {"quant_algo": "FP8"}}),
            r"self_attn.q_proj: named as FP8, but the checkpoint has no such layer",
        ),
        (
            lambda layers: layers.update({"model.layers.0.self_attn.q_proj": {"quant_algo": "W4A8_AWQ"}}),
            r"self_attn.q_proj: quant_algo is 'W4A8_AWQ': no format that is supported",
        ),
        (
            lambda layers: layers["model.layers.1.mlp.experts"].update(weight_scale_encoding="zip"),
            r"model.layers.1.mlp.experts: unknown weight_scale_encoding 'zip'",
        ),
        (
            lambda layers: layers.pop("model.layers.1.mlp.experts"),
            r"model.layers.1.mlp.experts: has compressed scales, but is not marked",
        ),
    ],
)
def test_a_wrong_config(damaged, change, message):
    root = damaged(config=lambda config: change(config["quantization_config"]["quantized_layers"]))
    with pytest.raises(CheckpointError, match=message):
        load(root)


def test_a_config_that_names_single_experts(paths, tmp_path):
    """As in ModelOpt's MIXED_PRECISION, where every linear layer has its own entry."""
    root = shutil.copytree(paths["dense"], tmp_path / "single")

    def name_experts(config: dict) -> None:
        layers = config["quantization_config"]["quantized_layers"]
        modules = [
            f"{module}.{expert}.{projection}"
            for module in layers
            for expert in range(8)
            for projection in ("gate_proj", "up_proj", "down_proj")
        ]
        config["quantization_config"]["quantized_layers"] = {key: {"quant_algo": "NVFP4"} for key in modules}

    edit_json(root / "config.json", name_experts)
    ids = torch.arange(8).view(1, -1)
    assert torch.equal(load(root)(ids).logits, load(paths["dense"])(ids).logits)
    stray = {"model.layers.9.mlp.experts.0.up_proj": {"quant_algo": "NVFP4"}}
    edit_json(root / "config.json", lambda config: config["quantization_config"]["quantized_layers"].update(stray))
    with pytest.raises(
        CheckpointError, match=r"layers.9.mlp.experts.0.up_proj: named as NVFP4, but the checkpoint has no"
    ):
        load(root)


def test_structures_that_the_kernels_do_not_compute(paths, tmp_path):
    root = shutil.copytree(paths["csf"], tmp_path / "gelu")
    edit_json(root / "config.json", lambda config: config.update(hidden_act="gelu"))
    with pytest.raises(CheckpointError, match=r"Qwen3MoeExperts cannot run on these kernels: its activation is GELU"):
        load(root)


ROUTED = {"n_routed_experts": 2, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "n_group": 1, "topk_group": 1}
OTHER_EXPERTS = {
    "gpt_oss": (
        {"num_local_experts": 2, "num_experts_per_tok": 2, "sliding_window": 64},
        "model.layers.0.mlp.experts: GptOssExperts cannot run on these kernels: has_bias is True; is_transposed is",
    ),
    "longcat_flash": (
        ROUTED | {"expert_ffn_hidden_size": 64, "zero_expert_num": 1, "q_lora_rank": 64, "kv_lora_rank": 64},
        "LongcatFlashExperts cannot run on these kernels: it is not of transformers' common kind",
    ),
    "nemotron_h": (
        ROUTED | {"hybrid_override_pattern": "E*", "moe_shared_expert_intermediate_size": 64},
        "NemotronHForCausalLM has no model.layers.0.mixer.experts.gate_up_proj: only experts of gate, up and down are",
    ),
}


@pytest.mark.parametrize("architecture", OTHER_EXPERTS)
def test_experts_of_another_kind_are_refused_for_what_they_are(bundle, architecture, tmp_path):
    changes, message = OTHER_EXPERTS[architecture]
    config = small_config(architecture, **changes)
    experts = "backbone.layers.0.mixer.experts" if architecture == "nemotron_h" else "model.layers.0.mlp.experts"
    content = {}
    for name, shape in (("gate_proj", (64, 128)), ("up_proj", (64, 128)), ("down_proj", (128, 64))):
        if architecture != "nemotron_h" or name != "gate_proj":
            stored = store_nvfp4(np.ones(shape)).tensors
            content |= {f"{experts}.{e}.{name}.{key}": value.clone() for e in range(2) for key, value in stored.items()}
    said = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
    document = config.to_dict() | {"dtype": "bfloat16", "quantization_config": said}
    with pytest.raises(CheckpointError, match=re.escape(message)):
        load(write_checkpoint(tmp_path / "experts", content, document))


@pytest.mark.parametrize(
    ("changes", "sizes"), [({"moe_intermediate_size": 48}, "128 x 48"), ({"hidden_size": 80}, "80 x 64")]
)
@pytest.mark.parametrize("strategy", ["auto", "staged", "dense"])
def test_sizes_that_the_kernels_do_not_take(bundle, tmp_path, changes, sizes, strategy):
    paths = write_checkpoints(tmp_path, "qwen3_moe", **changes)
    with pytest.raises(
        CheckpointError, match=rf"cannot run on these kernels: they are {sizes}, which must be multiples of"
    ):
        load(paths["csf"], strategy)


UNKNOWN = {
    "level of the checkpoint": ("router_scale", torch.tensor(3.0)),
    "level of the model": ("model.amax", torch.tensor(3.0)),
    "layer": ("model.layers.0.input_quantizer", torch.tensor(3.0)),
    "block": ("model.layers.0.self_attn.qkv_zero_point", torch.zeros(3, dtype=torch.int32)),
    "linear layer": ("model.layers.0.self_attn.o_proj.weight_scale", torch.tensor(3.0)),
    "linear layer, packed": ("model.layers.0.self_attn.o_proj.weight_packed", torch.zeros(128, 16, dtype=torch.int32)),
    "head": ("lm_head.weight_scale", torch.ones(128, 1)),
    "experts": ("model.layers.1.mlp.experts.weight_scale_3", torch.tensor(3.0)),
    "expert": (f"{EXPERT}.input_scale", torch.tensor(3.0)),
    "projection": (f"{EXPERT}.up_proj.weight_scale_3", torch.tensor(3.0)),
    "projection, no scale": (f"{EXPERT}.up_proj.rotation", torch.ones(4)),
    "float scale of no cache": ("model.layers.0.mlp.gate.k_scale", torch.tensor(3.0)),
    "integer scale of a cache": ("model.layers.0.self_attn.k_proj.k_scale", torch.tensor(3)),
    "float codebook": ("model.layers.0.self_attn.o_proj.codebook", torch.ones(16)),
    "packed bytes anywhere": ("model.layers.0.self_attn.rotation", torch.zeros(4, dtype=torch.uint8)),
}


@pytest.mark.parametrize("level", UNKNOWN)
def test_no_quantized_tensor_is_ignored(damaged, level):
    name, tensor = UNKNOWN[level]
    with pytest.raises(CheckpointError, match=rf"model.safetensors: {name}: unknown"):
        load(damaged(put(name, tensor)))


def test_scales_of_a_quantized_cache_are_said_to_be_left_out(damaged, monkeypatch):
    from finegrained_kernels.integrations.transformers import quantizer

    said: list[str] = []
    monkeypatch.setattr(quantizer.logger, "warning_once", said.append)
    names = [f"model.layers.{i}.self_attn.{n}" for i in (0, 1) for n in ("k_proj.k_scale", "v_proj.v_scale")]
    root = damaged(lambda tensors: tensors.update({name: torch.tensor(0.5) for name in names}))
    load(root).save_pretrained(root.parent / "saved")
    (message,) = said
    said_first = "scales of a quantized KV cache are not applied, 4 such as model.layers.0.self_attn.k_proj.k_scale: "
    assert message.startswith(said_first)
    assert read_tensors(root.parent / "saved").keys() == read_tensors(root).keys()


@pytest.mark.parametrize(
    ("dtype", "stored", "scale"),
    [(torch.int8, "I8", "SCB"), (torch.float8_e5m2, "F8_E5M2", "weight_scale"), (torch.uint8, "U8", "absmax")],
)
def test_other_formats_are_not_cast(damaged, dtype, stored, scale):
    """Otherwise, transformers would cast the codes to bfloat16, and drop their scale with a warning."""
    name = "model.layers.0.self_attn.o_proj"

    def quantize_a_projection(tensors: dict) -> None:
        tensors[f"{name}.weight"] = tensors[f"{name}.weight"].float().to(dtype)
        tensors[f"{name}.{scale}"] = torch.tensor(3.0)

    message = rf"model.safetensors: {name}.weight: is {stored}, in layer {name}: no format that is supported"
    with pytest.raises(CheckpointError, match=message):
        load(damaged(quantize_a_projection))


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        (
            {"weight": torch.zeros(128, 128).to(torch.float8_e4m3fn)},
            r"o_proj.weight: FP8 \[128, 128\] in layer .*o_proj: expected",
        ),
        (
            {"weight": torch.zeros(128, 128).to(torch.float8_e4m3fn), "weight_scale": torch.ones(3)},
            r"o_proj.weight_scale: F32 \[3\] for FP8 \[128, 128\] in layer .*o_proj: expected one float, one a row",
        ),
        (
            {"weight": torch.zeros(64, 128).to(torch.float8_e4m3fn), "weight_scale": torch.tensor(1.0)},
            r"o_proj.weight: FP8 \[64, 128\] in layer .*o_proj: expected weights \[128, 128\]",
        ),
    ],
)
def test_fp8_that_does_not_fit(damaged, tensors, message):
    name = "model.layers.0.self_attn.o_proj"
    with pytest.raises(CheckpointError, match=message):
        load(damaged(lambda content: content.update({f"{name}.{last}": tensor for last, tensor in tensors.items()})))


def test_nothing_is_initialized_in_silence(paths):
    """By transformers' own loading info, nothing is missing, unexpected or mismatched."""
    for layout in ("csf", "dense"):
        _, info = AutoModelForCausalLM.from_pretrained(paths[layout], output_loading_info=True)
        assert not any(info.values()), info


def test_a_config_without_quantization_does_not_load_packed_bytes(damaged):
    root = damaged(config=lambda config: config.pop("quantization_config"))
    with pytest.raises(CheckpointError, match="has compressed scales, but is not marked as compressed"):
        load(root)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda q: q.update(quant_algo="FP8"), r"quantization_config: quant_algo is 'FP8'"),
        (lambda q: q.update(quant_algo="W4A8_AWQ"), r"quantization_config: quant_algo is 'W4A8_AWQ'"),
        (
            lambda q: q["quantized_layers"]["model.layers.1.mlp.experts"].update(group_size=32),
            r"experts.group_size: 32: NVFP4 has a scale for 16 weights",
        ),
        (lambda q: q["quantized_layers"].update({f"{EXPERT}.upp_proj": {"quant_algo": "NVFP4"}}), r"upp_proj: named"),
        (
            lambda q: q["quantized_layers"].update({"model.layers.1.mlp.experts.77.up_proj": {"quant_algo": "NVFP4"}}),
            r"experts.77.up_proj: named as NVFP4, but the checkpoint has no such expert",
        ),
    ],
)
def test_a_config_that_contradicts_its_checkpoint(damaged, change, message):
    with pytest.raises(CheckpointError, match=message):
        load(damaged(config=lambda config: change(config["quantization_config"])))


def test_a_negative_second_level_scale(damaged):
    name = f"{EXPERT}.up_proj.weight_scale_2"
    with pytest.raises(CheckpointError, match=rf"{name}: is -1.0, which is not a scale"):
        load(damaged(put(name, torch.tensor(-1.0))))


def test_a_config_given_by_hand_is_not_changed(paths):
    config = AutoConfig.from_pretrained(paths["csf"])
    before = json.dumps(config.quantization_config, sort_keys=True)
    for _ in range(2):
        model = AutoModelForCausalLM.from_pretrained(paths["csf"], config=config)
    assert json.dumps(config.quantization_config, sort_keys=True) == before
    assert json.dumps(model.config.quantization_config.to_dict(), sort_keys=True) == before
