"""The GEMM on NVIDIA tensor cores: weights as rows, tokens as columns, one persistent grid for every routing.

A tile is BLOCK_N weight rows by up to BLOCK_T routed rows of one expert. Each weight and scale byte of a tile is read
once; activations come again for every tile of their expert, from L2. With `GATE`, a tile's weight rows alternate
between 8 gate rows and their 8 up rows, so that both halves of a result meet in one lane.
Scales arrive with the weights; compressed, or of short rows, a tile's come at once (scale_strip.py). The products are
the same. What the next tile needs first is asked for before a tile is stored.
"""

from __future__ import annotations

import triton.experimental.gluon.language as gl
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from .epilogue import store_tile
from .scale_strip import (
    exception_ranges,
    fill_strip,
    load_scales,
    new_strip,
    prefetch_windows,
    strip_pairs,
)
from .unpack import (
    barrier,
    copy_layout,
    group_layout,
    group_scales,
    load_async,
    mma_layout,
    operand_shift,
    token_layout,
    token_operand,
    token_pairs,
    uniform,
    weight_operand,
    word_values,
)
from .weights import clamped, copy_weights, find_tile, group_tile_ends, has_strip, row_swizzle, source_rows


@gluon.jit
def copy_tokens(x_smem, x_ptr, sources, chunk, stage, BLOCK_T: gl.constexpr, GROUPS: gl.constexpr, K: gl.constexpr):
    """Start the copy of one K chunk of activations into a stage of the ring: row 4 * token + t for lane t of a quad."""
    OWN: gl.constexpr = 4 * GROUPS
    LAYOUT: gl.constexpr = copy_layout(OWN, 8, gl.num_warps())
    lane = gl.arange(0, 4 * BLOCK_T, gl.SliceLayout(1, LAYOUT)) % 4
    value = (lane * OWN)[:, None] + gl.arange(0, OWN, gl.SliceLayout(0, LAYOUT))[None, :]
    mask = (sources >= 0)[:, None]
    if K % (16 * GROUPS) != 0:
        mask = mask & (chunk * (16 * GROUPS) + value < K)
    load_async(
        x_smem.index(stage), (x_ptr + chunk * (16 * GROUPS)) + (sources.to(gl.int64)[:, None] * K + value), mask=mask
    )


@gluon.jit
def multiply_chunk(acc, words, scale_pairs, x, BLOCK_N: gl.constexpr, BLOCK_T: gl.constexpr, GROUPS: gl.constexpr):
    """acc + weights @ activations over one chunk."""
    MMA: gl.constexpr = mma_layout(gl.num_warps())
    scales = group_scales(scale_pairs, x.dtype == gl.float16)
    pairs = token_pairs(x, BLOCK_T, GROUPS)
    for word in gl.static_range(2):
        w = word_values(words, scales, word, x.dtype == gl.float16)
        for i in gl.static_range(4):
            left = weight_operand(w[2 * i], w[2 * i + 1], BLOCK_N, GROUPS, MMA)
            acc = mma_v2(left, token_operand(pairs[4 * word + i], BLOCK_T, GROUPS, MMA), acc)
    return acc


@gluon.jit
def start_copies(
    x_ptr, w_ptr, scales, sources, tile, smem, x_smem,
    N: gl.constexpr, K: gl.constexpr, GATE: gl.constexpr, SWIZZLED: gl.constexpr,
    BLOCK_N: gl.constexpr, GROUPS: gl.constexpr, BLOCK_T: gl.constexpr, STAGES: gl.constexpr, BURST: gl.constexpr,
):  # fmt: skip
    """Fill the ring with the first chunks of a tile, all but BURST stages of it."""
    for chunk in gl.static_range(STAGES - BURST):
        if chunk * GROUPS < K // 16:
            copy_weights(smem, w_ptr, scales, tile, chunk, chunk, N, K, GATE, SWIZZLED, BLOCK_N, GROUPS)
            copy_tokens(x_smem, x_ptr, sources, chunk, chunk, BLOCK_T, GROUPS, K)
        if chunk % BURST == BURST - 1:
            async_copy.commit_group()


@gluon.jit
def first_scales(
    scales, tile, ranges, N: gl.constexpr, C: gl.constexpr, COLS: gl.constexpr, GATE: gl.constexpr,
    BLOCK_N: gl.constexpr,
):  # fmt: skip
    """What fills a tile's strip, if it has one, in registers; of slices, the first one's codes go to L2."""
    held = ()
    if has_strip(scales):
        if COLS == C:
            held = load_scales(scales, tile, ranges, 0, N, C, COLS, GATE, BLOCK_N)
        else:
            prefetch_windows(scales, tile, 0, N, C, COLS, GATE, BLOCK_N)
    return held


