"""Names the kind of layer that a module is, and the format in which, by its headers, a checkpoint stores its
weights."""

from __future__ import annotations

import re

from finegrained_kernels.checkpoint.headers import TensorInfo
from finegrained_kernels.checkpoint.names import Located, Plane

# The first of these that matches any part of the module's name counts.
_KINDS = {
    "vision": r"visual|vision_\w+|vit|audio_\w+|multi_modal_projector|mm_projector|connector",
    "lm_head": r"lm_head",
    "embeddings": r"\w*embed\w*|wte|wpe",
    "routers": r"gate|router|shared_expert_gate",
    "MTP": r"mtp\w*|nextn\w*",
    "experts": r"experts",
    "shared experts": r"shared_experts?",
    "linear attention": r"linear_attn|mamba|mixer|ssm",
    "attention": r"\w*attn|\w*attention",
    "MLP": r"mlp|feed_forward|ffn|block_sparse_moe",
}
FLOATS = ("BF16", "F16", "F32", "F64")
_FP8 = ("F8_E4M3", "F8_E5M2")
_FP8_SCALES = (".weight_scale", ".weight_scale_inv", "_weight_scale", "_scale_inv")


def layer_kind(module: str) -> str:
    """The kind, such as "experts", "shared experts" or "attention", by the module's name; "other" if that does not
    tell."""
    parts = module.split(".")
    for kind, pattern in _KINDS.items():
        if any(re.fullmatch(pattern, part) for part in parts):
            return kind
    return "other"


def other_formats(located: Located, planes: dict[str, Plane]) -> dict[str, str | None]:
    """The format of each weight that is quantized but not NVFP4, by tensor name; None if the format is unknown."""
    claimed = {plane.weight for plane in planes.values()}
    return {
        name: _format(name, info, located)
        for name, (_, info) in located.items()
        if name not in claimed and len(info.shape) > 1 and info.dtype not in FLOATS and _is_weight(name, info.dtype)
    }


def _is_weight(name: str, dtype: str) -> bool:
    last = name.rpartition(".")[2]
    return last in ("weight", "weight_packed", "qweight") or (last.endswith(("_proj", "_blocks")) and dtype != "BOOL")


def _format(name: str, info: TensorInfo, located: Located) -> str | None:
    if info.dtype not in _FP8:
        return None
    module = name.removesuffix(".weight")
    scale = next((located[module + suffix][1] for suffix in _FP8_SCALES if module + suffix in located), None)
    if scale is None:
        return None
    rows, cols = info.shape[-2:]
    if scale.dtype in ("U8", "F8_E8M0"):
        return "MXFP8" if scale.shape[-1] * 32 == cols else None
    count = scale.nbytes // {"F32": 4, "BF16": 2, "F16": 2}.get(scale.dtype, 1)
    if count == 1:
        return "FP8, one scale per tensor"
    return "FP8, one scale per channel" if count == rows else "FP8, one scale per block"
