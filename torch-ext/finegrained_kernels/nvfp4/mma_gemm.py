"""The GEMM on NVIDIA tensor cores: weights as rows, tokens as columns, one persistent grid for every routing.

A tile is BLOCK_N weight rows by up to BLOCK_T routed rows of one expert. Each weight and scale byte of a tile is read
once; activations come again for every tile of their expert, from L2. With `GATE`, a tile's weight rows alternate
between 8 gate rows and their 8 up rows, so that both halves of a result meet in one lane.
Rows of no expert form one more group, of an expert with no weights: their sums are 0.
"""

from __future__ import annotations

import triton.experimental.gluon.language as gl
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from .rounding import e2m1_code, e4m3_from_amax, e4m3_to_float, gated_product
from .tiles import (
    copy_layout,
    group_layout,
    group_scales,
    load_async,
    mma_layout,
    operand_shift,
    store_layout,
    token_layout,
    token_operand,
    token_pairs,
    weight_operand,
    word_values,
)

gl_e4m3_from_amax = gluon.jit(e4m3_from_amax.fn)
gl_e4m3_to_float = gluon.jit(e4m3_to_float.fn)
gl_e2m1_code = gluon.jit(e2m1_code.fn)
gl_gated_product = gluon.jit(gated_product.fn)


@gluon.jit
def add(a, b):
    return a + b


