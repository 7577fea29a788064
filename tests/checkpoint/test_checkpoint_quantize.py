"""quantize: what the bundle's quantizer gives for every expert weight, in files that compress takes."""

from __future__ import annotations

import pytest
import torch

import checkpoints
from finegrained_kernels.checkpoint import CheckpointError, compress, quantize, restore, verify

pytestmark = pytest.mark.usefixtures("bundle")

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@pytest.mark.parametrize("model", ["minilm", "qwen"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_quantize_then_round_trip(bundle, tmp_path, model, dtype):
    make = checkpoints.minilm_moe if model == "minilm" else checkpoints.random_qwen
    tensors = make(dtype=DTYPES[dtype])
    source = checkpoints.write_checkpoint(
        tmp_path / "source", tensors, checkpoints.CONFIG, shard_of=checkpoints.by_layer if dtype == "bf16" else None
    )
    before = checkpoints.tree(source)
    quantize(source, tmp_path / "nvfp4")
    assert checkpoints.tree(source) == before
    written = checkpoints.read_tensors(tmp_path / "nvfp4")
    for name, tensor in tensors.items():
        if ".experts." not in name:
            assert torch.equal(written.pop(name), tensor)
            continue
        packed, scales, global_scale = bundle.nvfp4_quantize_two_level(tensor)
        assert torch.equal(written.pop(name), packed)
        assert torch.equal(written.pop(f"{name}_scale").view(torch.uint8), scales.view(torch.uint8))
        assert torch.equal(written.pop(f"{name}_scale_2"), global_scale)
    assert not written
    for layout in ("hf", "container"):
        report = compress(tmp_path / "nvfp4", tmp_path / layout, layout=layout)
        assert report.compressed or model == "qwen"  # 2 columns a row cannot shrink below a base and a code
        assert verify(tmp_path / layout, against=tmp_path / "nvfp4").faults == []
        restore(tmp_path / layout, tmp_path / f"{layout}-restored")
        assert checkpoints.tree(tmp_path / f"{layout}-restored") == checkpoints.tree(tmp_path / "nvfp4")


def test_quantize_writes_an_input_scale_if_asked_to(bundle, tmp_path):
    source = checkpoints.write_checkpoint(
        tmp_path / "source", checkpoints.random_qwen(torch.bfloat16), checkpoints.CONFIG
    )
    quantize(source, tmp_path / "nvfp4", include=["*.layers.1.*"], exclude=["*.up_proj.*"], input_scale=0.5)
    written = checkpoints.read_tensors(tmp_path / "nvfp4")
    modules = {name.removesuffix(".input_scale") for name in written if name.endswith(".input_scale")}
    assert modules == {f"model.layers.1.mlp.experts.{e}.{p}_proj" for e in range(4) for p in ("gate", "down")}
    assert all(float(written[f"{module}.input_scale"]) == 0.5 for module in modules)
    assert written["model.layers.0.mlp.experts.0.gate_proj.weight"].dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors["x.experts.0.up_proj.weight"].fill_(float("nan")), "x.experts.0.up_proj.weight"),
        (lambda tensors: tensors.update({"x.experts.0.up_proj.weight": torch.ones(4, 24)}), "multiple of 16"),
        (lambda tensors: tensors.update({"x.experts.0.up_proj.weight": torch.ones(4, 32).double()}), "F64"),
        (lambda tensors: tensors.pop("x.experts.0.up_proj.weight"), "no weight"),
    ],
)
def test_quantize_refuses(bundle, tmp_path, change, message):
    tensors = {"x.experts.0.up_proj.weight": torch.ones(4, 32), "y": torch.ones(3)}
    change(tensors)
    source = checkpoints.write_checkpoint(tmp_path / "source", tensors, checkpoints.CONFIG)
    with pytest.raises(CheckpointError, match=message):
        quantize(source, tmp_path / "nvfp4")
    assert not list(tmp_path.glob("nvfp4/*.safetensors"))
