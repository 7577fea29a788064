"""The GEMM on NVIDIA tensor cores: weights are rows, tokens are columns, and one persistent grid serves every routing.

A tile is BLOCK_N weight rows by up to BLOCK_T routed rows of one expert. Each weight and scale byte of a tile is read
once; activations are read again, from L2, for every tile of their expert. With a gate, a tile's weight rows alternate
between 8 gate rows and the 8 matching up rows, so that both halves of a result meet in one lane. Scales arrive with the
weights, unless they are compressed or their rows are short: then all scales of a tile are loaded at once
(scale_strip.py). The products are the same. The first loads of the next tile are started before a tile is stored.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton.experimental.gluon.language as gl
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from . import ptx
from .epilogue import store_tile
from .persistent import all_experts, nth_tile
from .scale_strip import (
    Slice,
    exception_span,
    fill_strip,
    load_slice,
    new_strips,
    prefetch_windows,
    strip_pairs,
)
from .schedule import Schedule, count_tiles, source_rows, with_weights
from .unpack import (
    barrier,
    copy_layout,
    group_layout,
    load_async,
    mma_layout,
    operand_shift,
    token_layout,
    token_operand,
    token_pairs,
    weight_operand,
    word_values,
)
from .weights import copy_weights, new_ring, row_swizzle


class Work(NamedTuple):
    """A tile, and what is known about it before it is multiplied."""

    tile: Any
    sources: Any
    """Activation rows, in the layout of `copy_tokens`."""
    exceptions: Any
    scales: Any
    """The content of the strip, in registers; 0 if there is no strip, or if it holds a slice at a time."""


@gluon.jit
def plan_work(schedule, index, weight, SHAPE: gl.constexpr, TILE: gl.constexpr):
    """Tile `index`, without its scales."""
    tile = nth_tile(schedule, index, SHAPE, TILE)
    exceptions = exception_span(weight.scales, tile, schedule.num_experts, SHAPE, TILE)
    LAYOUT: gl.constexpr = copy_layout(4 * TILE.GROUPS, 8, gl.num_warps())
    tokens = gl.arange(0, 4 * TILE.BLOCK_T, gl.SliceLayout(1, LAYOUT)) // 4
    return Work(tile, source_rows(schedule, tile, tokens), exceptions, 0)


@gluon.jit
def with_scales(work, schedule, weight, SHAPE: gl.constexpr, TILE: gl.constexpr):
    """`work` with the content of the strip, if there is one. If that is a slice, only prefetches its codes to L2."""
    part = Slice(with_weights(work.tile, schedule), work.exceptions, 0)
    scales = 0
    if TILE.STRIPS > 0:
        if TILE.COLS == SHAPE.C:
            scales = load_slice(weight.scales, part, SHAPE, TILE)
        else:
            prefetch_windows(weight.scales, part, SHAPE, TILE)
    return Work(work.tile, work.sources, work.exceptions, scales)


@gluon.jit
def copy_tokens(ring, x_ptr, sources, chunk, SHAPE: gl.constexpr, TILE: gl.constexpr):
    """Start the copy of one K chunk of activations into a stage of the ring: row 4 * token + t for lane t of a quad."""
    OWN: gl.constexpr = 4 * TILE.GROUPS
    DEPTH: gl.constexpr = 16 * TILE.GROUPS
    LAYOUT: gl.constexpr = copy_layout(OWN, 8, gl.num_warps())
    lane = gl.arange(0, 4 * TILE.BLOCK_T, gl.SliceLayout(1, LAYOUT)) % 4
    value = (lane * OWN)[:, None] + gl.arange(0, OWN, gl.SliceLayout(0, LAYOUT))[None, :]
    mask = (sources >= 0)[:, None]
    if SHAPE.K % DEPTH != 0:
        mask = mask & (chunk * DEPTH + value < SHAPE.K)
    x_ptrs = (x_ptr + chunk * DEPTH) + (sources.to(gl.int64)[:, None] * SHAPE.K + value)
    load_async(ring.tokens.index(chunk % TILE.STAGES), x_ptrs, mask=mask)


@gluon.jit
def copy_chunk(ring, x_ptr, weight, work, chunk, SHAPE: gl.constexpr, TILE: gl.constexpr):
    """Start the copies of one K chunk of weights, scales and activations into a stage of the ring."""
    copy_weights(ring, weight, work.tile, chunk, SHAPE=SHAPE, TILE=TILE)
    copy_tokens(ring, x_ptr, work.sources, chunk, SHAPE=SHAPE, TILE=TILE)


@gluon.jit
def start_copies(ring, x_ptr, weight, work, SHAPE: gl.constexpr, TILE: gl.constexpr):
    """Start copying the first chunks of a tile, into all but BURST stages of the ring."""
    FIRST: gl.constexpr = TILE.STAGES - TILE.BURST
    for chunk in gl.static_range(FIRST):
        if chunk * TILE.GROUPS < SHAPE.C:
            copy_chunk(ring, x_ptr, weight, work, chunk, SHAPE=SHAPE, TILE=TILE)
        if chunk % TILE.BURST == TILE.BURST - 1:
            async_copy.commit_group()


@gluon.jit
def multiply_chunk(acc, words, factors, x):
    """acc + weights @ activations over one chunk, with codes [BLOCK_N, G], pairs of factors [BLOCK_N, G/2] and
    activations [4 * BLOCK_T, 4G]."""
    MMA: gl.constexpr = acc.type.layout
    BLOCK_N: gl.constexpr = acc.shape[0]
    BLOCK_T: gl.constexpr = acc.shape[1]
    GROUPS: gl.constexpr = words.shape[1]
    pairs = token_pairs(x, BLOCK_T, GROUPS)
    for word in gl.static_range(2):
        w = word_values(words, factors, word, x.dtype == gl.float16)
        for i in gl.static_range(4):
            left = weight_operand(w[2 * i], w[2 * i + 1], BLOCK_N, GROUPS, MMA)
            acc = mma_v2(left, token_operand(pairs[4 * word + i], BLOCK_T, GROUPS, MMA), acc)
    return acc


@gluon.jit
def load_chunk(ring, strip, chunk, first_col, TILE: gl.constexpr):
    """Load a chunk into registers: codes, pairs of scales as factors, activations. The strip begins at `first_col`."""
    W: gl.constexpr = gl.num_warps()
    GROUPS: gl.constexpr = TILE.GROUPS
    stage = chunk % TILE.STAGES
    if TILE.STRIPS > 0:
        pairs = strip_pairs(strip, chunk - first_col // GROUPS, TILE.BLOCK_N, TILE)
    else:
        pairs = ring.scales.index(stage).load(group_layout(TILE.BLOCK_N, GROUPS // 2, W))
    words = ring.codes.index(stage).load(group_layout(TILE.BLOCK_N, GROUPS, W))
    x = ring.tokens.index(stage).load(token_layout(TILE.BLOCK_T, 4 * GROUPS, W))
    return words, ptx.scale_factors(pairs, x.dtype == gl.float16), x


@gluon.jit
def multiply(acc, x_ptr, weight, work, ring, strip, SHAPE: gl.constexpr, TILE: gl.constexpr):
    """Unscaled sums of one tile. The ring has STAGES chunks, all but BURST of which are in flight.

    BURST chunks are requested at a time, because memory is slow if it has to read a row in pieces of 64 bytes."""
    C: gl.constexpr = SHAPE.C
    COLS: gl.constexpr = TILE.COLS
    GROUPS: gl.constexpr = TILE.GROUPS
    BURST: gl.constexpr = TILE.BURST
    CHUNKS: gl.constexpr = (C + GROUPS - 1) // GROUPS
    AHEAD: gl.constexpr = TILE.STAGES - BURST
    for first_col in range(0, C, COLS):
        if TILE.STRIPS > 0:
            part = Slice(work.tile, work.exceptions, first_col)
            loaded = work.scales
            if COLS != C:
                loaded = load_slice(weight.scales, part, SHAPE, TILE)
                prefetch_windows(weight.scales, Slice(work.tile, work.exceptions, first_col + COLS), SHAPE, TILE)
            barrier()  # until every warp is done with the strip
            fill_strip(strip, weight.scales, loaded, part, SHAPE=SHAPE, TILE=TILE)
        end = (first_col + COLS + GROUPS - 1) // GROUPS
        for first in range(first_col // GROUPS, end, BURST):
            async_copy.wait_group(AHEAD // BURST - 1)
            if TILE.STRIPS > 0:
                barrier()  # for the strip; Triton then adds no barrier of its own for the copies
            for i in gl.static_range(BURST):
                ahead = first + AHEAD + i
                if AHEAD + i < CHUNKS:  # separate: Triton cannot lower copies known to be dead  # noqa: SIM102
                    if ahead < CHUNKS:
                        copy_chunk(ring, x_ptr, weight, work, ahead, SHAPE=SHAPE, TILE=TILE)
            async_copy.commit_group()
            for i in gl.static_range(BURST):
                if first + i < end:
                    words, factors, x = load_chunk(ring, strip, first + i, first_col, TILE)
                    acc = multiply_chunk(acc, words, factors, x)
    return acc


@gluon.jit(do_not_specialize=["num_rows", "num_sources", "num_experts"])
def nvfp4_gemm_kernel(
    x_ptr, weight, routing, epilogue, num_rows, num_sources, num_experts, SHAPE: gl.constexpr, TILE: gl.constexpr
):
    """operands.py describes the groups of arguments and SHAPE, smem_plan.py describes TILE."""
    TOKENS: gl.constexpr = row_swizzle(4 * TILE.GROUPS, 8)
    DTYPE: gl.constexpr = x_ptr.dtype.element_ty
    tokens = gl.allocate_shared_memory(DTYPE, [TILE.STAGES, 4 * TILE.BLOCK_T, 4 * TILE.GROUPS], TOKENS)
    ring = new_ring(tokens, TILE)
    strip = 0
    if TILE.STRIPS > 0:
        strip = new_strips(num_rows, TILE)
    tile_ends, row_tiles = count_tiles(all_experts(SHAPE), routing, num_rows, num_experts, BLOCK_T=TILE.BLOCK_T)
    schedule = Schedule(routing, tile_ends, num_rows, num_sources, num_experts)
    num_tiles = row_tiles * TILE.N_TILES
    BLOCK_N: gl.constexpr = TILE.BLOCK_N
    BLOCK_T: gl.constexpr = TILE.BLOCK_T
    step = gl.num_programs(0)
    work = plan_work(schedule, gl.program_id(0), weight, SHAPE, TILE)
    work = with_scales(work, schedule, weight, SHAPE, TILE)
    if (gl.program_id(0) < num_tiles) & (work.tile.expert < num_experts):
        start_copies(ring, x_ptr, weight, work, SHAPE=SHAPE, TILE=TILE)
    for index in range(gl.program_id(0), num_tiles, step):
        following = plan_work(schedule, gl.minimum(index + step, num_tiles - 1), weight, SHAPE, TILE)
        acc = gl.zeros([BLOCK_N, BLOCK_T], gl.float32, mma_layout(gl.num_warps()))
        if work.tile.expert < num_experts:
            acc = multiply(acc, x_ptr, weight, work, ring, strip=strip, SHAPE=SHAPE, TILE=TILE)
        # Before this tile is stored, so that the first products of the next one do not wait for memory.
        following = with_scales(following, schedule, weight, SHAPE, TILE)
        if (index + step < num_tiles) & (following.tile.expert < num_experts):
            start_copies(ring, x_ptr, weight, following, SHAPE=SHAPE, TILE=TILE)
        store_tile(acc, work.tile, schedule, epilogue, operand_shift(DTYPE), SHAPE=SHAPE)
        work = following
