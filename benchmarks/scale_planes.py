"""Scale planes like those of trained stacks: a window of 16 values per row, and a share of exceptions."""

from __future__ import annotations

import torch

PERCENT = {"qwen_gate_up": 1.02, "qwen_down": 0.22, "glm_gate_up": 0.30, "glm_down": 0.30}
"""Rates of exceptions of the models' own stacks; those of GLM are a guess."""


def make_planes(
    num_planes: int, num_rows: int, num_cols: int, percent: float, seed: int = 0, device: str = "cuda"
) -> torch.Tensor:
    """uint8 `[E, N, C]`: a window of 16 values per row, and `percent` of the bytes below it, as exceptions."""
    generator = torch.Generator(device).manual_seed(seed)
    options = {"generator": generator, "device": device}
    shape = (num_planes, num_rows, num_cols)
    base = torch.randint(70, 100, (*shape[:2], 1), dtype=torch.uint8, **options)
    code = torch.randn(shape, dtype=torch.float16, **options).mul_(2.5).add_(8).clamp_(0, 15)
    planes = base + code.to(torch.uint8)
    planes[..., 0], planes[..., 1] = base[..., 0], base[..., 0] + 15  # the window is the only one that covers the row
    chosen = torch.rand(shape, **options) < percent / 100
    chosen[..., :2] = False
    planes[chosen] = torch.randint(0, 50, (int(chosen.sum()),), dtype=torch.uint8, **options)
    return planes


def plain_scales(bundle, num_planes: int, num_rows: int, num_cols: int, device: str = "cuda"):
    """Compressed scales that are all 0, without exceptions. They are quick to make, and only for compiling."""
    options = {"dtype": torch.uint8, "device": device}
    bases = torch.zeros(num_planes, num_rows, **options)
    codes = torch.zeros(num_planes, num_rows, num_cols // 2, **options)
    offsets = torch.zeros(num_planes * -(-num_rows * num_cols // 1024) + 1, dtype=torch.int32, device=device)
    return bundle.NVFP4CSFScales(bases, codes, offsets[:0].clone(), offsets)


def moved_bytes(planes: int, num_rows: int, num_cols: int, exceptions: int) -> int:
    """Bytes read and written by decoding `planes` planes: bases, codes and exceptions, and one byte per scale."""
    return planes * (num_rows + num_rows * num_cols * 3 // 2) + 4 * exceptions
