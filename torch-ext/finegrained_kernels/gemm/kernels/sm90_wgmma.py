"""The GEMM for many rows an expert on Hopper: warpgroup products, weights from registers, tokens from shared memory.

Same tiles, routing and epilogue as mma.py, and the same unpacking. Warpgroup products read tokens through
descriptors, in order, so that here it is the activations that are relabelled, once, in memory (`permute_tokens`): a
chunk of G groups holds, for each of a group's two words, 4 products of 2G values, value 2 * slot + h of a product.
One word's products run while the other word is unpacked. Products read their weights from registers until they are
waited for, which compilers do not know: what is in flight is named in every wait, or its registers are used again.
"""

from __future__ import annotations

import torch
import triton
import triton.experimental.gluon.language as gl
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from ...device import cdiv
from ...launching import bind
from .epilogue import store_tile
from .scale_strip import (
    STRIP_LIMIT,
    exception_ranges,
    fill_strip,
    load_exceptions,
    load_rows,
    load_scales,
    new_strip,
    no_exceptions,
    patch_strip,
    store_rows,
    strip_pairs,
    strip_stride,
)
from .unpack import (
    barrier,
    copy_layout,
    group_layout,
    group_scales,
    load_async,
    opaque_zero,
    operand_shift,
    powers,
    to_slots,
    uniform,
    word_values,
)
from .weights import clamped, copy_weights, find_tile, group_tile_ends, has_strip, row_swizzle, source_rows

PERMUTE_BLOCK = 4096


@triton.jit
def permute_tokens_kernel(x_ptr, out_ptr, num_rows, K: tl.constexpr, GROUPS: tl.constexpr, BLOCK: tl.constexpr):
    """BLOCK results a program. In a chunk, k = (lane, own group, word, half, p) and the result is (word, p, own group,
    lane, half): unpack.py. Zeros past K."""
    ROW: tl.constexpr = (K + 16 * GROUPS - 1) // (16 * GROUPS) * (16 * GROUPS)
    offs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    row, k = offs // ROW, offs % ROW
    values = tl.load(x_ptr + row * K + k, mask=(row < num_rows) & (k < K), other=0.0)
    values = values.reshape(BLOCK // (16 * GROUPS), 4, GROUPS // 4, 2, 2, 4)
    tl.store(out_ptr + offs, values.permute(0, 3, 5, 2, 1, 4).reshape(BLOCK), mask=row < num_rows)


def permute_tokens(x: torch.Tensor, groups: int) -> torch.Tensor:
    """[M, chunks, 8, 2G] of activations [M, K]; bytes moved: each value read and written once."""
    chunks = cdiv(x.shape[1], 16 * groups)
    out = x.new_empty(x.shape[0], chunks, 8, 2 * groups)
    grid = (cdiv(out.numel(), PERMUTE_BLOCK),)
    bind(permute_tokens_kernel, K=x.shape[1], GROUPS=groups, BLOCK=PERMUTE_BLOCK)(grid, x, out, x.shape[0])
    return out


@gluon.constexpr_function
def wgmma_layout(num_warps: int, block_t: int):
    """Sums [BLOCK_N, BLOCK_T] of warpgroups stacked along weight rows."""
    return gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, block_t, 16])


