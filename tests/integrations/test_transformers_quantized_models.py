"""Models of many architectures, quantized by `quantize`, load and compute what their tensors say."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("transformers", reason="needs transformers, the extra [transformers]")

import transformers
from safetensors.torch import save_file

from checkpoints import read_tensors
from finegrained_kernels.checkpoint import compress, quantize
from finegrained_kernels.integrations.transformers import nvfp4_experts, nvfp4_linears
from moe_models import load
from replicas import cosine, dequantized, small_config

pytestmark = pytest.mark.usefixtures("one_thread")

ROUTED = {"n_routed_experts": 4, "num_experts_per_tok": 4, "moe_intermediate_size": 64, "n_group": 1, "topk_group": 1}
LATENT = {"q_lora_rank": 64, "kv_lora_rank": 64, "qk_rope_head_dim": 16, "qk_nope_head_dim": 32, "v_head_dim": 32}
MAMBA = {"mamba_num_heads": 8, "mamba_head_dim": 32, "n_groups": 1, "ssm_state_size": 16}
CONVOLUTIONS = {"num_experts": 4, "num_experts_per_tok": 4, "moe_intermediate_size": 64, "num_dense_layers": 1}
ARCHITECTURES: dict[str, tuple[dict, int, int]] = {
    "llama": ({}, 14, 0),
    "phi3": ({}, 8, 0),  # q, k and v in one layer, gate and up in another
    "gemma3_text": ({}, 14, 0),
    "deepseek_v3": ({**ROUTED, **LATENT, "head_dim": 16, "num_key_value_heads": 4, "first_k_dense_replace": 1}, 16, 1),
    "lfm2_moe": ({**CONVOLUTIONS, "layer_types": ["conv", "full_attention"]}, 9, 1),
    # Its in_proj, of 552 rows, is left alone; and its own code initializes weights of modules inside others.
    "nemotron_h": ({**MAMBA, "num_hidden_layers": 3, "hybrid_override_pattern": "M*-"}, 7, 0),
}
"""By architecture: changes to the config, and how many linear layers and layers of experts are quantized."""


@pytest.mark.parametrize("format", ["modelopt", "compressed-tensors"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@torch.no_grad()
def test_what_quantize_writes(bundle, tmp_path, architecture, format):
    """Everything that it quantizes by default loads from either format."""
    changes, linears, experts = ARCHITECTURES[architecture]
    source = write_bf16(tmp_path / "bf16", small_config(architecture, **changes))
    quantize(source, tmp_path / "dense", format=format)
    compress(tmp_path / "dense", tmp_path / "csf")
    ids = (torch.arange(24) * 7 % 128).view(1, -1)
    found = []
    for form in ("dense", "csf"):
        model = load(tmp_path / form)
        assert (len(nvfp4_linears(model)), len(nvfp4_experts(model))) == (linears, experts)
        found.append(model(ids).logits)
    write_floats(source, tmp_path / "dense", tmp_path / "floats")
    reference = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "floats", dtype=torch.float32)
    assert torch.equal(*found) and cosine(found[0], reference(ids).logits) >= 0.9999


@torch.no_grad()
def test_stacked_experts(bundle, tmp_path):
    """Stacks on the hub have K in the middle. Engines know tensors of single experts, but transformers does not."""
    text = small_config("qwen3_vl_moe_text", num_experts=4, num_experts_per_tok=4, moe_intermediate_size=64)
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 128}
    vision |= {"num_position_embeddings": 16, "patch_size": 4, "deepstack_visual_indexes": [0]}
    config = transformers.AutoConfig.for_model("qwen3_vl_moe", text_config=text.to_dict(), vision_config=vision)
    config.tie_word_embeddings = False
    model_class = transformers.AutoModelForImageTextToText
    source = write_bf16(tmp_path / "bf16", config, model_class)
    tensors = read_tensors(source)
    stacks = {name: tensor for name, tensor in tensors.items() if tensor.dim() == 3 and ".experts." in name}
    assert len(stacks) == 4
    transposed = {name: tensor.mT.contiguous() for name, tensor in stacks.items()}
    save_file(tensors | transposed, source / "model.safetensors", {"format": "pt"})
    quantize(source, tmp_path / "dense")
    compress(tmp_path / "dense", tmp_path / "csf")
    floats = dequantized_tensors(tensors, tmp_path / "dense")
    for name, stack in stacks.items():
        experts, _, projection = name.rpartition(".")
        parts = ("gate_proj", "up_proj") if projection == "gate_up_proj" else (projection,)
        each = [[floats.pop(f"{experts}.{e}.{part}.weight") for part in parts] for e in range(len(stack))]
        floats[name] = torch.stack([torch.cat(rows) for rows in each])
    write_model(source, floats, tmp_path / "floats")
    ids = (torch.arange(24) * 7 % 128).view(1, -1)
    reference = model_class.from_pretrained(tmp_path / "floats", dtype=torch.float32)(ids).logits
    for form in ("dense", "csf"):
        model = load(tmp_path / form, model_class=model_class)
        assert (len(nvfp4_linears(model)), len(nvfp4_experts(model))) == (8, 2)
        assert cosine(model(ids).logits, reference) >= 0.9999


def write_bf16(
    root: Path, config: transformers.PreTrainedConfig, model_class: type = transformers.AutoModelForCausalLM
) -> Path:
    torch.manual_seed(0)
    model = model_class.from_config(config, dtype=torch.bfloat16)
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            spread = 1.0 if "embed" in name else parameter.shape[-1] ** -0.5
            parameter.copy_(torch.randn(parameter.shape) * spread)
    model.save_pretrained(root)
    return root


def write_floats(source: Path, quantized: Path, root: Path) -> None:
    """Write the model of ``source`` in float32, with the values that the tensors of ``quantized`` represent."""
    write_model(source, dequantized_tensors(read_tensors(source), quantized), root)


def dequantized_tensors(floats: dict[str, torch.Tensor], quantized: Path) -> dict[str, torch.Tensor]:
    floats, tensors = dict(floats), read_tensors(quantized)
    for name in [name for name in tensors if name.endswith(".weight_scale")]:
        module = name.removesuffix(".weight_scale")
        divides = f"{module}.weight_packed" in tensors
        packed = tensors[f"{module}.weight_packed" if divides else f"{module}.weight"].numpy()
        scale = float(tensors[f"{module}.weight_global_scale" if divides else f"{module}.weight_scale_2"])
        codes = np.stack([packed % 16, packed // 16], -1).reshape(len(packed), -1)
        value = dequantized(codes, tensors[name].view(torch.uint8).numpy(), 1 / scale if divides else scale)
        floats[f"{module}.weight"] = torch.from_numpy(value)
    return floats


def write_model(source: Path, floats: dict[str, torch.Tensor], root: Path) -> None:
    root.mkdir()
    save_file({name: tensor.float() for name, tensor in floats.items()}, root / "model.safetensors", {"format": "pt"})
    shutil.copy(source / "config.json", root)
