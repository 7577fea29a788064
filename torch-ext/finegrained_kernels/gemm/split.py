"""Plans and chooses tiles for one weight, where the programs of a cluster share K (kernels/sm90_split.py).

The choice is a pure function of shapes and device: measured tiles (tables/split/*.json), or a rule. Dense and
compressed scales use the same tiles, so results have the same bits.
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from ..device import cdiv, num_sms
from ..nvfp4.reference import GROUP
from .smem_plan import HOPPER_BYTES, MAX_STRIP_BYTES, RESERVED_BYTES, stage_bytes, strip_stride, whole_units

STRIP_BYTES = 20 << 10
"""The most bytes of decoded scales that a warpgroup tile has in shared memory at a time."""


@dataclass(frozen=True)
class SplitConfig:
    """Tile of a cluster of `programs`: `block_n` weight rows by `block_t` tokens. Each program goes through its part of
    K in steps of `block_k`."""

    block_n: int
    block_k: int
    block_t: int
    num_warps: int
    num_stages: int
    programs: int
    warpgroup: bool


@dataclass(frozen=True)
class SplitPlan:
    """What the kernel is compiled for, given a `SplitConfig`: the fields of a `TilePlan` (smem_plan.py), and the
    cluster."""

    BLOCK_N: int
    BLOCK_T: int
    GROUPS: int
    STAGES: int
    HALVES: int
    HALF: int
    N_TILES: int
    COLS: int
    STRIPS: int
    STRIDE: int
    STRIP_BYTES: int
    PROGRAMS: int
    WARPGROUP: bool


@functools.lru_cache(maxsize=4096)
def plan_split(config: SplitConfig, num_cols: int, depth: int, gate: bool, compressed: bool) -> SplitPlan | None:
    """The plan for `config`, or None if it does not fit the shape or shared memory."""
    groups, halves = config.block_k // GROUP, 2 if gate else 1
    if depth % (config.block_k * config.programs):
        return None
    chunks = depth // config.block_k // config.programs
    slices = 1
    if config.warpgroup:
        limit = STRIP_BYTES if config.block_t < 256 else STRIP_BYTES // 2
        fitting = [n for n in range(1, chunks) if chunks % n == 0 and config.block_n * groups * chunks // n <= limit]
        slices = fitting[0] if fitting else chunks
    cols = chunks // slices * groups
    strip = whole_units(config.block_n * strip_stride(cols, groups), config.warpgroup) if compressed else 0
    dense = 0 if compressed else config.block_n * groups  # scales in the ring, beside their weights
    ring = config.num_stages * (stage_bytes(config) + dense)
    if strip > MAX_STRIP_BYTES or ring + strip + RESERVED_BYTES > HOPPER_BYTES:
        return None
    return SplitPlan(
        BLOCK_N=config.block_n,
        BLOCK_T=config.block_t,
        GROUPS=groups,
        STAGES=config.num_stages,
        HALVES=halves,
        HALF=config.block_n // halves,
        N_TILES=cdiv(num_cols, config.block_n // halves),
        COLS=cols,
        STRIPS=1 if compressed else 0,
        STRIDE=strip_stride(cols, groups),
        STRIP_BYTES=strip,
        PROGRAMS=config.programs,
        WARPGROUP=config.warpgroup,
    )


def reads_whole(config: SplitConfig, depth: int) -> bool:
    """Whether the kernel runs on rows of `depth` weights with this tile, for both forms of scales."""
    return all(plan_split(config, config.block_n, depth, False, compressed) for compressed in (False, True))


@functools.lru_cache(maxsize=None)
def load_split_table(device_name: str) -> dict[tuple[int, int], list[tuple[int, SplitConfig]]]:
    """(weight rows, K) -> [(fewest tokens, config)], ascending; empty for devices without a shipped table."""
    path = Path(__file__).parent / "tables/split" / f"{device_name.lower().replace(' ', '_')}.json"
    if not path.exists():
        return {}
    table: dict[tuple[int, int], list[tuple[int, SplitConfig]]] = {}
    for entry in json.loads(path.read_text())["entries"]:
        table.setdefault((entry["n"], entry["k"]), []).append((entry["tokens"], SplitConfig(**entry["config"])))
    return {shape: sorted(configs, key=lambda pair: pair[0]) for shape, configs in table.items()}


@functools.lru_cache(maxsize=4096)
def choose_split(device: torch.device, weight_rows: int, depth: int, num_tokens: int) -> SplitConfig | None:
    """The tile for one weight [weight_rows, depth], or None if another kernel has to multiply it."""
    if not has_clusters(device):
        return None
    entries = load_split_table(torch.cuda.get_device_name(device)).get((weight_rows, depth), [])
    fitting = [config for tokens, config in entries if tokens <= num_tokens]
    config = fitting[-1] if fitting else default_split(weight_rows, depth, num_tokens, num_sms(device))
    return config if config is not None and reads_whole(config, depth) else None


def has_clusters(device: torch.device) -> bool:
    """Whether the device is a Hopper GPU, whose warpgroup products the kernel needs too."""
    return device.type == "cuda" and not torch.version.hip and torch.cuda.get_device_capability(device)[0] == 9


def default_split(weight_rows: int, depth: int, num_tokens: int, sms: int) -> SplitConfig | None:
    """The tile for shapes without measured ones. It has the fewest tokens that cover the call's, up to 64, or up to 256
    if the weight is large enough to occupy the GPU that way; then the fewest programs per tile that occupy the GPU.
    None if K is not a whole number of chunks."""
    if depth % 128:
        return None
    rows_128 = cdiv(weight_rows, 128)
    if num_tokens <= 16:
        block_k = 256 if depth % 256 == 0 else 128
        config = SplitConfig(64, block_k, 8 if num_tokens <= 8 else 16, 4, 4 if num_tokens <= 8 else 3, 1, False)
    elif num_tokens <= 64:
        config = SplitConfig(64, 128, 32 if num_tokens <= 32 else 64, 4, 4, 1, True)
    elif num_tokens > 256 and rows_128 * cdiv(num_tokens, 256) >= sms // 2:
        config = SplitConfig(128, 128, 256, 8, 3, 1, True)
    elif rows_128 * cdiv(num_tokens, 128) >= sms // 2:
        config = SplitConfig(128, 128, 128, 8, 4, 1, True)
    else:
        config = SplitConfig(64, 128, 64, 4, 4, 1, True)
    tiles = cdiv(weight_rows, config.block_n) * cdiv(num_tokens, config.block_t)
    chunks = depth // config.block_k
    options = [replace(config, programs=n) for n in (1, 2, 4, 8) if chunks % n == 0]
    options = [option for option in options if reads_whole(option, depth)]
    wanted = 1.5 if config.num_warps == 4 else 0.9  # programs per multiprocessor
    for least in (wanted, 0.9):
        for option in options:
            load = tiles * option.programs / sms
            if load >= least and load / cdiv(tiles * option.programs, sms) >= 0.85:
                return option
    return options[-1] if options and tiles < sms else options[0] if options else None
