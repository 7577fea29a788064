"""Tile choice: a pure function of shapes and device, from shipped tables (tables/*.json) and one default rule."""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from ..device import num_sms

MAX_STRIP_BYTES = 48 << 10
"""Shared memory that a kernel may declare by itself, on every GPU."""


@dataclass(frozen=True)
class Config:
    """Tile of one program: `block_n` weight rows by `block_t` routed rows, `block_k` deep a step.

    `warpgroup`: Hopper's warpgroup products (sm90_wgmma.py), for many rows an expert; else mma.py.
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


@functools.lru_cache(maxsize=None)
def load_table(device_name: str) -> dict[tuple[int, int, bool], list[tuple[float, Config]]]:
    """(N weight rows, K, whether scales are compressed) -> [(rows an expert, config)], ascending; empty for devices
    without a shipped table."""
    path = Path(__file__).parent / "tables" / f"{device_name.lower().replace(' ', '_')}.json"
    if not path.exists():
        return {}
    table: dict[tuple[int, int, bool], list[tuple[float, Config]]] = {}
    for entry in json.loads(path.read_text())["entries"]:
        config = Config(**entry["config"])
        key = (entry["n"], entry["k"], entry.get("compressed", False))
        table.setdefault(key, []).append((entry["rows_per_expert"], config))
    return {shape: sorted(configs, key=lambda pair: pair[0]) for shape, configs in table.items()}


def strip_cols(config: Config, depth: int) -> int:
    """Columns of scales decoded at a time: a row's, or equal parts of whole chunks where rows are long."""
    cols, groups = depth // 16, config.block_k // 16
    while cols > config.max_cols and cols % (2 * groups) == 0 and not config.warpgroup:
        cols //= 2
    return cols


