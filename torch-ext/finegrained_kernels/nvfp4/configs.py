"""Tile choice: a pure function of shapes and device, from shipped tables (configs/*.json) and one default rule."""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from pathlib import Path

import torch

from ..device import num_sms


@dataclass(frozen=True)
class Config:
    """Tile of one program: `block_n` weight rows by `block_t` routed rows, `block_k` deep a step.

    `warpgroup`: Hopper's warpgroup products (wgmma_gemm.py), for many rows an expert; else mma_gemm.py.
    """

    block_n: int
    block_k: int
    block_t: int
    num_warps: int
    num_stages: int
    programs_per_sm: int
    warpgroup: bool = False


@functools.lru_cache(maxsize=None)
def load_table(device_name: str) -> dict[tuple[int, int], list[tuple[float, Config]]]:
    """(N weight rows, K) -> [(rows an expert, config)], ascending; empty for devices without a shipped table."""
    path = Path(__file__).parent / "configs" / f"{device_name.lower().replace(' ', '_')}.json"
    if not path.exists():
        return {}
    table: dict[tuple[int, int], list[tuple[float, Config]]] = {}
    for entry in json.loads(path.read_text())["entries"]:
        config = Config(**entry["config"])
        table.setdefault((entry["n"], entry["k"]), []).append((entry["rows_per_expert"], config))
    return {shape: sorted(configs, key=lambda pair: pair[0]) for shape, configs in table.items()}


@functools.lru_cache(maxsize=4096)
def choose_config(device: torch.device, weight_rows: int, depth: int, num_rows: int, num_experts: int) -> Config:
    """Tiles for `num_rows` routed rows over `num_experts` weights [weight_rows, depth].

    The table's entry of the largest rows an expert not above the call's (or its smallest); the default where there is
    none, or where that entry's tiles are too few to occupy the device.
    """
    sms = num_sms(device)
    is_hopper = torch.cuda.get_device_capability(device)[0] == 9
    entries = load_table(torch.cuda.get_device_name(device)).get((weight_rows, depth))
    if entries:
        fitting = [config for rows, config in entries if rows <= num_rows / num_experts]
        config = fitting[-1] if fitting else entries[0][1]
        if not config.warpgroup or num_tiles(config, weight_rows, num_rows, num_experts) >= sms:
            return config
    return default_config(weight_rows, depth, num_rows, num_experts, sms, is_hopper)


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
