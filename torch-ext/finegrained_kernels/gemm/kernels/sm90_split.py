"""The GEMM for one weight on Hopper: each cluster has a tile, and its programs share K.

A single weight has too few tiles to occupy a GPU, and a program that goes through whole rows has too few bytes in
flight. So each of a cluster's PROGRAMS multiplies an equal part of K, and the sums are added up in shared memory
(cluster.py), which needs no memory to be set up before. Products are those of mma.py, or for more tokens those of
sm90_wgmma.py on permuted activations. Each program takes one tile, and the same tile rules serve all numbers of rows.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton.experimental.gluon.language as gl
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from . import ptx
from .cluster import exchange_sums, num_owners
from .epilogue import store_tile
from .mma import Work, copy_chunk, load_chunk, multiply_chunk
from .scale_strip import Slice, exception_span, fill_strip, load_slice, new_strips, strip_pairs
from .schedule import Schedule, Tile, source_rows
from .sm90_wgmma import weight_operand, wgmma_layout
from .unpack import barrier, copy_layout, group_layout, load_async, mma_layout, operand_shift
from .weights import copy_weights, new_ring, row_swizzle


class Share(NamedTuple):
    """The chunks that a program multiplies: those of a tile from `first` on."""

    work: Any
    first: Any


@gluon.constexpr_function
def num_chunks(shape, tile) -> int:
    """The number of chunks of one program. Parts of K are equal, and are whole chunks."""
    return shape.C // tile.PROGRAMS // tile.GROUPS


@gluon.jit
def fill_slice(strip, scales, share, chunk, SHAPE: gl.constexpr, TILE: gl.constexpr):
    """Fill the strip with the scales from `chunk` on. A barrier must follow."""
    part = Slice(share.work.tile, share.work.exceptions, chunk * TILE.GROUPS)
    fill_strip(strip, scales, load_slice(scales, part, SHAPE, TILE), part, SHAPE=SHAPE, TILE=TILE)


@gluon.jit
def mma_sums(x_ptr, weight, share, ring, strip, SHAPE: gl.constexpr, TILE: gl.constexpr):
    """Unscaled sums [BLOCK_N, BLOCK_T] of this program's chunks. If there is a strip, it holds all of their scales."""
    CHUNKS: gl.constexpr = num_chunks(SHAPE, TILE)
    STAGES: gl.constexpr = TILE.STAGES
    BLOCK_N: gl.constexpr = TILE.BLOCK_N
    BLOCK_T: gl.constexpr = TILE.BLOCK_T
    for i in gl.static_range(STAGES - 1):
        if i < CHUNKS:
            copy_chunk(ring, x_ptr, weight, share.work, share.first + i, SHAPE=SHAPE, TILE=TILE)
        async_copy.commit_group()
    if TILE.STRIPS > 0:
        fill_slice(strip, weight.scales, share, share.first, SHAPE, TILE)
    acc = gl.zeros([BLOCK_N, BLOCK_T], gl.float32, mma_layout(gl.num_warps()))
    for i in range(CHUNKS):
        async_copy.wait_group(STAGES - 2)
        if TILE.STRIPS > 0:
            barrier()  # for the strip; Triton then adds no barrier of its own for the copies
        ahead = i + STAGES - 1
        if STAGES <= CHUNKS:  # separate: Triton cannot lower copies known to be dead  # noqa: SIM102
            if ahead < CHUNKS:
                copy_chunk(ring, x_ptr, weight, share.work, share.first + ahead, SHAPE=SHAPE, TILE=TILE)
        async_copy.commit_group()
        words, factors, x = load_chunk(ring, strip, share.first + i, share.first * TILE.GROUPS, TILE)
        acc = multiply_chunk(acc, words, factors, x)
    return acc


