"""Tile choice: a pure function of shapes and device, from shipped tables (configs/*.json) and one default rule."""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from pathlib import Path

import torch


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
def choose_config(device: torch.device, weight_rows: int, depth: int, rows_per_expert: float) -> Config:
    """The table's entry of the largest `rows_per_expert` not above the call's (or its smallest), else the default."""
    entries = load_table(torch.cuda.get_device_name(device)).get((weight_rows, depth))
    if not entries:
        return default_config(depth, rows_per_expert, torch.cuda.get_device_capability(device)[0] == 9)
    fitting = [config for rows, config in entries if rows <= rows_per_expert]
    return fitting[-1] if fitting else entries[0][1]


def default_config(depth: int, rows_per_expert: float, is_hopper: bool) -> Config:
    """Token tiles that cover the mean group of routed rows; chunks of 256 k where K has whole ones."""
    if is_hopper and rows_per_expert >= 32:
        block_t = 64 if rows_per_expert < 96 else 128
        return Config(128, 128, block_t, num_warps=8, num_stages=4, programs_per_sm=1, warpgroup=True)
    block_t = 8
    while block_t < min(rows_per_expert, 32):
        block_t *= 2
    block_k = 256 if depth % 256 == 0 and block_t <= 8 else 128
    return Config(64, block_k, block_t, num_warps=4, num_stages=3, programs_per_sm=3)
