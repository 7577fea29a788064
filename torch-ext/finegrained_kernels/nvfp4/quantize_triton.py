"""Quantizes activation rows on a GPU, and makes the exact bf16 operands of W4A4 for tensor cores before Blackwell.

A code times its scale has 6 significant bits, so bf16 holds it exactly; the global is left out and multiplies the sums.
Bytes moved per value: 2 read, and 9/16 (packed) or 2 (operands) written.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..device import cdiv, on_device
from ..launching import bind
from .reference import GROUP
from .rounding import e2m1_from_value, e2m1_to_float, e4m3_to_float, global_from_row_amax, scale_from_amax


@triton.jit
def load_blocks(ptrs, mask, start, K: tl.constexpr, BLOCK_K: tl.constexpr, COUNT: tl.constexpr):
    """A tuple of COUNT blocks of BLOCK_K values from `start` on, 0 outside. All loads are started before any value is
    used."""
    blocks = ()
    for i in tl.static_range(COUNT):
        k = start + i * BLOCK_K
        blocks += (tl.load(ptrs + k, mask=within(mask, k, K, BLOCK_K), other=0.0),)
    return blocks


@triton.jit
def within(mask, k, K: tl.constexpr, WIDTH: tl.constexpr):
    """`mask` [rows, 1]; if WIDTH columns from `k` on reach past a row's end, also a mask of the columns before it."""
    if K % WIDTH != 0:
        mask = mask & (k + tl.arange(0, WIDTH) < K)[None, :]
    return mask


