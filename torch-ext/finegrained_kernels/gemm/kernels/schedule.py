"""Which rows and columns a tile has, for every kernel, in both dialects: Gluon calls these functions as Triton does.

Row tiles are cut from each expert's routed rows; those of no expert form one more group, of an expert `num_experts`
with no weights. `experts` is the caller's 0 .. BLOCK_E - 1, in whatever layout.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl


class Schedule(NamedTuple):
    """What finding a tile takes, the same for all tiles of a launch. Made in kernels, as Triton 3.6 cannot return what
    may be None."""

    routing: Any
    tile_ends: Any  # of `count_tiles`
    num_rows: Any
    num_sources: Any
    num_experts: Any


class Tile(NamedTuple):
    """Routed rows [first, end) of an expert, BLOCK_T at the most, and the n-th block of output columns."""

    expert: Any
    first: Any
    end: Any
    n_tile: Any


@triton.jit
def add(a, b):
    return a + b


@triton.jit
def tiles_of(rows, BLOCK_T: tl.constexpr):
    """Row tiles of so many rows, none of a negative number. Of what is not negative a division is a shift."""
    return tl.maximum(rows + (BLOCK_T - 1), 0) // BLOCK_T


@triton.jit
def count_tiles(experts, routing, num_rows, num_experts, BLOCK_T: tl.constexpr):
    """(row tiles up to and including every expert [BLOCK_E], or 0 where rows are not grouped; all row tiles)."""
    tile_ends = 0
    if routing.expert_ids is not None:
        row_tiles = num_rows
    elif routing.expert_start is not None:
        start = tl.load(routing.expert_start + experts, mask=experts < num_experts, other=0)
        end = tl.load(routing.expert_start + experts + 1, mask=experts < num_experts, other=0)
        rows = tl.minimum(end, num_rows) - tl.maximum(start, 0)  # those that exist, whatever the entries
        tile_ends = tl.associative_scan(tiles_of(rows, BLOCK_T), 0, add)
        of_none = num_rows - tl.maximum(tl.load(routing.expert_start + num_experts), 0)
        row_tiles = tl.max(tile_ends, axis=0) + tiles_of(of_none, BLOCK_T)
    else:
        row_tiles = tiles_of(num_rows, BLOCK_T)
    return tile_ends, row_tiles


@triton.jit
def find_tile(schedule, row_tile, n_tile, experts, BLOCK_T: tl.constexpr):
    """The tile at row tile `row_tile`. An expert id that no expert has becomes `num_experts`."""
    num_experts = schedule.num_experts
    if schedule.routing.expert_ids is not None:
        expert = tl.load(schedule.routing.expert_ids + row_tile)  # int32 or int64: compared before it is narrowed
        expert = tl.where((expert >= 0) & (expert < num_experts), expert, num_experts).to(tl.int32)
        first = row_tile
        end = row_tile + 1
    elif schedule.routing.expert_start is not None:
        start_ptr = schedule.routing.expert_start
        before = schedule.tile_ends <= row_tile
        expert = tl.minimum(tl.max(tl.where(before, experts + 1, 0), axis=0), num_experts)
        first_tile = tl.max(tl.where(before, schedule.tile_ends, 0), axis=0)
        first = tl.minimum(tl.maximum(tl.load(start_ptr + expert), 0), schedule.num_rows)
        first += (row_tile - first_tile) * BLOCK_T
        end = tl.load(start_ptr + expert + 1, mask=expert < num_experts, other=schedule.num_rows)
        end = tl.minimum(end, schedule.num_rows)
    else:
        expert = row_tile * 0
        first = row_tile * BLOCK_T
        end = schedule.num_rows
    return Tile(expert, first, end, n_tile)


@triton.jit
def with_weights(tile, schedule):
    """`tile`, or where it is of no expert one whose weights exist, to be read in its place."""
    return Tile(tl.minimum(tile.expert, schedule.num_experts - 1), tile.first, tile.end, tile.n_tile)


@triton.jit
def indexed_rows(index_ptr, tile, rows):
    """What an index has for those of a tile's `rows` (counted from its first) that exist, -1 for others, and which do;
    without an index, the rows themselves."""
    rows = tile.first + rows
    ok = rows < tile.end
    if index_ptr is not None:
        rows = tl.load(index_ptr + rows, mask=ok, other=-1)
    return rows, ok


@triton.jit
def source_rows(schedule, tile, rows):
    """The activation row of a tile's `rows`; -1 where there is none."""
    rows, ok = indexed_rows(schedule.routing.gather, tile, rows)
    return tl.where(ok & (rows >= 0) & (rows < schedule.num_sources), rows, -1).to(tl.int32)


@triton.jit
def target_rows(schedule, tile, rows):
    """(output row, whether to write it) of a tile's `rows`."""
    rows, ok = indexed_rows(schedule.routing.scatter, tile, rows)
    if schedule.routing.scatter is not None:
        ok = (rows >= 0) & (rows < schedule.num_rows)
    return rows, ok
