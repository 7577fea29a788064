"""A tile of the tensor-core kernels and the memory it takes: the one plan that kernels, launcher, tuner and tests read.

A program's shared memory is a ring of stages, a chunk of weights and activations each; results on their way out; and,
unless scales come through the ring with the weights, one strip or two of a tile's scales (kernels/scale_strip.py).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Protocol

from ..nvfp4.reference import GROUP

MAX_STRIP_BYTES = 48 << 10
"""Shared memory that a kernel may declare by itself, on every GPU."""

LEAST_BYTES = 99 << 10
"""Shared memory that a program may have on every GPU that kernels/mma.py runs on."""

HOPPER_BYTES = 228 << 10
"""Shared memory of a multiprocessor that has warpgroup products, of which every program takes `RESERVED_BYTES`."""

RESERVED_BYTES = 1024

RESULT_BYTES = 16 << 10
"""How many bytes of results are in shared memory at a time, on their way out, or less than twice as many."""


class HasBlocks(Protocol):
    """A `Config`, or one weight's (split.py)."""

    @property
    def block_n(self) -> int: ...
    @property
    def block_k(self) -> int: ...
    @property
    def block_t(self) -> int: ...


@dataclass(frozen=True)
class Config:
    """Tile of one program: `block_n` weight rows by `block_t` routed rows, `block_k` deep a step.

    `warpgroup`: Hopper's warpgroup products (kernels/sm90_wgmma.py), for many rows an expert; else kernels/mma.py.
    `max_registers`: of a thread, so that `programs_per_sm` programs fit; None leaves it to the compiler.
    `max_cols`: of compressed scales decoded at a time, for the same.
    `chunks_at_once`: steps whose copies are asked for together; `num_stages` are a multiple of it.
    """

    block_n: int
    block_k: int
    block_t: int
    num_warps: int
    num_stages: int
    programs_per_sm: int
    warpgroup: bool = False
    max_registers: int | None = None
    max_cols: int = 176
    chunks_at_once: int = 1


@dataclass(frozen=True)
class TilePlan:
    """A `Config` as kernels are compiled for it, for one shape. Values alone: kernels/operands.py says why."""

    BLOCK_N: int
    BLOCK_T: int
    GROUPS: int
    """Groups of 16 k in a chunk."""
    STAGES: int
    BURST: int
    """Chunks asked for together."""
    HALVES: int
    """2 with a gate, whose rows a tile has beside those of up; else 1."""
    HALF: int
    """Weight rows of each half in a tile, and so the output's columns."""
    N_TILES: int
    """Tiles along the output's columns."""
    PARTS: int
    """Parts of a warpgroup tile's rows that are multiplied one after the other."""
    COLS: int
    """Scale columns that a strip holds: all of a row, or an equal part."""
    STRIPS: int
    """Of scales: none where they come through the ring; two where the next tile's are stored while this one's serve."""
    STRIDE: int
    """Bytes from row to row of a strip."""
    STRIP_BYTES: int
    """What a kernel declares for its strips."""