@gluon.constexpr_function
def word_rows_layout(block_t: int, cols: int, num_warps: int):
    """[2 words, BLOCK_T] as the rows of `copy_layout(cols, 8)` of [2 * BLOCK_T, cols] are spread."""
    across = cols // 8
    rows = [[bit // block_t, bit % block_t] for bit in powers(1, 2 * block_t)]
    in_lanes, in_warps = len(powers(across, 32)), len(powers(1, num_warps))
    lanes = [[0, 0]] * len(powers(1, across)) + rows[:in_lanes]
    warps = rows[in_lanes : in_lanes + in_warps]
    warps += [[0, 0]] * (in_warps - len(warps))
    return gl.DistributedLinearLayout(rows[in_lanes + in_warps :], lanes, warps, [], [2, block_t])


@gluon.jit
def weight_operand(words, scales, WORD: gl.constexpr, GROUPS: gl.constexpr, MMA: gl.constexpr, IS_FP16: gl.constexpr):
    """The left operand [BLOCK_N, 8G] of the 4 products, one after the other, of one word of every group."""
    BLOCK_N: gl.constexpr = words.shape[0]
    w = word_values(words, scales, WORD, IS_FP16)
    pairs = ()
    for i in gl.static_range(4):
        pair = gl.join(to_slots(w[2 * i], BLOCK_N, GROUPS), to_slots(w[2 * i + 1], BLOCK_N, GROUPS))
        pairs = pairs + (pair,)  # noqa: RUF005 (Triton tuples do not unpack)
    left = gl.join(gl.join(pairs[0], pairs[1]), gl.join(pairs[2], pairs[3]))  # row, slot, half, product & 1, >> 1
    left = left.permute([0, 4, 3, 1, 2]).reshape([BLOCK_N, 8 * GROUPS])
    return gl.convert_layout(left, gl.DotOperandLayout(0, MMA, 2), assert_trivial=True)


@gluon.constexpr_function
def row_address(num_bytes: int) -> str:
    """PTX: $0 <- the address of row $1 of those from $2 on, of `num_bytes` each. In PTX, as compilers would keep the
    product of every row in two registers instead of its number in one."""
    return f"mad.wide.s32 $0, $1, {num_bytes}, $2;"


@gluon.jit
def copy_chunk(
    smem, w_ptr, scales, x_ptr, sources, x_value, tile, chunk, stage, N: gl.constexpr, K: gl.constexpr,
    GATE: gl.constexpr, SWIZZLED: gl.constexpr, BLOCK_N: gl.constexpr, GROUPS: gl.constexpr, PARTS: gl.constexpr,
):  # fmt: skip
    """Start the copies of one K chunk of weights, scales and permuted activations into a stage of the ring."""
    copy_weights(smem[1:], w_ptr, scales, tile, chunk, stage, N, K, GATE, SWIZZLED, BLOCK_N, GROUPS)
    ROW: gl.constexpr = (K + 16 * GROUPS - 1) // (16 * GROUPS) * (16 * GROUPS)
    if PARTS == 1:
        x_ptrs = x_ptr + sources.to(gl.int64)[:, None] * ROW + x_value + chunk * (16 * GROUPS)
    else:
        start = (x_ptr + chunk * (16 * GROUPS)).to(gl.int64)
        rows = gl.inline_asm_elementwise(
            row_address(ROW * 2), "=l,r,l", [sources, start], dtype=gl.int64, is_pure=True, pack=1
        )
        x_ptrs = gl.multiple_of(rows.to(x_ptr.dtype), 16)[:, None] + x_value
    load_async(smem[0].index(stage).slice(0, x_ptrs.shape[0]), x_ptrs, mask=(sources >= 0)[:, None])


@gluon.jit
def fill_next(
    next_strip, scales, held, next_ranges, next_tile, N: gl.constexpr, C: gl.constexpr, GROUPS: gl.constexpr,
    GATE: gl.constexpr, BLOCK_N: gl.constexpr,
):  # fmt: skip
    """Store the next tile's scales, all at once; load them first where registers did not hold them."""
    zero = opaque_zero() if len(held) == 0 else 0
    loaded = held
    if len(held) == 0:
        loaded = load_rows(scales, next_tile, 0, N, C, C, GATE, BLOCK_N, zero)
    if len(scales) == 4:
        exceptions = load_exceptions(scales, next_ranges, zero, BLOCK_N, C)
    store_rows(next_strip, scales, loaded, C, GROUPS, GATE, BLOCK_N, zero)
    barrier()
    if len(scales) == 4:
        patch_strip(next_strip, scales, exceptions, next_ranges, next_tile[3], 0, N, C, C, GROUPS, GATE, BLOCK_N)
        barrier()


@gluon.jit
def load_part(
    scales, smem, strip, chunk, stage, part, ROWS: gl.constexpr, GROUPS: gl.constexpr, C: gl.constexpr,
    IS_FP16: gl.constexpr,
):  # fmt: skip
    """(words [ROWS, G], pairs of scales as operands [ROWS, G/2]) of a chunk and one part of a tile's rows."""
    words = smem[1].index(stage).slice(part * ROWS, ROWS).load(group_layout(ROWS, GROUPS, gl.num_warps()))
    if has_strip(scales):
        pairs = strip_pairs(strip + part * (ROWS * strip_stride(C, GROUPS)), chunk, ROWS, GROUPS, C)
    else:
        pairs = smem[2].index(stage).slice(part * ROWS, ROWS).load(group_layout(ROWS, GROUPS // 2, gl.num_warps()))
    return words, group_scales(pairs, IS_FP16)


@gluon.jit
def replaced(values, index: gl.constexpr, value):
    """The tuple `values` with another item `index`."""
    out = ()
    for i in gl.static_range(len(values)):
        out = out + ((value if i == index else values[i]),)  # noqa: RUF005
    return out


@gluon.jit
def multiply(
    sums, x_ptr, w_ptr, scales, sources, tile, smem, strip, next_strip, held, next_ranges, next_tile,
    N: gl.constexpr, K: gl.constexpr, GATE: gl.constexpr, SWIZZLED: gl.constexpr,
    BLOCK_N: gl.constexpr, GROUPS: gl.constexpr, STAGES: gl.constexpr, TWO_STRIPS: gl.constexpr,
):  # fmt: skip
    """Unscaled sums of one tile, part by part. A word is unpacked while the products of the one before it run.

    Scales of the next tile that have a strip are stored on the way, if there are two strips, or else at the end."""
    C: gl.constexpr = K // 16
    ROWS: gl.constexpr = sums[0].shape[0]
    PARTS: gl.constexpr = len(sums)
    BLOCK_T: gl.constexpr = sums[0].shape[1]
    MMA: gl.constexpr = sums[0].type.layout
    NUM_CHUNKS: gl.constexpr = (C + GROUPS - 1) // GROUPS
    IS_FP16: gl.constexpr = smem[0].dtype == gl.float16
    X_COPY: gl.constexpr = copy_layout(8 * GROUPS, 8, gl.num_warps())
    row = gl.arange(0, 2 * BLOCK_T, gl.SliceLayout(1, X_COPY))
    x_value = (row // BLOCK_T * (8 * GROUPS))[:, None] + gl.arange(0, 8 * GROUPS, gl.SliceLayout(0, X_COPY))[None, :]
    for chunk in gl.static_range(STAGES - 1):
        if chunk < NUM_CHUNKS:
            copy_chunk(
                smem, w_ptr, scales, x_ptr, sources, x_value, tile, chunk, chunk,
                N, K, GATE, SWIZZLED, BLOCK_N, GROUPS, PARTS,
            )  # fmt: skip
        async_copy.commit_group()
    busy = gl.zeros([ROWS, 8 * GROUPS], smem[0].dtype, gl.DotOperandLayout(0, MMA, 2))
    if len(scales) == 4:
        exceptions = no_exceptions(BLOCK_N, C)
    for chunk in range(NUM_CHUNKS):
        async_copy.wait_group(STAGES - 2)
        hopper.fence_async_shared()
        stage = chunk % STAGES
        for part in gl.static_range(PARTS):
            words, factors = load_part(scales, smem, strip, chunk, stage, part, ROWS, GROUPS, C, IS_FP16)
            for word in gl.static_range(2):
                left = weight_operand(words, factors, word, GROUPS, MMA, IS_FP16)
                right = smem[0].index(stage).slice(word * BLOCK_T, BLOCK_T).permute([1, 0])
                sums = replaced(sums, part, hopper.warpgroup_mma(left, right, sums[part], is_async=True))
                if part == 0 and word == 1:
                    barrier()  # every warp has waited for the last chunk's products: its stage is free
                    ahead = chunk + STAGES - 1
                    if NUM_CHUNKS >= STAGES:  # alone: Triton cannot lower copies it knows to be dead  # noqa: SIM102
                        if ahead < NUM_CHUNKS:
                            copy_chunk(
                                smem, w_ptr, scales, x_ptr, sources, x_value, tile, ahead, ahead % STAGES,
                                N, K, GATE, SWIZZLED, BLOCK_N, GROUPS, PARTS,
                            )  # fmt: skip
                    async_copy.commit_group()
                    if TWO_STRIPS and has_strip(scales):  # each step between two chunks' barriers
                        if chunk == NUM_CHUNKS - 2:
                            store_rows(next_strip, scales, held, C, GROUPS, GATE, BLOCK_N)
                            if len(scales) == 4:
                                exceptions = load_exceptions(scales, next_ranges, 0, BLOCK_N, C)
                        if len(scales) == 4:  # alone: not known with the other  # noqa: SIM102
                            if chunk == NUM_CHUNKS - 1:
                                patch_strip(
                                    next_strip, scales, exceptions, next_ranges, next_tile[3], 0, N, C, C, GROUPS, GATE,
                                    BLOCK_N,
                                )  # fmt: skip
                # What products in flight read and write keeps its registers until it is waited for.
                waited = hopper.warpgroup_mma_wait(1, deps=sums + (busy,))  # noqa: RUF005
                sums = waited[:PARTS]
                busy = left
    waited = hopper.warpgroup_mma_wait(0, deps=sums + (busy,))  # noqa: RUF005
    sums = waited[:PARTS]
    barrier()  # the next tile's copies overwrite what the other warpgroup's products read
    if not TWO_STRIPS and has_strip(scales):
        fill_next(next_strip, scales, held, next_ranges, next_tile, N, C, GROUPS, GATE, BLOCK_N)
    return sums


@gluon.jit
def tile_sums(
    x_ptr, w_ptr, scales, gather_ptr, tile, num_sources, num_experts, smem, strip, next_strip, held, next_ranges,
    next_tile, N: gl.constexpr, K: gl.constexpr, GATE: gl.constexpr, SWIZZLED: gl.constexpr,
    BLOCK_N: gl.constexpr, GROUPS: gl.constexpr, BLOCK_T: gl.constexpr, STAGES: gl.constexpr,
    TWO_STRIPS: gl.constexpr, PARTS: gl.constexpr,
):  # fmt: skip
    """Unscaled sums of `tile`, [BLOCK_N / PARTS, BLOCK_T] for each part of its rows."""
    ROWS: gl.constexpr = BLOCK_N // PARTS
    sums = ()
    for _ in gl.static_range(PARTS):
        sums = sums + (gl.zeros([ROWS, BLOCK_T], gl.float32, wgmma_layout(gl.num_warps(), BLOCK_T)),)  # noqa: RUF005
    if tile[0] < num_experts:
        WORD_ROWS: gl.constexpr = word_rows_layout(BLOCK_T, 8 * GROUPS, gl.num_warps())
        tokens = gl.arange(0, BLOCK_T, gl.SliceLayout(0, WORD_ROWS))
        sources = source_rows(tokens, gather_ptr, tile, num_sources)
        sources = gl.full([2, BLOCK_T], 0, gl.int32, WORD_ROWS) + sources[None, :]
        X_COPY: gl.constexpr = copy_layout(8 * GROUPS, 8, gl.num_warps())
        sources = gl.convert_layout(sources.reshape([2 * BLOCK_T]), gl.SliceLayout(1, X_COPY), assert_trivial=True)
        sums = multiply(
            sums, x_ptr, w_ptr, scales, sources, tile, smem, strip, next_strip, held, next_ranges, next_tile,
            N, K, GATE, SWIZZLED, BLOCK_N, GROUPS, STAGES, TWO_STRIPS,
        )  # fmt: skip
    elif has_strip(scales):
        barrier()
        fill_next(next_strip, scales, held, next_ranges, next_tile, N, K // 16, GROUPS, GATE, BLOCK_N)
    return sums


@gluon.jit(do_not_specialize=["num_rows", "num_sources", "num_experts"])
def nvfp4_wgmma_kernel(
    x_ptr, x_global_ptr, w_ptr, scales, w_global_ptr, out_ptr, out_scales_ptr, out_global_ptr,
    expert_start_ptr, expert_ids_ptr, gather_ptr, scatter_ptr, num_rows, num_sources, num_experts, strides, swiglu,
    N: gl.constexpr, K: gl.constexpr, GATE: gl.constexpr, HAS_LIMIT: gl.constexpr, SWIZZLED: gl.constexpr,
    X_GLOBAL_PER_ROW: gl.constexpr, ROUNDED: gl.constexpr, BLOCK_E: gl.constexpr,
    BLOCK_N: gl.constexpr, GROUPS: gl.constexpr, BLOCK_T: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """As `nvfp4_gemm_kernel`, on permuted activations. A tile of few rows is multiplied as one of BLOCK_T / 4.

    Of scales that have a strip, the next tile's are loaded before this tile is multiplied, and stored meanwhile; by 4
    warps, which share a multiprocessor with 4 others and have neither the registers nor a second strip, afterwards.
    """
    C: gl.constexpr = K // 16
    OUT_N: gl.constexpr = BLOCK_N // 2 if GATE else BLOCK_N
    N_TILES: gl.constexpr = (N + OUT_N - 1) // OUT_N
    DTYPE: gl.constexpr = x_ptr.dtype.element_ty
    HAS_STRIP: gl.constexpr = has_strip(scales)
    ROWS: gl.constexpr = 16 * gl.num_warps()  # at least what all warps multiply at once
    PARTS: gl.constexpr = BLOCK_N // ROWS if BLOCK_T > 64 else 1  # more rows of so many tokens, and registers run out
    STRIP: gl.constexpr = BLOCK_N * strip_stride(C, GROUPS)
    TWO_STRIPS: gl.constexpr = 2 * STRIP <= STRIP_LIMIT and C > GROUPS and gl.num_warps() > 4
    x_smem = gl.allocate_shared_memory(DTYPE, [STAGES, 2 * BLOCK_T, 8 * GROUPS], gl.NVMMASharedLayout(128, 16, 2))
    w_smem = gl.allocate_shared_memory(gl.int64, [STAGES, BLOCK_N, GROUPS], row_swizzle(GROUPS, 2))
    if HAS_STRIP:
        smem = (x_smem, w_smem)
        strip = new_strip(num_rows, 2 * BLOCK_N if TWO_STRIPS else BLOCK_N, C, GROUPS, WARPGROUP=True)
        next_strip = strip + STRIP if TWO_STRIPS else strip
    else:
        S_LAYOUT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
        smem = (x_smem, w_smem, gl.allocate_shared_memory(gl.int16, [STAGES, BLOCK_N, GROUPS // 2], S_LAYOUT))
        strip = 0
        next_strip = 0
    tile_ends = 0
    if expert_start_ptr is not None:
        tile_ends, row_tiles = group_tile_ends(expert_start_ptr, num_rows, num_experts, BLOCK_E, BLOCK_T)
    else:
        row_tiles = (num_rows + BLOCK_T - 1) // BLOCK_T

    pid = gl.program_id(0)
    tile = uniform(find_tile(pid, tile_ends, expert_start_ptr, expert_ids_ptr, num_rows, num_experts, N_TILES, BLOCK_T))
    if HAS_STRIP:
        first = clamped(tile, num_experts)
        ranges = exception_ranges(scales, first, num_experts, N, C, GATE, BLOCK_N)
        loaded = load_scales(scales, first, ranges, 0, N, C, C, GATE, BLOCK_N)
        fill_strip(strip, scales, loaded, ranges, first[3], 0, N, C, C, GROUPS, GATE, BLOCK_N)
        barrier()
    for index in range(pid, row_tiles * N_TILES, gl.num_programs(0)):
        following = tile
        source = tile
        next_ranges = ()
        held = ()
        if HAS_STRIP:
            following = find_tile(
                index + gl.num_programs(0), tile_ends, expert_start_ptr, expert_ids_ptr, num_rows, num_experts,
                N_TILES, BLOCK_T,
            )  # fmt: skip
            following = uniform(following)
            source = clamped(following, num_experts)
            next_ranges = uniform(exception_ranges(scales, source, num_experts, N, C, GATE, BLOCK_N))
            if gl.num_warps() > 4:
                held = load_rows(scales, source, 0, N, C, C, GATE, BLOCK_N)
        else:
            tile = find_tile(
                index, tile_ends, expert_start_ptr, expert_ids_ptr, num_rows, num_experts, N_TILES, BLOCK_T
            )
            tile = uniform(tile)
        is_small = tile[2] - tile[1] <= BLOCK_T // 4
        for part in gl.static_range(1, 5, 3):
            if is_small == (part == 4):
                sums = tile_sums(
                    x_ptr, w_ptr, scales, gather_ptr, tile, num_sources, num_experts, smem, strip, next_strip,
                    held, next_ranges, source, N, K, GATE, SWIZZLED, BLOCK_N, GROUPS, BLOCK_T // part,
                    STAGES, TWO_STRIPS, PARTS,
                )  # fmt: skip
                for i in gl.static_range(PARTS):
                    store_tile(
                        sums[i], (tile[0], tile[1], tile[2], tile[3] * PARTS + i), x_global_ptr, w_global_ptr,
                        out_ptr, out_scales_ptr, out_global_ptr, gather_ptr, scatter_ptr, num_rows, num_sources,
                        num_experts, strides, swiglu, operand_shift(DTYPE), N, GATE, HAS_LIMIT, X_GLOBAL_PER_ROW,
                        ROUNDED,
                    )  # fmt: skip
        tile = following
        strip, next_strip = next_strip, strip
