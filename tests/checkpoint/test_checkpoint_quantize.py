"""quantize: the result of the bundle's quantizer for every linear layer, in files that compress accepts."""

from __future__ import annotations

import pytest
import torch

import checkpoints
from finegrained_kernels.checkpoint import (
    CheckpointError,
    compress,
    inspect,
    open_checkpoint,
    quantize,
    restore,
    verify,
)

pytestmark = pytest.mark.usefixtures("bundle")

TOGETHER = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


def global_of(module: str, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    """From the largest value of the layers that engines run as one, by docs/format.md: amax / (448 * 6)."""
    parent, _, name = module.rpartition(".")
    names = next((names for names in TOGETHER if name in names), (name,))
    return max(tensors[f"{parent}.{each}.weight"].abs().max().float() for each in names) / 2688


DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@pytest.mark.parametrize("model", ["minilm", "qwen"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scales", ["amax", "mse"])
def test_quantize_then_round_trip(bundle, tmp_path, model, dtype, scales):
    make = checkpoints.minilm_moe if model == "minilm" else checkpoints.random_qwen
    tensors = make(dtype=DTYPES[dtype])
    source = checkpoints.write_checkpoint(
        tmp_path / "source", tensors, checkpoints.CONFIG, shard_of=checkpoints.by_layer if dtype == "bf16" else None
    )
    before = checkpoints.tree(source)
    quantize(source, tmp_path / "nvfp4", scales=scales)
    assert checkpoints.tree(source) == before
    written = checkpoints.read_tensors(tmp_path / "nvfp4")
    for name, tensor in tensors.items():
        if not name.endswith("_proj.weight"):  # embeddings, lm_head, the router and norms
            assert torch.equal(written.pop(name), tensor)
            continue
        global_scale = global_of(name.removesuffix(".weight"), tensors)
        packed, planes, _ = bundle.nvfp4_quantize_two_level(tensor, scales=scales, global_scale=global_scale)
        assert torch.equal(written.pop(name), packed)
        assert torch.equal(written.pop(f"{name}_scale").view(torch.uint8), planes.view(torch.uint8))
        assert torch.equal(written.pop(f"{name}_scale_2"), global_scale)
    assert not written
    for layout in ("hf", "container"):
        report = compress(tmp_path / "nvfp4", tmp_path / layout, layout=layout)
        assert report.compressed
        assert verify(tmp_path / layout, against=tmp_path / "nvfp4").faults == []
        restore(tmp_path / layout, tmp_path / f"{layout}-restored")
        assert checkpoints.tree(tmp_path / f"{layout}-restored") == checkpoints.tree(tmp_path / "nvfp4")


def test_quantize_writes_an_input_scale_if_asked_to(bundle, tmp_path):
    source = checkpoints.write_checkpoint(
        tmp_path / "source", checkpoints.random_qwen(torch.bfloat16), checkpoints.CONFIG
    )
    quantize(source, tmp_path / "nvfp4", include=["*.layers.1.*_proj.*"], exclude=["*.up_proj.*"], input_scale=0.5)
    written = checkpoints.read_tensors(tmp_path / "nvfp4")
    modules = {name.removesuffix(".input_scale") for name in written if name.endswith(".input_scale")}
    experts = {f"model.layers.1.mlp.experts.{e}.{p}_proj" for e in range(4) for p in ("gate", "down")}
    assert modules == experts | {f"model.layers.1.self_attn.{p}_proj" for p in "qkvo"}
    assert all(float(written[f"{module}.input_scale"]) == 0.5 for module in modules)
    assert written["model.layers.0.mlp.experts.0.gate_proj.weight"].dtype == torch.bfloat16


@pytest.mark.parametrize("input_scale", [None, 0.3])
def test_quantize_as_llm_compressor_does(bundle, tmp_path, input_scale):
    """Codes are computed with what a reader multiplies by: the float32 reciprocal of the stored divisor."""
    tensors = checkpoints.random_qwen(torch.bfloat16)
    source = checkpoints.write_checkpoint(
        tmp_path / "source", tensors, checkpoints.CONFIG, shard_of=checkpoints.by_layer
    )
    root = tmp_path / "nvfp4"
    quantize(source, root, format="compressed-tensors", input_scale=input_scale, scales="mse")
    written = checkpoints.read_tensors(root)
    modules = [name.removesuffix(".weight") for name in tensors if name.endswith("_proj.weight")]
    for module in modules:
        weight, divisor = tensors[f"{module}.weight"], written.pop(f"{module}.weight_global_scale")
        assert divisor.dtype == torch.float32 and divisor.shape == (1,)
        assert float(divisor) == pytest.approx(1 / float(global_of(module, tensors)), rel=2**-22)
        packed, planes, _ = bundle.nvfp4_quantize_two_level(weight, scales="mse", global_scale=1 / divisor[0])
        assert torch.equal(written.pop(f"{module}.weight_packed"), packed)
        assert torch.equal(written.pop(f"{module}.weight_scale").view(torch.uint8), planes.view(torch.uint8))
        if input_scale is not None:
            assert torch.equal(written.pop(f"{module}.input_global_scale"), 1 / torch.tensor([input_scale]))
    assert written.keys() == tensors.keys() - {f"{module}.weight" for module in modules}

    opened = open_checkpoint(root)
    assert opened.quantization.method == "compressed-tensors"
    algorithm = "NVFP4A16" if input_scale is None else "NVFP4"
    found = {module: opened.quantization.layer_format(module) for module in modules}
    assert {(form.algorithm, form.globals_divide) for form in found.values()} == {(algorithm, True)}
    for module in ("lm_head", "model.layers.0.mlp.gate"):
        assert opened.quantization.layer_format(module) is None
    assert inspect(root).faults == []
    compress(root, tmp_path / "csf")
    assert verify(tmp_path / "csf", against=root).faults == []
    restore(tmp_path / "csf", tmp_path / "restored")
    assert checkpoints.tree(tmp_path / "restored") == checkpoints.tree(root)


SHARED = [
    ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
    ["self_attn.q_a_proj", "self_attn.kv_a_proj_with_mqa"],
    ["linear_attn.in_proj_qkv", "linear_attn.in_proj_z"],
    ["mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj"],
    ["mlp.experts.0.w1", "mlp.experts.0.w3"],
    ["mlp.experts.1.w1", "mlp.experts.1.w3"],
    ["mlp.experts.gate_proj.2", "mlp.experts.up_proj.2"],
    *(["self_attn.o_proj"], ["self_attn.q_b_proj"], ["self_attn.kv_b_proj"], ["linear_attn.out_proj"]),
    *(["mlp.experts.0.w2"], ["mlp.experts.1.w2"], ["mlp.experts.down_proj.2"], ["mlp.shared_expert.down_proj"]),
]
"""Layers whose weights engines multiply at once, with one second-level scale for all of them."""


@pytest.mark.parametrize("format", ["modelopt", "compressed-tensors"])
def test_layers_that_engines_fuse_share_a_global(bundle, tmp_path, format):
    """Even if they are in different shards, and their magnitudes differ by a factor of up to 100."""
    generator = torch.Generator().manual_seed(3)
    names = [f"model.layers.{layer}.{name}" for layer in range(2) for group in SHARED for name in group]
    tensors = {
        f"{name}.weight": torch.randn(32, 64, generator=generator) * 10.0 ** -(i % 3) for i, name in enumerate(names)
    }
    source = checkpoints.write_checkpoint(
        tmp_path / "source",
        tensors,
        checkpoints.CONFIG,
        shard_of=lambda name: f"s{names.index(name[:-7]) % 4}.safetensors",
    )
    quantize(source, tmp_path / "nvfp4", format=format, jobs=2)
    written = checkpoints.read_tensors(tmp_path / "nvfp4")
    divides = format == "compressed-tensors"
    for layer in range(2):
        for group in SHARED:
            members = [f"model.layers.{layer}.{name}" for name in group]
            largest = max(tensors[f"{name}.weight"].abs().max() for name in members)
            for name in members:
                stored = written[f"{name}.weight_global_scale" if divides else f"{name}.weight_scale_2"]
                assert stored == (1 / (largest / 2688) if divides else largest / 2688)
                assert error_of(bundle, tensors[f"{name}.weight"], largest / 2688) < 1.03 * error_of(
                    bundle, tensors[f"{name}.weight"], None
                )


def error_of(bundle, weight: torch.Tensor, global_scale: torch.Tensor | None) -> float:
    """The relative root mean square error of a weight in NVFP4."""
    packed, planes, global_scale = bundle.nvfp4_quantize_two_level(weight, global_scale=global_scale)
    codes = torch.stack([packed % 16, packed // 16], -1).flatten(-2).long()
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])[codes % 8] * (1 - codes // 8 * 2)
    values = values * planes.float().repeat_interleave(16, -1) * global_scale
    return float((values - weight).norm() / weight.norm())


def test_what_is_not_finite_is_named_not_what_shares_its_global(bundle, tmp_path):
    tensors = {f"x.{name}_proj.weight": torch.ones(32, 64) for name in ("gate", "up")}
    tensors["x.up_proj.weight"][3, 5] = float("nan")
    source = checkpoints.write_checkpoint(tmp_path / "source", tensors, checkpoints.CONFIG)
    with pytest.raises(CheckpointError, match=r"model.safetensors: x.up_proj.weight: expected finite values, got nan"):
        quantize(source, tmp_path / "nvfp4")


@pytest.mark.parametrize("suffix", ["", ".weight"])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("inner", [16, 32, 48])
def test_stacks_of_experts_become_a_tensor_each(bundle, tmp_path, transposed, inner, suffix):
    """The files are the same as for experts with a tensor each, except for the order of tensors."""
    generator = torch.Generator().manual_seed(4)
    apart, stacked = {"model.norm.weight": torch.ones(32)}, {"model.norm.weight": torch.ones(32)}
    for layer in range(2):
        experts = f"model.layers.{layer}.mlp.experts"
        gate, up, down = (
            torch.randn(3, *shape, generator=generator).bfloat16() for shape in [(inner, 32)] * 2 + [(32, inner)]
        )
        for e in range(3):
            apart |= {
                f"{experts}.{e}.{name}_proj.weight": stack[e].clone()
                for name, stack in (("gate", gate), ("up", up), ("down", down))
            }
        for name, stack in (("gate_up_proj", torch.cat([gate, up], 1)), ("down_proj", down)):
            stacked[f"{experts}.{name}{suffix}"] = stack.mT.contiguous() if transposed else stack
    results = []
    for name, tensors in (("apart", apart), ("stacked", stacked)):
        checkpoints.write_checkpoint(tmp_path / name, tensors, checkpoints.CONFIG, shard_of=checkpoints.by_layer)
        report = quantize(tmp_path / name, tmp_path / f"{name}-nvfp4", input_scale=0.5)
        assert report.quantized == 18 and inspect(tmp_path / f"{name}-nvfp4").faults == []
        results.append(checkpoints.read_tensors(tmp_path / f"{name}-nvfp4"))
    assert results[0].keys() == results[1].keys()
    for name, tensor in results[0].items():
        assert torch.equal(tensor.view(-1).view(torch.uint8), results[1][name].view(-1).view(torch.uint8)), name
    configs = [(tmp_path / f"{name}-nvfp4" / "config.json").read_bytes() for name in ("apart", "stacked")]
    assert configs[0] == configs[1]


@pytest.mark.parametrize("where", ["text_config.compression_config", "hf_quant_config.json"])
def test_what_is_quantized_already_is_known_wherever_it_says_so(bundle, tmp_path, where):
    config, files = dict(checkpoints.CONFIG), {}
    if where == "hf_quant_config.json":
        files[where] = {"quantization": {"quant_algo": "FP8", "exclude_modules": ["lm_head"]}}
    else:
        config["text_config"] = {"compression_config": {"quant_method": "fp8"}}
    source = checkpoints.write_checkpoint(tmp_path / "source", {"lm_head.weight": torch.ones(32, 64)}, config)
    for name, document in files.items():
        checkpoints.write_json(source / name, document)
    with pytest.raises(CheckpointError, match=rf"{where}.*: the checkpoint is quantized already"):
        quantize(source, tmp_path / "nvfp4", include=["lm_head.*"])


def test_quantize_refuses_another_format(tmp_path):
    with pytest.raises(CheckpointError, match="format must be one of 'modelopt', 'compressed-tensors', got 'gguf'"):
        quantize(tmp_path, tmp_path / "nvfp4", format="gguf")


def test_which_layers_are_quantized_and_what_the_config_calls_them(bundle, tmp_path):
    shapes = {
        "model.language_model.embed_tokens": (96, 64), "model.language_model.norm": (64,), "lm_head": (96, 64),
        "model.language_model.layers.0.mlp.gate": (4, 64),
        "model.language_model.layers.0.mlp.shared_expert_gate": (1, 64),
        "model.visual.blocks.0.attn.qkv": (192, 64), "model.language_model.layers.0.linear_attn.conv1d": (64, 1, 4),
        "mtp.layers.0.mlp.gate": (4, 64), "model.multi_modal_projector.up_proj": (64, 64),
    }  # fmt: skip
    linears = [
        "model.language_model.layers.0.self_attn.q_proj", "model.language_model.layers.0.linear_attn.in_proj_qkv",
        "model.language_model.layers.0.mlp.shared_expert.up_proj", "model.language_model.layers.1.mlp.down_proj",
        "mtp.layers.0.self_attn.o_proj", "model.language_model.layers.0.mlp.experts.0.up_proj",
    ]  # fmt: skip
    generator = torch.Generator().manual_seed(1)
    tensors = {f"{name}.weight": torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    tensors |= {f"{name}.weight": torch.randn(64, 64, generator=generator) for name in linears}
    source = checkpoints.write_checkpoint(tmp_path / "source", tensors, checkpoints.CONFIG)
    for options, algorithm in (({}, "W4A16_NVFP4"), ({"input_scale": 0.25}, "NVFP4")):
        root = tmp_path / algorithm
        assert quantize(source, root, **options).quantized == len(linears)
        packed = {
            name.removesuffix(".weight") for name, t in checkpoints.read_tensors(root).items() if t.dtype == torch.uint8
        }
        assert packed == set(linears)
        opened = open_checkpoint(root)
        found = {name: opened.quantization.layer_format(name) for name in (*shapes, *linears)}
        assert {name: form and form.algorithm for name, form in found.items()} == {
            **dict.fromkeys(shapes), **dict.fromkeys(linears, algorithm)
        }  # fmt: skip
        assert inspect(root).faults == []
    quantize(source, tmp_path / "head", include=["lm_head.*"])
    assert [plane.module for plane in open_checkpoint(tmp_path / "head").planes.values()] == ["lm_head"]


def stacks(**shapes: tuple[int, ...]):
    return lambda tensors: tensors.update({f"y.experts.{name}": torch.ones(shape) for name, shape in shapes.items()})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors["x.experts.0.up_proj.weight"].fill_(float("nan")), "x.experts.0.up_proj.weight"),
        (lambda tensors: tensors.update({"x.experts.0.up_proj.weight": torch.ones(4, 24)}), "multiple of 16"),
        (lambda tensors: tensors.update({"x.experts.0.up_proj.weight": torch.ones(4, 32).double()}), "F64"),
        (lambda tensors: tensors.pop("x.experts.0.up_proj.weight"), "no weight of a linear layer is asked for"),
        (stacks(up_proj=(2, 4, 32)), r"up_proj: \[2, 4, 32\]: of stacks of experts only gate_up_proj and down_proj"),
        (stacks(down_proj=(2, 32, 16)), r"down_proj: \[2, 32, 16\]: is quantized together with y.experts.gate_up_proj"),
        (
            stacks(gate_up_proj=(2, 32, 32), down_proj=(2, 32, 32)),
            r"expected stacks \[E, 2 \* I, H\] and \[E, H, I\], or each expert's transposed, got \[2, 32, 32\] and",
        ),
        (stacks(gate_up_proj=(3, 64, 32), down_proj=(2, 32, 32)), r"expected stacks .* got \[3, 64, 32\] and"),
        (stacks(gate_up_proj=(2, 48, 32), down_proj=(2, 32, 24)), r"K a multiple of 16, got \[32, 24\]"),
        (
            stacks(gate_up_proj=(2, 64, 32), down_proj=(2, 32, 32), gate_up_proj_bias=(2, 64)),
            r"gate_up_proj: \[2, 64, 32\]: beside y.experts.gate_up_proj_bias: experts with biases may",
        ),
        (
            lambda tensors: tensors.update(
                {"x.experts.gate_up_proj": torch.ones(1, 8, 32), "x.experts.down_proj": torch.ones(1, 32, 4)}
            ),
            r"the same experts have tensors of their own, such as x.experts.0.up_proj.weight",
        ),
    ],
)
def test_quantize_refuses(bundle, tmp_path, change, message):
    tensors = {"x.experts.0.up_proj.weight": torch.ones(4, 32), "y": torch.ones(3)}
    change(tensors)
    source = checkpoints.write_checkpoint(tmp_path / "source", tensors, checkpoints.CONFIG)
    with pytest.raises(CheckpointError, match=message):
        quantize(source, tmp_path / "nvfp4")
    assert not list(tmp_path.glob("nvfp4/*.safetensors"))
