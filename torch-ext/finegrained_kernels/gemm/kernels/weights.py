"""What the tensor-core GEMMs share: which tile is next, and the ring of shared memory that its chunks arrive in.

Every program walks tiles pid, pid + programs, ..; tiles of one row tile are neighbours.
Rows of no expert form one more group, of an expert with no weights.
"""

from __future__ import annotations

import triton.experimental.gluon.language as gl
from triton.experimental import gluon

from .unpack import copy_layout, load_async


@gluon.jit
def add(a, b):
    return a + b


@gluon.jit
def group_tile_ends(expert_start_ptr, num_rows, num_experts, BLOCK_E: gl.constexpr, BLOCK_T: gl.constexpr):
    """(row tiles up to and including every expert [BLOCK_E], all row tiles: also those of the rows of none)."""
    offs = gl.arange(0, BLOCK_E, gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    start = gl.load(expert_start_ptr + offs, mask=offs < num_experts, other=0)
    end = gl.load(expert_start_ptr + offs + 1, mask=offs < num_experts, other=0)
    tile_ends = gl.associative_scan((gl.maximum(end - start, 0) + BLOCK_T - 1) // BLOCK_T, 0, add)
    of_none = gl.maximum(num_rows - gl.load(expert_start_ptr + num_experts), 0)
    return tile_ends, gl.max(tile_ends, axis=0) + (of_none + BLOCK_T - 1) // BLOCK_T


@gluon.jit
def find_tile(
    index, tile_ends, expert_start_ptr, expert_ids_ptr, num_rows, num_experts,
    N_TILES: gl.constexpr, BLOCK_T: gl.constexpr,
):  # fmt: skip
    """(expert, first row, end row, n_tile) of a tile. An expert id that no expert has becomes `num_experts`."""
    row_tile = index // N_TILES
    if expert_ids_ptr is not None:
        expert = gl.load(expert_ids_ptr + row_tile)  # int32 or int64: compared before it is narrowed
        expert = gl.where((expert >= 0) & (expert < num_experts), expert, num_experts).to(gl.int32)
        first = row_tile
        end = row_tile + 1
    elif expert_start_ptr is not None:
        experts = gl.arange(1, 1 + tile_ends.shape[0], tile_ends.type.layout)
        before = tile_ends <= row_tile
        expert = gl.minimum(gl.max(gl.where(before, experts, 0), axis=0), num_experts)
        first_tile = gl.max(gl.where(before, tile_ends, 0), axis=0)
        first = gl.load(expert_start_ptr + expert) + (row_tile - first_tile) * BLOCK_T
        end = gl.load(expert_start_ptr + expert + 1, mask=expert < num_experts, other=num_rows)
    else:
        expert = index * 0
        first = row_tile * BLOCK_T
        end = num_rows
    return expert, first, end, index % N_TILES


@gluon.jit
def clamped(tile, num_experts):
    """A tile whose weights exist, where `tile` may be one of no expert."""
    return gl.minimum(tile[0], num_experts - 1), tile[1], tile[2], tile[3]


@gluon.jit
def source_rows(tokens, gather_ptr, tile, num_sources):
    """The activation row of `tokens` (counted from a tile's first row); -1 where there is none."""
    _, first, end, _ = tile
    rows = first + tokens
    ok = rows < end
    if gather_ptr is not None:
        rows = gl.load(gather_ptr + rows, mask=ok, other=-1)
    return gl.where(ok & (rows >= 0) & (rows < num_sources), rows, -1).to(gl.int32)


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
def tile_row(rows, GATE: gl.constexpr):
    """(row of its half, half) of rows of a tile: with GATE, 8 rows of gate alternate with their 8 rows of up."""
    if GATE:
        return rows // 16 * 8 + rows % 8, rows // 8 % 2
    else:
        return rows, 0


@gluon.jit
def copy_rows(
    destination, source_ptr, columns, step, tile, N: gl.constexpr, ROW: gl.constexpr, GATE: gl.constexpr,
    BLOCK_N: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Start the copy of columns `step + columns` of a tile's rows of [experts, N or 2N, ROW]; zeros past its end.

    Offsets are 64-bit from the start, so that what is constant in them becomes part of the instruction.
    """
    expert, _, _, n_tile = tile
    HALF: gl.constexpr = BLOCK_N // 2 if GATE else BLOCK_N
    HALVES: gl.constexpr = 2 if GATE else 1
    row, half = tile_row(gl.arange(0, BLOCK_N, gl.SliceLayout(1, LAYOUT)), GATE)
    mask = (n_tile * HALF + row < N)[:, None] if N % HALF != 0 else (row >= 0)[:, None]
    if ROW % columns.shape[0] != 0:
        mask = mask & (step + columns < ROW)[None, :]
    start_ptr = source_ptr + (expert.to(gl.int64) * (HALVES * N * ROW) + n_tile * (HALF * ROW) + step)
    offsets = (half * N + row).to(gl.int64)[:, None] * ROW + columns.to(gl.int64)[None, :]
    load_async(destination, start_ptr + offsets, mask=mask)


@gluon.jit
def copy_swizzled_scales(
    destination, scales_ptr, chunk, tile, N: gl.constexpr, C: gl.constexpr, GATE: gl.constexpr,
    BLOCK_N: gl.constexpr, GROUPS: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """The same for a chunk of scale pairs in the form of swizzle.py."""
    expert, _, _, n_tile = tile
    HALF: gl.constexpr = BLOCK_N // 2 if GATE else BLOCK_N
    COL_TILES: gl.constexpr = (C + 3) // 4
    PLANE: gl.constexpr = ((2 * N if GATE else N) + 127) // 128 * COL_TILES * 256
    row, half = tile_row(gl.arange(0, BLOCK_N, gl.SliceLayout(1, LAYOUT)), GATE)
    row = n_tile * HALF + row
    pair = gl.arange(0, GROUPS // 2, gl.SliceLayout(0, LAYOUT))
    mask = (row < N)[:, None]
    if C % GROUPS != 0:
        mask = mask & (pair < (C - chunk * GROUPS) // 2)[None, :]
    row = half * N + row
    offsets = (row // 128 * (COL_TILES * 256) + row % 32 * 8 + row % 128 // 32 * 2)[:, None]
    offsets += (pair // 2 * 256 + pair % 2)[None, :]
    base = expert.to(gl.int64) * PLANE + chunk * (GROUPS // 4 * 256)
    load_async(destination, scales_ptr + base + offsets, mask=mask)


@gluon.constexpr_function
def has_strip(scales) -> bool:
    """Whether scales come to a strip of their own (scale_strip.py), and not through the ring."""
    return len(scales) == 4 or scales[0].dtype.element_ty != gl.int16


@gluon.jit
def copy_weights(
    smem, w_ptr, scales, tile, chunk, stage, N: gl.constexpr, K: gl.constexpr, GATE: gl.constexpr,
    SWIZZLED: gl.constexpr, BLOCK_N: gl.constexpr, GROUPS: gl.constexpr,
):  # fmt: skip
    """Start the copies of a K chunk of weights, and of scales unless they have a strip, into a stage of the ring."""
    C: gl.constexpr = K // 16
    W_COPY: gl.constexpr = copy_layout(GROUPS, 2, gl.num_warps())
    groups = gl.arange(0, GROUPS, gl.SliceLayout(0, W_COPY))
    copy_rows(smem[0].index(stage), w_ptr, groups, chunk * GROUPS, tile, N, C, GATE, BLOCK_N, W_COPY)
    if not has_strip(scales):
        S_COPY: gl.constexpr = copy_layout(GROUPS // 2, scale_vector(C, GROUPS, SWIZZLED), gl.num_warps())
        pairs = gl.arange(0, GROUPS // 2, gl.SliceLayout(0, S_COPY))
        destination = smem[1].index(stage)
        if SWIZZLED:
            copy_swizzled_scales(destination, scales[0], chunk, tile, N, C, GATE, BLOCK_N, GROUPS, S_COPY)
        else:
            step = chunk * (GROUPS // 2)
            copy_rows(destination, scales[0], pairs, step, tile, N, C // 2, GATE, BLOCK_N, S_COPY)
