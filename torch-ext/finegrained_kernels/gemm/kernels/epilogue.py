"""From the sums of a tile to the output: globals, gate, rounding or requantization, and where rows go."""

from __future__ import annotations

import triton.experimental.gluon.language as gl
from triton.experimental import gluon

from ...nvfp4.rounding import e2m1_from_value, gated_product, scale_from_amax
from .unpack import opaque_zero, store_layout
from .weights import source_rows

gl_scale_from_amax = gluon.jit(scale_from_amax.fn)
gl_e2m1_from_value = gluon.jit(e2m1_from_value.fn)
gl_gated_product = gluon.jit(gated_product.fn)


@gluon.jit
def scale_and_gate(
    acc, expert, of_none, w_global_ptr, x_global_ptr, strides, swiglu,
    SHIFT: gl.constexpr, GATE: gl.constexpr, HAS_LIMIT: gl.constexpr,
):  # fmt: skip
    """Sums times their globals; gated, [BLOCK_N, BLOCK_T] becomes [BLOCK_N / 2, BLOCK_T].

    Of no expert, sums are zeros. Globals are made zeros, whatever the last expert's are, and what gates harmless:
    results then are zeros without a selection for each.
    """
    BLOCK_N: gl.constexpr = acc.shape[0]
    BLOCK_T: gl.constexpr = acc.shape[1]
    first = gl.where(of_none, 0.0, gl.load(w_global_ptr + expert * strides[0]))
    second = gl.where(of_none, 0.0, gl.load(w_global_ptr + expert * strides[0] + strides[1])) if GATE else first
    if x_global_ptr is None:  # a power of two: it may join the weights' global
        x_global = 1.0
        first *= SHIFT
        second *= SHIFT
    else:
        x_global = gl.where(of_none, 0.0, gl.load(x_global_ptr + expert * strides[2])) * SHIFT
    if GATE:
        gate, up = gl.split(acc.reshape([BLOCK_N // 16, 2, 8, BLOCK_T]).permute([0, 2, 3, 1]))
        gate = gate.reshape([BLOCK_N // 2, BLOCK_T]) * first * x_global
        up = up.reshape([BLOCK_N // 2, BLOCK_T]) * second * x_global
        alpha = gl.where(of_none, 0.0, swiglu[0])
        limit = gl.where(of_none, float("inf"), swiglu[1])
        return gl_gated_product(gate, up, alpha, limit, HAS_LIMIT)
    else:
        return acc * first * x_global


@gluon.jit
def token_halves(values):
    """[BLOCK_N, T] as its first and its last T / 2 tokens."""
    halves = values.reshape([values.shape[0], 2, values.shape[1] // 2])
    return gl.split(halves.permute([0, 2, 1]))


@gluon.jit
def store_values(values, out_ptr, targets_ptr, first, end, n_tile, num_rows, N: gl.constexpr):
    """Write a tile [BLOCK_N, BLOCK_T], already in the output's dtype, to its rows of out [S, N].

    By way of shared memory, where a lane's values of one weight row become values of one token; 16 KB at a time.
    """
    BLOCK_N: gl.constexpr = values.shape[0]
    LAYOUT: gl.constexpr = store_layout(BLOCK_N, 8 if values.shape[1] >= 64 else 4, gl.num_warps())
    STAGED: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
    BYTES: gl.constexpr = BLOCK_N * values.shape[1] * (values.dtype.primitive_bitwidth // 8)
    zero = opaque_zero() if values.shape[1] > 64 else 0  # with so many sums, registers are scarce
    cols = n_tile * BLOCK_N + gl.arange(0, BLOCK_N, gl.SliceLayout(1, LAYOUT))
    parts = (values,)
    for _ in gl.static_range(BYTES // 32768):
        halves = ()
        for i in gl.static_range(len(parts)):
            halves = halves + token_halves(parts[i])
        parts = halves  # type: ignore[assignment]  # a longer tuple
    PART: gl.constexpr = parts[0].shape[1]
    for i in gl.static_range(len(parts)):
        staged = gl.allocate_shared_memory(values.dtype, [PART, BLOCK_N], STAGED, parts[i].permute([1, 0]))
        rows, ok = target_rows(targets_ptr, first + (zero + i * PART), end, num_rows, gl.SliceLayout(0, LAYOUT), PART)
        mask = (cols < N)[:, None] & ok[None, :]
        by_token = staged.permute([1, 0]).load(LAYOUT)
        gl.store(out_ptr + rows.to(gl.int64)[None, :] * N + cols[:, None], by_token, mask=mask)


@gluon.jit
def target_rows(targets_ptr, first, end, num_rows, LAYOUT: gl.constexpr, BLOCK_T: gl.constexpr):
    """(output row, whether to write it) of a tile's routed rows."""
    rows = first + gl.arange(0, BLOCK_T, LAYOUT)
    ok = rows < end
    if targets_ptr is not None:
        rows = gl.load(targets_ptr + rows, mask=ok, other=-1)
        ok = (rows >= 0) & (rows < num_rows)
    return rows, ok


@gluon.jit
def store_quantized(
    values, out_ptr, out_scales_ptr, global_scale, targets_ptr, first, end, n_tile, num_rows, N: gl.constexpr
):
    """Quantize a tile of values [BLOCK_N, BLOCK_T] by the law of quantize.py and write codes and scales."""
    BLOCK_N: gl.constexpr = values.shape[0]
    BLOCK_T: gl.constexpr = values.shape[1]
    ROWS: gl.constexpr = gl.BlockedLayout(
        [16, 1], [min(32, BLOCK_N // 16), 32 // min(32, BLOCK_N // 16)], [1, gl.num_warps()], [0, 1]
    )
    groups = gl.convert_layout(values, ROWS).to(gl.float32).reshape([BLOCK_N // 16, 16, BLOCK_T])
    magnitude = groups.to(gl.int32, bitcast=True) & 0x7FFFFFFF
    amax = gl.max(magnitude, axis=1).to(gl.float32, bitcast=True)  # of the bits: NaN is the largest
    scale, byte = gl_scale_from_amax(amax, gl.full_like(amax, 0.0) + global_scale)
    step = gl.convert_layout((scale * global_scale).expand_dims(1), groups.type.layout)
    _, code = gl_e2m1_from_value(groups, groups.to(gl.int32, bitcast=True), step)
    low, high = gl.split(code.reshape([BLOCK_N // 2, 2, BLOCK_T]).permute([0, 2, 1]))

    B_LAYOUT: gl.constexpr = store_layout(BLOCK_N // 2, 4, gl.num_warps())
    packed = gl.convert_layout((low | (high << 4)).to(gl.uint8), B_LAYOUT)
    cols = n_tile * (BLOCK_N // 2) + gl.arange(0, BLOCK_N // 2, gl.SliceLayout(1, B_LAYOUT))
    rows, ok = target_rows(targets_ptr, first, end, num_rows, gl.SliceLayout(0, B_LAYOUT), BLOCK_T)
    mask = (cols < N // 2)[:, None] & ok[None, :]
    gl.store(out_ptr + rows.to(gl.int64)[None, :] * (N // 2) + cols[:, None], packed, mask=mask)

    S_LAYOUT: gl.constexpr = store_layout(BLOCK_N // 16, 1, gl.num_warps())
    cols = n_tile * (BLOCK_N // 16) + gl.arange(0, BLOCK_N // 16, gl.SliceLayout(1, S_LAYOUT))
    rows, ok = target_rows(targets_ptr, first, end, num_rows, gl.SliceLayout(0, S_LAYOUT), BLOCK_T)
    mask = (cols < N // 16)[:, None] & ok[None, :]
    scales = gl.convert_layout(byte.to(gl.uint8), S_LAYOUT)
    gl.store(out_scales_ptr + rows.to(gl.int64)[None, :] * (N // 16) + cols[:, None], scales, mask=mask)


@gluon.jit
def store_tile(
    acc, tile, x_global_ptr, w_global_ptr, out_ptr, out_scales_ptr, out_global_ptr, gather_ptr, scatter_ptr,
    num_rows, num_sources, num_experts, strides, swiglu, SHIFT: gl.constexpr,
    N: gl.constexpr, GATE: gl.constexpr, HAS_LIMIT: gl.constexpr, X_GLOBAL_PER_ROW: gl.constexpr, ROUNDED: gl.constexpr,
):  # fmt: skip
    """From the sums [BLOCK_N, BLOCK_T] of `tile` (expert, first row, end row, n_tile) to the output."""
    expert, first, end, n_tile = tile
    TOKENS: gl.constexpr = gl.SliceLayout(0, acc.type.layout)
    of_none = expert >= num_experts
    expert = gl.minimum(expert, num_experts - 1)
    if X_GLOBAL_PER_ROW:
        sources = source_rows(gl.arange(0, acc.shape[1], TOKENS), gather_ptr, tile, num_sources)
        ok = (sources >= 0) & (tile[0] < num_experts)
        acc = acc * gl.load(x_global_ptr + sources, mask=ok, other=0.0)[None, :]
        x_global_ptr = None
    values = scale_and_gate(acc, expert, of_none, w_global_ptr, x_global_ptr, strides, swiglu, SHIFT, GATE, HAS_LIMIT)
    if out_scales_ptr is None:
        store_values(values.to(out_ptr.dtype.element_ty), out_ptr, scatter_ptr, first, end, n_tile, num_rows, N)
    else:
        global_scale = gl.where(of_none, 1.0, gl.load(out_global_ptr + expert * strides[3]))
        store_quantized(
            values.to(ROUNDED), out_ptr, out_scales_ptr, global_scale, scatter_ptr, first, end, n_tile, num_rows, N
        )
