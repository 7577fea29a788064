"""The NVFP4 quantizers, and the law that every requantizing kernel matches bit for bit.

THE LAW. Everything in IEEE float32, each operation rounded to nearest even, no operation fused with another:

    amax    = max |w|                               over the tensor (weights) or the row (dynamic activations)
    global  = max(amax / 2688, 2^-117)              2688 = 448 * 6; 1.0 when amax is 0
    ratio   = max |w| over a 16-group / (6 * global)
    byte    = e4m3(min(max(ratio, 2^-9), 448))      nearest even; never 0, so that nothing divides by 0
    q       = |w| / (float(byte) * global)
    code    = e2m1(q)                               nearest even, saturating at 6; bit 3 is the sign bit of w

2^-117 keeps float(byte) * global a normal number. An all-zero group gets byte 0x01 and codes 0. This is ModelOpt's
recipe in its order of operations; the bounds on `global` and `byte` are what it leaves undefined.

Weights may have another byte, near that of the law (`least_squares_bytes`). Codes follow the law for any byte.
"""

from __future__ import annotations

import math
from typing import Optional, Tuple

import torch

from .._ops import add_op_namespace_prefix, ops
from ..arguments import as_float32, kind_of, no_dense_tensor
from .reference import E2M1_MAX, E4M3_MAX, GROUP

GLOBAL_MIN = 2.0**-117
E4M3_MIN = 2.0**-9
MAX_BYTE = 0x7E
"""The E4M3 byte of the largest number: 448."""

NEIGHBOURS = (0, 1, -1, 2, 3, 4, 5)
"""Steps from the law's byte that `least_squares_bytes` tries. Four or five steps up, values that were 6 become 4."""

_SEARCHED_AT_ONCE = 1 << 16
"""How many values are searched at a time on a CPU, so that the temporaries stay in its caches."""

CHUNK_ELEMENTS = 1 << 25
"""How many elements are quantized at a time. It limits the float32 temporaries for a whole stack of experts to a few
hundred MB."""


def global_from_amax(amax: torch.Tensor) -> torch.Tensor:
    """Second-level scale (float32) of tensors whose largest magnitude is `amax`."""
    amax = amax.float()
    divisor = torch.full_like(amax, E4M3_MAX * E2M1_MAX)  # a tensor: CUDA divides by a scalar through its reciprocal
    return torch.where(amax == 0, torch.ones_like(amax), (amax / divisor).clamp(min=GLOBAL_MIN))


def round_to_e2m1(q: torch.Tensor) -> torch.Tensor:
    """Magnitude codes 0..7 (uint8) of non-negative float32; a tie between two codes goes to the even one."""
    code = (q > 0.25).to(torch.uint8)
    code += q >= 0.75
    code += q > 1.25
    code += q >= 1.75
    code += q > 2.5
    code += q >= 3.5
    code += q > 5.0
    return code


