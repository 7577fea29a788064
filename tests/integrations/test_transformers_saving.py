"""`save_pretrained` writes the checkpoint again, bit for bit, and it loads again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers", reason="needs transformers, the extra [transformers]")

from transformers import AutoModel

from checkpoints import by_component, read_tensors, write_checkpoint
from finegrained_kernels.checkpoint import compress, quantize
from moe_models import (
    ARCHITECTURES,
    generate,
    load,
    quantize_experts,
    write_bf16,
    write_checkpoints,
    write_compressed_tensors,
)

pytestmark = pytest.mark.usefixtures("one_thread")


def assert_same_checkpoint(saved: Path, original: Path) -> None:
    """The same tensors, by name, dtype, shape and bytes, and the same quantization in config.json."""
    ours, theirs = read_tensors(saved), read_tensors(original)
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert (ours[name].dtype, ours[name].shape) == (tensor.dtype, tensor.shape), name
        assert torch.equal(ours[name].view(-1).view(torch.uint8), tensor.view(-1).view(torch.uint8)), name
    configs = [json.loads((root / "config.json").read_text()) for root in (saved, original)]
    assert configs[0]["quantization_config"] == configs[1]["quantization_config"]


@pytest.mark.parametrize(
    ("architecture", "layout"),
    [*((name, "csf") for name in ARCHITECTURES), ("mixtral", "dense"), ("glm4_moe", "dense")],
)
def test_saved_as_it_was(bundle, tmp_path, architecture, layout):
    paths = write_checkpoints(tmp_path, architecture, input_scale=0.01)
    for strategy in ("staged", "dense"):
        model = load(paths[layout], strategy, activation_format="bf16")
        model.save_pretrained(tmp_path / f"saved-{strategy}", max_shard_size="60KB")
        assert (tmp_path / f"saved-{strategy}" / "model.safetensors.index.json").exists()
        assert_same_checkpoint(tmp_path / f"saved-{strategy}", paths[layout])
    again = load(tmp_path / "saved-staged", activation_format="bf16")
    assert torch.equal(generate(again, 4), generate(model, 4))


@pytest.mark.parametrize("layout", ["csf", "dense"])
def test_compressed_tensors_saved_as_it_was(bundle, tmp_path, layout):
    """Divisors are saved as they were read, not as the reciprocal of a reciprocal."""
    modelopt = write_checkpoints(tmp_path / "modelopt", "glm4_moe", input_scale=0.013)
    paths = write_compressed_tensors(tmp_path, modelopt["dense"])
    load(paths[layout], "fused").save_pretrained(tmp_path / "saved")
    assert_same_checkpoint(tmp_path / "saved", paths[layout])


def test_streams_of_other_encoders_and_forms_survive(bundle, tmp_path):
    """Flat fixed streams, signed weights, globals of shape [1], and codes of positions that exceptions overwrite."""
    paths = write_checkpoints(tmp_path, "qwen3_moe")
    tensors = read_tensors(paths["csf"])
    for name, tensor in tensors.items():
        if name.endswith("nvfp4_csf_fixed") and ".3." in name:
            tensors[name] = tensor.reshape(-1)
        elif ".experts.5." in name and name.endswith("proj.weight"):
            tensors[name] = tensor.view(torch.int8)
        elif name.endswith("weight_scale_2") and ".up_proj" in name:
            tensors[name] = tensor.reshape(1)
    changed = 0
    for name in [name for name in tensors if name.endswith("nvfp4_csf_exceptions") and tensors[name].numel()]:
        fixed = tensors[name.replace("exceptions", "fixed")]
        slab = fixed.view(-1)
        cols = 4 if "down_proj" in name else 8
        for word in tensors[name].view(torch.int32).tolist():
            row, col = divmod(word & 0xFFFFFF, cols)
            at = row // 16 * 16 * (1 + cols // 2) + 16 + row % 16 * cols // 2 + col // 2
            slab[at] |= 0xF0 if col % 2 else 0x0F
            changed += 1
    assert changed
    config = json.loads((paths["csf"] / "config.json").read_text())
    other = write_checkpoint(tmp_path / "other", tensors, config)
    model = load(other, "staged")
    model.save_pretrained(tmp_path / "saved")
    assert_same_checkpoint(tmp_path / "saved", other)
    assert torch.equal(generate(model, 4), generate(load(paths["csf"], "dense"), 4))


def test_planes_that_stayed_dense_stay_so(bundle, tmp_path):
    """A layer that has compressed and dense planes side by side."""
    paths = write_checkpoints(tmp_path, "qwen3_moe")
    dense, tensors = read_tensors(paths["dense"]), read_tensors(paths["csf"])
    name = "model.layers.1.mlp.experts.2.up_proj.weight_scale"
    del tensors[f"{name}.nvfp4_csf_fixed"], tensors[f"{name}.nvfp4_csf_exceptions"]
    tensors[name] = dense[name]
    mixed = write_checkpoint(tmp_path / "mixed", tensors, json.loads((paths["csf"] / "config.json").read_text()))
    for strategy in ("staged", "dense", "auto"):
        model = load(mixed, strategy)
        model.save_pretrained(tmp_path / f"saved-{strategy}")
        assert_same_checkpoint(tmp_path / f"saved-{strategy}", mixed)
        assert torch.equal(generate(model, 4), generate(load(paths["csf"], "dense"), 4))


def test_input_scales_that_some_experts_lack(bundle, tmp_path):
    """As if calibration sent no tokens to an expert; those of the others are saved."""
    paths = write_checkpoints(tmp_path, "qwen3_moe", input_scale=0.01)
    tensors = read_tensors(paths["csf"])
    for projection in ("gate_proj", "up_proj"):
        del tensors[f"model.layers.1.mlp.experts.3.{projection}.input_scale"]
    del tensors["model.layers.0.mlp.experts.5.down_proj.input_scale"]
    config = json.loads((paths["csf"] / "config.json").read_text())
    some = write_checkpoint(tmp_path / "some", tensors, config)
    load(some, activation_format="bf16").save_pretrained(tmp_path / "saved")
    assert_same_checkpoint(tmp_path / "saved", some)


def test_layers_that_were_never_quantized_stay_so(bundle, tmp_path):
    """One layer's experts are NVFP4, and the other's bfloat16, which transformers loads and saves itself."""
    write_bf16(tmp_path / "bf16", "mixtral")
    quantize(tmp_path / "bf16", tmp_path / "dense", include=["*.experts.*"], exclude=["*layers.0.*"])
    compress(tmp_path / "dense", tmp_path / "csf")
    model = load(tmp_path / "csf", "staged")
    kinds = [type(layer.mlp.experts).__name__ for layer in model.model.layers]
    assert kinds == ["MixtralExperts", "NVFP4ExpertsModule"]
    ids = torch.arange(16).view(1, -1) * 7 % 128
    with torch.no_grad():
        expected = model(ids).logits
        for implementation in ("eager", "finegrained_kernels_fused"):  # for the layer in bfloat16
            model.set_experts_implementation(implementation)
            torch.testing.assert_close(model(ids).logits, expected, atol=0.1, rtol=0.05)
    model.save_pretrained(tmp_path / "saved")
    assert_same_checkpoint(tmp_path / "saved", tmp_path / "csf")


@pytest.mark.parametrize(
    ("architecture", "copied", "left_out"),
    [
        ("qwen3_next", "model.layers.1.", "mtp.layers.0."),
        ("glm4_moe", "model.layers.2.", "model.layers.46."),
    ],
)
@pytest.mark.parametrize("layout", ["csf", "dense"])
def test_layers_for_further_tokens_are_left_out(bundle, tmp_path, architecture, copied, left_out, layout):
    """Published checkpoints have them, but transformers' models do not, so they are not loaded, saved or named."""
    paths = write_checkpoints(tmp_path, architecture)
    tensors = read_tensors(paths["bf16"])
    for name in [name for name in tensors if name.startswith(copied)]:
        tensors[name.replace(copied, left_out)] = tensors[name].clone()
    config = json.loads((paths["bf16"] / "config.json").read_text())
    longer = write_checkpoint(tmp_path / "longer", tensors, config)
    quantize_experts(longer, tmp_path / "longer-dense")
    compress(tmp_path / "longer-dense", tmp_path / "longer-csf")
    path = tmp_path / f"longer-{layout}"
    assert (
        f"{left_out}mlp.experts"
        in json.loads((path / "config.json").read_text())["quantization_config"]["quantized_layers"]
    )
    model = load(path)
    assert torch.equal(generate(model, 4), generate(load(paths[layout]), 4))
    model.save_pretrained(tmp_path / "saved")
    assert_same_checkpoint(tmp_path / "saved", paths[layout])
    assert torch.equal(generate(load(tmp_path / "saved"), 4), generate(model, 4))


def test_shards_in_a_subfolder_and_models_without_a_head(bundle, tmp_path):
    paths = write_checkpoints(tmp_path, "mixtral")
    config = json.loads((paths["csf"] / "config.json").read_text())
    moved = write_checkpoint(
        tmp_path / "moved", read_tensors(paths["csf"]), config, shard_of=lambda name: f"weights/{by_component(name)}"
    )
    ids = torch.arange(8).view(1, -1)
    expected = load(paths["csf"])
    assert torch.equal(load(moved)(ids).logits, expected(ids).logits)
    base = AutoModel.from_pretrained(paths["csf"])
    assert torch.equal(base(ids).last_hidden_state, expected.model(ids).last_hidden_state)
