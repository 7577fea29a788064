"""The kinds of NVFP4 checkpoints that people publish, as tiny replicas that transformers loads."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import transformers

from finegrained_kernels.checkpoint import compress
from replicas import Stored, small_config, stack_experts, store_fp8, store_nvfp4, write_replica


@dataclasses.dataclass
class Kind:
    """How a replica is made, and what it should contain."""

    config: Callable[..., transformers.PreTrainedConfig]
    store: Callable[[str, np.ndarray], Stored | None]
    documents: dict[str, dict]
    linears: int
    experts: int = 0
    fp8: int = 0
    extra: Callable[[], dict[str, torch.Tensor]] = dict
    rename: Callable[[str], str] = lambda name: name
    arrange: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]] = lambda tensors: tensors
    model_class: type = transformers.AutoModelForCausalLM


def sized(architecture: str, **own) -> Callable[..., transformers.PreTrainedConfig]:
    return lambda **sizes: small_config(architecture, **{**own, **sizes})


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
"""Every token uses all experts, because a choice between nearly equal experts would depend on the dtype."""

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
    """MLP and head are NVFP4, both kinds of attention FP8 with one scale per tensor."""
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


def of_three_algorithms(module: str, weight: np.ndarray) -> Stored | None:
    """AWQ in attention, plain NVFP4 in the first MLP, and weight-only with meaningless input scales in the second."""
    if "self_attn" in module:
        return store_nvfp4(weight, awq=True)
    return store_nvfp4(weight, input_scale="layers.1" in module) if is_linear(module) else None


def table_of_three() -> dict[str, dict]:
    table: dict[str, dict] = {}
    for layer, algorithm in enumerate(("NVFP4", "W4A16_NVFP4")):
        for name in "qkvo":
            entry = {"quant_algo": "NVFP4_AWQ", "group_size": 16, "has_zero_point": False, "pre_quant_scale": True}
            table[f"model.layers.{layer}.self_attn.{name}_proj"] = entry
        for name in GLU:
            table[f"model.layers.{layer}.mlp.{name}_proj"] = {"quant_algo": algorithm, "group_size": 16}
    return table


def in_wrapper(name: str) -> str:
    return name if name.startswith("lm_head") else name.replace("model.", "model.language_model.", 1)


def every_linear(store: Callable[[np.ndarray], Stored], *others: str) -> Callable[[str, np.ndarray], Stored | None]:
    return lambda module, weight: store(weight) if is_linear(module) or module in others else None


def multimodal_config(**sizes: int) -> transformers.PreTrainedConfig:
    """A vision tower and a text model, whose config has the quantization config."""
    text = small_config("qwen3_5_moe_text", **{**HYBRID, **MOE, **sizes})
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 128}
    vision |= {"num_position_embeddings": 16, "patch_size": 4}
    config = transformers.AutoConfig.for_model("qwen3_5_moe", text_config=text.to_dict(), vision_config=vision)
    config.tie_word_embeddings = False
    return config


KINDS = {
    "a_llm_compressor_w4a16": Kind(
        sized("qwen3_next", **HYBRID, **MOE),
        of_hybrid_moe,
        {"config.json": {"quantization_config": pack_quantized(
            ["lm_head", "re:.*linear_attn.*", "re:.*mlp.gate$", "re:.*shared_expert_gate$"])}},
        linears=10,
        experts=2,
    ),
    "b_modelopt_mixed": Kind(
        sized("qwen3_5_text", **{k: HYBRID[k] for k in HYBRID if "expert" not in k}),
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
        sized("qwen3"),
        every_linear(store_nvfp4),
        {
            "config.json": {"quantization_config": modelopt("NVFP4", ignore=["lm_head"])},
            "hf_quant_config.json": {"quantization": {"quant_algo": "NVFP4", "exclude_modules": ["lm_head"]}},
        },
        linears=14,
    ),
    "d_fp8_blocks": Kind(
        sized("qwen3_moe", **MOE, hidden_size=160, head_dim=48),
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
        sized("qwen3"),
        every_linear(lambda weight: store_nvfp4(weight, awq=True)),
        {"config.json": {"quantization_config": modelopt("NVFP4_AWQ", ignore=["lm_head"])}},
        linears=14,
    ),
    "f_per_layer": Kind(
        sized("qwen3"),
        of_three_algorithms,
        {"config.json": {"quantization_config": modelopt("MIXED_PRECISION", quantized_layers=table_of_three())}},
        linears=14,
    ),
    "f_w4a16_hf_quant_config_alone": Kind(
        sized("qwen3"),
        every_linear(lambda weight: store_nvfp4(weight, input_scale=True), "lm_head"),
        {"hf_quant_config.json": {"quantization": {"quant_algo": "W4A16_NVFP4", "exclude_modules": []}}},
        linears=15,
    ),
    **{
        f"g_{layout}_experts": Kind(
            sized("qwen3_5_moe_text", **HYBRID, **MOE),
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
        sized("qwen2", tie_word_embeddings=True),
        every_linear(store_nvfp4),
        {"config.json": {"quantization_config": modelopt("NVFP4", ignore=["lm_head"])}},
        linears=14,
    ),
}  # fmt: skip


def write_kind(kind: Kind, root: Path, **sizes: int) -> dict[str, Path]:
    """Write a replica: "dense", "csf", and "float", the values that these represent. ``sizes`` change its config."""
    paths = write_replica(
        root,
        kind.config(**sizes),
        kind.store,
        kind.documents,
        rename=kind.rename,
        arrange=kind.arrange,
        extra=kind.extra(),
        model_class=kind.model_class,
    )
    compress(paths["dense"], root / "csf")
    return {**paths, "csf": root / "csf"}
