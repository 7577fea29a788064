"""Quantizing activation rows on a GPU, and the exact bf16 operands that W4A4 multiplies on pre-Blackwell tensor cores.

A code times its scale has 6 significant bits, so bf16 holds it exactly; the global stays out and multiplies the sums.
Bytes moved: 2 a value read, and 9/16 (packed) or 2 (operands) a value written.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..device import next_power_of_2, on_device
from .reference import GROUP
from .rounding import e2m1_code, e4m3_from_amax, e4m3_to_float, global_from_row_amax


@triton.jit
def quantize_rows_kernel(
    x_ptr, global_ptr, packed_ptr, scales_ptr, operand_ptr, row_index_ptr,
    num_sources, K, global_stride,
    IS_DYNAMIC: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One row a program: its global (given, or from its own amax), scales and codes; stores packed or operand form."""
    row = tl.program_id(0).to(tl.int64)
    source = row
    if row_index_ptr is not None:
        source = tl.load(row_index_ptr + row).to(tl.int64)
    depth = tl.where((source >= 0) & (source < num_sources), K, 0)
    offs = tl.arange(0, BLOCK_K)
    x = tl.load(x_ptr + source * K + offs, mask=offs < depth, other=0.0).to(tl.float32)
    magnitude = (x.to(tl.int32, bitcast=True) & 0x7FFFFFFF).reshape(BLOCK_K // 16, 16)
    amax = tl.max(magnitude, axis=1)  # of the bits: NaN is the largest
    if IS_DYNAMIC:
        global_scale = global_from_row_amax(tl.max(amax, axis=0).to(tl.float32, bitcast=True))
        tl.store(global_ptr + row, global_scale)
    else:
        global_scale = tl.load(global_ptr + row * global_stride)
    byte = e4m3_from_amax(amax.to(tl.float32, bitcast=True), global_scale)
    scale = e4m3_to_float(byte)
    code = e2m1_code(x.reshape(BLOCK_K // 16, 16), (scale * global_scale)[:, None])
    if operand_ptr is not None:
        magnitude = code & 7
        value = tl.where(
            magnitude < 4, magnitude * 0.5, tl.where(magnitude < 6, magnitude - 2.0, magnitude * 2.0 - 8.0)
        )
        value = tl.where(code > 7, -value, value) * scale[:, None]
        tl.store(operand_ptr + row * K + offs, value.reshape(BLOCK_K).to(tl.bfloat16), mask=offs < K)
    else:
        offs_c, offs_b = tl.arange(0, BLOCK_K // 16), tl.arange(0, BLOCK_K // 2)
        tl.store(scales_ptr + row * (K // 16) + offs_c, byte.to(tl.uint8), mask=offs_c < K // 16)
        low, high = tl.split(code.reshape(BLOCK_K // 2, 2))
        tl.store(packed_ptr + row * (K // 2) + offs_b, (low | (high << 4)).to(tl.uint8), mask=offs_b < K // 2)


@triton.jit
def expand_rows_kernel(packed_ptr, scales_ptr, operand_ptr, K, BLOCK_K: tl.constexpr):
    """One packed row a program to its bf16 operands."""
    row = tl.program_id(0).to(tl.int64)
    offs = tl.arange(0, BLOCK_K)
    mask = offs < K
    byte = tl.load(packed_ptr + row * (K // 2) + offs // 2, mask=mask, other=0).to(tl.int32)
    code = (byte >> ((offs % 2) * 4)) & 15
    scale = e4m3_to_float(tl.load(scales_ptr + row * (K // 16) + offs // 16, mask=mask, other=0).to(tl.int32))
    magnitude = code & 7
    value = tl.where(magnitude < 4, magnitude * 0.5, tl.where(magnitude < 6, magnitude - 2.0, magnitude * 2.0 - 8.0))
    value = tl.where(code > 7, -value, value) * scale
    tl.store(operand_ptr + row * K + offs, value.to(tl.bfloat16), mask=mask)


def quantize_rows(
    x: torch.Tensor, global_scale: torch.Tensor | None, row_index: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(packed [.., K/2], scales [.., K/16], row globals [.., 1]) of `x` [.., K], or of the rows of [M, K] that
    `row_index` names; the globals are empty when one was given."""
    lead, depth = x.shape[:-1] if row_index is None else row_index.shape, x.shape[-1]
    packed = x.new_empty(*lead, depth // 2, dtype=torch.uint8)
    scales = x.new_empty(*lead, depth // GROUP, dtype=torch.float8_e4m3fn)
    row_global = x.new_empty((*lead, 1) if global_scale is None else (0,), dtype=torch.float32)
    is_dynamic = global_scale is None
    _launch(
        x.reshape(-1, depth), row_global if is_dynamic else global_scale, is_dynamic, packed, scales, None, row_index
    )
    return packed, scales, row_global


def quantized_operands(
    x: torch.Tensor, global_scale: torch.Tensor | None, row_index: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """bf16 code * scale [rows, K] of the (gathered) rows of `x` [M, K], and their float32 globals [rows] or [1]."""
    rows = x.shape[0] if row_index is None else row_index.shape[0]
    operands = x.new_empty(rows, x.shape[1], dtype=torch.bfloat16)
    is_dynamic = global_scale is None
    if global_scale is None:
        global_scale = x.new_empty(rows, dtype=torch.float32)
    _launch(x, global_scale, is_dynamic, None, None, operands, row_index)
    return operands, global_scale


def expanded_operands(packed: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """bf16 code * scale [M, K] of packed [M, K/2] and scale bytes [M, K/16]."""
    rows, depth = packed.shape[0], packed.shape[1] * 2
    operands = packed.new_empty(rows, depth, dtype=torch.bfloat16)
    if rows:
        with on_device(packed.device):
            expand_rows_kernel[(rows,)](
                packed.contiguous().view(torch.uint8), scales.contiguous().view(torch.uint8), operands, depth,
                BLOCK_K=next_power_of_2(depth),
            )  # fmt: skip
    return operands


def _launch(x, global_scale, is_dynamic: bool, packed=None, scales=None, operands=None, row_index=None) -> None:
    rows, depth = (x if row_index is None else row_index).shape[0], x.shape[1]
    if not rows:
        return
    with on_device(x.device):
        quantize_rows_kernel[(rows,)](
            x.contiguous(), global_scale, packed, None if scales is None else scales.view(torch.uint8), operands,
            row_index, x.shape[0], depth, 0 if global_scale.numel() == 1 else 1,
            IS_DYNAMIC=is_dynamic, BLOCK_K=next_power_of_2(depth),
        )  # fmt: skip
