"""The GEMM for many rows per expert on Hopper: warpgroup products of weights in registers and tokens in shared memory.

Tiles, routing, epilogue and unpacking are those of mma.py. Warpgroup products read tokens through descriptors, in
order, so here the activations are reordered once, in memory (`permute_tokens`): a chunk of G groups holds, for each of
a group's two words, 4 products of 2G values each, ordered as 2 * slot + h. One word's products run while the other word
is unpacked. Products read their weights from registers until they are waited for. Compilers do not know that, so every
wait names the values that are in flight; otherwise their registers would be reused.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.experimental.gluon.language as gl
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.language.extra.cuda import gdc_launch_dependents

from ...device import cdiv
from ...launching import bind
from . import ptx
from .epilogue import store_tile
from .persistent import all_experts, nth_tile
from .scale_strip import (
    Slice,
    exception_span,
    fill_strip,
    first_lane_span,
    load_exceptions,
    load_rows,
    load_slice,
    new_strips,
    no_exceptions,
    patch_strip,
    store_rows,
    strip_pairs,
)
from .schedule import Schedule, Tile, count_tiles, source_rows, with_weights
from .unpack import (
    barrier,
    copy_layout,
    group_layout,
    load_async,
    operand_shift,
    powers,
    to_slots,
    word_values,
)
from .weights import copy_weights, new_ring

PERMUTE_BLOCK = 4096


@triton.jit(do_not_specialize=["num_rows"])
def permute_tokens_kernel(x_ptr, out_ptr, num_rows, K: tl.constexpr, GROUPS: tl.constexpr, BLOCK: tl.constexpr):
    """Each program writes BLOCK results. In a chunk, k is (lane, own group, word, half, p) and its place in the result
    (word, p, own group, lane, half), as in unpack.py. Writes zeros past K."""
    gdc_launch_dependents()  # the launch that waits for the end of this one may begin
    ROW: tl.constexpr = (K + 16 * GROUPS - 1) // (16 * GROUPS) * (16 * GROUPS)
    offs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    row, k = offs // ROW, offs % ROW
    values = tl.load(x_ptr + row * K + k, mask=(row < num_rows) & (k < K), other=0.0)
    values = values.reshape(BLOCK // (16 * GROUPS), 4, GROUPS // 4, 2, 2, 4)
    tl.store(out_ptr + offs, values.permute(0, 3, 5, 2, 1, 4).reshape(BLOCK), mask=row < num_rows)


def permute_tokens(x: torch.Tensor, groups: int) -> torch.Tensor:
    """Reorder activations [M, K] into [M, chunks, 8, 2G]. Bytes moved: each value is read and written once."""
    chunks = cdiv(x.shape[1], 16 * groups)
    out = x.new_empty(x.shape[0], chunks, 8, 2 * groups)
    grid = (cdiv(out.numel(), PERMUTE_BLOCK),)
    bind(permute_tokens_kernel, K=x.shape[1], GROUPS=groups, BLOCK=PERMUTE_BLOCK)(grid, x, out, x.shape[0])
    return out


class Work(NamedTuple):
    """A tile, and its activation rows in the layout of `copy_chunk`."""

    tile: Any
    sources: Any


class Strips(NamedTuple):
    """The shared addresses of this tile's scales and of the next tile's, which may be the same."""

    current: Any
    following: Any


class NextScales(NamedTuple):
    """The next tile's scales, to be stored into its strip: a slice, and its rows in registers if `holds_next_rows`,
    else 0."""

    part: Any
    rows: Any


@gluon.constexpr_function
def wgmma_layout(num_warps: int, block_t: int):
    """Layout of sums [BLOCK_N, BLOCK_T], with warpgroups stacked along weight rows."""
    return gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, block_t, 16])


@gluon.constexpr_function
def word_rows_layout(block_t: int, cols: int, num_warps: int):
    """Layout of [2 words, BLOCK_T] that matches the rows of [2 * BLOCK_T, cols] in `copy_layout(cols, 8)`."""
    across = cols // 8
    rows = [[bit // block_t, bit % block_t] for bit in powers(1, 2 * block_t)]
    in_lanes, in_warps = len(powers(across, 32)), len(powers(1, num_warps))
    lanes = [[0, 0]] * len(powers(1, across)) + rows[:in_lanes]
    warps = rows[in_lanes : in_lanes + in_warps]
    warps += [[0, 0]] * (in_warps - len(warps))
    return gl.DistributedLinearLayout(rows[in_lanes + in_warps :], lanes, warps, [], [2, block_t])


@gluon.jit
def weight_operand(words, factors, WORD: gl.constexpr, MMA: gl.constexpr, IS_FP16: gl.constexpr):
    """The left operands [ROWS, 8G] of 4 products, one after the other, from one word of every group [ROWS, G]."""
    ROWS: gl.constexpr = words.shape[0]
    GROUPS: gl.constexpr = words.shape[1]
    w = word_values(words, factors, WORD, IS_FP16)
    pairs = ()
    for i in gl.static_range(4):
        pair = gl.join(to_slots(w[2 * i], ROWS, GROUPS), to_slots(w[2 * i + 1], ROWS, GROUPS))
        pairs = pairs + (pair,)  # noqa: RUF005 (Triton tuples do not unpack)
    left = gl.join(gl.join(pairs[0], pairs[1]), gl.join(pairs[2], pairs[3]))  # row, slot, half, product & 1, >> 1
    left = left.permute([0, 4, 3, 1, 2]).reshape([ROWS, 8 * GROUPS])
    return gl.convert_layout(left, gl.DotOperandLayout(0, MMA, 2), assert_trivial=True)


@gluon.jit
def copy_chunk(ring, x_ptr, weight, work, chunk, SHAPE: gl.constexpr, TILE: gl.constexpr):
    """Start the copies of one K chunk of weights, scales and permuted activations into a stage of the ring."""
    copy_weights(ring, weight, work.tile, chunk, SHAPE=SHAPE, TILE=TILE)
    DEPTH: gl.constexpr = 16 * TILE.GROUPS
    ROW: gl.constexpr = (SHAPE.K + DEPTH - 1) // DEPTH * DEPTH
    ROWS: gl.constexpr = work.sources.shape[0]
    LAYOUT: gl.constexpr = work.sources.type.layout.parent
    row = gl.arange(0, ROWS, work.sources.type.layout)
    value = gl.arange(0, 8 * TILE.GROUPS, gl.SliceLayout(0, LAYOUT))
    value = (row // (ROWS // 2) * (8 * TILE.GROUPS))[:, None] + value[None, :]
    if TILE.PARTS == 1:
        x_ptrs = x_ptr + work.sources.to(gl.int64)[:, None] * ROW + value + chunk * DEPTH
    else:
        rows = ptx.row_address((x_ptr + chunk * DEPTH).to(gl.int64), work.sources, ROW * 2)
        x_ptrs = gl.multiple_of(rows.to(x_ptr.dtype), 16)[:, None] + value
    tokens = ring.tokens.index(chunk % TILE.STAGES).slice(0, ROWS)
    load_async(tokens, x_ptrs, mask=(work.sources >= 0)[:, None])


@gluon.constexpr_function
def holds_next_rows(num_warps: int) -> bool:
    """Whether registers hold the next tile's rows of scales while this tile is multiplied."""
    return num_warps > 4


