"""`device_map`: transformers decides where layers go by sizes that include their scales."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers", reason="needs transformers, the extra [transformers]")
pytest.importorskip("accelerate", reason="needs accelerate, without which transformers knows no device_map")

from accelerate import cpu_offload
from transformers.integrations.accelerate import compute_module_sizes

from finegrained_kernels.integrations.transformers import nvfp4_experts
from moe_models import generate, load, write_checkpoints


@pytest.fixture(scope="module")
def paths(bundle, tmp_path_factory) -> dict[str, Path]:
    return write_checkpoints(tmp_path_factory.mktemp("devices"), "qwen3_moe")


@pytest.mark.parametrize("device_map", ["auto", "cpu", {"": "cpu"}])
def test_on_the_cpu(paths, device_map, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    model = load(paths["csf"], "staged", device_map=device_map)
    assert torch.equal(generate(model, 5), generate(load(paths["csf"], "dense"), 5))


def test_sizes_that_a_device_map_is_made_of(paths, monkeypatch):
    """While loading, as much is reserved as the scales will take, and it is released afterwards."""
    reserved = {}

    def sizes(model, *args, **options):
        found = compute_module_sizes(model, *args, **options)
        for name, module in model.named_modules():
            if name.startswith("model.") and "reserved" in dict(module.named_buffers(recurse=False)):
                reserved[name] = found[0][name]
        return found

    monkeypatch.setattr("transformers.integrations.accelerate.compute_module_sizes", sizes)
    model = load(paths["csf"], "staged", device_map="auto")
    assert len(reserved) == 2
    for layer, expected in zip(nvfp4_experts(model), reserved.values(), strict=True):
        assert not hasattr(layer, "reserved")
        taken = layer.gate_up_proj.nbytes + layer.down_proj.nbytes + layer.scale_bytes
        assert abs(taken - expected) < 0.05 * taken


def test_layers_that_accelerate_offloads_stay_where_they_are(paths, monkeypatch):
    """What accelerate does with a layer on the CPU in a model on a GPU; here, the CPU stands in for the GPU."""
    first, second = nvfp4_experts(load(paths["csf"], "dense"))
    offloaded = []

    def dispatch(model, *_):
        cpu_offload(model.model.layers[1], execution_device="cpu")
        offloaded.append(model.model.layers[1].mlp.experts.device.type)

    monkeypatch.setattr("transformers.modeling_utils.accelerate_dispatch", dispatch)
    device_map = {"model": torch.device("cpu"), "model.layers.1": "cpu", "lm_head": torch.device("cpu")}
    for strategy in ("dense", "staged", "fused"):
        model = load(paths["csf"], strategy, device_map=device_map)
        assert offloaded.pop() == "meta"
        assert [layer.experts.gate_up.device.type for layer in nvfp4_experts(model)] == ["cpu", "cpu"]
        for layer, expected in zip(nvfp4_experts(model), (first, second), strict=True):
            assert torch.equal(layer.gate_up_proj, expected.gate_up_proj)
            hidden, routing = torch.randn(4, 128).bfloat16(), (torch.tensor([[0, 1]] * 4), torch.full((4, 2), 0.5))
            assert torch.equal(layer(hidden, *routing), expected(hidden, *routing))


def test_no_device_is_refused(paths):
    with pytest.raises(ValueError, match="NVFP4 layers cannot be loaded on the meta device"):
        load(paths["csf"], device_map="meta")


def test_disk_is_refused(paths, tmp_path):
    with pytest.raises(ValueError, match="NVFP4 layers cannot be offloaded to disk"):
        load(paths["csf"], device_map={"": "cpu", "lm_head": "disk"}, offload_folder=tmp_path)


@pytest.mark.gpu
def test_layers_on_two_devices(paths):
    """On a GPU and the CPU: each device has a workspace, and accelerate moves activations between them."""
    device_map = {"model.embed_tokens": 0, "model.layers.0": 0, "model.layers.1": "cpu", "model.norm": 0, "lm_head": 0}
    model = load(paths["csf"], "staged", device_map=device_map | {"model.rotary_emb": 0})
    assert [layer.experts.gate_up.device.type for layer in nvfp4_experts(model)] == ["cuda", "cpu"]
    assert generate(model, 5).shape == (5,)
