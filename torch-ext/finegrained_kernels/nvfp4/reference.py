"""What NVFP4 bytes mean: slow, exact and independent of every kernel.

It follows docs/format.md ("NVFP4 in one paragraph"). Tables are computed from formulas, never by casting, so that this
file can judge code that casts.
"""

from __future__ import annotations

import torch

GROUP = 16
"""Consecutive k that share one scale byte."""

E2M1_MAX = 6.0
E4M3_MAX = 448.0

E2M1_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def e2m1_values(device: torch.device | str = "cpu") -> torch.Tensor:
    """The 16 code values as float64 [16]; bit 3 of a code is its sign."""
    magnitudes = torch.tensor(E2M1_MAGNITUDES, dtype=torch.float64, device=device)
    return torch.cat([magnitudes, -magnitudes])


def e4m3_values(device: torch.device | str = "cpu") -> torch.Tensor:
    """The 256 scale byte values as float64 [256]; 0x7F and 0xFF are NaN, exponent 0 is subnormal."""
    byte = torch.arange(256, device=device)
    mantissa = (byte & 7).double()
    exponent = (byte >> 3) & 15
    normal = (1 + mantissa / 8) * torch.exp2(exponent.double() - 7)
    value = torch.where(exponent == 0, mantissa / 8 * 2.0**-6, normal)
    value = torch.where((byte & 0x7F) == 0x7F, torch.nan, value)
    return torch.where(byte >= 128, -value, value)


def unpack_e2m1(packed: torch.Tensor) -> torch.Tensor:
    """Codes (uint8, 0..15) [.., K] of packed bytes [.., K/2]; the low nibble has the even k.

    >>> e2m1_values()[unpack_e2m1(torch.tensor([0x72, 0xA1], dtype=torch.uint8)).long()].tolist()
    [1.0, 6.0, 0.5, -1.0]
    """
    byte = packed.view(torch.uint8)
    return torch.stack([byte & 15, byte >> 4], dim=-1).flatten(-2)


def dequantize_nvfp4(
    packed: torch.Tensor, scales: torch.Tensor, global_scale: torch.Tensor | float = 1.0
) -> torch.Tensor:
    """float64 values [.., N, K] of packed bytes [.., N, K/2], scale bytes [.., N, K/16] and globals [..], which are
    multipliers.

    Exact for code * scale; the product with the fp32 global is exact in float64 too (6 + 24 bits).
    """
    values = e2m1_values(packed.device)[unpack_e2m1(packed).long()]
    steps = e4m3_values(scales.device)[scales.view(torch.uint8).long()]
    values = (values.unflatten(-1, (-1, GROUP)) * steps.unsqueeze(-1)).flatten(-2)
    return values * align_global(global_scale, values)


def align_global(global_scale: torch.Tensor | float, values: torch.Tensor) -> torch.Tensor:
    """`global_scale` as float64, to multiply `values` [.., N, K]: a scalar, [..] per tensor, or [N, 1] per row."""
    scale = torch.as_tensor(global_scale, dtype=torch.float64, device=values.device)
    per_tensor = scale.ndim > 0 and scale.shape == values.shape[:-2]
    return scale[..., None, None] if per_tensor else scale