@gluon.jit
def copy_word(ring, x_ptr, sources, chunk, WORD: gl.constexpr, SHAPE: gl.constexpr, TILE: gl.constexpr):
    """Start the copy of the permuted activations that meet one word of a chunk's groups."""
    LAYOUT: gl.constexpr = sources.type.layout.parent
    GROUPS: gl.constexpr = TILE.GROUPS
    value = gl.arange(0, 8 * GROUPS, gl.SliceLayout(0, LAYOUT)) + WORD * (8 * GROUPS)
    x_ptrs = (x_ptr + chunk * (16 * GROUPS)) + (sources.to(gl.int64)[:, None] * SHAPE.K + value[None, :])
    tokens = ring.tokens.index(chunk % TILE.STAGES).slice(WORD * TILE.BLOCK_T, TILE.BLOCK_T)
    load_async(tokens, x_ptrs, mask=(sources >= 0)[:, None])


@gluon.jit
def load_weights(ring, strip, chunk, column, TILE: gl.constexpr):
    """(codes [BLOCK_N, G], pairs of scales as factors [BLOCK_N, G/2]) of a chunk; `column` is its chunk in the
    strip."""
    stage = chunk % TILE.STAGES
    words = ring.codes.index(stage).load(group_layout(TILE.BLOCK_N, TILE.GROUPS, gl.num_warps()))
    if TILE.STRIPS > 0:
        pairs = strip_pairs(strip, column, TILE.BLOCK_N, TILE)
    else:
        pairs = ring.scales.index(stage).load(group_layout(TILE.BLOCK_N, TILE.GROUPS // 2, gl.num_warps()))
    return words, ptx.scale_factors(pairs, ring.tokens.dtype == gl.float16)


@gluon.jit
def wgmma_sums(x_ptr, weight, share, ring, strip, SHAPE: gl.constexpr, TILE: gl.constexpr):
    """The same by warpgroups. A word is unpacked while the products of the previous word run; what these read and write
    keeps its registers until they are waited for. Copies are started word by word too, since many at once stall, and
    the ring has two stages more than are in flight. If rows are long, the strip holds a slice at a time."""
    CHUNKS: gl.constexpr = num_chunks(SHAPE, TILE)
    A_SLICE: gl.constexpr = TILE.COLS // TILE.GROUPS
    AHEAD: gl.constexpr = TILE.STAGES - 2
    BLOCK_N: gl.constexpr = TILE.BLOCK_N
    DEPTH: gl.constexpr = 8 * TILE.GROUPS
    BLOCK_T: gl.constexpr = TILE.BLOCK_T
    MMA: gl.constexpr = wgmma_layout(gl.num_warps(), BLOCK_T)
    IS_FP16: gl.constexpr = ring.tokens.dtype == gl.float16
    tile = share.work.tile
    sources = share.work.sources
    for i in gl.static_range(AHEAD):
        if i < CHUNKS:
            copy_weights(ring, weight, tile, share.first + i, SHAPE=SHAPE, TILE=TILE)
    ptx.wait_for_last_launch()  # it permutes the tokens
    for i in gl.static_range(AHEAD):
        if i < CHUNKS:
            for word in gl.static_range(2):
                copy_word(ring, x_ptr, sources, share.first + i, word, SHAPE=SHAPE, TILE=TILE)
        async_copy.commit_group()
    if TILE.STRIPS > 0:
        fill_slice(strip, weight.scales, share, share.first, SHAPE, TILE)
    acc = gl.zeros([BLOCK_N, BLOCK_T], gl.float32, MMA)
    busy = gl.zeros([BLOCK_N, DEPTH], ring.tokens.dtype, gl.DotOperandLayout(0, MMA, 2))
    for i in range(CHUNKS):
        chunk = share.first + i
        async_copy.wait_group(AHEAD - 1)
        hopper.fence_async_shared()
        barrier()
        if TILE.STRIPS > 0 and A_SLICE < CHUNKS:  # separate: known at compile time, unlike the other  # noqa: SIM102
            if (i > 0) & (i % A_SLICE == 0):
                fill_slice(strip, weight.scales, share, chunk, SHAPE, TILE)
                barrier()
        words, factors = load_weights(ring, strip, chunk, i % A_SLICE, TILE)
        for word in gl.static_range(2):
            if AHEAD < CHUNKS:  # separate: Triton cannot lower copies known to be dead  # noqa: SIM102
                if i + AHEAD < CHUNKS:
                    if word == 0:
                        copy_weights(ring, weight, tile, chunk + AHEAD, SHAPE=SHAPE, TILE=TILE)
                    copy_word(ring, x_ptr, sources, chunk + AHEAD, word, SHAPE=SHAPE, TILE=TILE)
            left = weight_operand(words, factors, word, MMA, IS_FP16)
            right = ring.tokens.index(chunk % TILE.STAGES).slice(word * BLOCK_T, BLOCK_T).permute([1, 0])
            acc = hopper.warpgroup_mma(left, right, acc, is_async=True)
            acc, busy = hopper.warpgroup_mma_wait(1, deps=(acc, busy))
            busy = left
        async_copy.commit_group()
    acc, busy = hopper.warpgroup_mma_wait(0, deps=(acc, busy))
    return acc


@gluon.jit(do_not_specialize=["num_rows", "num_sources", "num_experts"])
def nvfp4_split_kernel(
    x_ptr, weight, routing, epilogue, num_rows, num_sources, num_experts, SHAPE: gl.constexpr, TILE: gl.constexpr
):
    """Like `nvfp4_gemm_kernel`, for one weight and rows that are not routed; with TILE.WARPGROUP, for permuted
    activations."""
    DTYPE: gl.constexpr = x_ptr.dtype.element_ty
    PROGRAMS: gl.constexpr = TILE.PROGRAMS
    program = gl.program_id(0) % PROGRAMS
    STAGES: gl.constexpr = TILE.STAGES
    BLOCK_T: gl.constexpr = TILE.BLOCK_T
    GROUPS: gl.constexpr = TILE.GROUPS
    row_tile = gl.program_id(0) // PROGRAMS // TILE.N_TILES
    n_tile = gl.program_id(0) // PROGRAMS % TILE.N_TILES
    tile = Tile(row_tile * 0, row_tile * TILE.BLOCK_T, num_rows, n_tile)
    schedule = Schedule(routing, 0, num_rows, num_sources, num_experts)
    if TILE.WARPGROUP:
        TOKENS: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
        ring = new_ring(gl.allocate_shared_memory(DTYPE, [STAGES, 2 * BLOCK_T, 8 * GROUPS], TOKENS), TILE)
    else:
        TOKENS: gl.constexpr = row_swizzle(4 * GROUPS, 8)
        ring = new_ring(gl.allocate_shared_memory(DTYPE, [STAGES, 4 * BLOCK_T, 4 * GROUPS], TOKENS), TILE)
    strip = 0
    if TILE.STRIPS > 0:
        strip = new_strips(num_rows, TILE)
    exceptions = exception_span(weight.scales, tile, num_experts, SHAPE, TILE)
    first = program * num_chunks(SHAPE, TILE)
    LAYOUT: gl.constexpr = copy_layout((8 if TILE.WARPGROUP else 4) * TILE.GROUPS, 8, gl.num_warps())
    if TILE.WARPGROUP:
        tokens = gl.arange(0, TILE.BLOCK_T, gl.SliceLayout(1, LAYOUT))
        work = Work(tile, source_rows(schedule, tile, tokens), exceptions, 0)
        sums = wgmma_sums(x_ptr, weight, Share(work, first), ring, strip, SHAPE, TILE)
    else:
        tokens = gl.arange(0, 4 * TILE.BLOCK_T, gl.SliceLayout(1, LAYOUT)) // 4
        work = Work(tile, source_rows(schedule, tile, tokens), exceptions, 0)
        sums = mma_sums(x_ptr, weight, Share(work, first), ring, strip, SHAPE, TILE)
    if PROGRAMS > 1:
        OWNERS: gl.constexpr = num_owners(TILE)
        owned = exchange_sums(sums, program, TILE)
        if program < OWNERS:
            first_row = tile.first + program * (TILE.BLOCK_T // OWNERS)
            store_tile(
                owned,
                Tile(tile.expert, first_row, num_rows, n_tile),
                schedule,
                epilogue,
                operand_shift(DTYPE),
                SHAPE=SHAPE,
            )
    else:
        store_tile(sums, tile, schedule, epilogue, operand_shift(DTYPE), SHAPE=SHAPE)
