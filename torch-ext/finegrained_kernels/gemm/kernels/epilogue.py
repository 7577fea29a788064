"""Turns the sums of a tile into output: applies globals and gate, rounds or requantizes, and stores rows where they
belong."""

from __future__ import annotations

import triton.experimental.gluon.language as gl
from triton.experimental import gluon

from ...nvfp4.rounding import e2m1_from_value, gated_product, scale_from_amax
from .. import smem_plan
from . import ptx
from .schedule import Tile, source_rows, target_rows, with_weights
from .unpack import store_layout

RESULT_BYTES = gl.constexpr(smem_plan.RESULT_BYTES)


@gluon.jit
def scale_and_gate(acc, tile, schedule, epilogue, SHIFT: gl.constexpr, SHAPE: gl.constexpr):
    """Multiply sums by their globals. With a gate, [BLOCK_N, BLOCK_T] becomes [BLOCK_N / 2, BLOCK_T].

    Rows without an expert have sums of zero. Their globals are set to zero too, and alpha and limit to harmless values,
    whatever those of the last expert are. So the results are zero without a selection for each of them.
    """
    BLOCK_N: gl.constexpr = acc.shape[0]
    BLOCK_T: gl.constexpr = acc.shape[1]
    of_none = tile.expert >= schedule.num_experts
    expert = with_weights(tile, schedule).expert
    w_global_ptr = epilogue.w_global + expert * epilogue.w_expert_stride
    first = gl.where(of_none, 0.0, gl.load(w_global_ptr))
    second = gl.where(of_none, 0.0, gl.load(w_global_ptr + epilogue.w_half_stride)) if SHAPE.GATE else first
    if epilogue.x_global is None or SHAPE.GLOBAL_PER_ROW:  # SHIFT, a power of two, may join the weights' global
        x_global = 1.0
        first *= SHIFT
        second *= SHIFT
    else:
        x_global = gl.load(epilogue.x_global + expert * epilogue.x_expert_stride)
        x_global = gl.where(of_none, 0.0, x_global) * SHIFT
    if SHAPE.GATE:
        gate, up = gl.split(acc.reshape([BLOCK_N // 16, 2, 8, BLOCK_T]).permute([0, 2, 3, 1]))
        gate = gate.reshape([BLOCK_N // 2, BLOCK_T]) * first * x_global
        up = up.reshape([BLOCK_N // 2, BLOCK_T]) * second * x_global
        alpha = gl.where(of_none, 0.0, epilogue.alpha)
        limit = gl.where(of_none, float("inf"), epilogue.limit)
        return gated_product(gate, up, alpha, limit, SHAPE.HAS_LIMIT)
    else:
        return acc * first * x_global


@gluon.constexpr_function
def num_shares(num_bytes: int) -> int:
    """Into how many equal shares a tile's results are divided, so that each has less than 2 * RESULT_BYTES."""
    shares = 1
    while num_bytes // shares >= 2 * RESULT_BYTES.value:
        shares *= 2
    return shares


@gluon.jit
def token_halves(values):
    """Split [BLOCK_N, T] into its first and its last T / 2 tokens."""
    halves = values.reshape([values.shape[0], 2, values.shape[1] // 2])
    return gl.split(halves.permute([0, 2, 1]))


@gluon.jit
def token_shares(values, COUNT: gl.constexpr):
    """Split [BLOCK_N, T] into a tuple of COUNT shares of its tokens, in order; COUNT is a power of two."""
    shares = (values,)
    for _ in gl.static_range(COUNT.bit_length() - 1):
        halves = ()
        for i in gl.static_range(len(shares)):
            halves = halves + token_halves(shares[i])
        shares = halves
    return shares


@gluon.jit
def store_values(values, out_ptr, tile, schedule, N: gl.constexpr):
    """Write a tile [BLOCK_N, BLOCK_T], already in the output's dtype, to its rows of out [S, N].

    They pass through shared memory, one share at a time: there, a lane's values for one weight row become values for
    one token.
    """
    BLOCK_N: gl.constexpr = values.shape[0]
    LAYOUT: gl.constexpr = store_layout(BLOCK_N, 8 if values.shape[1] >= 64 else 4, gl.num_warps())
    STAGED: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
    SHARES: gl.constexpr = num_shares(BLOCK_N * values.shape[1] * (values.dtype.primitive_bitwidth // 8))
    zero = ptx.opaque_zero() if values.shape[1] > 64 else 0  # with so many sums, few registers are left
    cols = tile.n_tile * BLOCK_N + gl.arange(0, BLOCK_N, gl.SliceLayout(1, LAYOUT))
    shares = token_shares(values, SHARES)
    SHARE: gl.constexpr = shares[0].shape[1]
    for i in gl.static_range(len(shares)):
        staged = gl.allocate_shared_memory(values.dtype, [SHARE, BLOCK_N], STAGED, shares[i].permute([1, 0]))
        share = Tile(tile.expert, tile.first + (zero + i * SHARE), tile.end, tile.n_tile)
        rows, ok = target_rows(schedule, share, gl.arange(0, SHARE, gl.SliceLayout(0, LAYOUT)))
        mask = (cols < N)[:, None] & ok[None, :]
        by_token = staged.permute([1, 0]).load(LAYOUT)
        gl.store(out_ptr + rows.to(gl.int64)[None, :] * N + cols[:, None], by_token, mask=mask)


@gluon.jit
def store_quantized(values, global_scale, tile, schedule, epilogue, N: gl.constexpr):
    """Quantize a tile of values [BLOCK_N, BLOCK_T] by the law in quantize.py, and write codes and scales."""
    BLOCK_N: gl.constexpr = values.shape[0]
    BLOCK_T: gl.constexpr = values.shape[1]
    ROWS: gl.constexpr = gl.BlockedLayout(
        [16, 1], [min(32, BLOCK_N // 16), 32 // min(32, BLOCK_N // 16)], [1, gl.num_warps()], [0, 1]
    )
    groups = gl.convert_layout(values, ROWS).to(gl.float32).reshape([BLOCK_N // 16, 16, BLOCK_T])
    magnitude = groups.to(gl.int32, bitcast=True) & 0x7FFFFFFF
    amax = gl.max(magnitude, axis=1).to(gl.float32, bitcast=True)  # compares bits, of which NaN has the largest
    scale, byte = scale_from_amax(amax, gl.full_like(amax, 0.0) + global_scale)
    step = gl.convert_layout((scale * global_scale).expand_dims(1), groups.type.layout)
    _, code = e2m1_from_value(groups, groups.to(gl.int32, bitcast=True), step)
    low, high = gl.split(code.reshape([BLOCK_N // 2, 2, BLOCK_T]).permute([0, 2, 1]))
    store_bytes(low | (high << 4), epilogue.out, tile, schedule, COLS=N // 2, VECTOR=4)
    store_bytes(byte, epilogue.out_scales, tile, schedule, COLS=N // 16, VECTOR=1)


@gluon.jit
def store_bytes(values, out_ptr, tile, schedule, COLS: gl.constexpr, VECTOR: gl.constexpr):
    """Write the low bytes of a tile [columns, BLOCK_T] to its rows of out [S, COLS]."""
    LAYOUT: gl.constexpr = store_layout(values.shape[0], VECTOR, gl.num_warps())
    values = gl.convert_layout(values.to(gl.uint8), LAYOUT)
    cols = tile.n_tile * values.shape[0] + gl.arange(0, values.shape[0], gl.SliceLayout(1, LAYOUT))
    tokens = gl.arange(0, values.shape[1], gl.SliceLayout(0, LAYOUT))
    rows, ok = target_rows(schedule, tile, tokens)
    mask = (cols < COLS)[:, None] & ok[None, :]
    gl.store(out_ptr + rows.to(gl.int64)[None, :] * COLS + cols[:, None], values, mask=mask)


@gluon.jit
def store_tile(acc, tile, schedule, epilogue, SHIFT: gl.constexpr, SHAPE: gl.constexpr):
    """Turn the sums [BLOCK_N, BLOCK_T] of `tile` into output, and write it."""
    if SHAPE.GLOBAL_PER_ROW:
        tokens = gl.arange(0, acc.shape[1], gl.SliceLayout(0, acc.type.layout))
        sources = source_rows(schedule, tile, tokens)
        ok = (sources >= 0) & (tile.expert < schedule.num_experts)
        acc = acc * gl.load(epilogue.x_global + sources, mask=ok, other=0.0)[None, :]
    values = scale_and_gate(acc, tile, schedule, epilogue, SHIFT, SHAPE=SHAPE)
    if epilogue.out_scales is None:
        store_values(values.to(epilogue.out.dtype.element_ty), epilogue.out, tile, schedule, SHAPE.N)
    else:
        expert = with_weights(tile, schedule).expert
        global_scale = gl.load(epilogue.out_global + expert * epilogue.out_expert_stride)
        global_scale = gl.where(tile.expert >= schedule.num_experts, 1.0, global_scale)
        store_quantized(values.to(SHAPE.ROUNDED), global_scale, tile, schedule, epilogue, N=SHAPE.N)
