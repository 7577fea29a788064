"""Tiny random models of every architecture that the transformers plug-in is tested with, and their checkpoints."""

from __future__ import annotations

import json
import re
import warnings
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from checkpoints import as_compressed_tensors, read_tensors, write_checkpoint
from finegrained_kernels.checkpoint import compress, quantize

COMMON = {
    "vocab_size": 128,
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
MOE = {"moe_intermediate_size": 64, "num_experts_per_tok": 2, "norm_topk_prob": True}
ARCHITECTURES = {
    "qwen3_moe": {**MOE, "num_experts": 8, "intermediate_size": 96},
    "qwen3_next": {
        **MOE,
        "num_experts": 8,
        "intermediate_size": 96,
        "shared_expert_intermediate_size": 64,
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "layer_types": ["linear_attention", "full_attention"],
    },
    "glm4_moe": {
        **MOE,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        "intermediate_size": 96,
        "first_k_dense_replace": 1,
        "num_hidden_layers": 3,
    },
    "mixtral": {"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 64, "sliding_window": None},
}


def write_bf16(root: Path, architecture: str, *, seed: int = 0, **changes) -> Path:
    """Write a random model in bfloat16, with `save_pretrained`. It is wide enough for its tokens to vary."""
    torch.manual_seed(seed)
    options = {**COMMON, **ARCHITECTURES[architecture], **changes}
    config = AutoConfig.for_model(architecture, **options)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                scale = 1.0 if "embed" in name else 2.0 / parameter.shape[-1] ** 0.5
                parameter.copy_(torch.randn(parameter.shape) * scale)
    model.save_pretrained(root)
    return root


def write_checkpoints(root: Path, architecture: str, *, input_scale: float | None = None, **changes) -> dict[str, Path]:
    """Write a model as "bf16", as NVFP4 with "dense" scales, and with compressed scales, "csf"."""
    paths = {name: root / name for name in ("bf16", "dense", "csf")}
    write_bf16(paths["bf16"], architecture, **changes)
    quantize_experts(paths["bf16"], paths["dense"], input_scale=input_scale)
    compress(paths["dense"], paths["csf"])
    return paths


def quantize_experts(source: Path, destination: Path, *, input_scale: float | None = None) -> None:
    """Like `quantize`, but gate and up get different globals, as in some checkpoints, so that mixing them up is
    noticed."""
    quantize(source, destination, include=["*.experts.*"], input_scale=input_scale)
    tensors = load_file(destination / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith(("up_proj.weight_scale_2", "w3.weight_scale_2")):
            tensors[name] = tensor * 1.25
    save_file(tensors, destination / "model.safetensors", {"format": "pt"})


def write_compressed_tensors(root: Path, dense: Path) -> dict[str, Path]:
    """Write the NVFP4 checkpoint ``dense`` in the layout of compressed-tensors, dense and compressed."""
    config = json.loads((dense / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "nvfp4-pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 4, "group_size": 16}}},
        "ignore": ["lm_head"],
    }
    paths = {"dense": root / "dense", "csf": root / "csf"}
    write_checkpoint(paths["dense"], as_compressed_tensors(read_tensors(dense)), config)
    compress(paths["dense"], paths["csf"])
    return paths


def load(
    path: Path, strategy: str = "auto", *, device: str = "cpu", model_class: type = AutoModelForCausalLM, **options
):
    """`from_pretrained` with the plug-in, as documented."""
    from finegrained_kernels.integrations.transformers import NVFP4CSFConfig

    config = NVFP4CSFConfig(
        scale_strategy=strategy,
        **{name: options.pop(name) for name in ("activation_format", "prefetch", "fp8") if name in options},
    )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="You passed `quantization_config`")
        model = model_class.from_pretrained(path, quantization_config=config, **options)
    return model if device == "cpu" else model.to(device)


def generate(model, length: int = 64, **options) -> torch.Tensor:
    """Greedy tokens after a fixed prompt."""
    prompt = torch.arange(16, device=model.device).view(1, -1) * 7 % COMMON["vocab_size"]
    return model.generate(prompt, max_new_tokens=length, do_sample=False, **options)[0, 16:]


def hidden_states(width: int) -> torch.Tensor:
    """Random bfloat16 `[1, 32, width]`, always the same."""
    return torch.randn(1, 32, width, generator=torch.Generator().manual_seed(1)).bfloat16()


E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.float64)
_EXPERT = re.compile(r".*layers\.(\d+)\..*experts\.(\d+)\.(gate_proj|up_proj|down_proj|w1|w3|w2)\.weight")


def reference_model(paths: dict[str, Path]):
    """The float64 model whose expert weights are the NVFP4 values, computed from the dense checkpoint's tensors
    alone."""
    model = AutoModelForCausalLM.from_pretrained(paths["bf16"], experts_implementation="eager").double()
    tensors = read_tensors(paths["dense"])
    for name, packed in tensors.items():
        if not (match := _EXPERT.fullmatch(name)):
            continue
        base = name.removesuffix(".weight")
        codes = torch.stack([packed & 15, packed >> 4], dim=-1).flatten(-2)
        scales = tensors[f"{base}.weight_scale"].double() * tensors[f"{base}.weight_scale_2"].double()
        weight = E2M1[codes.long()] * scales.repeat_interleave(16, -1)
        experts = model.model.layers[int(match[1])].mlp.experts
        rows = experts.gate_up_proj.shape[1] // 2
        with torch.no_grad():
            if match[3] in ("down_proj", "w2"):
                experts.down_proj[int(match[2])] = weight
            else:
                first = rows if match[3] in ("up_proj", "w3") else 0
                experts.gate_up_proj[int(match[2]), first : first + rows] = weight
    return model
