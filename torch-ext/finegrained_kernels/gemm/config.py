"""Tile choice: a pure function of shapes and device, from shipped tables (tables/*.json) and one default rule."""

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
"""Compressed scales are decoded in whole blocks of so many columns (kernels/tile_scales.py)."""


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


@dataclass(frozen=True)
class BlockConfig:
    """Tile of a kernel in Triton: `rows` of weights, of each half where there is a gate, by `block_t` routed rows,
    `block_k` deep a step. At most `programs_per_sm` are launched; each decodes up to `max_cols` columns of compressed
    scales at a time."""

    rows: int
    block_k: int
    block_t: int
    num_warps: int = 4
    programs_per_sm: int = 8
    max_cols: int = 256


PORTABLE = BlockConfig(rows=64, block_k=64, block_t=16)


def scaled_config(rows_per_expert: float, gate: bool) -> BlockConfig:
    """Of the block-scaled kernel; not tuned, as it never ran on a GPU that has such products.

    128 weight rows and 16 routed rows or more: fewer, and Triton makes bf16 products of sm_100's.
    """
    block_t = 16
    while block_t < min(rows_per_expert, 64):
        block_t *= 2
    return BlockConfig(rows=64 if gate else 128, block_k=128, block_t=block_t)


def plan_blocks(config: BlockConfig, num_cols: int, depth: int, compressed: bool) -> BlockTile:
    """`config` as kernels are compiled for it, for results of `num_cols` columns and rows of `depth` weights."""
    blocks = cdiv(depth, 16 * DECODED_COLS)
    parts = cdiv(blocks * DECODED_COLS, config.max_cols) if compressed else 1
    return BlockTile(
        HALF=config.rows,
        BLOCK_K=config.block_k,
        BLOCK_T=config.block_t,
        N_TILES=cdiv(num_cols, config.rows),
        COLS=cdiv(blocks, parts) * DECODED_COLS,
    )
