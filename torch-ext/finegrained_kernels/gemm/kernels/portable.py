"""The GEMM in plain Triton, for AMD and Intel GPUs, NVIDIA GPUs before sm_89, and shapes that the tensor-core kernel
does not take.

Tiles, routing and sums are those of mma.py. Codes and scales are expanded by integer and float operations that every
backend and the interpreter have. Weights and scales of a tile are read once.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...nvfp4.rounding import e2m1_from_value, e2m1_to_float, e4m3_to_float, gated_product, scale_from_amax
from ...swizzle_triton import col_tiles, swizzled_bytes, swizzled_offset
from .schedule import Schedule, count_tiles, find_tile, source_rows, target_rows, with_weights
from .tile_scales import decode_tile


@triton.jit
def scale_offsets(rows, cols, STRIDE: tl.constexpr, SWIZZLED: tl.constexpr):
    """Offset of a scale byte, in rows of STRIDE bytes or in a swizzled plane with STRIDE columns."""
    if SWIZZLED:
        return swizzled_offset(rows, cols, col_tiles(STRIDE), UNIT=1)
    else:
        return rows * STRIDE + cols


@triton.jit
def expert_weight(weight, tile, schedule, SHAPE: tl.constexpr):
    """Pointers to the codes of a tile's expert, and to its scale bytes if those are dense. For a tile without an
    expert, those of some other expert."""
    ROWS: tl.constexpr = 2 * SHAPE.N if SHAPE.GATE else SHAPE.N
    PLANE: tl.constexpr = swizzled_bytes(ROWS, SHAPE.C) if SHAPE.SWIZZLED else ROWS * SHAPE.C
    expert = with_weights(tile, schedule).expert.to(tl.int64)
    codes_ptr = weight.codes + expert * (ROWS * (SHAPE.K // 2))
    if SHAPE.COMPRESSED:
        return codes_ptr, codes_ptr
    else:
        return codes_ptr, weight.scales.dense + expert * PLANE


@triton.jit
def weight_tile(
    codes_ptr, scales_ptr, rows, scale_rows, k0,
    ROWS: tl.constexpr, BLOCK_K: tl.constexpr, STRIDE: tl.constexpr, SHAPE: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Scaled weights [rows, BLOCK_K], exact in DTYPE; 0 past ROWS and K."""
    BLOCK_N: tl.constexpr = rows.shape[0]
    byte_col = k0 // 2 + tl.arange(0, BLOCK_K // 2)
    mask = (rows < ROWS)[:, None] & (byte_col < SHAPE.K // 2)[None, :]
    byte = tl.load(codes_ptr + rows[:, None] * (SHAPE.K // 2) + byte_col[None, :], mask=mask, other=0).to(tl.int32)
    code = tl.join(byte & 15, byte >> 4).reshape(BLOCK_N, BLOCK_K // 16, 16)
    col = k0 // 16 + tl.arange(0, BLOCK_K // 16)
    mask = (rows < ROWS)[:, None] & (col < SHAPE.C)[None, :]
    offsets = scale_offsets(scale_rows[:, None], col[None, :], STRIDE, SHAPE.SWIZZLED)
    scale = e4m3_to_float(tl.load(scales_ptr + offsets, mask=mask, other=0).to(tl.int32))
    return (e2m1_to_float(code) * scale[:, :, None]).reshape(BLOCK_N, BLOCK_K).to(DTYPE)


@triton.jit
def store_quantized(values, epilogue, global_scale, rows, ok, n_tile, N: tl.constexpr):
    """Quantize values [BLOCK_T, columns], already rounded to the output's dtype, and write codes and scales."""
    BLOCK_T: tl.constexpr = values.shape[0]
    COLS: tl.constexpr = values.shape[1]
    groups = values.to(tl.float32).reshape(BLOCK_T, COLS // 16, 16)
    amax = tl.max(groups.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=2)  # compares bits, of which NaN has the largest
    scale, byte = scale_from_amax(amax.to(tl.float32, bitcast=True), global_scale)
    _, code = e2m1_from_value(groups, groups.to(tl.int32, bitcast=True), (scale * global_scale)[:, :, None])
    low, high = tl.split(code.reshape(BLOCK_T, COLS // 2, 2))
    store_columns(low | (high << 4), epilogue.out, rows, ok, n_tile, COLS=N // 2)
    store_columns(byte, epilogue.out_scales, rows, ok, n_tile, COLS=N // 16)


@triton.jit
def store_columns(values, out_ptr, rows, ok, n_tile, COLS: tl.constexpr):
    """Write values [BLOCK_T, columns] of tile `n_tile` to rows of out [.., COLS]."""
    cols = n_tile * values.shape[1] + tl.arange(0, values.shape[1])
    mask = ok[:, None] & (cols < COLS)[None, :]
    out_ptrs = out_ptr + rows.to(tl.int64)[:, None] * COLS + cols[None, :]
    tl.store(out_ptrs, values.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def finish_tile(acc, acc_up, tile, schedule, epilogue, SHAPE: tl.constexpr):
    """Turn sums [BLOCK_T, columns] (with a gate, those of up too) into output: globals, gate, quantization, scatter.

    Rows without an expert are 0, whatever their activations are.
    """
    rows = tl.arange(0, acc.shape[0])
    of_none = tile.expert >= schedule.num_experts
    expert = with_weights(tile, schedule).expert.to(tl.int64)
    if SHAPE.GLOBAL_PER_ROW:
        sources = source_rows(schedule, tile, rows)
        x_global = tl.load(epilogue.x_global + sources, mask=sources >= 0, other=0.0)[:, None]
    elif epilogue.x_global is not None:
        x_global = tl.load(epilogue.x_global + expert * epilogue.x_expert_stride)
    else:
        x_global = 1.0
    w_global_ptr = epilogue.w_global + expert * epilogue.w_expert_stride
    values = tl.where(of_none, 0.0, acc * tl.load(w_global_ptr) * x_global)
    if SHAPE.GATE:
        up = tl.where(of_none, 0.0, acc_up * tl.load(w_global_ptr + epilogue.w_half_stride) * x_global)
        values = gated_product(values, up, epilogue.alpha, epilogue.limit, SHAPE.HAS_LIMIT)
    rows, ok = target_rows(schedule, tile, rows)
    if epilogue.out_scales is None:
        store_columns(values, epilogue.out, rows, ok, tile.n_tile, COLS=SHAPE.N)
    else:
        global_scale = tl.load(epilogue.out_global + expert * epilogue.out_expert_stride)
        global_scale = tl.where(of_none, 1.0, global_scale)
        store_quantized(values.to(SHAPE.ROUNDED), epilogue, global_scale, rows, ok, n_tile=tile.n_tile, N=SHAPE.N)


@triton.jit
def multiply_tile(x_ptr, weight, tile, schedule, SHAPE: tl.constexpr, TILE: tl.constexpr):
    """Sums [BLOCK_T, BLOCK_N] of one tile, and with a gate also those of up; zeros for a tile without an expert."""
    BLOCK_N: tl.constexpr = TILE.HALF
    BLOCK_K: tl.constexpr = TILE.BLOCK_K
    BLOCK_T: tl.constexpr = TILE.BLOCK_T
    N: tl.constexpr = SHAPE.N
    STRIDE: tl.constexpr = TILE.COLS if SHAPE.COMPRESSED else SHAPE.C
    UP: tl.constexpr = BLOCK_N if SHAPE.COMPRESSED else N
    sources = source_rows(schedule, tile, tl.arange(0, BLOCK_T))
    codes_ptr, scales_ptr = expert_weight(weight, tile, schedule, SHAPE)
    rows = tile.n_tile * BLOCK_N + tl.arange(0, BLOCK_N)
    scale_rows = tl.arange(0, BLOCK_N) if SHAPE.COMPRESSED else rows
    acc = tl.zeros((BLOCK_T, BLOCK_N), tl.float32)
    acc_up = tl.zeros((BLOCK_T, BLOCK_N), tl.float32)
    depth = tl.where(tile.expert < schedule.num_experts, SHAPE.K, 0)
    for first in range(0, depth, 16 * TILE.COLS):
        if SHAPE.COMPRESSED:
            scales_ptr = decode_tile(weight, tile, first // 16, HALF=BLOCK_N, COLS=TILE.COLS, SHAPE=SHAPE)
        for k0 in range(first, tl.minimum(first + 16 * TILE.COLS, depth), BLOCK_K):
            k = k0 + tl.arange(0, BLOCK_K)
            x_mask = (sources >= 0)[:, None] & (k < SHAPE.K)[None, :]
            x = tl.load(x_ptr + sources.to(tl.int64)[:, None] * SHAPE.K + k[None, :], mask=x_mask, other=0.0)
            w = weight_tile(
                codes_ptr, scales_ptr, rows, scale_rows, k0,
                ROWS=N, BLOCK_K=BLOCK_K, STRIDE=STRIDE, SHAPE=SHAPE, DTYPE=x.dtype,
            )  # fmt: skip
            acc = tl.dot(x, w.trans(), acc)
            if SHAPE.GATE:
                w = weight_tile(
                    codes_ptr, scales_ptr, N + rows, UP + scale_rows, k0,
                    ROWS=2 * N, BLOCK_K=BLOCK_K, STRIDE=STRIDE, SHAPE=SHAPE, DTYPE=x.dtype,
                )  # fmt: skip
                acc_up = tl.dot(x, w.trans(), acc_up)
    return acc, acc_up


@triton.jit(do_not_specialize=["num_rows", "num_sources", "num_experts"])
def portable_gemm_kernel(
    x_ptr, weight, routing, epilogue, num_rows, num_sources, num_experts, SHAPE: tl.constexpr, TILE: tl.constexpr
):
    """Runs on a persistent grid. operands.py describes the groups of arguments, SHAPE, and TILE, which is a
    BlockTile."""
    experts = tl.arange(0, SHAPE.BLOCK_E)
    tile_ends, row_tiles = count_tiles(experts, routing, num_rows, num_experts, TILE.BLOCK_T)
    schedule = Schedule(routing, tile_ends, num_rows, num_sources, num_experts)
    for index in range(tl.program_id(0), row_tiles * TILE.N_TILES, tl.num_programs(0)):
        tile = find_tile(schedule, index // TILE.N_TILES, index % TILE.N_TILES, experts, TILE.BLOCK_T)
        acc, acc_up = multiply_tile(x_ptr, weight, tile, schedule, SHAPE, TILE)
        finish_tile(acc, acc_up, tile, schedule, epilogue, SHAPE=SHAPE)