@gluon.jit
def group_tile_ends(expert_start_ptr, num_rows, num_experts, BLOCK_E: gl.constexpr, BLOCK_T: gl.constexpr):
    """Row tiles up to and including every expert [BLOCK_E]; entry `num_experts` adds the rows of none."""
    offs = gl.arange(0, BLOCK_E, gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    start = gl.load(expert_start_ptr + offs, mask=offs <= num_experts, other=0)
    end = gl.load(expert_start_ptr + offs + 1, mask=offs < num_experts, other=0)
    end = gl.where(offs == num_experts, num_rows, end)
    tiles = (gl.maximum(end - start, 0) + BLOCK_T - 1) // BLOCK_T
    return gl.associative_scan(tiles, 0, add)


@gluon.jit
def locate(row_tile, tile_ends, expert_start_ptr, expert_ids_ptr, num_rows, num_experts, BLOCK_T: gl.constexpr):
    """(expert, first row, end row) of a row tile. An expert id no expert has becomes `num_experts`."""
    if expert_ids_ptr is not None:
        expert = gl.load(expert_ids_ptr + row_tile)  # int32 or int64: compared before it is narrowed
        expert = gl.where((expert >= 0) & (expert < num_experts), expert, num_experts).to(gl.int32)
        return expert, row_tile, row_tile + 1
    elif expert_start_ptr is not None:
        expert = gl.sum((tile_ends <= row_tile).to(gl.int32), axis=0)
        first_tile = gl.max(gl.where(tile_ends <= row_tile, tile_ends, 0), axis=0)
        first = gl.load(expert_start_ptr + expert) + (row_tile - first_tile) * BLOCK_T
        end = gl.load(expert_start_ptr + expert + 1, mask=expert < num_experts, other=num_rows)
        return expert, first, end
    else:
        return 0, row_tile * BLOCK_T, num_rows


@gluon.jit
def weight_rows(n_tile, rows, N: gl.constexpr, BLOCK_N: gl.constexpr, GATE: gl.constexpr):
    """(weight row, whether it exists) for tile rows `rows`."""
    if GATE:
        col = n_tile * (BLOCK_N // 2) + rows // 16 * 8 + rows % 8
        return (rows // 8 % 2) * N + col, col < N
    else:
        return n_tile * BLOCK_N + rows, n_tile * BLOCK_N + rows < N


@gluon.jit
def scale_offsets(rows, pairs, C: gl.constexpr, SWIZZLED: gl.constexpr):
    """Offsets, in pairs of scale bytes, of columns 2 * pairs of plane rows `rows` (swizzled: layouts.py)."""
    if SWIZZLED:
        tile = rows // 128 * ((C + 3) // 4) + pairs // 2
        return tile * 256 + rows % 32 * 8 + rows % 128 // 32 * 2 + pairs % 2
    else:
        return rows * (C // 2) + pairs


@gluon.jit
def copy_weights(smem, pointers, masks, chunk, stage, GROUPS: gl.constexpr, C: gl.constexpr, SWIZZLED: gl.constexpr):
    """Start the copies of one K chunk of weights and scales into a stage of the ring."""
    w_mask, s_mask, w_group, s_pair = masks
    if C % GROUPS != 0:
        left = C - chunk * GROUPS
        w_mask = w_mask & (w_group < left)
        s_mask = s_mask & (s_pair < left // 2)
    SCALE_STEP: gl.constexpr = GROUPS // 4 * 256 if SWIZZLED else GROUPS // 2
    load_async(smem[0].index(stage), pointers[0] + chunk * GROUPS, mask=w_mask)
    load_async(smem[1].index(stage), pointers[1] + chunk * SCALE_STEP, mask=s_mask)


@gluon.jit
def copy_tokens(x_smem, x_ptrs, x_mask, x_value, chunk, stage, GROUPS: gl.constexpr, C: gl.constexpr):
    """Start the copy of one K chunk of activations into a stage of the ring."""
    if C % GROUPS != 0:
        x_mask = x_mask & (x_value < (C - chunk * GROUPS) * 16)
    load_async(x_smem.index(stage), x_ptrs + chunk * (GROUPS * 16), mask=x_mask)


@gluon.jit
def multiply_chunk(acc, smem, stage, BLOCK_N: gl.constexpr, BLOCK_T: gl.constexpr, GROUPS: gl.constexpr):
    """acc + weights @ activations over the chunk in a stage of the ring."""
    w_smem, s_smem, x_smem = smem
    MMA: gl.constexpr = mma_layout(gl.num_warps())
    words = w_smem.index(stage).load(group_layout(BLOCK_N, GROUPS, gl.num_warps()))
    scale_pairs = s_smem.index(stage).load(group_layout(BLOCK_N, GROUPS // 2, gl.num_warps()))
    x = x_smem.index(stage).load(token_layout(BLOCK_T, 4 * GROUPS, gl.num_warps()))
    scales = group_scales(scale_pairs, x.dtype == gl.float16)
    pairs = token_pairs(x, BLOCK_T, GROUPS)
    for word in gl.static_range(2):
        w = word_values(words, scales, word, x.dtype == gl.float16)
        for i in gl.static_range(4):
            left = weight_operand(w[2 * i], w[2 * i + 1], BLOCK_N, GROUPS, MMA)
            acc = mma_v2(left, token_operand(pairs[4 * word + i], BLOCK_T, GROUPS, MMA), acc)
    return acc


@gluon.constexpr_function
def scale_vector(C: int, GROUPS: int, SWIZZLED: bool) -> int:
    """Pairs of scale bytes that lie together, aligned, in every row; one copy takes 4 to 16 bytes."""
    return 2 if SWIZZLED else min(8, GROUPS // 2, (C & -C) // 2)


@gluon.constexpr_function
def row_swizzle(cols: int, vector: int):
    """Shared [rows, cols] in which lanes that read 16-byte vectors of 8 rows meet 8 different bank groups."""
    vectors = cols // vector
    return gl.SwizzledSharedLayout(vector, max(1, 8 // vectors), min(8, vectors), [1, 0])


@gluon.jit
def weight_pointers(
    w_ptr, scales_ptr, expert, n_tile, N: gl.constexpr, K: gl.constexpr, GATE: gl.constexpr, SWIZZLED: gl.constexpr,
    BLOCK_N: gl.constexpr, GROUPS: gl.constexpr,
):  # fmt: skip
    """((words, scale pairs), masks) of a tile's first chunk; masks carry the columns that `copy_weights` compares."""
    C: gl.constexpr = K // 16
    ROWS: gl.constexpr = 2 * N if GATE else N
    PLANE: gl.constexpr = (ROWS + 127) // 128 * ((C + 3) // 4) * 256 if SWIZZLED else ROWS * C // 2
    W_COPY: gl.constexpr = copy_layout(GROUPS, 2, gl.num_warps())
    S_COPY: gl.constexpr = copy_layout(GROUPS // 2, scale_vector(C, GROUPS, SWIZZLED), gl.num_warps())
    w_row, w_ok = weight_rows(n_tile, gl.arange(0, BLOCK_N, gl.SliceLayout(1, W_COPY)), N, BLOCK_N, GATE)
    s_row, s_ok = weight_rows(n_tile, gl.arange(0, BLOCK_N, gl.SliceLayout(1, S_COPY)), N, BLOCK_N, GATE)
    w_group = gl.arange(0, GROUPS, gl.SliceLayout(0, W_COPY))[None, :]
    s_pair = gl.arange(0, GROUPS // 2, gl.SliceLayout(0, S_COPY))[None, :]
    w_ptrs = w_ptr + expert * (ROWS * C) + (w_row[:, None] * C + w_group)
    s_ptrs = scales_ptr + expert * PLANE + scale_offsets(s_row[:, None], s_pair, C, SWIZZLED)
    return (w_ptrs, s_ptrs), (w_ok[:, None], s_ok[:, None], w_group, s_pair)


@gluon.jit
def multiply(
    acc, x_ptr, w_ptr, scales_ptr, sources, expert, n_tile, smem,
    N: gl.constexpr, K: gl.constexpr, GATE: gl.constexpr, SWIZZLED: gl.constexpr,
    GROUPS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Unscaled sums of one tile: a ring of STAGES chunks, STAGES - 1 of them in flight. `expert` is int64."""
    C: gl.constexpr = K // 16
    BLOCK_N: gl.constexpr = acc.shape[0]
    BLOCK_T: gl.constexpr = acc.shape[1]
    pointers, masks = weight_pointers(w_ptr, scales_ptr, expert, n_tile, N, K, GATE, SWIZZLED, BLOCK_N, GROUPS)
    X_COPY: gl.constexpr = copy_layout(4 * GROUPS, 8, gl.num_warps())
    lane = gl.arange(0, 4 * BLOCK_T, gl.SliceLayout(1, X_COPY)) % 4
    x_value = (lane * (4 * GROUPS))[:, None] + gl.arange(0, 4 * GROUPS, gl.SliceLayout(0, X_COPY))[None, :]
    x_ptrs = x_ptr + sources.to(gl.int64)[:, None] * K + x_value
    x_mask = (sources >= 0)[:, None]

    NUM_CHUNKS: gl.constexpr = (C + GROUPS - 1) // GROUPS
    for chunk in gl.static_range(STAGES - 1):
        if chunk < NUM_CHUNKS:
            copy_weights(smem, pointers, masks, chunk, chunk, GROUPS, C, SWIZZLED)
            copy_tokens(smem[2], x_ptrs, x_mask, x_value, chunk, chunk, GROUPS, C)
        async_copy.commit_group()
    for chunk in range(NUM_CHUNKS):
        async_copy.wait_group(STAGES - 2)
        ahead = chunk + STAGES - 1
        if NUM_CHUNKS >= STAGES:  # alone: Triton cannot lower copies it knows to be dead  # noqa: SIM102
            if ahead < NUM_CHUNKS:
                copy_weights(smem, pointers, masks, ahead, ahead % STAGES, GROUPS, C, SWIZZLED)
                copy_tokens(smem[2], x_ptrs, x_mask, x_value, ahead, ahead % STAGES, GROUPS, C)
        async_copy.commit_group()
        acc = multiply_chunk(acc, smem, chunk % STAGES, BLOCK_N, BLOCK_T, GROUPS)
    return acc


@gluon.jit
def scale_and_gate(
    acc, expert, w_global_ptr, x_global_ptr, strides, swiglu,
    SHIFT: gl.constexpr, GATE: gl.constexpr, HAS_LIMIT: gl.constexpr,
):  # fmt: skip
    """Sums times their globals; gated, [BLOCK_N, BLOCK_T] becomes [BLOCK_N / 2, BLOCK_T]."""
    BLOCK_N: gl.constexpr = acc.shape[0]
    BLOCK_T: gl.constexpr = acc.shape[1]
    x_global = SHIFT
    if x_global_ptr is not None:
        x_global = gl.load(x_global_ptr + expert * strides[2]) * SHIFT
    first = gl.load(w_global_ptr + expert * strides[0])
    if GATE:
        second = gl.load(w_global_ptr + expert * strides[0] + strides[1])
        gate, up = gl.split(acc.reshape([BLOCK_N // 16, 2, 8, BLOCK_T]).permute([0, 2, 3, 1]))
        gate = gate.reshape([BLOCK_N // 2, BLOCK_T]) * first * x_global
        up = up.reshape([BLOCK_N // 2, BLOCK_T]) * second * x_global
        return gl_gated_product(gate, up, swiglu[0], swiglu[1], HAS_LIMIT)
    else:
        return acc * first * x_global


@gluon.jit
def store_values(values, out_ptr, targets_ptr, first, end, n_tile, num_rows, N: gl.constexpr):
    """Write a tile [BLOCK_N, BLOCK_T], already in the output's dtype, to its rows of out [S, N]."""
    BLOCK_N: gl.constexpr = values.shape[0]
    LAYOUT: gl.constexpr = store_layout(BLOCK_N, 4, gl.num_warps())
    cols = n_tile * BLOCK_N + gl.arange(0, BLOCK_N, gl.SliceLayout(1, LAYOUT))
    rows, ok = target_rows(targets_ptr, first, end, num_rows, gl.SliceLayout(0, LAYOUT), values.shape[1])
    mask = (cols < N)[:, None] & ok[None, :]
    gl.store(out_ptr + rows.to(gl.int64)[None, :] * N + cols[:, None], gl.convert_layout(values, LAYOUT), mask=mask)


@gluon.jit
def source_rows(tokens, gather_ptr, first, end, num_sources):
    """The activation row of `tokens` (counted from a tile's first row); -1 where there is none."""
    rows = first + tokens
    ok = rows < end
    if gather_ptr is not None:
        rows = gl.load(gather_ptr + rows, mask=ok, other=-1)
    return gl.where(ok & (rows >= 0) & (rows < num_sources), rows, -1).to(gl.int32)


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
    byte = gl_e4m3_from_amax(amax, gl.full_like(amax, 0.0) + global_scale)
    step = gl_e4m3_to_float(byte) * global_scale
    step = gl.convert_layout(step.expand_dims(1), groups.type.layout)
    code = gl_e2m1_code(groups, step.broadcast_to([BLOCK_N // 16, 16, BLOCK_T]))
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
    expert = gl.minimum(expert, num_experts - 1)
    if X_GLOBAL_PER_ROW:
        sources = source_rows(gl.arange(0, acc.shape[1], TOKENS), gather_ptr, first, end, num_sources)
        acc = acc * gl.load(x_global_ptr + sources, mask=sources >= 0, other=0.0)[None, :]
        x_global_ptr = None
    values = scale_and_gate(acc, expert, w_global_ptr, x_global_ptr, strides, swiglu, SHIFT, GATE, HAS_LIMIT)
    if out_scales_ptr is None:
        store_values(values.to(out_ptr.dtype.element_ty), out_ptr, scatter_ptr, first, end, n_tile, num_rows, N)
    else:
        global_scale = gl.load(out_global_ptr + expert * strides[3])
        store_quantized(
            values.to(ROUNDED), out_ptr, out_scales_ptr, global_scale, scatter_ptr, first, end, n_tile, num_rows, N
        )


@gluon.jit(do_not_specialize=["num_rows", "num_sources", "num_experts"])
def nvfp4_gemm_kernel(
    x_ptr, x_global_ptr, w_ptr, scales_ptr, w_global_ptr, out_ptr, out_scales_ptr, out_global_ptr,
    expert_start_ptr, expert_ids_ptr, gather_ptr, scatter_ptr, num_rows, num_sources, num_experts, strides, swiglu,
    N: gl.constexpr, K: gl.constexpr, GATE: gl.constexpr, HAS_LIMIT: gl.constexpr, SWIZZLED: gl.constexpr,
    X_GLOBAL_PER_ROW: gl.constexpr, ROUNDED: gl.constexpr, BLOCK_E: gl.constexpr,
    BLOCK_N: gl.constexpr, GROUPS: gl.constexpr, BLOCK_T: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Every program walks the tiles pid, pid + programs, ..; tiles of one row tile are neighbours.

    strides: of w_global (expert, half), x_global (expert) and out_global (expert). swiglu: (alpha, limit).
    """
    W: gl.constexpr = gl.num_warps()
    OUT_N: gl.constexpr = BLOCK_N // 2 if GATE else BLOCK_N
    N_TILES: gl.constexpr = (N + OUT_N - 1) // OUT_N
    QUAD_TOKENS: gl.constexpr = gl.SliceLayout(1, copy_layout(4 * GROUPS, 8, W))
    DTYPE: gl.constexpr = x_ptr.dtype.element_ty
    smem = (
        gl.allocate_shared_memory(gl.int64, [STAGES, BLOCK_N, GROUPS], row_swizzle(GROUPS, 2)),
        gl.allocate_shared_memory(gl.int16, [STAGES, BLOCK_N, GROUPS // 2], gl.SwizzledSharedLayout(1, 1, 1, [1, 0])),
        gl.allocate_shared_memory(DTYPE, [STAGES, 4 * BLOCK_T, 4 * GROUPS], row_swizzle(4 * GROUPS, 8)),
    )
    tile_ends = 0
    if expert_ids_ptr is not None:
        row_tiles = num_rows
    elif expert_start_ptr is not None:
        tile_ends = group_tile_ends(expert_start_ptr, num_rows, num_experts, BLOCK_E, BLOCK_T)
        row_tiles = gl.max(tile_ends, axis=0)
    else:
        row_tiles = (num_rows + BLOCK_T - 1) // BLOCK_T

    for tile in range(gl.program_id(0), row_tiles * N_TILES, gl.num_programs(0)):
        n_tile = tile % N_TILES
        expert, first, end = locate(
            tile // N_TILES, tile_ends, expert_start_ptr, expert_ids_ptr, num_rows, num_experts, BLOCK_T
        )
        acc = gl.zeros([BLOCK_N, BLOCK_T], gl.float32, mma_layout(W))
        if expert < num_experts:
            sources = source_rows(gl.arange(0, 4 * BLOCK_T, QUAD_TOKENS) // 4, gather_ptr, first, end, num_sources)
            acc = multiply(
                acc, x_ptr, w_ptr, scales_ptr, sources, expert.to(gl.int64), n_tile, smem,
                N, K, GATE, SWIZZLED, GROUPS, STAGES,
            )  # fmt: skip
        store_tile(
            acc, (expert, first, end, n_tile), x_global_ptr, w_global_ptr, out_ptr, out_scales_ptr, out_global_ptr,
            gather_ptr, scatter_ptr, num_rows, num_sources, num_experts, strides, swiglu, operand_shift(DTYPE),
            N, GATE, HAS_LIMIT, X_GLOBAL_PER_ROW, ROUNDED,
        )  # fmt: skip
