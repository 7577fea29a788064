"""Whole models: each published kind of checkpoint loads, runs right, compresses, restores and saves."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("transformers", reason="needs transformers, the extra [transformers]")

import transformers

from checkpoints import read_tensors, tree
from finegrained_kernels.checkpoint import compress, restore, verify
from finegrained_kernels.integrations.transformers import FP8Linear, nvfp4_experts, nvfp4_linears
from moe_models import load
from replicas import (
    Stored,
    cosine,
    quantizing_model,
    small_config,
    stack_experts,
    store_fp8,
    store_nvfp4,
    write_replica,
)

IDS = (torch.arange(24) * 7 % 128).view(1, -1)

pytestmark = pytest.mark.usefixtures("one_thread")


@dataclasses.dataclass
class Kind:
    """How a replica is made, and what is to be found in it."""

    config: Callable[[], transformers.PreTrainedConfig]
    store: Callable[[str, np.ndarray], Stored | None]
    documents: dict[str, dict]
    linears: int
    experts: int = 0
    fp8: int = 0
    extra: Callable[[], dict[str, torch.Tensor]] = dict
    rename: Callable[[str], str] = lambda name: name
    arrange: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]] = lambda tensors: tensors
    model_class: type = transformers.AutoModelForCausalLM


def modelopt(algorithm: str, **more) -> dict:
    return {"quant_method": "modelopt", "quant_algo": algorithm, **more}


def is_linear(module: str) -> bool:
    return module.endswith("_proj")


def pack_quantized(ignore: list[str], *, activations: dict | None = None, **more) -> dict:
    weights = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "symmetric": True}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": "nvfp4-pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group | more},
        "ignore": ignore,
    }


MOE = {"moe_intermediate_size": 64, "num_experts": 4, "num_experts_per_tok": 4, "norm_topk_prob": True}
"""All experts for each token: a choice between experts that are nearly equal would depend on the dtype."""

GLU = ("gate", "up", "down")
HYBRID = {
    "shared_expert_intermediate_size": 64,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "layer_types": ["linear_attention", "full_attention"],
}


def of_hybrid_moe(module: str, weight: np.ndarray) -> Stored | None:
    """Experts, shared experts and full attention; routers, linear attention and the head are left alone."""
    is_quantized = is_linear(module) and "linear_attn" not in module
    return store_nvfp4(weight, divides=True, input_scale=True) if is_quantized else None


def of_mixed(module: str, weight: np.ndarray) -> Stored | None:
    """MLP and head NVFP4, attention of both kinds FP8 with a scale a tensor."""
    if ".mlp." in module or module == "lm_head":
        return store_nvfp4(weight)
    if "self_attn" in module or module.rpartition(".")[2] in ("in_proj_qkv", "in_proj_z", "out_proj"):
        return store_fp8(weight, "tensor", input_scale=True)
    return None


def mixed_table() -> dict[str, dict]:
    table: dict[str, dict] = {"lm_head": {"quant_algo": "NVFP4", "group_size": 16}}
    for layer in range(2):
        for name in ("gate_proj", "up_proj", "down_proj"):
            table[f"model.language_model.layers.{layer}.mlp.{name}"] = {"quant_algo": "NVFP4", "group_size": 16}
    for name in ("in_proj_qkv", "in_proj_z", "out_proj"):
        table[f"model.language_model.layers.0.linear_attn.{name}"] = {"quant_algo": "FP8"}
    for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
        table[f"model.language_model.layers.1.self_attn.{name}"] = {"quant_algo": "FP8"}
    return table


def mixed_config() -> dict:
    return modelopt("MIXED_PRECISION", quantized_layers=mixed_table(), kv_cache_quant_algo="FP8")


def of_deepseek_like(module: str, weight: np.ndarray) -> Stored | None:
    if ".experts." in module:
        return store_nvfp4(weight)
    return store_fp8(weight, "block", name="weight_scale_inv") if "self_attn" in module else None


def in_wrapper(name: str) -> str:
    return name if name.startswith("lm_head") else name.replace("model.", "model.language_model.", 1)


def every_linear(store: Callable[[np.ndarray], Stored], *others: str) -> Callable[[str, np.ndarray], Stored | None]:
    return lambda module, weight: store(weight) if is_linear(module) or module in others else None


def multimodal_config() -> transformers.PreTrainedConfig:
    """A vision tower beside a text model, whose config has the quantization config."""
    text = small_config("qwen3_5_moe_text", **HYBRID, **MOE)
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 128}
    vision |= {"num_position_embeddings": 16, "patch_size": 4}
    config = transformers.AutoConfig.for_model("qwen3_5_moe", text_config=text.to_dict(), vision_config=vision)
    config.tie_word_embeddings = False
    return config


KINDS = {
    "a_llm_compressor_w4a16": Kind(
        lambda: small_config("qwen3_next", **HYBRID, **MOE),
        of_hybrid_moe,
        {"config.json": {"quantization_config": pack_quantized(
            ["lm_head", "re:.*linear_attn.*", "re:.*mlp.gate$", "re:.*shared_expert_gate$"])}},
        linears=10,
        experts=2,
    ),
    "b_modelopt_mixed": Kind(
        lambda: small_config("qwen3_5_text", **{k: HYBRID[k] for k in HYBRID if "expert" not in k}),
        of_mixed,
        {
            "config.json": {"quantization_config": mixed_config()},
            "hf_quant_config.json": {"quantization": mixed_config()},
        },
        linears=7,
        fp8=7,
        extra=lambda: {f"model.language_model.layers.1.self_attn.{n}_proj.{n}_scale": torch.tensor(0.5) for n in "kv"},
        rename=in_wrapper,
    ),
    "c_modelopt_dense": Kind(
        lambda: small_config("qwen3"),
        every_linear(store_nvfp4),
        {
            "config.json": {"quantization_config": modelopt("NVFP4", ignore=["lm_head"])},
            "hf_quant_config.json": {"quantization": {"quant_algo": "NVFP4", "exclude_modules": ["lm_head"]}},
        },
        linears=14,
    ),
    "d_fp8_blocks": Kind(
        lambda: small_config("qwen3_moe", **MOE, hidden_size=160, head_dim=48),
        of_deepseek_like,
        {"config.json": {"quantization_config": {
            "quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic",
            "config_groups": {"experts": {
                "targets": ["re:.*experts.*"], "weights": {"num_bits": 4, "type": "float", "group_size": 16}}},
        }}},
        linears=0,
        experts=2,
        fp8=8,
    ),
    "e_multimodal_nested_config": Kind(
        multimodal_config,
        lambda module, weight: store_nvfp4(weight, divides=True, input_scale=True) if ".experts." in module else None,
        {"config.json": {"text_config": {"quantization_config": pack_quantized(
            ["lm_head", "re:.*self_attn.*", "re:.*linear_attn.*", "re:.*shared_expert.*", "re:.*visual.*"])}}},
        linears=0,
        experts=2,
        model_class=transformers.AutoModelForImageTextToText,
    ),
    "f_awq": Kind(
        lambda: small_config("qwen3"),
        every_linear(lambda weight: store_nvfp4(weight, awq=True)),
        {"config.json": {"quantization_config": modelopt("NVFP4_AWQ", ignore=["lm_head"])}},
        linears=14,
    ),
    "f_w4a16_hf_quant_config_alone": Kind(
        lambda: small_config("qwen3"),
        every_linear(lambda weight: store_nvfp4(weight, input_scale=True), "lm_head"),
        {"hf_quant_config.json": {"quantization": {"quant_algo": "W4A16_NVFP4", "exclude_modules": []}}},
        linears=15,
    ),
    **{
        f"g_{layout}_experts": Kind(
            lambda: small_config("qwen3_5_moe_text", **HYBRID, **MOE),
            lambda module, weight: (
                store_nvfp4(weight, input_scale=True, global_scale=0.0002) if ".experts." in module else None
            ),
            {"config.json": {"quantization_config": modelopt("W4A16_NVFP4", ignore=["lm_head"])}},
            linears=0,
            experts=2,
            arrange=functools.partial(stack_experts, layout=layout),
        )
        for layout in ("fused", "rows", "numbered")
    },
    "h_biases_and_tied": Kind(
        lambda: small_config("qwen2", tie_word_embeddings=True),
        every_linear(store_nvfp4),
        {"config.json": {"quantization_config": modelopt("NVFP4", ignore=["lm_head"])}},
        linears=14,
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def replicas(bundle, tmp_path_factory):
    """By kind: "dense", "csf", and "float", what they stand for."""
    made: dict[str, dict[str, Path]] = {}

    def get(name: str) -> dict[str, Path]:
        if name not in made:
            kind, root = KINDS[name], tmp_path_factory.mktemp(name)
            made[name] = write_replica(
                root,
                kind.config(),
                kind.store,
                kind.documents,
                rename=kind.rename,
                arrange=kind.arrange,
                extra=kind.extra(),
                model_class=kind.model_class,
            )
            compress(made[name]["dense"], root / "csf")
            made[name]["csf"] = root / "csf"
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


@pytest.mark.parametrize("form", ["dense", "csf"])
def test_compiles_in_one_graph(replicas, form):
    """Before anything was called, too."""
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
    assert cosine(logits_of(model), expected) >= 0.9999
    # The bound tells: without quantized activations, or with them everywhere, logits are elsewhere.
    for other in ("bf16", "nvfp4_dynamic"):
        assert cosine(logits_of(load(paths["dense"], activation_format=other)), expected) < 0.9999
