"""The GEMM in plain Triton: AMD and Intel GPUs, NVIDIA before sm_89, and shapes the tensor-core kernel does not take.

The same tiles, routing and sums as mma.py, with codes and scales expanded by integer and float operations that
every backend and the interpreter have. Weights and scales of a tile are read once.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...nvfp4.rounding import e2m1_from_value, e4m3_to_float, gated_product, scale_from_amax
from ...swizzle_triton import swizzled_offset
from .schedule import Schedule, count_tiles, find_tile, source_rows, target_rows, with_weights


@triton.jit
def program_tile(schedule, SHAPE: tl.constexpr, TILE: tl.constexpr):
    """The tile of a program of the grid [row tiles, column tiles]."""
    experts = tl.arange(0, SHAPE.BLOCK_E)
    tile_ends, _ = count_tiles(experts, schedule.routing, schedule.num_rows, schedule.num_experts, TILE.BLOCK_T)
    schedule = Schedule(
        schedule.routing, tile_ends, schedule.num_rows, schedule.num_sources, num_experts=schedule.num_experts
    )
    return find_tile(schedule, tl.program_id(0), tl.program_id(1), experts, TILE.BLOCK_T)


@triton.jit
def scale_offsets(rows, cols, C: tl.constexpr, SWIZZLED: tl.constexpr):
    """Offset of a scale byte in its plane of C columns."""
    if SWIZZLED:
        return swizzled_offset(rows, cols, (C + 3) // 4, UNIT=1)
    else:
        return rows * C + cols


@triton.jit
def expert_weight(weight, tile, schedule, SHAPE: tl.constexpr):
    """Pointers to the codes and the scale bytes of a tile's expert, or of another in place of none."""
    ROWS: tl.constexpr = 2 * SHAPE.N if SHAPE.GATE else SHAPE.N
    PLANE: tl.constexpr = (ROWS + 127) // 128 * ((SHAPE.C + 3) // 4) * 512 if SHAPE.SWIZZLED else ROWS * SHAPE.C
    expert = with_weights(tile, schedule).expert.to(tl.int64)
    return weight.codes + expert * (ROWS * (SHAPE.K // 2)), weight.scales.dense + expert * PLANE


@triton.jit
def weight_tile(codes_ptr, scales_ptr, rows, k, ROWS: tl.constexpr, SHAPE: tl.constexpr, DTYPE: tl.constexpr):
    """Scaled weights [rows, k] in DTYPE, exact; 0 past ROWS and K."""
    mask = (rows < ROWS)[:, None] & (k < SHAPE.K)[None, :]
    byte = tl.load(codes_ptr + rows[:, None] * (SHAPE.K // 2) + (k // 2)[None, :], mask=mask, other=0).to(tl.int32)
    code = (byte >> (k % 2 * 4)[None, :]) & 15
    offsets = scale_offsets(rows[:, None], (k // 16)[None, :], SHAPE.C, SHAPE.SWIZZLED)
    scale = e4m3_to_float(tl.load(scales_ptr + offsets, mask=mask, other=0).to(tl.int32))
    magnitude = code & 7
    value = tl.where(magnitude < 4, magnitude * 0.5, tl.where(magnitude < 6, magnitude - 2.0, magnitude * 2.0 - 8.0))
    return (tl.where(code > 7, -value, value) * scale).to(DTYPE)


@triton.jit
def store_quantized(values, epilogue, global_scale, rows, ok, n_tile, N: tl.constexpr):
    """Quantize values [BLOCK_T, columns] (already rounded to the output's dtype) and write codes and scales."""
    BLOCK_T: tl.constexpr = values.shape[0]
    COLS: tl.constexpr = values.shape[1]
    groups = values.to(tl.float32).reshape(BLOCK_T, COLS // 16, 16)
    amax = tl.max(groups.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=2)  # of the bits: NaN is the largest
    scale, byte = scale_from_amax(amax.to(tl.float32, bitcast=True), global_scale)
    _, code = e2m1_from_value(groups, groups.to(tl.int32, bitcast=True), (scale * global_scale)[:, :, None])
    low, high = tl.split(code.reshape(BLOCK_T, COLS // 2, 2))
    store_columns(low | (high << 4), epilogue.out, rows, ok, n_tile, COLS=N // 2)
    store_columns(byte, epilogue.out_scales, rows, ok, n_tile, COLS=N // 16)


@triton.jit
def store_columns(values, out_ptr, rows, ok, n_tile, COLS: tl.constexpr):
    """Write values [BLOCK_T, columns] of the n-th tile to rows of out [.., COLS]."""
    cols = n_tile * values.shape[1] + tl.arange(0, values.shape[1])
    mask = ok[:, None] & (cols < COLS)[None, :]
    out_ptrs = out_ptr + rows.to(tl.int64)[:, None] * COLS + cols[None, :]
    tl.store(out_ptrs, values.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def finish_tile(acc, acc_up, tile, schedule, epilogue, SHAPE: tl.constexpr):
    """From sums [BLOCK_T, columns] (with a gate those of up too) to the output: globals, gate, scatter, quantization.

    Rows of no expert are 0, whatever their activations.
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


@triton.jit(do_not_specialize=["num_rows", "num_sources", "num_experts"])
def portable_gemm_kernel(
    x_ptr, weight, routing, epilogue, num_rows, num_sources, num_experts, SHAPE: tl.constexpr, TILE: tl.constexpr
):
    """One tile a program. Groups of arguments, and SHAPE: operands.py; TILE: a BlockTile."""
    schedule = Schedule(routing, 0, num_rows, num_sources, num_experts)
    tile = program_tile(schedule, SHAPE, TILE)
    sources = source_rows(schedule, tile, tl.arange(0, TILE.BLOCK_T))
    depth = tl.where(tile.expert < num_experts, SHAPE.K, 0)
    codes_ptr, scales_ptr = expert_weight(weight, tile, schedule, SHAPE)
    cols = tile.n_tile * TILE.BLOCK_N + tl.arange(0, TILE.BLOCK_N)
    BLOCK_N: tl.constexpr = TILE.BLOCK_N
    BLOCK_T: tl.constexpr = TILE.BLOCK_T
    acc = tl.zeros((BLOCK_T, BLOCK_N), tl.float32)
    acc_up = tl.zeros((BLOCK_T, BLOCK_N), tl.float32)
    for k0 in range(0, depth, TILE.BLOCK_K):
        k = k0 + tl.arange(0, TILE.BLOCK_K)
        x_mask = (sources >= 0)[:, None] & (k < SHAPE.K)[None, :]
        x = tl.load(x_ptr + sources.to(tl.int64)[:, None] * SHAPE.K + k[None, :], mask=x_mask, other=0.0)
        w = weight_tile(codes_ptr, scales_ptr, cols, k, ROWS=SHAPE.N, SHAPE=SHAPE, DTYPE=x.dtype)
        acc = tl.dot(x, w.trans(), acc)
        if SHAPE.GATE:
            w = weight_tile(codes_ptr, scales_ptr, SHAPE.N + cols, k, ROWS=2 * SHAPE.N, SHAPE=SHAPE, DTYPE=x.dtype)
            acc_up = tl.dot(x, w.trans(), acc_up)
    finish_tile(acc, acc_up, tile, schedule, epilogue, SHAPE=SHAPE)
