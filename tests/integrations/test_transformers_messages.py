"""The words of messages that are not in test_transformers_faults.py."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("transformers", reason="needs transformers, the extra [transformers]")

from transformers.quantizers import auto

import checkpoints
from finegrained_kernels.checkpoint import CheckpointError
from finegrained_kernels.integrations.transformers import (
    experts_plan,
    linear_plan,
    loading,
    quantizer,
    register,
    set_scale_strategy,
)
from finegrained_kernels.integrations.transformers.saving import state_of_fp8
from moe_models import load, write_checkpoints

PACKAGE = "finegrained_kernels.integrations.transformers"
LAYER = "model.layers.1.mlp.experts"
Q_PROJ = "model.layers.0.self_attn.q_proj"


@pytest.fixture(scope="module")
def dense(bundle, tmp_path_factory) -> Path:
    return write_checkpoints(tmp_path_factory.mktemp("messages"), "qwen3_moe", input_scale=0.01)["dense"]


def test_without_transformers(monkeypatch):
    for name in [name for name in sys.modules if name.startswith(PACKAGE)]:
        monkeypatch.delitem(sys.modules, name)
    for name in [name for name in sys.modules if name.partition(".")[0] == "transformers"]:
        monkeypatch.setitem(sys.modules, name, None)
    advice = "needs transformers 5.17 or newer, and accelerate: pip install transformers accelerate"
    with pytest.raises(ImportError, match=f"^{PACKAGE} {advice} ") as caught:
        importlib.import_module(PACKAGE)
    assert caught.value.name.partition(".")[0] == "transformers"


def test_a_method_that_somebody_else_registered(monkeypatch):
    monkeypatch.setitem(auto.AUTO_QUANTIZATION_CONFIG_MAPPING, "modelopt", dict)
    with pytest.raises(RuntimeError, match=r"'modelopt' is registered with transformers already, by builtins\.dict"):
        register()


def test_files_that_are_not_safetensors():
    with pytest.raises(CheckpointError, match=r"are loaded from safetensors files, got \['pytorch_model\.bin'\]"):
        quantizer._root_of(["pytorch_model.bin"])


def test_a_strategy_for_nothing():
    with pytest.raises(ValueError, match="the model has no compressed scales: load it with scale_strategy='staged'"):
        set_scale_strategy(torch.nn.Linear(2, 2), "fused")


def test_saving_what_was_dequantized():
    plan, module = SimpleNamespace(module="model.proj"), SimpleNamespace(is_dequantized=True)
    said = r"save_pretrained: model\.proj was dequantized from FP8: load with fp8='stored' to save it"
    with pytest.raises(ValueError, match=said):
        next(state_of_fp8(plan, module))


class Gated(torch.nn.Module):
    """Experts whose structure is almost what the kernels compute."""

    has_post_expert_norm = True
    act_fn = staticmethod(torch.nn.functional.silu)

    def _apply_gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        return gate_up


@pytest.mark.parametrize("divisor", [0.0, float("inf"), 1e-39])
def test_a_divisor_whose_reciprocal_is_no_scale(divisor):
    plane = SimpleNamespace(input_scale="x.input_global_scale", global_scale_divides=True)
    reader = SimpleNamespace(checkpoint=SimpleNamespace(located={plane.input_scale: ("a.safetensors", None)}))
    with pytest.raises(CheckpointError, match=r"^a.safetensors: x.input_global_scale: is .*, which is not a scale;"):
        loading._input_scales(reader, [[plane]], torch.tensor([[divisor]]))


def test_experts_that_the_kernels_do_not_compute():
    gated = Gated()
    with pytest.raises(
        CheckpointError, match=r"^model.experts: Gated cannot .* it is not of transformers' common kind$"
    ):
        experts_plan._check_structure(gated, "model.experts")
    vars(gated).update(has_gate=True, is_concatenated=True, has_bias=False, is_transposed=False)
    wrong = "it has a norm after each expert; it has a gate of its own"
    with pytest.raises(CheckpointError, match=f"^model.experts: Gated cannot run on these kernels: {wrong}$"):
        experts_plan._check_structure(gated, "model.experts")


def test_experts_that_are_made_of_something_else():
    planes = {(0, name): None for name in ("up_proj", "down_proj")}
    rename = Rename({"experts.gate_up_proj", "experts.down_proj"}, "experts.{}.up_proj")
    rename.target = "experts.gate_up_proj"
    checkpoint = SimpleNamespace(experts={"experts": planes})
    said = "experts: expected gate_up_proj of Linear to be made of 2 weights of an expert, got a, b, c"
    with pytest.raises(CheckpointError, match=f"^{said}$"):
        experts_plan.plan_experts(torch.nn.Linear(2, 2), checkpoint, "experts", rename)


class Rename:
    """Stands in for transformers' conversions: every tensor becomes part of one parameter."""

    def __init__(self, state: set[str], pattern: str | None) -> None:
        self.state, self.pattern, self.target = state, pattern, ""

    def __call__(self, name: str) -> tuple[str, str | None]:
        return self.target or name, self.pattern

    def converter(self, _: str) -> SimpleNamespace:
        return SimpleNamespace(source_patterns=["a", "b", "c"])


