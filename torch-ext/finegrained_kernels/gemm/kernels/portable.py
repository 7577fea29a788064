"""The GEMM in plain Triton: AMD and Intel GPUs, NVIDIA before sm_89, and shapes the tensor-core kernel does not take.

The same tiles, routing and sums as mma.py, with codes and scales expanded by integer and float operations that
every backend and the interpreter have. Weights and scales of a tile are read once.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...nvfp4.rounding import e2m1_from_value, e4m3_to_float, gated_product, scale_from_amax


@triton.jit
def locate(
    row_tile, expert_start_ptr, expert_ids_ptr, num_rows, num_experts, BLOCK_E: tl.constexpr, BLOCK_T: tl.constexpr
):
    """(expert, first row, end row) of a row tile; the rows of no expert belong to expert `num_experts`."""
    if expert_ids_ptr is not None:
        expert = tl.load(expert_ids_ptr + row_tile)  # int32 or int64: compared before it is narrowed
        expert = tl.where((expert >= 0) & (expert < num_experts), expert, num_experts).to(tl.int32)
        first = row_tile
        end = row_tile + 1
    elif expert_start_ptr is not None:
        offs = tl.arange(0, BLOCK_E)
        start = tl.load(expert_start_ptr + offs, mask=offs <= num_experts, other=0)
        end_of = tl.load(expert_start_ptr + offs + 1, mask=offs < num_experts, other=0)
        end_of = tl.where(offs == num_experts, num_rows, end_of)
        tile_ends = tl.cumsum((tl.maximum(end_of - start, 0) + BLOCK_T - 1) // BLOCK_T, 0)
        expert = tl.sum((tile_ends <= row_tile).to(tl.int32), 0)
        first_tile = tl.max(tl.where(tile_ends <= row_tile, tile_ends, 0), 0)
        is_expert = offs == expert
        first = tl.sum(tl.where(is_expert, start, 0), 0) + (row_tile - first_tile) * BLOCK_T
        end = tl.sum(tl.where(is_expert, end_of, 0), 0)
    else:
        expert = 0
        first = row_tile * BLOCK_T
        end = num_rows
    return expert, first, end


@triton.jit
def scale_offsets(rows, cols, C: tl.constexpr, SWIZZLED: tl.constexpr):
    """Offset of a scale byte in its plane (swizzle.py for the swizzled form)."""
    if SWIZZLED:
        return (rows // 128 * ((C + 3) // 4) + cols // 4) * 512 + rows % 32 * 16 + rows % 128 // 32 * 4 + cols % 4
    else:
        return rows * C + cols


@triton.jit
def plane_bytes(ROWS: tl.constexpr, C: tl.constexpr, SWIZZLED: tl.constexpr):
    """Scale bytes of an expert, padding included."""
    if SWIZZLED:
        return (ROWS + 127) // 128 * ((C + 3) // 4) * 512
    else:
        return ROWS * C


@triton.jit
def weight_tile(
    w_ptr, scales_ptr, rows, k, N_ROWS: tl.constexpr, K: tl.constexpr, SWIZZLED: tl.constexpr, DTYPE: tl.constexpr
):
    """Scaled weights [rows, k] in DTYPE, exact; 0 outside the weight."""
    mask = (rows < N_ROWS)[:, None] & (k < K)[None, :]
    byte = tl.load(w_ptr + rows[:, None] * (K // 2) + (k // 2)[None, :], mask=mask, other=0).to(tl.int32)
    code = (byte >> (k % 2 * 4)[None, :]) & 15
    offsets = scale_offsets(rows[:, None], (k // 16)[None, :], K // 16, SWIZZLED)
    scale = e4m3_to_float(tl.load(scales_ptr + offsets, mask=mask, other=0).to(tl.int32))
    magnitude = code & 7
    value = tl.where(magnitude < 4, magnitude * 0.5, tl.where(magnitude < 6, magnitude - 2.0, magnitude * 2.0 - 8.0))
    return (tl.where(code > 7, -value, value) * scale).to(DTYPE)


@triton.jit
def store_quantized(values, out_ptr, out_scales_ptr, global_scale, rows, ok, cols, N: tl.constexpr):
    """Quantize values [BLOCK_T, BLOCK_N] (already rounded to the output's dtype) and write codes and scales."""
    BLOCK_T: tl.constexpr = values.shape[0]
    BLOCK_N: tl.constexpr = values.shape[1]
    groups = values.to(tl.float32).reshape(BLOCK_T, BLOCK_N // 16, 16)
    amax = tl.max(groups.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=2)  # of the bits: NaN is the largest
    scale, byte = scale_from_amax(amax.to(tl.float32, bitcast=True), global_scale)
    _, code = e2m1_from_value(groups, groups.to(tl.int32, bitcast=True), (scale * global_scale)[:, :, None])
    low, high = tl.split(code.reshape(BLOCK_T, BLOCK_N // 2, 2))
    rows = rows.to(tl.int64)[:, None]
    packed_cols = (cols // 2 + tl.arange(0, BLOCK_N // 2))[None, :]
    mask = ok[:, None] & (packed_cols < N // 2)
    tl.store(out_ptr + rows * (N // 2) + packed_cols, (low | (high << 4)).to(tl.uint8), mask=mask)
    scale_cols = (cols // 16 + tl.arange(0, BLOCK_N // 16))[None, :]
    mask = ok[:, None] & (scale_cols < N // 16)
    tl.store(out_scales_ptr + rows * (N // 16) + scale_cols, byte.to(tl.uint8), mask=mask)


@triton.jit
def routed_sources(rows, end, gather_ptr, num_sources):
    """(activation row, -1 where there is none, of routed rows; whether the row belongs to the tile)."""
    ok = rows < end
    sources = rows
    if gather_ptr is not None:
        sources = tl.load(gather_ptr + rows, mask=ok, other=-1)
    return tl.where(ok & (sources >= 0) & (sources < num_sources), sources, -1), ok


@triton.jit
def finish_tile(
    acc, acc_up, expert, rows, ok, sources, n_tile,
    x_global_ptr, w_global_ptr, out_ptr, out_scales_ptr, out_global_ptr, scatter_ptr,
    num_rows, num_experts, strides, swiglu,
    N: tl.constexpr, GATE: tl.constexpr, HAS_LIMIT: tl.constexpr, X_GLOBAL_PER_ROW: tl.constexpr,
    ROUNDED: tl.constexpr,
):  # fmt: skip
    """From sums [BLOCK_T, BLOCK_N] (with `GATE` those of up too) to the output: globals, gate, scatter, quantization.

    strides: of w_global (expert, half), x_global, out_global. swiglu: alpha, limit. Rows of no expert are 0, whatever
    their activations.
    """
    BLOCK_N: tl.constexpr = acc.shape[1]
    of_none = expert >= num_experts
    expert = tl.minimum(expert, num_experts - 1).to(tl.int64)
    if X_GLOBAL_PER_ROW:
        x_global = tl.load(x_global_ptr + sources, mask=sources >= 0, other=0.0)[:, None]
    elif x_global_ptr is not None:
        x_global = tl.load(x_global_ptr + expert * strides[2])
    else:
        x_global = 1.0
    w_global_ptr += expert * strides[0]
    values = tl.where(of_none, 0.0, acc * tl.load(w_global_ptr) * x_global)
    if GATE:
        up = tl.where(of_none, 0.0, acc_up * tl.load(w_global_ptr + strides[1]) * x_global)
        values = gated_product(values, up, swiglu[0], swiglu[1], HAS_LIMIT)
    if scatter_ptr is not None:
        rows = tl.load(scatter_ptr + rows, mask=ok, other=-1)
        ok = (rows >= 0) & (rows < num_rows)
    if out_scales_ptr is None:
        cols = n_tile * BLOCK_N + tl.arange(0, BLOCK_N)
        mask = ok[:, None] & (cols < N)[None, :]
        out_ptrs = out_ptr + rows.to(tl.int64)[:, None] * N + cols[None, :]
        tl.store(out_ptrs, values.to(out_ptr.dtype.element_ty), mask=mask)
    else:
        global_scale = tl.where(of_none, 1.0, tl.load(out_global_ptr + expert * strides[3]))
        store_quantized(values.to(ROUNDED), out_ptr, out_scales_ptr, global_scale, rows, ok, n_tile * BLOCK_N, N)


@triton.jit(do_not_specialize=["num_rows", "num_sources", "num_experts"])
def portable_gemm_kernel(
    x_ptr, x_global_ptr, w_ptr, scales_ptr, w_global_ptr, out_ptr, out_scales_ptr, out_global_ptr,
    expert_start_ptr, expert_ids_ptr, gather_ptr, scatter_ptr, num_rows, num_sources, num_experts, strides, swiglu,
    N: tl.constexpr, K: tl.constexpr, GATE: tl.constexpr, HAS_LIMIT: tl.constexpr, SWIZZLED: tl.constexpr,
    X_GLOBAL_PER_ROW: tl.constexpr, ROUNDED: tl.constexpr, BLOCK_E: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """One tile a program; strides and swiglu as `finish_tile` takes them."""
    n_tile = tl.program_id(1)
    expert, first, end = locate(
        tl.program_id(0), expert_start_ptr, expert_ids_ptr, num_rows, num_experts, BLOCK_E, BLOCK_T
    )
    rows = first + tl.arange(0, BLOCK_T)
    sources, ok = routed_sources(rows, end, gather_ptr, num_sources)
    ROWS: tl.constexpr = 2 * N if GATE else N
    depth = tl.where(expert < num_experts, K, 0)
    plane = tl.minimum(expert, num_experts - 1).to(tl.int64)
    w_ptr += plane * (ROWS * (K // 2))
    scales_ptr += plane * plane_bytes(ROWS, K // 16, SWIZZLED)
    cols = n_tile * BLOCK_N + tl.arange(0, BLOCK_N)
    acc = tl.zeros((BLOCK_T, BLOCK_N), tl.float32)
    acc_up = tl.zeros((BLOCK_T, BLOCK_N), tl.float32)
    for k0 in range(0, depth, BLOCK_K):
        k = k0 + tl.arange(0, BLOCK_K)
        x_mask = (sources >= 0)[:, None] & (k < K)[None, :]
        x = tl.load(x_ptr + sources.to(tl.int64)[:, None] * K + k[None, :], mask=x_mask, other=0.0)
        w = weight_tile(w_ptr, scales_ptr, cols, k, N, K, SWIZZLED, x.dtype)
        acc = tl.dot(x, w.trans(), acc)
        if GATE:
            w = weight_tile(w_ptr, scales_ptr, N + cols, k, ROWS, K, SWIZZLED, x.dtype)
            acc_up = tl.dot(x, w.trans(), acc_up)
    finish_tile(
        acc, acc_up, expert, rows, ok, sources, n_tile,
        x_global_ptr, w_global_ptr, out_ptr, out_scales_ptr, out_global_ptr, scatter_ptr,
        num_rows, num_experts, strides, swiglu, N, GATE, HAS_LIMIT, X_GLOBAL_PER_ROW, ROUNDED,
    )  # fmt: skip
