"""Which rows and columns a tile has, for every kernel and in both dialects: Gluon can call these functions like Triton.

Each expert's routed rows are cut into row tiles. Rows without an expert form one more group, of an expert `num_experts`
that has no weights. `experts` is 0 .. BLOCK_E - 1, in a layout that the caller chooses.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl


class Schedule(NamedTuple):
    """What is needed to find a tile; the same for all tiles of a launch. Kernels make it themselves, because in Triton
    3.6 a function cannot return values that may be None."""

    routing: Any
    tile_ends: Any  # of `count_tiles`
    num_rows: Any
    num_sources: Any
    num_experts: Any


class Tile(NamedTuple):
    """Routed rows [first, end) of an expert, of which a tile has the first BLOCK_T, and a block of output columns."""

    expert: Any
    first: Any
    end: Any
    n_tile: Any


@triton.jit
def add(a, b):
    return a + b


@triton.jit
def tiles_of(rows, BLOCK_T: tl.constexpr):
    """The number of row tiles for `rows` rows; 0 if `rows` is negative. The maximum comes first, because a division of
    non-negative numbers is a shift."""
    return tl.maximum(rows + (BLOCK_T - 1), 0) // BLOCK_T


@triton.jit
def count_tiles(experts, routing, num_rows, num_experts, BLOCK_T: tl.constexpr):
    """(row tiles up to and including each expert [BLOCK_E], or 0 if rows are not grouped; number of all row tiles)."""
    tile_ends = 0
    if routing.expert_ids is not None:
        row_tiles = num_rows
    elif routing.expert_start is not None:
        start = tl.load(routing.expert_start + experts, mask=experts < num_experts, other=0)
        end = tl.load(routing.expert_start + experts + 1, mask=experts < num_experts, other=0)
        rows = tl.minimum(end, num_rows) - tl.maximum(start, 0)  # only rows that exist, whatever the entries are
        tile_ends = tl.associative_scan(tiles_of(rows, BLOCK_T), 0, add)
        of_none = num_rows - tl.maximum(tl.load(routing.expert_start + num_experts), 0)
        row_tiles = tl.max(tile_ends, axis=0) + tiles_of(of_none, BLOCK_T)
    else:
        row_tiles = tiles_of(num_rows, BLOCK_T)
    return tile_ends, row_tiles


@triton.jit
def find_tile(schedule, row_tile, n_tile, experts, BLOCK_T: tl.constexpr):
    """The tile of row tile `row_tile`. An expert id that is out of range becomes `num_experts`."""
    num_experts = schedule.num_experts
    if schedule.routing.expert_ids is not None:
        expert = tl.load(schedule.routing.expert_ids + row_tile)  # int32 or int64, so compared before it is narrowed
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
    """`tile`, but if it has no expert, with one whose weights exist and can be read."""
    return Tile(tl.minimum(tile.expert, schedule.num_experts - 1), tile.first, tile.end, tile.n_tile)


@triton.jit
def indexed_rows(index_ptr, tile, rows):
    """(the index's entries for a tile's `rows`, which are counted from its first, or -1 for rows that do not exist;
    whether rows exist). Without an index, the entries are the rows themselves."""
    rows = tile.first + rows
    ok = rows < tile.end
    if index_ptr is not None:
        rows = tl.load(index_ptr + rows, mask=ok, other=-1)
    return rows, ok


@triton.jit
def source_rows(schedule, tile, rows):
    """The activation row for each of a tile's `rows`; -1 if there is none."""
    rows, ok = indexed_rows(schedule.routing.gather, tile, rows)
    return tl.where(ok & (rows >= 0) & (rows < schedule.num_sources), rows, -1).to(tl.int32)


@triton.jit
def target_rows(schedule, tile, rows):
    """(output row, whether to write it) for each of a tile's `rows`."""
    rows, ok = indexed_rows(schedule.routing.scatter, tile, rows)
    if schedule.routing.scatter is not None:
        ok = (rows >= 0) & (rows < schedule.num_rows)
    return rows, ok