def test_linear_layers_that_the_kernels_do_not_run():
    weight = checkpoints.nvfp4_module("proj", 24, 48, torch.Generator().manual_seed(0))["proj.weight"]
    located = {"proj.weight": ("x.safetensors", SimpleNamespace(dtype="U8", shape=tuple(weight.shape)))}
    plane = SimpleNamespace(weight="proj.weight", module="proj", rows=24, cols=3)
    model = torch.nn.ModuleDict({"proj": torch.nn.Linear(48, 24)})
    for pattern, said in (
        (None, "NVFP4 of proj is [24, 48]: these kernels need multiples of [16, 32]"),
        (
            "qkv",
            "NVFP4 [24, 24] in layer proj: it would become part of proj.weight, and only experts in NVFP4 can be fused",
        ),
    ):
        faults: list = []
        rename = Rename({"proj.weight"}, pattern)
        assert linear_plan.plan_linear(model, SimpleNamespace(located=located), plane, rename, faults) is None
        assert list(map(str, faults)) == [f"x.safetensors: proj.weight: {said}"]


def test_a_parameter_that_is_cut_twice():
    sharded = SimpleNamespace(is_replicate=lambda: False)
    with pytest.raises(CheckpointError, match=r"^proj: cut along several mesh dimensions, which is not supported: "):
        loading._cut_of(SimpleNamespace(placements=(sharded, sharded)), "proj")


def without_input_scales(tensors: dict) -> None:
    for name in [name for name in tensors if name.startswith(LAYER) and name.endswith("input_scale")]:
        del tensors[name]


def nvfp4(name: str, n: int, k: int, **more: torch.Tensor) -> Callable[[dict], object]:
    module = checkpoints.nvfp4_module(name, n, k, torch.Generator().manual_seed(0))
    return lambda tensors: tensors.update(module | {f"{name}.{last}": value for last, value in more.items()})


@pytest.mark.parametrize(
    ("tensors", "config", "message"),
    [
        (
            None,
            {f"{LAYER}.3.up_proj": {"quant_algo": "W4A16_NVFP4"}},
            rf"config\.json: {LAYER}: weight-only for some of its experts, and not for others",
        ),
        (
            None,
            {f"{LAYER}.99.up_proj": {"quant_algo": "NVFP4"}},
            rf"{LAYER}\.99\.up_proj: named as NVFP4, but the checkpoint has no such expert or projection",
        ),
        (
            without_input_scales,
            {},
            rf"config\.json: {LAYER}: has no input scales, like 1 of 2 layers that quantize what they read: choose an ",
        ),
        (
            nvfp4("model.embed_tokens", 128, 128),
            {"model.embed_tokens": {"quant_algo": "NVFP4"}},
            r"model\.embed_tokens is Embedding, and only linear layers can be quantized",
        ),
        (
            nvfp4("model.layers.0.self_attn.x_proj", 128, 128),
            {"model.layers.0.self_attn.x_proj": {"quant_algo": "NVFP4"}},
            r"Qwen3MoeForCausalLM has no model\.layers\.0\.self_attn\.x_proj\.weight",
        ),
        (
            nvfp4(Q_PROJ, 128, 128, pre_quant_scale=torch.ones(64)),
            {Q_PROJ: {"quant_algo": "NVFP4_AWQ"}},
            rf"expected floats \[128\], one for each input of {Q_PROJ}, got F32 \[64\]",
        ),
    ],
    ids=["weight-only", "no such expert", "input scales", "embedding", "no such layer", "AWQ"],
)
def test_of_a_checkpoint(dense, tmp_path, tensors, config, message):
    content = checkpoints.read_tensors(dense)
    if tensors is not None:
        tensors(content)
    document = json.loads((dense / "config.json").read_text())
    document["quantization_config"]["quantized_layers"].update(config)
    root = checkpoints.write_checkpoint(tmp_path / "damaged", content, document)
    with pytest.raises(CheckpointError, match=message):
        load(root)
