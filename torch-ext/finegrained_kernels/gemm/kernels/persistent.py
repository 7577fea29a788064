"""The order of tiles in a persistent grid: program p has tiles p, p + programs, ..; tiles of one row tile are
neighbours."""

from __future__ import annotations

import triton.experimental.gluon.language as gl
from triton.experimental import gluon

from . import ptx
from .schedule import Tile, find_tile


@gluon.jit
def all_experts(SHAPE: gl.constexpr):
    return gl.arange(0, SHAPE.BLOCK_E, gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))


@gluon.jit
def nth_tile(schedule, index, SHAPE: gl.constexpr, TILE: gl.constexpr):
    """Tile number `index`, in values that compilers know to be the same in every lane."""
    experts = all_experts(SHAPE)
    tile = find_tile(schedule, index // TILE.N_TILES, index % TILE.N_TILES, experts, TILE.BLOCK_T)
    return Tile(
        ptx.first_lane(tile.expert), ptx.first_lane(tile.first), ptx.first_lane(tile.end), ptx.first_lane(tile.n_tile)
    )  # fmt: skip
