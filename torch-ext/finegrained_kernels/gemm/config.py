"""Chooses tiles, as a pure function of shapes and device, from shipped tables (tables/*.json) and one default rule."""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from pathlib import Path

import torch

from ..device import cdiv, num_sms
from .kernels.operands import BlockTile
from .smem_plan import Config, with_strip

DECODED_COLS = 32
"""Compressed scales are decoded in whole blocks of this many columns (kernels/tile_scales.py)."""


@functools.lru_cache(maxsize=None)
def load_table(device_name: str) -> dict[tuple[int, int, bool], list[tuple[float, Config]]]:
    """(N weight rows, K, whether scales are compressed) -> [(rows per expert, config)], ascending; empty for devices
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
    """The tile for `num_rows` routed rows over `num_experts` weights [weight_rows, depth]; `result_bytes` as in
    `with_strip`.

    Takes the table's last entry with at most the call's rows per expert, or else its first. Takes the default if the
    table has no entry, or if that entry's tiles are too few to occupy the device.
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
    """The number of tiles if rows are spread evenly over experts."""
    groups = min(num_rows, num_experts)
    return groups * -(-num_rows // (groups * config.block_t)) * -(-weight_rows // config.block_n)


WARPGROUP_TILES = ((128, 128, 8), (128, 64, 8), (64, 64, 4))
"""(block_n, block_t, num_warps); the first is the best if there is enough work for it."""


def default_config(weight_rows: int, depth: int, num_rows: int, num_experts: int, sms: int, is_hopper: bool) -> Config:
    """For many rows per expert on Hopper, the largest warpgroup tile that still gives every multiprocessor one.
    Otherwise a tile with enough tokens for the mean number of rows per expert, and with chunks of 256 k if they divide
    K."""
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


@dataclass(frozen=True)
class BlockConfig:
    """Tile of a kernel in Triton: `rows` weight rows (with a gate, of each half) by `block_t` routed rows, in steps of
    `block_k`. At most `programs_per_sm` programs are launched for each multiprocessor; each decodes up to `max_cols`
    columns of compressed scales at a time."""

    rows: int
    block_k: int
    block_t: int
    num_warps: int = 4
    programs_per_sm: int = 8
    max_cols: int = 256


PORTABLE = BlockConfig(rows=64, block_k=64, block_t=16)


def scaled_config(rows_per_expert: float, gate: bool) -> BlockConfig:
    """The tile of the block-scaled kernel. It is not tuned, as the kernel has never run on a GPU with such products.

    It has 128 weight rows and at least 16 routed rows: with fewer, Triton uses bf16 products on sm_100.
    """
    block_t = 16
    while block_t < min(rows_per_expert, 64):
        block_t *= 2
    return BlockConfig(rows=64 if gate else 128, block_k=128, block_t=block_t)


def plan_blocks(config: BlockConfig, num_cols: int, depth: int, compressed: bool) -> BlockTile:
    """What kernels are compiled for, given `config`, results of `num_cols` columns, and rows of `depth` weights."""
    blocks = cdiv(depth, 16 * DECODED_COLS)
    parts = cdiv(blocks * DECODED_COLS, config.max_cols) if compressed else 1
    return BlockTile(
        HALF=config.rows,
        BLOCK_K=config.block_k,
        BLOCK_T=config.block_t,
        N_TILES=cdiv(num_cols, config.rows),
        COLS=cdiv(blocks, parts) * DECODED_COLS,
    )
