"""Checkpoints to attack, and a check of what a refusal looks like."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

import checkpoints
from finegrained_kernels.checkpoint import CheckpointError, compress

LAYOUTS = ("hf", "container")


def one_line(call, *arguments, **options) -> str:
    with pytest.raises((CheckpointError, ValueError)) as caught:
        call(*arguments, **options)
    text = str(caught.value)
    assert text and text.isprintable(), text
    return text


def in_both_layouts(root: Path) -> Path:
    """Make a checkpoint in ``root / "source"``, and its compressed forms beside it, named after their layouts."""
    source = another(root / "source", seed=0)
    for layout in LAYOUTS:
        compress(source, root / layout, layout=layout)
    return root


def another(root: Path, seed: int = 1, write=checkpoints.random_moe, config=checkpoints.MODELOPT_CONFIG) -> Path:
    """A model with the same names, shapes, sizes and other files, but other weights."""
    return checkpoints.write_checkpoint(root, write(seed=seed), config, shard_of=checkpoints.by_layer)


def plain(*, seed: int = 0) -> checkpoints.Tensors:
    """An unquantized model."""
    generator = torch.Generator().manual_seed(seed)
    names = [f"model.layers.{i}.mlp.experts.{e}.{p}.weight" for i in (0, 1) for e in (0, 1) for p in ("up_proj",)]
    return {"model.norm.weight": torch.ones(8)} | {name: torch.randn(64, 64, generator=generator) for name in names}


def sparse(path: Path, tensors: dict) -> None:
    """A safetensors file with these entries (dtype, shape, bytes) whose data takes no space on disk."""
    header, end = {}, 0
    for name, (dtype, shape, size) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text)
    os.truncate(path, 8 + len(text) + end)


def module(name: str, rows: int, cols: int, words: int | None = None) -> dict:
    scale = f"{name}.weight_scale"
    if words is None:
        parts = {scale: ("F8_E4M3", [rows, cols], rows * cols)}
    else:
        size = rows // 16 * (16 + 8 * cols)
        parts = {
            f"{scale}.nvfp4_csf_fixed": ("U8", [size], size),
            f"{scale}.nvfp4_csf_exceptions": ("U32", [words], 4 * words),
        }
    weight = {f"{name}.weight": ("U8", [rows, 8 * cols], rows * 8 * cols)}
    return {**weight, **parts, f"{name}.weight_scale_2": ("F32", [], 4)}
