"""Whole models: each published kind of checkpoint can be loaded, run, compressed, restored and saved."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers", reason="needs transformers, the extra [transformers]")

import transformers

from checkpoints import read_tensors, tree
from finegrained_kernels.checkpoint import restore, verify
from finegrained_kernels.integrations.transformers import FP8Linear, nvfp4_experts, nvfp4_linears
from moe_models import load
from replica_kinds import GLU, KINDS, MOE, every_linear, modelopt, pack_quantized, write_kind
from replicas import (
    assert_is_product,
    cosine,
    experts_product,
    quantize_activations,
    quantizing_model,
    small_config,
    store_nvfp4,
    write_replica,
)

IDS = (torch.arange(24) * 7 % 128).view(1, -1)

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def replicas(bundle, tmp_path_factory):
    """By kind: "dense", "csf", and "float", the values that these represent."""
    made: dict[str, dict[str, Path]] = {}

    def get(name: str) -> dict[str, Path]:
        if name not in made:
            made[name] = write_kind(KINDS[name], tmp_path_factory.mktemp(name))
        return made[name]

    return get


@pytest.fixture(autouse=True)
def silent():
    transformers.logging.disable_progress_bar()


every_kind = pytest.mark.parametrize("name", KINDS)


@torch.no_grad()
def logits_of(model, ids: torch.Tensor = IDS) -> torch.Tensor:
    return model(ids.to(model.device)).logits.float().cpu()


@every_kind
def test_every_strategy_from_either_form(replicas, name):
    kind, paths = KINDS[name], replicas(name)
    expected = logits_of(kind.model_class.from_pretrained(paths["float"], dtype=torch.float32))
    found = {}
    for form in ("dense", "csf"):
        for strategy in ("auto", "staged", "fused", "dense"):
            model = load(paths[form], strategy, model_class=kind.model_class)
            assert len(nvfp4_linears(model)) == kind.linears
            assert len(nvfp4_experts(model)) == kind.experts
            assert sum(isinstance(module, FP8Linear) for module in model.modules()) == kind.fp8
            compressed = {layer.is_compressed for layer in [*nvfp4_linears(model), *nvfp4_experts(model)]}
            assert compressed == {strategy in ("staged", "fused") or (form == "csf" and strategy == "auto")}
            found[form, strategy] = logits_of(model)
    for logits in found.values():
        assert torch.equal(logits, found["csf", "dense"])
    assert cosine(found["csf", "dense"], expected) >= 0.9999


@every_kind
def test_compressed_verified_and_restored(replicas, name, tmp_path):
    paths = replicas(name)
    assert not verify(paths["csf"], against=paths["dense"]).faults
    restore(paths["csf"], tmp_path / "restored")
    assert tree(tmp_path / "restored") == tree(paths["dense"])


@every_kind
@pytest.mark.parametrize("form", ["dense", "csf"])
def test_saved_and_loaded_again(replicas, name, form, tmp_path):
    kind, path = KINDS[name], replicas(name)[form]
    for strategy in ("auto", "dense"):
        model = load(path, strategy, model_class=kind.model_class)
        model.save_pretrained(tmp_path / strategy)
        saved, original = read_tensors(tmp_path / strategy), read_tensors(path)
        assert saved.keys() == original.keys()
        for key, tensor in original.items():
            assert (saved[key].dtype, saved[key].shape) == (tensor.dtype, tensor.shape), key
            assert torch.equal(saved[key].view(-1).view(torch.uint8), tensor.view(-1).view(torch.uint8)), key
        again = load(tmp_path / strategy, model_class=kind.model_class)
        assert torch.equal(logits_of(again), logits_of(model))


@every_kind
def test_quantized_activations_layer_by_layer(replicas, name):
    """W4A4 in every kind: each layer's output is the product of its input, quantized by a reference."""
    kind, paths = KINDS[name], replicas(name)
    model = load(paths["csf"], activation_format="nvfp4_dynamic", model_class=kind.model_class)
    floats, seen = read_tensors(paths["float"]), []

    def check_linear(layer: str, module: torch.nn.Module, given: tuple, out: torch.Tensor) -> None:
        rows, weight = given[0].reshape(-1, module.in_features), floats[f"{layer}.weight"].double().numpy()
        if module.pre_quant_scale is not None:
            rows, weight = rows * module.pre_quant_scale, weight / module.pre_quant_scale.double().numpy()
        assert_is_product(out.reshape(len(rows), -1), quantize_activations(rows, None), weight, module.bias)
        seen.append(layer)

    def check_experts(layer: str, module: torch.nn.Module, given: tuple, out: torch.Tensor) -> None:
        weights = [[floats[f"{layer}.{e}.{n}_proj.weight"] for n in GLU] for e in range(module.num_experts)]
        expected = experts_product(*given, weights, None)
        # If a sum is close to a tie, it may round the other way, and so may a quantized activation.
        assert (out == expected).float().mean() > 0.99 and cosine(out, expected) > 1 - 1e-6
        seen.append(layer)

    for layers, check in ((nvfp4_linears(model), check_linear), (nvfp4_experts(model), check_experts)):
        for layer, module in model.named_modules():
            if any(module is one for one in layers):
                module.register_forward_hook(functools.partial(check, layer))
    logits_of(model)
    assert len(seen) == kind.linears + kind.experts