@gluon.jit
def fill_next(strip, scales, following, SHAPE: gl.constexpr, TILE: gl.constexpr):
    """Store the next tile's scales, all at once. Load them first if they are not in registers."""
    zero = 0
    rows = following.rows
    if not holds_next_rows(gl.num_warps()):
        zero = ptx.opaque_zero()
        rows = load_rows(scales, following.part, zero, SHAPE, TILE)
    exceptions = load_exceptions(scales, following.part.exceptions, zero, SHAPE, TILE)
    store_rows(strip, rows, zero, SHAPE, TILE)
    barrier()
    if SHAPE.COMPRESSED:
        patch_strip(strip, scales, exceptions, following.part, SHAPE=SHAPE, TILE=TILE)
        barrier()


@gluon.jit
def load_part(ring, strip, chunk, part, SHAPE: gl.constexpr, TILE: gl.constexpr):
    """(codes [ROWS, G], pairs of scales as factors [ROWS, G/2]) of a chunk and one part of a tile's rows."""
    ROWS: gl.constexpr = TILE.BLOCK_N // TILE.PARTS
    GROUPS: gl.constexpr = TILE.GROUPS
    stage = chunk % TILE.STAGES
    words = ring.codes.index(stage).slice(part * ROWS, ROWS).load(group_layout(ROWS, GROUPS, gl.num_warps()))
    if TILE.STRIPS > 0:
        pairs = strip_pairs(strip + part * (ROWS * TILE.STRIDE), chunk, ROWS, TILE)
    else:
        pairs = ring.scales.index(stage).slice(part * ROWS, ROWS).load(group_layout(ROWS, GROUPS // 2, gl.num_warps()))
    return words, ptx.scale_factors(pairs, ring.tokens.dtype == gl.float16)


@gluon.jit
def replaced(values, index: gl.constexpr, value):
    """The tuple `values`, with item `index` replaced."""
    out = ()
    for i in gl.static_range(len(values)):
        out = out + ((value if i == index else values[i]),)  # noqa: RUF005
    return out


@gluon.jit
def multiply(sums, x_ptr, weight, work, ring, strips, following, SHAPE: gl.constexpr, TILE: gl.constexpr):
    """Unscaled sums of one tile, part by part. A word is unpacked while the products of the previous word run.

    If scales have strips, the next tile's are stored meanwhile if there are two strips, and otherwise at the end."""
    PARTS: gl.constexpr = TILE.PARTS
    ROWS: gl.constexpr = sums[0].shape[0]
    BLOCK_T: gl.constexpr = sums[0].shape[1]
    MMA: gl.constexpr = sums[0].type.layout
    STAGES: gl.constexpr = TILE.STAGES
    CHUNKS: gl.constexpr = (SHAPE.C + TILE.GROUPS - 1) // TILE.GROUPS
    IS_FP16: gl.constexpr = ring.tokens.dtype == gl.float16
    for chunk in gl.static_range(STAGES - 1):
        if chunk < CHUNKS:
            copy_chunk(ring, x_ptr, weight, work, chunk, SHAPE=SHAPE, TILE=TILE)
        async_copy.commit_group()
    busy = gl.zeros([ROWS, 8 * TILE.GROUPS], ring.tokens.dtype, gl.DotOperandLayout(0, MMA, 2))
    exceptions = no_exceptions(SHAPE, TILE)
    for chunk in range(CHUNKS):
        async_copy.wait_group(STAGES - 2)
        hopper.fence_async_shared()
        for part in gl.static_range(PARTS):
            words, factors = load_part(ring, strips.current, chunk, part, SHAPE=SHAPE, TILE=TILE)
            for word in gl.static_range(2):
                left = weight_operand(words, factors, word, MMA, IS_FP16)
                right = ring.tokens.index(chunk % STAGES).slice(word * BLOCK_T, BLOCK_T).permute([1, 0])
                sums = replaced(sums, part, hopper.warpgroup_mma(left, right, sums[part], is_async=True))
                if part == 0 and word == 1:
                    barrier()  # every warp has waited for the last chunk's products, so its stage is free
                    ahead = chunk + STAGES - 1
                    if CHUNKS >= STAGES:  # separate: Triton cannot lower copies known to be dead  # noqa: SIM102
                        if ahead < CHUNKS:
                            copy_chunk(ring, x_ptr, weight, work, ahead, SHAPE=SHAPE, TILE=TILE)
                    async_copy.commit_group()
                    if TILE.STRIPS == 2:  # each step is between the barriers of two chunks
                        if chunk == CHUNKS - 2:
                            store_rows(strips.following, following.rows, 0, SHAPE, TILE)
                            if SHAPE.COMPRESSED:
                                exceptions = load_exceptions(weight.scales, following.part.exceptions, 0, SHAPE, TILE)
                        if SHAPE.COMPRESSED:  # separate: known at compile time, unlike the other  # noqa: SIM102
                            if chunk == CHUNKS - 1:
                                patch_strip(
                                    strips.following, weight.scales, exceptions, following.part, SHAPE=SHAPE, TILE=TILE
                                )  # fmt: skip
                # What products in flight read and write keeps its registers until they are waited for.
                waited = hopper.warpgroup_mma_wait(1, deps=sums + (busy,))  # noqa: RUF005
                sums = waited[:PARTS]
                busy = left
    waited = hopper.warpgroup_mma_wait(0, deps=sums + (busy,))  # noqa: RUF005
    sums = waited[:PARTS]
    barrier()  # the next tile's copies overwrite what the other warpgroup's products read
    if TILE.STRIPS == 1:
        fill_next(strips.following, weight.scales, following, SHAPE, TILE)
    return sums


@gluon.jit
def tile_sources(schedule, tile, BLOCK_T: gl.constexpr, GROUPS: gl.constexpr):
    """The activation rows of a tile, twice: once for each of a group's words."""
    WORD_ROWS: gl.constexpr = word_rows_layout(BLOCK_T, 8 * GROUPS, gl.num_warps())
    COPY: gl.constexpr = copy_layout(8 * GROUPS, 8, gl.num_warps())
    sources = source_rows(schedule, tile, gl.arange(0, BLOCK_T, gl.SliceLayout(0, WORD_ROWS)))
    sources = gl.full([2, BLOCK_T], 0, gl.int32, WORD_ROWS) + sources[None, :]
    return gl.convert_layout(sources.reshape([2 * BLOCK_T]), gl.SliceLayout(1, COPY), assert_trivial=True)


@gluon.jit
def tile_sums(
    x_ptr, weight, schedule, tile, ring, strips, following,
    BLOCK_T: gl.constexpr, SHAPE: gl.constexpr, TILE: gl.constexpr,
):  # fmt: skip
    """Unscaled sums of `tile`, [BLOCK_N / PARTS, BLOCK_T] for each part of its rows."""
    ROWS: gl.constexpr = TILE.BLOCK_N // TILE.PARTS
    PARTS: gl.constexpr = TILE.PARTS
    sums = ()
    for _ in gl.static_range(PARTS):
        sums = sums + (gl.zeros([ROWS, BLOCK_T], gl.float32, wgmma_layout(gl.num_warps(), BLOCK_T)),)  # noqa: RUF005
    if tile.expert < schedule.num_experts:
        work = Work(tile, tile_sources(schedule, tile, BLOCK_T, TILE.GROUPS))
        sums = multiply(sums, x_ptr, weight, work, ring, strips=strips, following=following, SHAPE=SHAPE, TILE=TILE)
    elif TILE.STRIPS > 0:
        barrier()
        fill_next(strips.following, weight.scales, following, SHAPE, TILE)
    return sums


@gluon.jit
def plan_slice(schedule, tile, scales, SHAPE: gl.constexpr, TILE: gl.constexpr):
    """A slice of all of a tile's scales; for a tile without an expert, those of another."""
    tile = with_weights(tile, schedule)
    exceptions = exception_span(scales, tile, schedule.num_experts, SHAPE, TILE)
    if SHAPE.COMPRESSED:
        exceptions = first_lane_span(exceptions)
    return Slice(tile, exceptions, 0)


@gluon.jit(do_not_specialize=["num_rows", "num_sources", "num_experts"])
def nvfp4_wgmma_kernel(
    x_ptr, weight, routing, epilogue, num_rows, num_sources, num_experts, SHAPE: gl.constexpr, TILE: gl.constexpr
):
    """Like `nvfp4_gemm_kernel`, for permuted activations. A tile with few rows is multiplied as one of BLOCK_T / 4.

    If scales have strips, the next tile's are loaded before this tile is multiplied, and stored while it is. A program
    of 4 warps shares a multiprocessor with another, and has neither the registers nor the second strip for that, so it
    loads and stores them afterwards.
    """
    DTYPE: gl.constexpr = x_ptr.dtype.element_ty
    BLOCK_T: gl.constexpr = TILE.BLOCK_T
    PARTS: gl.constexpr = TILE.PARTS
    TOKENS: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    scales = weight.scales
    ring = new_ring(gl.allocate_shared_memory(DTYPE, [TILE.STAGES, 2 * BLOCK_T, 8 * TILE.GROUPS], TOKENS), TILE)
    tile_ends, row_tiles = count_tiles(all_experts(SHAPE), routing, num_rows, num_experts, BLOCK_T=TILE.BLOCK_T)
    schedule = Schedule(routing, tile_ends, num_rows, num_sources, num_experts)
    tile = nth_tile(schedule, gl.program_id(0), SHAPE, TILE)
    strips = Strips(0, 0)
    if TILE.STRIPS > 0:
        strip = new_strips(num_rows, TILE)
        strips = Strips(strip, strip + (TILE.STRIPS - 1) * (TILE.BLOCK_N * TILE.STRIDE))
        part = plan_slice(schedule, tile, scales, SHAPE, TILE)
        fill_strip(strip, scales, load_slice(scales, part, SHAPE, TILE), part, SHAPE=SHAPE, TILE=TILE)
        barrier()
    for index in range(gl.program_id(0), row_tiles * TILE.N_TILES, gl.num_programs(0)):
        next_tile = tile
        following = NextScales(0, 0)
        if TILE.STRIPS > 0:
            next_tile = nth_tile(schedule, index + gl.num_programs(0), SHAPE, TILE)
            part = plan_slice(schedule, next_tile, scales, SHAPE, TILE)
            rows = 0
            if holds_next_rows(gl.num_warps()):
                rows = load_rows(scales, part, 0, SHAPE, TILE)
            following = NextScales(part, rows)
        else:
            tile = nth_tile(schedule, index, SHAPE, TILE)
        is_small = tile.end - tile.first <= BLOCK_T // 4
        for divisor in gl.static_range(1, 5, 3):
            if is_small == (divisor == 4):
                sums = tile_sums(
                    x_ptr, weight, schedule, tile, ring, strips=strips, following=following,
                    BLOCK_T=BLOCK_T // divisor, SHAPE=SHAPE, TILE=TILE,
                )  # fmt: skip
                for i in gl.static_range(PARTS):
                    part_tile = Tile(tile.expert, tile.first, tile.end, tile.n_tile * PARTS + i)
                    store_tile(sums[i], part_tile, schedule, epilogue, operand_shift(DTYPE), SHAPE=SHAPE)
        tile = next_tile
        strips = Strips(strips.following, strips.current)
