"""Ways to damage small checkpoints; each is a function of a checkpoint's directory."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

import checkpoints
from finegrained_kernels.checkpoint import compress

SHARD = "model-00002-of-00002.safetensors"
FIRST = "model-00001-of-00002.safetensors"
INDEX = "model.safetensors.index.json"
EXPERTS = "model.layers.0.mlp.experts"
UP = "model.layers.0.mlp.experts.0.up_proj"
SCALE = f"{UP}.weight_scale"
BEFORE = "finegrained-kernels-csf-digests/2"
FIXED, WORDS = f"{SCALE}.nvfp4_csf_fixed", f"{SCALE}.nvfp4_csf_exceptions"

Change = Callable[[Path], object]


def shard_of(name: str) -> str:
    return SHARD if ".experts." in name else FIRST


def small_checkpoint(root: Path) -> Path:
    """Make a checkpoint in ``root / "source"``, and its compressed forms beside it, named after their layouts."""
    tensors = checkpoints.random_moe(layers=1, experts=2)
    checkpoints.write_checkpoint(root / "source", tensors, checkpoints.MODELOPT_CONFIG, shard_of=shard_of)
    for layout in ("hf", "container"):
        compress(root / "source", root / layout, layout=layout)
    return root


def text(name: str, content: str) -> Change:
    return lambda root: (root / name).write_text(content)


def edit(name: str, change: Callable[[dict], object]) -> Change:
    """Change a JSON file."""
    return lambda root: checkpoints.edit_json(root / name, change)


def tensor(name: str, value: torch.Tensor | None, shard: str = SHARD) -> Change:
    """Replace the tensor of this name; None removes it."""

    def change(root: Path) -> None:
        path = next(root.rglob(shard))
        tensors = load_file(path) | ({} if value is None else {name: value})
        if value is None:
            del tensors[name]
        save_file(tensors, path, {"format": "pt"})
        if (root / INDEX).exists():
            listed = {name: shard} if value is not None else {}
            checkpoints.edit_json(
                root / INDEX, lambda index: (index["weight_map"].pop(name, 0), index["weight_map"].update(listed))
            )

    return change


def header(change: Callable[[dict], object], shard: str = SHARD) -> Change:
    """Change a shard's header, but none of its data."""

    def changed(root: Path) -> None:
        path = next(root.rglob(shard))
        data = path.read_bytes()
        size = 8 + int.from_bytes(data[:8], "little")
        entries = json.loads(data[8:size])
        change(entries)
        words = json.dumps(entries).encode()
        path.write_bytes(len(words).to_bytes(8, "little") + words + data[size:])

    return changed


def of_index(change: Callable[[dict], object]) -> Change:
    return edit(INDEX, change)


def listed(**places: str) -> Change:
    """Add entries to the index."""
    return of_index(lambda index: index["weight_map"].update(places))


def layers(change: Callable[[dict], object]) -> Change:
    """Change what config.json says about compressed layers."""
    return edit("config.json", lambda config: change(config["quantization_config"]["quantized_layers"]))


def manifest(change: Callable[[dict], object]) -> Change:
    return edit("manifest.json", change)


def contract(change: Callable[[dict], object]) -> Change:
    return edit("build-contract.json", change)


def sums(change: Callable[[str], str]) -> Change:
    return lambda root: (root / "SHA256SUMS").write_text(change((root / "SHA256SUMS").read_text()))


def gone(name: str) -> Change:
    return lambda root: next(root.rglob(name)).unlink()


def all_of(*changes: Change) -> Change:
    return lambda root: [change(root) for change in changes]


def entry(**values: object) -> Change:
    return header(lambda entries: entries[SCALE].update(values))


def cut(count: int) -> Change:
    return lambda root: os.truncate(root / SHARD, (root / SHARD).stat().st_size + count)


def without_digest(**values: object) -> Callable[[dict], object]:
    """A job of the schema whose records have no digest, with other values."""

    def change(job: dict) -> None:
        del job["digest"], job["source_headers"]
        job.update(values, schema=BEFORE)

    return change


def as_before(job: dict) -> None:
    """A job of the schema without digests, with a file named twice."""
    del job["digest"], job["source_headers"]
    job["copied"][SHARD] = "0" * 64
    job["schema"] = BEFORE


def twice(root: Path) -> None:
    """Put the second shard's tensors into the first, too."""
    save_file(load_file(root / FIRST) | load_file(root / SHARD), root / FIRST, {"format": "pt"})


def pipe(root: Path) -> None:
    os.mkfifo(root / "pipe")


def of_one_name(root: Path) -> None:
    """Shards in different folders, with the same name."""
    for i, shard in enumerate((FIRST, SHARD)):
        (root / str(i)).mkdir()
        (root / shard).rename(root / str(i) / "model.safetensors")
    places = {FIRST: "0/model.safetensors", SHARD: "1/model.safetensors"}
    checkpoints.edit_json(
        root / INDEX, lambda index: index.update(weight_map={n: places[s] for n, s in index["weight_map"].items()})
    )
