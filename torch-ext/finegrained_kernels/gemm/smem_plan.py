"""A tile of the tensor-core kernels and the memory that it takes. Kernels, launcher, tuner and tests all use this plan.

A program's shared memory holds a ring of stages, each with a chunk of weights and activations; results on their way
out; and, unless scales come through the ring with the weights, one or two strips with a tile's scales
(kernels/scale_strip.py).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Protocol

from ..nvfp4.reference import GROUP

MAX_STRIP_BYTES = 48 << 10
"""Bytes of shared memory that a kernel may declare by itself, on every GPU."""

LEAST_BYTES = 99 << 10
"""Bytes of shared memory that a program may have on every GPU on which kernels/mma.py runs."""

HOPPER_BYTES = 228 << 10
"""Bytes of shared memory of a Hopper multiprocessor; the system takes `RESERVED_BYTES` of it for every program."""

RESERVED_BYTES = 1024

RESULT_BYTES = 16 << 10
"""Bytes of results that are in shared memory at a time, on their way out; there may be up to twice as many."""


class HasBlocks(Protocol):
    """A `Config`, or a `SplitConfig` (split.py)."""

    @property
    def block_n(self) -> int: ...
    @property
    def block_k(self) -> int: ...
    @property
    def block_t(self) -> int: ...


@dataclass(frozen=True)
class Config:
    """Tile of one program: `block_n` weight rows by `block_t` routed rows, in steps of `block_k`.

    `warpgroup`: Hopper's warpgroup products (kernels/sm90_wgmma.py), for many rows per expert; else kernels/mma.py.
    `max_registers`: registers per thread, so that `programs_per_sm` programs fit; None leaves it to the compiler.
    `max_cols`: columns of compressed scales that are decoded at a time, for the same reason.
    `chunks_at_once`: how many steps' copies are started together; `num_stages` is a multiple of it.
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
    """What kernels are compiled for, given a `Config` and a shape. It holds only values; kernels/operands.py says
    why."""

    BLOCK_N: int
    BLOCK_T: int
    GROUPS: int
    """Groups of 16 k in a chunk."""
    STAGES: int
    BURST: int
    """Chunks whose copies are started together."""
    HALVES: int
    """2 with a gate, when a tile has rows of gate and of up; else 1."""
    HALF: int
    """Weight rows of each half in a tile, which are columns of the output."""
    N_TILES: int
    """Tiles along the output's columns."""
    PARTS: int
    """Parts of a warpgroup tile's rows that are multiplied one after the other."""
    COLS: int
    """Scale columns in a strip: a whole row, or one of several equal parts."""
    STRIPS: int
    """Strips of scales: none if scales come through the ring; two if the next tile's are stored while this one's are in
    use."""
    STRIDE: int
    """Bytes from row to row of a strip."""
    STRIP_BYTES: int
    """Bytes that a kernel declares for its strips."""


@functools.lru_cache(maxsize=4096)
def plan_tile(config: Config, num_cols: int, depth: int, gate: bool, has_strip: bool, compressed: bool) -> TilePlan:
    """The plan for `config`, results of `num_cols` columns, and rows of `depth` weights."""
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
    """Columns of scales that are decoded at a time: a whole row, or if rows are long, equal parts of whole chunks."""
    cols, groups = depth // GROUP, config.block_k // GROUP
    while cols > config.max_cols and cols % (2 * groups) == 0 and not config.warpgroup:
        cols //= 2
    return cols


def strip_stride(cols: int, groups: int) -> int:
    """Bytes from row to row of decoded scales: an odd number of chunks, so that 8 rows meet different banks."""
    return groups * (-(-cols // groups) | 1)


def num_parts(config: Config) -> int:
    """Into how many parts a warpgroup tile's rows are divided. With many tokens the sums of all rows do not fit in
    registers, so a part has as many rows as all warps multiply at once."""
    return config.block_n // (16 * config.num_warps) if config.warpgroup and config.block_t > 64 else 1


def num_strips(config: Config, depth: int) -> int:
    """Two strips if the next tile's scales can be stored between this tile's products: by a warpgroup program that has
    a multiprocessor to itself, if both strips fit, and if a tile has at least two chunks. Else one."""
    fit = 2 * one_strip_bytes(config, depth) <= MAX_STRIP_BYTES
    return 2 if config.warpgroup and config.num_warps > 4 and fit and depth > config.block_k else 1


def one_strip_bytes(config: Config, depth: int) -> int:
    return config.block_n * strip_stride(strip_cols(config, depth), config.block_k // GROUP)


def strip_bytes(config: Config, depth: int) -> int:
    """Bytes of shared memory that a kernel declares for its strips."""
    return whole_units(num_strips(config, depth) * one_strip_bytes(config, depth), config.warpgroup)


def whole_units(num_bytes: int, warpgroup: bool) -> int:
    """`num_bytes` rounded up to the units in which kernels declare shared memory. Triton's own memory follows, in which
    warpgroup operands are aligned to 1 KB."""
    unit = 1024 if warpgroup else 256
    return -(-num_bytes // unit) * unit


def stage_bytes(config: HasBlocks) -> int:
    """Bytes of one stage of the ring: a chunk's codes, 4 bits each, and activations, 16 bits each."""
    return config.block_n * config.block_k // 2 + config.block_t * config.block_k * 2


def shared_bytes(config: Config, depth: int, result_bytes: int) -> int:
    """Bytes of shared memory of one program with a warpgroup tile and strips. If results are float32, to be
    requantized, up to half of a tile's may be in shared memory at a time."""
    at_once = RESULT_BYTES if result_bytes < 4 else 2 * RESULT_BYTES
    results = min(at_once, config.block_n * config.block_t * result_bytes // num_parts(config))
    return config.num_stages * stage_bytes(config) + strip_bytes(config, depth) + results + RESERVED_BYTES


def reads_compressed(depth: int, has_warpgroups: bool) -> bool:
    """Whether a GPU's tensor-core kernels read compressed scales of rows of `depth` weights. The codes of a row have to
    be whole words, and the strip of a narrow tile has to fit. On a GPU with warpgroup tiles, which have no slices, that
    is a warpgroup tile, so that both forms of scales always use the same kind of tile."""
    narrow = Config(64, 128, 64, 4, 4, 1, warpgroup=True)
    if not has_warpgroups:
        narrow = Config(32, 128 if depth % 256 else 256, 32, 2, 3, 1)  # longer steps allow longer slices
    return depth % 128 == 0 and strip_bytes(narrow, depth) <= MAX_STRIP_BYTES


@functools.lru_cache(maxsize=4096)
def with_strip(config: Config, depth: int, result_bytes: int = 4) -> Config:
    """`config` changed so that a tile's scales fit, with narrower tiles if necessary. The steps through K stay.

    Triton requests more than 48 KB for a program only if its own shared memory is larger than that, so where the total
    is, the ring is made deeper. Triton's own memory is the ring and, while results are rearranged, up to `result_bytes`
    for every weight row and routed row of a tile. A ring that leaves no room for strips and results is shortened.
    Raises ValueError if no tile is narrow enough (`reads_compressed` is False): Triton would end the process.
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
    """Whether a tile's dense scales are copied into a strip all at once. A chunk's share is so small that, copied chunk
    by chunk, every sector of memory is read several times. By measurement, short rows are copied at once; in warpgroup
    tiles, rows that are long enough to hide the copy behind products or another tile, if registers and shared memory
    hold them."""
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