@functools.lru_cache(maxsize=4096)
def plan_tile(config: Config, num_cols: int, depth: int, gate: bool, has_strip: bool, compressed: bool) -> TilePlan:
    """The plan of `config` for results of `num_cols` columns and rows of `depth` weights."""
    groups, halves = config.block_k // GROUP, 2 if gate else 1
    half = config.block_n // halves
    cols = strip_cols(config, depth) if compressed else depth // GROUP
    return TilePlan(
        BLOCK_N=config.block_n,
        BLOCK_T=config.block_t,
        GROUPS=groups,
        STAGES=config.num_stages,
        BURST=config.chunks_at_once,
        HALVES=halves,
        HALF=half,
        N_TILES=-(-num_cols // half),
        PARTS=num_parts(config),
        COLS=cols,
        STRIPS=num_strips(config, depth) if has_strip else 0,
        STRIDE=strip_stride(cols, groups),
        STRIP_BYTES=strip_bytes(config, depth) if has_strip else 0,
    )


def strip_cols(config: Config, depth: int) -> int:
    """Columns of scales decoded at a time: a row's, or equal parts of whole chunks where rows are long."""
    cols, groups = depth // GROUP, config.block_k // GROUP
    while cols > config.max_cols and cols % (2 * groups) == 0 and not config.warpgroup:
        cols //= 2
    return cols


def strip_stride(cols: int, groups: int) -> int:
    """Bytes from row to row of decoded scales: an odd number of chunks, so that 8 rows meet different banks."""
    return groups * (-(-cols // groups) | 1)


def num_parts(config: Config) -> int:
    """Parts of a warpgroup tile's rows: as many rows as all warps multiply at once, where of more the sums of so many
    tokens do not fit in registers."""
    return config.block_n // (16 * config.num_warps) if config.warpgroup and config.block_t > 64 else 1


def num_strips(config: Config, depth: int) -> int:
    """Two, for the next tile's scales to be stored between this tile's products: by warpgroups that have a
    multiprocessor alone, if they fit, and if a tile has two chunks to store them between."""
    fit = 2 * one_strip_bytes(config, depth) <= MAX_STRIP_BYTES
    return 2 if config.warpgroup and config.num_warps > 4 and fit and depth > config.block_k else 1


def one_strip_bytes(config: Config, depth: int) -> int:
    return config.block_n * strip_stride(strip_cols(config, depth), config.block_k // GROUP)


def strip_bytes(config: Config, depth: int) -> int:
    """Shared memory that a kernel declares for its strips."""
    return whole_units(num_strips(config, depth) * one_strip_bytes(config, depth), config.warpgroup)


def whole_units(num_bytes: int, warpgroup: bool) -> int:
    """As a kernel declares them: Triton's own shared memory follows, and warpgroup operands there are aligned to 1
    KB."""
    unit = 1024 if warpgroup else 256
    return -(-num_bytes // unit) * unit


def stage_bytes(config: HasBlocks) -> int:
    """One stage of the ring: a chunk's codes, 4 bits each, and activations, 16 bits each."""
    return config.block_n * config.block_k // 2 + config.block_t * config.block_k * 2


def shared_bytes(config: Config, depth: int, result_bytes: int) -> int:
    """Shared memory of one program of a warpgroup tile with strips. Of float32 results, which are requantized, half of
    a tile's may be in shared memory at a time."""
    at_once = RESULT_BYTES if result_bytes < 4 else 2 * RESULT_BYTES
    results = min(at_once, config.block_n * config.block_t * result_bytes // num_parts(config))
    return config.num_stages * stage_bytes(config) + strip_bytes(config, depth) + results + RESERVED_BYTES


def reads_compressed(depth: int, has_warpgroups: bool) -> bool:
    """Whether the tensor-core kernels of a GPU read compressed scales of rows of `depth` weights: whole words of codes,
    and a narrow tile's strip fits. Where there are warpgroup tiles, which have no slices, it is one of theirs, so that
    both forms of scales always have tiles of one kind."""
    narrow = Config(64, 128, 64, 4, 4, 1, warpgroup=True)
    if not has_warpgroups:
        narrow = Config(32, 128 if depth % 256 else 256, 32, 2, 3, 1)  # the longer a step, the longer slices may be
    return depth % 128 == 0 and strip_bytes(narrow, depth) <= MAX_STRIP_BYTES


def with_strip(config: Config, depth: int, result_bytes: int = 4) -> Config:
    """`config` with room for a tile's scales: narrower tiles if need be. It steps through K as `config` does.

    Triton asks for more than 48 KB a program only if its own shared memory is more, so a deeper ring makes it so. Its
    own is the ring and, as results are rearranged, up to `result_bytes` for every weight row and routed row of a tile.
    Raises ValueError where no tile is narrow enough (`reads_compressed` is False): Triton would end the process.
    A ring that leaves no room for strips and results is shortened.
    """
    while True:
        strips, stage, num_stages = strip_bytes(config, depth), stage_bytes(config), config.num_stages
        rest = config.block_n * config.block_t * result_bytes + strips
        while num_stages * stage <= MAX_STRIP_BYTES < num_stages * stage + rest:
            num_stages += config.chunks_at_once
        if strips <= MAX_STRIP_BYTES and (config.warpgroup or num_stages * stage + rest <= LEAST_BYTES):
            break
        rows = config.block_n // 2
        if rows < (64 if config.warpgroup else 16):
            raise ValueError(f"K: expected rows whose scales fit in {MAX_STRIP_BYTES} bytes, got {depth} for {config}")
        warps = max(4, config.num_warps // 2) if config.warpgroup else min(config.num_warps, rows // 16)
        config = replace(config, block_n=rows, num_warps=warps)
    config = replace(config, num_stages=num_stages)
    while config.warpgroup and config.num_stages > 2 and shared_bytes(config, depth, result_bytes) > HOPPER_BYTES:
        config = replace(config, num_stages=config.num_stages - 1)
    return config


@functools.lru_cache(maxsize=4096)
def comes_whole(config: Config, depth: int, result_bytes: int) -> bool:
    """Whether a tile's dense scales are copied into a strip, all at once, and not a chunk's share at a time, which is
    so little that every sector of memory is read several times. Measured: those of short rows; of warpgroup tiles
    those of rows long enough to hide it, behind products or another tile, if registers and shared memory hold them."""
    if config.warpgroup:
        words_a_lane = config.block_n * depth // (GROUP * 8 * 32 * config.num_warps)
        hidden = config.num_warps > 4 or config.programs_per_sm > 1
        if depth <= 1024 or not hidden or words_a_lane * config.num_warps > 80:
            return False
        if config.programs_per_sm * shared_bytes(config, depth, result_bytes) > HOPPER_BYTES:
            return False
    elif depth > 1024:
        return False
    return depth % 128 == 0 and with_strip(config, depth, result_bytes) == config