def quantize_groups(
    values: torch.Tensor, global_scale: torch.Tensor, scales: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Apply the law to `values` [.., K] with `global_scale` (float32, broadcastable to [.., 1]), or with given
    `scales`.

    Returns packed uint8 [.., K/2] and scales float8_e4m3fn [.., K/16]. NaN gives scale byte 0x7F, never a number.
    """
    groups = values.float().unflatten(-1, (-1, GROUP))
    if scales is None:
        ratio = groups.abs().amax(-1) / (E2M1_MAX * global_scale)
        scales = ratio.clamp(E4M3_MIN, E4M3_MAX).to(torch.float8_e4m3fn)
    step = scales.float() * global_scale
    code = round_to_e2m1(groups.abs() / step.unsqueeze(-1)) | (torch.signbit(groups).to(torch.uint8) << 3)
    low, high = code.flatten(-2).unflatten(-1, (-1, 2)).unbind(-1)
    return low | (high << 4), scales


def least_squares_bytes(values: torch.Tensor, global_scale: torch.Tensor) -> torch.Tensor:
    """The scale bytes of least squared error among the law's and its neighbours: float8_e4m3fn [.., K/16].

    A larger scale clips nothing and rounds small values worse; a smaller one clips the largest. If errors are equal,
    the first in the order of `NEIGHBOURS` wins, which begins with the law's own byte. Squares are added in float32, in
    pairs, then pairs of pairs and so on. Every device adds in this order, so all choose the same bytes.
    """
    rows = values.shape[-2] if values.is_cuda else max(1, _SEARCHED_AT_ONCE // values.shape[-1])
    return torch.cat([_search(part, global_scale) for part in values.split(rows, dim=-2)], dim=-2)


def _search(values: torch.Tensor, global_scale: torch.Tensor) -> torch.Tensor:
    magnitudes = values.float().unflatten(-1, (-1, GROUP)).abs()
    ratio = magnitudes.amax(-1) / (E2M1_MAX * global_scale)
    groups = magnitudes / global_scale.unsqueeze(-1)  # at most 2688, so squares neither overflow nor vanish
    law = ratio.clamp(E4M3_MIN, E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8).to(torch.int16)
    chosen, least = law, torch.full_like(ratio, math.inf)
    for offset in NEIGHBOURS:
        byte = (law + offset).clamp(1, MAX_BYTE)
        step = byte.to(torch.uint8).view(torch.float8_e4m3fn).float().unsqueeze(-1)
        q = groups / step
        # the value of the nearest code, ties to even: codes are 0.5 apart below 2, 1 below 4, and 2 above
        value = torch.where(q < 2, (q * 2).round_() * 0.5, torch.where(q < 4, q.round(), (q * 0.5).round_() * 2))
        error = value.clamp_(max=E2M1_MAX).mul_(step).sub_(groups).square_()
        while error.shape[-1] > 1:
            error = error[..., 0::2] + error[..., 1::2]
        error = error.squeeze(-1)
        better = error < least
        chosen, least = torch.where(better, byte, chosen), torch.where(better, error, least)
    return chosen.to(torch.uint8).view(torch.float8_e4m3fn)


def nvfp4_quantize_two_level(
    weight: torch.Tensor, *, global_scale: torch.Tensor | float | None = None, scales: str = "amax"
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Quantize weights offline: one global for each [N, K] tensor, and one E4M3 scale for every 16 k.

    weight: bf16, fp16 or fp32 [.., N, K], K % 16 == 0, finite. global_scale: the multiplier to use (scalar or [..]);
    None computes it from each tensor's largest magnitude. scales: how a group's scale is found: "amax", so that the
    largest value becomes the largest code, or "mse", the one with the least squared error among that scale and its
    neighbours. Returns packed uint8 [.., N, K/2], scales float8_e4m3fn [.., N, K/16], global float32 [..]. Raises
    ValueError or TypeError naming the argument. Reads its result back (a host sync): not for a hot path.
    """
    _check_values("weight", weight, min_ndim=2)
    if scales not in ("amax", "mse"):
        raise ValueError(f"scales: expected 'amax' or 'mse', got {scales!r}")
    lead = weight.shape[:-2]
    flat = weight.reshape(math.prod(lead), *weight.shape[-2:])
    amax = flat.abs().amax((-2, -1)) if flat.numel() else flat.new_zeros(flat.shape[0])
    if not bool(torch.isfinite(amax).all()):
        bad = int((~torch.isfinite(amax)).nonzero()[0])
        raise ValueError(
            f"weight: expected finite values, got NaN or inf in tensor {bad} of shape {tuple(weight.shape)}"
        )
    if global_scale is None:
        globals_ = global_from_amax(amax)
    else:
        globals_ = as_global("global_scale", global_scale, weight.device).expand(lead).reshape(-1)
        if not bool(((globals_ > 0) & torch.isfinite(globals_)).all()):
            raise ValueError("global_scale: expected finite values above 0")
    packed = torch.empty(*flat.shape[:-1], flat.shape[-1] // 2, dtype=torch.uint8, device=weight.device)
    planes = torch.empty(*flat.shape[:-1], flat.shape[-1] // GROUP, dtype=torch.float8_e4m3fn, device=weight.device)
    step = max(1, CHUNK_ELEMENTS // max(1, flat[0].numel() if len(flat) else 1))
    for start in range(0, len(flat), step):
        part = slice(start, start + step)
        values, factors = flat[part], globals_[part, None, None].float()
        found = least_squares_bytes(values, factors) if scales == "mse" and values.numel() else None
        packed[part], planes[part] = quantize_groups(values, factors, found)
    packed, planes = packed.reshape(*lead, *packed.shape[1:]), planes.reshape(*lead, *planes.shape[1:])
    return packed, planes, globals_.reshape(lead).contiguous()


def nvfp4_act_quant(
    x: torch.Tensor, a_global_scale: torch.Tensor | float | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Quantize activations; the same bytes on every device, no host sync.

    x: bf16, fp16 or fp32 [.., K], K % 16 == 0. a_global_scale: the calibrated multiplier, a scalar or one for each row
    [.., 1]. None computes it from each row's largest magnitude, so that no row can affect another. Returns packed uint8
    [.., K/2], scales float8_e4m3fn [.., K/16], and the float32 global used: [.., 1] or scalar. A row with NaN or inf
    keeps them: its scale bytes or its global are NaN. Raises ValueError or TypeError naming the argument.
    """
    _check_values("x", x, min_ndim=1)
    if a_global_scale is not None:
        a_global_scale = as_global("a_global_scale", a_global_scale, x.device)
        if a_global_scale.numel() != 1 and a_global_scale.shape != (*x.shape[:-1], 1):
            expected = (*x.shape[:-1], 1)
            raise ValueError(
                f"a_global_scale: expected a scalar or shape {expected}, got {tuple(a_global_scale.shape)}"
            )
    if torch.compiler.is_compiling():
        packed, scales, row_global = ops.nvfp4_act_quant(x, a_global_scale)
    else:
        packed, scales, row_global = _act_quant_on_device(x, a_global_scale)
    return packed, scales, row_global if a_global_scale is None else a_global_scale


def _act_quant_on_device(
    x: torch.Tensor, a_global_scale: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(packed, scales, row globals [.., 1]); the last is empty if a global is given."""
    if x.device.type != "cpu":
        from .quantize_triton import quantize_rows  # Triton may be absent where only the CPU is used

        return quantize_rows(x, a_global_scale)
    if a_global_scale is not None:
        return *quantize_groups(x, a_global_scale), x.new_empty(0, dtype=torch.float32)
    row_global = global_from_amax(x.abs().amax(-1, keepdim=True))
    return *quantize_groups(x, row_global), row_global


@torch.library.custom_op(add_op_namespace_prefix("nvfp4_act_quant"), mutates_args=())
def _nvfp4_act_quant(
    x: torch.Tensor, a_global_scale: Optional[torch.Tensor]
) -> Tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return _act_quant_on_device(x, a_global_scale)


@torch.library.register_fake(add_op_namespace_prefix("nvfp4_act_quant"))
def _nvfp4_act_quant_fake(x, a_global_scale):
    lead, depth = x.shape[:-1], x.shape[-1]
    return (
        x.new_empty(*lead, depth // 2, dtype=torch.uint8),
        x.new_empty(*lead, depth // GROUP, dtype=torch.float8_e4m3fn),
        x.new_empty((*lead, 1) if a_global_scale is None else (0,), dtype=torch.float32),
    )


def as_global(name: str, scale: torch.Tensor | float, device: torch.device) -> torch.Tensor:
    """A second-level scale as a float32 tensor on `device`. Tensors of other dtypes are refused, because a default
    dtype may have rounded them."""
    if not isinstance(scale, torch.Tensor):
        number = as_float32(name, scale)
        return torch.full((), number, dtype=torch.float32, device=device)  # a fill, which may be captured in a graph
    if scale.dtype != torch.float32:
        raise TypeError(f"{name}: expected float32, got {scale.dtype}")
    if scale.device != device:
        raise ValueError(f"{name}: expected device {device}, got {scale.device}")
    return scale


def _check_values(name: str, values: torch.Tensor, min_ndim: int) -> None:
    if not isinstance(values, torch.Tensor) or values.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise TypeError(f"{name}: expected a bfloat16, float16 or float32 tensor, got {kind_of(values)}")
    if got := no_dense_tensor(values):
        raise ValueError(f"{name}: expected a tensor on a CPU or GPU, got {got}")
    if values.ndim < min_ndim:
        raise ValueError(f"{name}: expected at least {min_ndim} dimensions, got shape {tuple(values.shape)}")
    if values.shape[-1] % GROUP or not values.shape[-1]:
        raise ValueError(f"{name}: expected K % {GROUP} == 0 and above 0, got K = {values.shape[-1]}")