@triton.jit(do_not_specialize=["num_rows", "num_sources"])
def quantize_rows_kernel(
    x_ptr, global_ptr, packed_ptr, scales_ptr, operand_ptr, row_index_ptr,
    num_rows, num_sources, global_stride,
    K: tl.constexpr, IS_DYNAMIC: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    """Quantize BLOCK_R rows per program: compute globals (given, or from each row's amax), scales and codes, and store
    them packed or as operands. COUNT blocks are held in registers; longer rows are read a second time after their amax
    is known.
    """
    STEP: tl.constexpr = COUNT * BLOCK_K
    rows = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    in_output = rows < num_rows
    sources = rows
    if row_index_ptr is not None:
        sources = tl.load(row_index_ptr + rows, mask=in_output, other=-1)
    in_input = ((sources >= 0) & (sources < num_sources))[:, None]
    x_ptrs = x_ptr + sources.to(tl.int64)[:, None] * K + tl.arange(0, BLOCK_K)[None, :]
    blocks = load_blocks(x_ptrs, in_input, 0, K, BLOCK_K=BLOCK_K, COUNT=COUNT)
    if IS_DYNAMIC:
        DTYPE: tl.constexpr = x_ptr.dtype.element_ty
        IS_WIDE: tl.constexpr = DTYPE.primitive_bitwidth == 32
        BITS: tl.constexpr = tl.int32 if IS_WIDE else tl.int16
        MAGNITUDE: tl.constexpr = 0x7FFFFFFF if IS_WIDE else 0x7FFF
        largest = tl.zeros([BLOCK_R, BLOCK_K], BITS)  # compares bits of magnitudes, of which NaN has the largest
        for start in range(0, K, STEP):
            if start > 0:
                blocks = load_blocks(x_ptrs, in_input, start, K, BLOCK_K=BLOCK_K, COUNT=COUNT)
            for i in tl.static_range(COUNT):
                largest = tl.maximum(largest, blocks[i].to(BITS, bitcast=True) & MAGNITUDE)
        largest = tl.max(largest.reshape(BLOCK_R, BLOCK_K // 16, 16), axis=2)  # as groups are, so no data moves
        amax = tl.max(largest, axis=1).to(BITS).to(DTYPE, bitcast=True).to(tl.float32)
        global_scale = global_from_row_amax(amax)
        tl.store(global_ptr + rows, global_scale, mask=in_output)
    else:
        global_scale = tl.load(global_ptr + rows * global_stride, mask=in_output, other=1.0)
    in_output, rows = in_output[:, None], rows.to(tl.int64)[:, None]
    for start in range(0, K, STEP):
        if STEP < K:
            blocks = load_blocks(x_ptrs, in_input, start, K, BLOCK_K=BLOCK_K, COUNT=COUNT)
        for i in tl.static_range(COUNT):
            quantize_block(
                blocks[i], global_scale, packed_ptr, scales_ptr, operand_ptr,
                rows=rows, mask=in_output, k=start + i * BLOCK_K, K=K, BLOCK_K=BLOCK_K,
            )  # fmt: skip


@triton.jit
def quantize_block(
    x, global_scale, packed_ptr, scales_ptr, operand_ptr, rows, mask, k, K: tl.constexpr, BLOCK_K: tl.constexpr
):  # fmt: skip
    """Quantize and store columns [k, k + BLOCK_K) of `rows` int64 [BLOCK_R, 1], whose values are `x`."""
    BLOCK_R: tl.constexpr = x.shape[0]
    groups = x.to(tl.float32).reshape(BLOCK_R, BLOCK_K // 16, 16)
    amax = tl.max(groups.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=2).to(tl.float32, bitcast=True)
    global_scale = global_scale[:, None]
    scale, byte = scale_from_amax(amax, global_scale)
    sign = groups.to(tl.int32, bitcast=True)
    if x.dtype == tl.float16:
        sign = (x.to(tl.int16, bitcast=True).to(tl.int32) << 16).reshape(BLOCK_R, BLOCK_K // 16, 16)
    number, code = e2m1_from_value(groups, sign, (scale * global_scale)[:, :, None])
    if operand_ptr is not None:
        value = (number * scale[:, :, None]).reshape(BLOCK_R, BLOCK_K).to(tl.bfloat16)
        offsets = rows * K + (k + tl.arange(0, BLOCK_K))[None, :]
        tl.store(operand_ptr + offsets, value, mask=within(mask, k, K, BLOCK_K))
    else:
        offsets = rows * (K // 16) + (k // 16 + tl.arange(0, BLOCK_K // 16))[None, :]
        tl.store(scales_ptr + offsets, byte.to(tl.uint8), mask=within(mask, k // 16, K // 16, BLOCK_K // 16))
        low, high = tl.split(code.reshape(BLOCK_R, BLOCK_K // 2, 2))
        offsets = rows * (K // 2) + (k // 2 + tl.arange(0, BLOCK_K // 2))[None, :]
        packed = (low | (high << 4)).to(tl.uint8)
        tl.store(packed_ptr + offsets, packed, mask=within(mask, k // 2, K // 2, BLOCK_K // 2))


@triton.jit(do_not_specialize=["num_rows"])
def expand_rows_kernel(
    packed_ptr, scales_ptr, operand_ptr, num_rows, K: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr
):
    """Turn a tile of packed rows into bf16 operands."""
    rows = (tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)).to(tl.int64)[:, None]
    in_output = rows < num_rows
    k = tl.program_id(1) * BLOCK_K
    offsets = rows * (K // 2) + (k // 2 + tl.arange(0, BLOCK_K // 2))[None, :]
    byte = tl.load(packed_ptr + offsets, mask=within(in_output, k // 2, K // 2, BLOCK_K // 2), other=0).to(tl.int32)
    offsets = rows * (K // 16) + (k // 16 + tl.arange(0, BLOCK_K // 16))[None, :]
    scale = tl.load(scales_ptr + offsets, mask=within(in_output, k // 16, K // 16, BLOCK_K // 16), other=0)
    code = tl.join(byte, byte >> 4).reshape(BLOCK_R, BLOCK_K // 16, 16)
    value = (
        (e2m1_to_float(code) * e4m3_to_float(scale.to(tl.int32))[:, :, None]).reshape(BLOCK_R, BLOCK_K).to(tl.bfloat16)
    )
    offsets = rows * K + (k + tl.arange(0, BLOCK_K))[None, :]
    tl.store(operand_ptr + offsets, value, mask=within(in_output, k, K, BLOCK_K))


def quantize_rows(
    x: torch.Tensor, global_scale: torch.Tensor | None, row_index: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(packed [.., K/2], scales [.., K/16], row globals [.., 1]) of `x` [.., K], or of the rows of [M, K] in
    `row_index`. The globals are empty if one is given."""
    lead, depth = x.shape[:-1] if row_index is None else row_index.shape, x.shape[-1]
    packed = x.new_empty(*lead, depth // 2, dtype=torch.uint8)
    scales = x.new_empty(*lead, depth // GROUP, dtype=torch.float8_e4m3fn)
    row_global = x.new_empty((*lead, 1) if global_scale is None else (0,), dtype=torch.float32)
    is_dynamic = global_scale is None
    given = row_global if is_dynamic else global_scale
    _launch(x.reshape(-1, depth), given, is_dynamic, packed=packed, scales=scales, row_index=row_index)
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
    _launch(x, global_scale, is_dynamic, operands=operands, row_index=row_index)
    return operands, global_scale


def expanded_operands(packed: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """bf16 code * scale [M, K] of packed [M, K/2] and scale bytes [M, K/16]."""
    rows, depth = packed.shape[0], packed.shape[1] * 2
    operands = packed.new_empty(rows, depth, dtype=torch.bfloat16)
    if rows:
        with on_device(packed.device):
            tile = row_tile(depth)
            bind(expand_rows_kernel, K=depth, **tile)(
                (cdiv(rows, tile["BLOCK_R"]), cdiv(depth, tile["BLOCK_K"])),
                packed.contiguous().view(torch.uint8), scales.contiguous().view(torch.uint8), operands, rows,
            )  # fmt: skip
    return operands


def row_tile(depth: int) -> dict[str, int]:
    """Rows and k of a block: 8 values for each thread of 4 warps, and at most an eighth of its k past the end of the
    rows."""
    block_k = next(width for width in (1024 >> i for i in range(7)) if cdiv(depth, width) * width * 8 <= depth * 9)
    return {"BLOCK_R": 1024 // block_k, "BLOCK_K": block_k}


def _launch(x, global_scale, is_dynamic: bool, packed=None, scales=None, operands=None, row_index=None) -> None:
    rows, depth = (x if row_index is None else row_index).shape[0], x.shape[1]
    if not rows:
        return
    with on_device(x.device):
        tile = row_tile(depth)
        blocks = cdiv(depth, tile["BLOCK_K"])
        count = max(n for n in range(1, 9) if blocks % n == 0)
        bind(quantize_rows_kernel, K=depth, IS_DYNAMIC=is_dynamic, COUNT=count, **tile)(
            (cdiv(rows, tile["BLOCK_R"]),),
            x.contiguous(), global_scale, packed, None if scales is None else scales.view(torch.uint8), operands,
            row_index, rows, x.shape[0], 1 if is_dynamic or global_scale.numel() > 1 else 0,
        )  # fmt: skip