@gluon.jit
def multiply(
    acc, x_ptr, w_ptr, scales, sources, tile, ranges, held, smem, x_smem, strip,
    N: gl.constexpr, K: gl.constexpr, GATE: gl.constexpr, SWIZZLED: gl.constexpr,
    BLOCK_N: gl.constexpr, GROUPS: gl.constexpr, BLOCK_T: gl.constexpr, STAGES: gl.constexpr, COLS: gl.constexpr,
    BURST: gl.constexpr,
):  # fmt: skip
    """Unscaled sums of one tile: a ring of STAGES chunks, all but BURST of them in flight.

    BURST chunks are asked for at a time, as memory is slow to give 64 bytes of a row now and the next ones later."""
    C: gl.constexpr = K // 16
    CHUNKS: gl.constexpr = (C + GROUPS - 1) // GROUPS
    W: gl.constexpr = gl.num_warps()
    for first_col in range(0, C, COLS):
        if has_strip(scales):
            part = held
            if COLS != C:
                part = load_scales(scales, tile, ranges, first_col, N, C, COLS, GATE, BLOCK_N)
                prefetch_windows(scales, tile, first_col + COLS, N, C, COLS, GATE, BLOCK_N)
            barrier()  # every warp is done with the strip
            fill_strip(strip, scales, part, ranges, tile[3], first_col, N, C, COLS, GROUPS, GATE, BLOCK_N)
        end = (first_col + COLS + GROUPS - 1) // GROUPS
        for first in range(first_col // GROUPS, end, BURST):
            async_copy.wait_group(STAGES // BURST - 2)
            if has_strip(scales):
                barrier()  # what filled the strip; Triton sees it, and adds none for what the copies brought
            for i in gl.static_range(BURST):
                ahead = first + STAGES - BURST + i
                if STAGES - BURST + i < CHUNKS:  # alone: Triton cannot lower copies it knows to be dead  # noqa: SIM102
                    if ahead < CHUNKS:
                        stage = ahead % STAGES
                        copy_weights(smem, w_ptr, scales, tile, ahead, stage, N, K, GATE, SWIZZLED, BLOCK_N, GROUPS)
                        copy_tokens(x_smem, x_ptr, sources, ahead, stage, BLOCK_T, GROUPS, K)
            async_copy.commit_group()
            for i in gl.static_range(BURST):
                chunk = first + i
                if chunk < end:
                    if has_strip(scales):
                        scale_pairs = strip_pairs(strip, chunk - first_col // GROUPS, BLOCK_N, GROUPS, COLS)
                    else:
                        scale_pairs = smem[1].index(chunk % STAGES).load(group_layout(BLOCK_N, GROUPS // 2, W))
                    words = smem[0].index(chunk % STAGES).load(group_layout(BLOCK_N, GROUPS, W))
                    x = x_smem.index(chunk % STAGES).load(token_layout(BLOCK_T, 4 * GROUPS, W))
                    acc = multiply_chunk(acc, words, scale_pairs, x, BLOCK_N, BLOCK_T, GROUPS)
    return acc


@gluon.jit(do_not_specialize=["num_rows", "num_sources", "num_experts"])
def nvfp4_gemm_kernel(
    x_ptr, x_global_ptr, w_ptr, scales, w_global_ptr, out_ptr, out_scales_ptr, out_global_ptr,
    expert_start_ptr, expert_ids_ptr, gather_ptr, scatter_ptr, num_rows, num_sources, num_experts, strides, swiglu,
    N: gl.constexpr, K: gl.constexpr, GATE: gl.constexpr, HAS_LIMIT: gl.constexpr, SWIZZLED: gl.constexpr,
    X_GLOBAL_PER_ROW: gl.constexpr, ROUNDED: gl.constexpr, BLOCK_E: gl.constexpr,
    BLOCK_N: gl.constexpr, GROUPS: gl.constexpr, BLOCK_T: gl.constexpr, STAGES: gl.constexpr, COLS: gl.constexpr,
    BURST: gl.constexpr,
):  # fmt: skip
    """scales: (scale bytes in pairs,), or in words of 8 if a tile's come all at once; or compressed, and decoded COLS
    columns at a time, (bases, words of codes, exceptions, exception offsets).
    strides: of w_global (expert, half), x_global (expert) and out_global (expert). swiglu: (alpha, limit).
    """
    W: gl.constexpr = gl.num_warps()
    OUT_N: gl.constexpr = BLOCK_N // 2 if GATE else BLOCK_N
    N_TILES: gl.constexpr = (N + OUT_N - 1) // OUT_N
    DTYPE: gl.constexpr = x_ptr.dtype.element_ty
    x_smem = gl.allocate_shared_memory(DTYPE, [STAGES, 4 * BLOCK_T, 4 * GROUPS], row_swizzle(4 * GROUPS, 8))
    w_smem = gl.allocate_shared_memory(gl.int64, [STAGES, BLOCK_N, GROUPS], row_swizzle(GROUPS, 2))
    if has_strip(scales):
        smem = (w_smem,)
        strip = new_strip(num_rows, BLOCK_N, COLS, GROUPS, WARPGROUP=False)
    else:
        S_LAYOUT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
        smem = (w_smem, gl.allocate_shared_memory(gl.int16, [STAGES, BLOCK_N, GROUPS // 2], S_LAYOUT))
        strip = 0
    tile_ends = 0
    if expert_ids_ptr is not None:
        row_tiles = num_rows
    elif expert_start_ptr is not None:
        tile_ends, row_tiles = group_tile_ends(expert_start_ptr, num_rows, num_experts, BLOCK_E, BLOCK_T)
    else:
        row_tiles = (num_rows + BLOCK_T - 1) // BLOCK_T

    tokens = gl.arange(0, 4 * BLOCK_T, gl.SliceLayout(1, copy_layout(4 * GROUPS, 8, W))) // 4
    num_tiles = row_tiles * N_TILES
    tile = find_tile(
        gl.program_id(0), tile_ends, expert_start_ptr, expert_ids_ptr, num_rows, num_experts, N_TILES, BLOCK_T
    )
    tile = uniform(tile)
    ranges = exception_ranges(scales, tile, num_experts, N, K // 16, GATE, BLOCK_N)
    sources = source_rows(tokens, gather_ptr, tile, num_sources)
    held = first_scales(scales, clamped(tile, num_experts), ranges, N, K // 16, COLS, GATE, BLOCK_N)
    if (gl.program_id(0) < num_tiles) & (tile[0] < num_experts):
        start_copies(
            x_ptr, w_ptr, scales, sources, tile, smem, x_smem,
            N, K, GATE, SWIZZLED, BLOCK_N, GROUPS, BLOCK_T, STAGES, BURST,
        )  # fmt: skip
    for index in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        following = find_tile(
            gl.minimum(index + gl.num_programs(0), num_tiles - 1), tile_ends, expert_start_ptr, expert_ids_ptr,
            num_rows, num_experts, N_TILES, BLOCK_T,
        )  # fmt: skip
        following = uniform(following)
        following_ranges = exception_ranges(scales, following, num_experts, N, K // 16, GATE, BLOCK_N)
        following_sources = source_rows(tokens, gather_ptr, following, num_sources)
        acc = gl.zeros([BLOCK_N, BLOCK_T], gl.float32, mma_layout(W))
        if tile[0] < num_experts:
            acc = multiply(
                acc, x_ptr, w_ptr, scales, sources, tile, ranges, held, smem, x_smem, strip,
                N, K, GATE, SWIZZLED, BLOCK_N, GROUPS, BLOCK_T, STAGES, COLS, BURST,
            )  # fmt: skip
        # Before this tile is stored, so that it is not memory that the next one's first products wait for.
        held = first_scales(scales, clamped(following, num_experts), following_ranges, N, K // 16, COLS, GATE, BLOCK_N)
        if (index + gl.num_programs(0) < num_tiles) & (following[0] < num_experts):
            start_copies(
                x_ptr, w_ptr, scales, following_sources, following, smem, x_smem,
                N, K, GATE, SWIZZLED, BLOCK_N, GROUPS, BLOCK_T, STAGES, BURST,
            )  # fmt: skip
        store_tile(
            acc, tile, x_global_ptr, w_global_ptr, out_ptr, out_scales_ptr, out_global_ptr,
            gather_ptr, scatter_ptr, num_rows, num_sources, num_experts, strides, swiglu, operand_shift(DTYPE),
            N, GATE, HAS_LIMIT, X_GLOBAL_PER_ROW, ROUNDED,
        )  # fmt: skip
        tile = following
        ranges = following_ranges
        sources = following_sources
