"""quantize: what the bundle's quantizer gives for every linear layer, in files that compress takes."""

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
        packed, planes, global_scale = bundle.nvfp4_quantize_two_level(tensor, scales=scales)
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
    """Codes are those under what a reader multiplies by, the float32 reciprocal of the divisor that is stored."""
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
        assert float(divisor) == pytest.approx(2688 / float(weight.abs().max()), rel=2**-22)
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


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors["x.experts.0.up_proj.weight"].fill_(float("nan")), "x.experts.0.up_proj.weight"),
        (lambda tensors: tensors.update({"x.experts.0.up_proj.weight": torch.ones(4, 24)}), "multiple of 16"),
        (lambda tensors: tensors.update({"x.experts.0.up_proj.weight": torch.ones(4, 32).double()}), "F64"),
        (lambda tensors: tensors.pop("x.experts.0.up_proj.weight"), "no weight of a linear layer is asked for"),
        (
            lambda tensors: tensors.update({"x.experts.up_proj": torch.ones(2, 4, 32)}),
            r"x.experts.up_proj: \[2, 4, 32\]: experts in one stack",
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