def test_activations_cast_to_bytes_are_no_activations():
    """Some models cast to the dtype of a layer's weight, and torch multiplies bytes without a word."""
    layer = FP8Linear(torch.nn.Linear(32, 16))
    with pytest.raises(TypeError, match=r"activations of FP8Linear\(in_features=32.*expected floating point"):
        layer(torch.ones(2, 32).to(layer.weight.dtype))


@pytest.mark.parametrize("form", ["dense", "csf"])
def test_compiles_in_one_graph(replicas, form):
    """Even before anything was called."""
    model = load(replicas("h_biases_and_tied")[form])
    torch.compiler.reset()
    compiled = torch.compile(lambda ids: model(ids).logits, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        assert torch.equal(compiled(IDS).float(), logits_of(model))


LOCAL = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "dynamic": "local"}
CALIBRATED = {
    "modelopt": (
        lambda: small_config("qwen3"),
        every_linear(lambda weight: store_nvfp4(weight, input_scale=True)),
        modelopt("NVFP4", ignore=["lm_head"]),
    ),
    "llm_compressor": (
        lambda: small_config("qwen3_moe", **MOE),
        every_linear(lambda weight: store_nvfp4(weight, divides=True, input_scale=True)),
        pack_quantized(["lm_head", "re:.*mlp.gate$"], activations=LOCAL),
    ),
    "mixed_by_layer": (
        lambda: small_config("qwen3"),
        every_linear(lambda weight: store_nvfp4(weight, input_scale=True)),
        modelopt(
            "MIXED_PRECISION",
            quantized_layers={
                f"model.layers.{layer}.{block}.{name}_proj": {"quant_algo": algorithm}
                for layer in range(2)
                for block, names, algorithm in (("self_attn", "qkvo", "NVFP4"), ("mlp", GLU, "W4A16_NVFP4"))
                for name in names
            },
        ),
    ),
}


@pytest.mark.parametrize("name", CALIBRATED)
def test_calibrated_activations_are_those_of_a_reference(bundle, tmp_path, name):
    config, store, said = CALIBRATED[name]
    paths = write_replica(tmp_path, config(), store, {"config.json": {"quantization_config": said}})

    def is_quantized(module: str) -> bool:
        return (
            module != "lm_head"
            and ".gate" not in module.removesuffix("gate_proj")
            and (name != "mixed_by_layer" or "self_attn" in module)
        )

    expected = logits_of(quantizing_model(paths, is_quantized))
    model = load(paths["dense"])
    assert all(layer.input_global is not None for layer in nvfp4_linears(model) if layer.activation_format is None)
    found = logits_of(model)
    # Both round each layer's float sums to bf16; a few that are close to a tie are rounded differently.
    assert (found == expected).float().mean() > 0.9 and cosine(found, expected) > 1 - 1e-6
    # The bound is tight enough: without quantized activations, or with them everywhere, logits exceed it.
    for other in ("bf16", "nvfp4_dynamic"):
        assert cosine(logits_of(load(paths["dense"], activation_format=other)), expected) < 0.9999