def strip_stride(cols: int, groups: int) -> int:
    """Bytes from row to row of decoded scales: an odd number of chunks, so that 8 rows meet different banks."""
    return groups * (-(-cols // groups) | 1)


def strip_bytes(config: Config, depth: int) -> int:
    """Shared memory of a tile's decoded scales (scale_strip.py)."""
    return whole(config.block_n * strip_stride(strip_cols(config, depth), config.block_k // 16), config.warpgroup)


def whole(num_bytes: int, warpgroup: bool) -> int:
    """What a strip declares: Triton's shared memory follows it, and warpgroup operands there are aligned to 1 KB."""
    unit = 1024 if warpgroup else 256
    return -(-num_bytes // unit) * unit


def reads_compressed(depth: int) -> bool:
    """Whether the kernels read compressed scales of rows of `depth` weights: whole words of codes, and the strip of a
    narrow warpgroup tile fits, so that both forms always have tiles of one kind."""
    return depth % 128 == 0 and strip_bytes(Config(64, 128, 64, 4, 4, 1, warpgroup=True), depth) <= MAX_STRIP_BYTES


def reads_compressed_on(device: torch.device, depth: int) -> bool:
    """Whether every GEMM on `device` reads compressed scales of rows of `depth` weights as they are. The others decode
    them first: into new memory, unless the caller has."""
    if device.type != "cuda" or torch.version.hip:
        return device.type == "cpu"
    return (8, 9) <= torch.cuda.get_device_capability(device) < (10, 0) and reads_compressed(depth)


LEAST_BYTES = 99 << 10
"""Shared memory that a program may have on every GPU that mma.py runs on."""


def with_strip(config: Config, depth: int, result_bytes: int = 4) -> Config:
    """`config` with room for a tile's decoded scales: narrower tiles if need be. It steps through K as `config` does.

    Triton asks for more than 48 KB a program only if its own shared memory is more, so a deeper ring makes it so. Its
    own is the ring and, as results are rearranged, up to `result_bytes` for every weight row and routed row of a tile.
    Raises ValueError where no tile is narrow enough (`reads_compressed` is False): Triton would end the process.
    A ring that leaves no room for strips and results is shortened.
    """
    while True:
        strip, num_stages = strip_bytes(config, depth), config.num_stages
        stage = config.block_n * config.block_k // 2 + config.block_t * config.block_k * 2
        rest = config.block_n * config.block_t * result_bytes + strip
        while num_stages * stage <= MAX_STRIP_BYTES < num_stages * stage + rest:
            num_stages += config.chunks_at_once
        if strip <= MAX_STRIP_BYTES and (config.warpgroup or num_stages * stage + rest <= LEAST_BYTES):
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


HOPPER_BYTES = 228 << 10
"""Shared memory of a multiprocessor that has warpgroup products, of which every program takes 1 KB for itself."""


def shared_bytes(config: Config, depth: int, result_bytes: int) -> int:
    """Shared memory of one program of a warpgroup tile with strips: they, the ring, and results on their way out, as
    much of them as `epilogue.py` takes at once (float32 that is requantized: half of a tile)."""
    strip = strip_bytes(config, depth)
    strips = 2 * strip if config.num_warps > 4 and 2 * strip <= MAX_STRIP_BYTES else strip
    parts = config.block_n // (16 * config.num_warps) if config.block_t > 64 else 1
    at_once = 16 << 10 if result_bytes < 4 else 32 << 10
    results = min(at_once, config.block_n * config.block_t * result_bytes // parts)
    ring = config.num_stages * (config.block_n * config.block_k // 2 + config.block_t * config.block_k * 2)
    return ring + strips + results + 1024


@functools.lru_cache(maxsize=4096)
def comes_whole(config: Config, depth: int, result_bytes: int) -> bool:
    """Whether a tile's dense scales are copied into a strip, all at once, and not a chunk's share at a time, which is
    so little that every sector of memory is read several times. Measured: those of short rows; of warpgroup tiles
    those of rows long enough to hide it, behind products or another tile, if registers and shared memory hold them."""
    if config.warpgroup:
        words_a_lane = config.block_n * depth // (16 * 8 * 32 * config.num_warps)
        hidden = config.num_warps > 4 or config.programs_per_sm > 1
        if depth <= 1024 or not hidden or words_a_lane * config.num_warps > 80:
            return False
        if config.programs_per_sm * shared_bytes(config, depth, result_bytes) > HOPPER_BYTES:
            return False
    elif depth > 1024:
        return False
    return depth % 128 == 0 and with_strip(config, depth, result_bytes) == config


@functools.lru_cache(maxsize=4096)
def choose_config(
    device: torch.device,
    weight_rows: int,
    depth: int,
    num_rows: int,
    num_experts: int,
    result_bytes: int,
    compressed: bool,
) -> Config:
    """Tiles for `num_rows` routed rows over `num_experts` weights [weight_rows, depth]; `result_bytes`: `with_strip`.

    The table's entry of the largest rows an expert not above the call's (or its smallest); the default where there is
    none, or where that entry's tiles are too few to occupy the device.
    """
    sms = num_sms(device)
    is_hopper = torch.cuda.get_device_capability(device)[0] == 9
    entries = load_table(torch.cuda.get_device_name(device)).get((weight_rows, depth, compressed))
    if compressed and not entries:
        dense = choose_config(device, weight_rows, depth, num_rows, num_experts, result_bytes, False)
        return with_strip(dense, depth, result_bytes)
    config: Config | None = None
    if entries:
        fitting = [config for rows, config in entries if rows <= num_rows / num_experts]
        config = fitting[-1] if fitting else entries[0][1]
    if config is None or num_tiles(config, weight_rows, num_rows, num_experts) < sms:
        config = default_config(weight_rows, depth, num_rows, num_experts, sms, is_hopper)
    return with_strip(config, depth, result_bytes) if compressed else config


def num_tiles(config: Config, weight_rows: int, num_rows: int, num_experts: int) -> int:
    """Tiles when the rows are spread evenly."""
    groups = min(num_rows, num_experts)
    return groups * -(-num_rows // (groups * config.block_t)) * -(-weight_rows // config.block_n)


WARPGROUP_TILES = ((128, 128, 8), (128, 64, 8), (64, 64, 4))
"""block_n, block_t, num_warps, the best first where there is work enough."""


def default_config(weight_rows: int, depth: int, num_rows: int, num_experts: int, sms: int, is_hopper: bool) -> Config:
    """The largest warpgroup tile that still gives every multiprocessor one, for many rows an expert on Hopper; else
    token tiles that cover the mean group of routed rows, with chunks of 256 k where K has whole ones."""
    rows_per_expert = num_rows / num_experts
    if is_hopper and rows_per_expert >= 32:
        for block_n, block_t, num_warps in WARPGROUP_TILES:
            config = Config(block_n, 128, block_t, num_warps, num_stages=4, programs_per_sm=1, warpgroup=True)
            if block_t < 2 * rows_per_expert and num_tiles(config, weight_rows, num_rows, num_experts) >= sms:
                break
        return config
    block_t = 8
    while block_t < min(rows_per_expert, 32):
        block_t *= 2
    block_k = 256 if depth % 256 == 0 and block_t <= 8 else 128
    return Config(64, block_k, block_t, num_warps=4, num_stages=3, programs_per_sm=3)


def scaled_tile(rows_per_expert: float) -> dict[str, int]:
    """Tile and launch options of the block-scaled kernel; not tuned, as it never ran on a GPU that has such products.

    128 weight rows and 16 routed rows or more: fewer, and Triton makes bf16 products of sm_100's.
    """
    block_t = 16
    while block_t < min(rows_per_expert, 64):
        block_t *= 2
    return {"BLOCK_N": 128, "BLOCK_K": 128, "BLOCK_T": block_t, "num_warps": 4}
