"""The GEMM for many rows an expert on Hopper: warpgroup products, weights from registers, tokens from shared memory.

Same tiles, routing and epilogue as mma_gemm.py, and the same unpacking. Warpgroup products read tokens through
descriptors, in order, so that here it is the activations that are relabelled, once, in memory (`permute_tokens`): in
each chunk of G groups, value 2 * slot + h of product i. A stage of the ring stacks the 8 products' [BLOCK_T, 2G].
While a chunk's products run, the next chunk is unpacked.
"""

from __future__ import annotations

import torch
import triton
import triton.experimental.gluon.language as gl
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from .mma_gemm import (
    copy_weights,
    group_tile_ends,
    locate,
    row_swizzle,
    scale_and_gate,
    source_rows,
    store_quantized,
    store_values,
    weight_pointers,
)
from .tiles import copy_layout, group_layout, group_scales, load_async, operand_shift, to_slots, word_values


@triton.jit
def permute_tokens_kernel(x_ptr, out_ptr, K, GROUPS: tl.constexpr):
    """One chunk of one row a program: [8 products, G slots, 2 values], zeros past K."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    offs = tl.arange(0, 16 * GROUPS)
    product = offs // (2 * GROUPS)
    slot, half = offs % (2 * GROUPS) // 2, offs % 2
    group = slot % 4 * (GROUPS // 4) + slot // 4
    k = chunk * (16 * GROUPS) + group * 16 + product // 4 * 8 + half * 4 + product % 4
    values = tl.load(x_ptr + row * K + k, mask=k < K, other=0.0)
    tl.store(out_ptr + (row * tl.num_programs(1) + chunk) * (16 * GROUPS) + offs, values)


def permute_tokens(x: torch.Tensor, groups: int) -> torch.Tensor:
    """[M, chunks, 8, 2G] of activations [M, K]; bytes moved: each value read and written once."""
    chunks = triton.cdiv(x.shape[1], 16 * groups)
    out = x.new_empty(x.shape[0], chunks, 8, 2 * groups)
    permute_tokens_kernel[(x.shape[0], chunks)](x, out, x.shape[1], GROUPS=groups, num_warps=1)
    return out


@gluon.constexpr_function
def wgmma_layout(num_warps: int, block_t: int):
    """Sums [BLOCK_N, BLOCK_T] of warpgroups stacked along weight rows."""
    return gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, block_t, 16])


@gluon.jit
def weight_operands(words, scales, WORD: gl.constexpr, GROUPS: gl.constexpr, MMA: gl.constexpr, DTYPE: gl.constexpr):
    """The left operands [BLOCK_N, 2G] of the 4 products of one word of every group."""
    BLOCK_N: gl.constexpr = words.shape[0]
    w = word_values(words, scales, WORD, DTYPE == gl.float16)
    left = ()
    for i in gl.static_range(4):
        pairs = gl.join(to_slots(w[2 * i], BLOCK_N, GROUPS), to_slots(w[2 * i + 1], BLOCK_N, GROUPS))
        pairs = gl.convert_layout(
            pairs.reshape([BLOCK_N, 2 * GROUPS]), gl.DotOperandLayout(0, MMA, 2), assert_trivial=True
        )
        left = left + (pairs,)  # noqa: RUF005 (Triton tuples do not unpack)
    return left


@gluon.jit
def copy_chunk(
    smem, pointers, masks, x_ptrs, x_mask, chunk, stage, GROUPS: gl.constexpr, C: gl.constexpr, SWIZZLED: gl.constexpr
):
    """Start the copies of one K chunk of weights, scales and permuted activations into a stage of the ring."""
    copy_weights(smem, pointers, masks, chunk, stage, GROUPS, C, SWIZZLED)
    load_async(smem[2].index(stage), x_ptrs + chunk * (16 * GROUPS), mask=x_mask)


@gluon.jit
def finish(acc, busy, OUTSTANDING: gl.constexpr):
    """Wait for all but the last products; `busy`, what the others read, keeps its registers until then."""
    return hopper.warpgroup_mma_wait(OUTSTANDING, deps=[acc, busy[0], busy[1], busy[2], busy[3]])[0]


@gluon.jit
def multiply(
    acc, x_ptr, w_ptr, scales_ptr, sources, expert, n_tile, smem,
    N: gl.constexpr, K: gl.constexpr, GATE: gl.constexpr, SWIZZLED: gl.constexpr,
    GROUPS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Unscaled sums of one tile. A chunk is unpacked while the products of the one before it run."""
    C: gl.constexpr = K // 16
    BLOCK_N: gl.constexpr = acc.shape[0]
    BLOCK_T: gl.constexpr = acc.shape[1]
    MMA: gl.constexpr = acc.type.layout
    NUM_CHUNKS: gl.constexpr = (C + GROUPS - 1) // GROUPS
    pointers, masks = weight_pointers(w_ptr, scales_ptr, expert, n_tile, N, K, GATE, SWIZZLED, BLOCK_N, GROUPS)
    X_COPY: gl.constexpr = copy_layout(2 * GROUPS, 8, gl.num_warps())
    product = gl.arange(0, 8 * BLOCK_T, gl.SliceLayout(1, X_COPY)) // BLOCK_T
    x_value = (product * (2 * GROUPS))[:, None] + gl.arange(0, 2 * GROUPS, gl.SliceLayout(0, X_COPY))[None, :]
    x_ptrs = x_ptr + sources.to(gl.int64)[:, None] * (NUM_CHUNKS * 16 * GROUPS) + x_value
    x_mask = (sources >= 0)[:, None]
    for chunk in gl.static_range(STAGES - 2):
        if chunk < NUM_CHUNKS:
            copy_chunk(smem, pointers, masks, x_ptrs, x_mask, chunk, chunk, GROUPS, C, SWIZZLED)
        async_copy.commit_group()
    NONE: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    none = gl.zeros([BLOCK_N, 2 * GROUPS], smem[2].dtype, NONE)
    busy = (none, none, none, none)
    for chunk in range(NUM_CHUNKS):
        async_copy.wait_group(STAGES - 3)
        hopper.fence_async_shared()
        ahead = chunk + STAGES - 2  # goes where the products that every warp has waited for, two chunks ago, read
        if ahead < NUM_CHUNKS:
            copy_chunk(smem, pointers, masks, x_ptrs, x_mask, ahead, ahead % STAGES, GROUPS, C, SWIZZLED)
        async_copy.commit_group()
        stage = chunk % STAGES
        words = smem[0].index(stage).load(group_layout(BLOCK_N, GROUPS, gl.num_warps()))
        scale_pairs = smem[1].index(stage).load(group_layout(BLOCK_N, GROUPS // 2, gl.num_warps()))
        scales = group_scales(scale_pairs, smem[2].dtype == gl.float16)
        for word in gl.static_range(2):
            left = weight_operands(words, scales, word, GROUPS, MMA, smem[2].dtype)
            for i in gl.static_range(4):
                right = smem[2].index(stage).slice((4 * word + i) * BLOCK_T, BLOCK_T).permute([1, 0])
                acc = hopper.warpgroup_mma(left[i], right, acc, is_async=True)
            acc = finish(acc, busy, 4)
            busy = left
    return finish(acc, busy, 0)


@gluon.jit(do_not_specialize=["num_rows", "num_sources", "num_experts"])
def nvfp4_wgmma_kernel(
    x_ptr, x_global_ptr, w_ptr, scales_ptr, w_global_ptr, out_ptr, out_scales_ptr, out_global_ptr,
    expert_start_ptr, expert_ids_ptr, gather_ptr, scatter_ptr, num_rows, num_sources, num_experts, strides, swiglu,
    N: gl.constexpr, K: gl.constexpr, GATE: gl.constexpr, HAS_LIMIT: gl.constexpr, SWIZZLED: gl.constexpr,
    X_GLOBAL_PER_ROW: gl.constexpr, ROUNDED: gl.constexpr, BLOCK_E: gl.constexpr,
    BLOCK_N: gl.constexpr, GROUPS: gl.constexpr, BLOCK_T: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """As `nvfp4_gemm_kernel`, on permuted activations."""
    W: gl.constexpr = gl.num_warps()
    MMA: gl.constexpr = wgmma_layout(W, BLOCK_T)
    N_TILES: gl.constexpr = (N + (BLOCK_N // 2 if GATE else BLOCK_N) - 1) // (BLOCK_N // 2 if GATE else BLOCK_N)
    DTYPE: gl.constexpr = x_ptr.dtype.element_ty
    SHIFT: gl.constexpr = operand_shift(DTYPE)
    smem = (
        gl.allocate_shared_memory(gl.int64, [STAGES, BLOCK_N, GROUPS], row_swizzle(GROUPS, 2)),
        gl.allocate_shared_memory(gl.int16, [STAGES, BLOCK_N, GROUPS // 2], gl.SwizzledSharedLayout(1, 1, 1, [1, 0])),
        gl.allocate_shared_memory(DTYPE, [STAGES, 8 * BLOCK_T, 2 * GROUPS], gl.NVMMASharedLayout(4 * GROUPS, 16, 2)),
    )
    tile_ends = 0
    if expert_start_ptr is not None:
        tile_ends = group_tile_ends(expert_start_ptr, num_rows, num_experts, BLOCK_E, BLOCK_T)
        row_tiles = gl.max(tile_ends, axis=0)
    else:
        row_tiles = (num_rows + BLOCK_T - 1) // BLOCK_T

    for tile in range(gl.program_id(0), row_tiles * N_TILES, gl.num_programs(0)):
        n_tile = tile % N_TILES
        expert, first, end = locate(
            tile // N_TILES, tile_ends, expert_start_ptr, expert_ids_ptr, num_rows, num_experts, BLOCK_T
        )
        acc = gl.zeros([BLOCK_N, BLOCK_T], gl.float32, MMA)
        if expert < num_experts:
            tokens = gl.arange(0, 8 * BLOCK_T, gl.SliceLayout(1, copy_layout(2 * GROUPS, 8, W))) % BLOCK_T
            sources = source_rows(tokens, gather_ptr, first, end, num_sources)
            acc = multiply(
                acc, x_ptr, w_ptr, scales_ptr, sources, expert.to(gl.int64), n_tile, smem,
                N, K, GATE, SWIZZLED, GROUPS, STAGES,
            )  # fmt: skip
        expert = gl.minimum(expert, num_experts - 1)
        if X_GLOBAL_PER_ROW:
            sources = source_rows(gl.arange(0, BLOCK_T, gl.SliceLayout(0, MMA)), gather_ptr, first, end, num_sources)
            acc = acc * gl.load(x_global_ptr + sources, mask=sources >= 0, other=0.0)[None, :]
        values = scale_and_gate(
            acc,
            expert,
            w_global_ptr,
            None if X_GLOBAL_PER_ROW else x_global_ptr,
            strides,
            swiglu,
            SHIFT,
            GATE,
            HAS_LIMIT,
        )
        if out_scales_ptr is None:
            values = values.to(out_ptr.dtype.element_ty)
            store_values(values, out_ptr, scatter_ptr, first, end, n_tile, num_rows, N)
        else:
            global_scale = gl.load(out_global_ptr + expert * strides[3])
            store_quantized(
                values.to(ROUNDED), out_ptr, out_scales_ptr, global_scale, scatter_ptr, first, end, n_tile, num_rows, N
            )
