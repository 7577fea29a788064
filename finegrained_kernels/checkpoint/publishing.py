"""The last step of `compress`: copies the files other than shards, or rewrites them to match the new shards."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from finegrained_kernels.checkpoint.config import dump_json, layer_entries, mark_config, mark_hf_quant_config
from finegrained_kernels.checkpoint.errors import CheckpointError, Fault
from finegrained_kernels.checkpoint.headers import Header, read_header
from finegrained_kernels.checkpoint.layouts import (
    CONFIG,
    CONTAINER_LAYOUT,
    CONTAINER_SCHEMA,
    CONTRACT,
    HF_QUANT_CONFIG,
    MANIFEST,
    SUMS,
    Checkpoint,
    read_json,
)
from finegrained_kernels.checkpoint.model_card import CARD, with_section
from finegrained_kernels.checkpoint.names import FIXED, Plane, group_by_scale
from finegrained_kernels.checkpoint.paths import DIGESTS, check_link, own_files
from finegrained_kernels.checkpoint.records import Job, read_records, source_name, write_written
from finegrained_kernels.checkpoint.stream import copy_file, file_sha256, write_file
from finegrained_kernels.checkpoint.wire import CODEC


def other_files(checkpoint: Checkpoint) -> Iterator[str]:
    """Paths of a source's files that are neither shards nor hidden, in a fixed order. The names of shards are checked
    too.

    Raises:
        CheckpointError: a copy of the checkpoint may not have such a name or link (paths.py).
    """
    for shard in checkpoint.headers:
        check_link(checkpoint.root, shard)
    for name in own_files(checkpoint.root):
        if name.split("/")[0] == DIGESTS:
            message = "lies where compress keeps its records, and the checkpoint is not compressed: remove it"
            raise CheckpointError([Fault(name, None, message)])
        if name not in checkpoint.headers:
            yield name


def rewritten_files(checkpoint: Checkpoint) -> list[str]:
    """Those of `other_files` that say something about the shards, and so are kept twice: as they were, and rewritten.

    The model card is one of them: it gains a section, and whoever publishes the result may change it further.
    """
    names = [CONFIG, HF_QUANT_CONFIG, checkpoint.layout.index, CARD]
    return [name for name in names if name is not None and (checkpoint.root / name).exists()]


def marked_files(source: Checkpoint, planes: Mapping[str, Plane], compressed: set[str]) -> dict[str, bytes]:
    """config.json, and hf_quant_config.json if there is one, in which the modules ``compressed`` are marked."""
    entries = layer_entries(source.quantization, planes.values(), source.located)
    divide = any(plane.global_scale_divides for plane in planes.values())
    config = mark_config(source.config or {}, source.quantization, entries, compressed, globals_divide=divide)
    files = {CONFIG: dump_json(config)}
    if source.layout.hf_quant_config is not None:
        quant = mark_hf_quant_config(source.layout.hf_quant_config, entries, compressed)
        files[HF_QUANT_CONFIG] = dump_json(quant)
    return files


def publish(source: Checkpoint, planes: Mapping[str, Plane], job: Job, destination: Path, work: Path) -> None:
    """Write every file except the shards; the index, or the container's description, comes last."""
    headers = {shard: read_header(destination / path, path) for shard, path in job.shards.items()}
    metadata = destination / "metadata" if job.layout == CONTAINER_LAYOUT else destination
    for name, digest in job.rewritten.items():
        if copy_file(source.root / name, destination / source_name(name), work, source_name(name)) != digest:
            raise CheckpointError([Fault(name, None, "changed while the checkpoint was compressed")])
    for name, digest in job.copied.items():
        if copy_file(source.root / name, metadata / name, work, name) != digest:
            raise CheckpointError([Fault(name, None, "changed while the checkpoint was compressed")])
    tensors = {name: info for header in headers.values() for name, info in header.tensors.items()}
    compressed = [planes[name.removesuffix(FIXED)].as_compressed() for name in tensors if name.endswith(FIXED)]
    card = source.root / CARD
    text = card.read_bytes() if card.exists() else b""
    text = with_section(text, compressed, tensors) if compressed else text
    if text:
        write_file(metadata / CARD, text, work, CARD, like=card if card.exists() else None)
    marked = marked_files(source, planes, {plane.layer_module for plane in compressed})
    for name, content in marked.items():
        write_file(metadata / name, content, work, name, like=source.root / name)
    write_written({name: hashlib.sha256(content).hexdigest() for name, content in marked.items()}, destination, work)
    if job.layout == CONTAINER_LAYOUT:
        _write_container(headers, job, destination, work)
    elif source.layout.index is not None:
        index = read_json(source.root / source.layout.index, source.layout.index)
        name = source.layout.index
        content = dump_json(new_index(index, headers, group_by_scale(planes.values())))
        write_file(destination / name, content, work, name, like=source.root / name)


def new_index(index: Mapping, headers: Mapping[str, Header], planes: Mapping[str, Sequence[Plane]]) -> dict:
    """The source's index, with each compressed scale replaced by its tensors, and with the new total size."""
    weight_map = {}
    for name, shard in index["weight_map"].items():
        tensors = headers[shard].tensors
        names = [name] if name in tensors else [n for plane in planes[name] for n in plane.as_compressed().tensors]
        weight_map.update(dict.fromkeys(names, shard))
    document = {**index, "weight_map": weight_map}
    if "total_size" in (index.get("metadata") or {}):
        total = sum(header.data_bytes for header in headers.values())
        document["metadata"] = {**index["metadata"], "total_size": total}
    return document


def _write_container(headers: Mapping[str, Header], job: Job, destination: Path, work: Path) -> None:
    common = {"schema": CONTAINER_SCHEMA, "codec": CODEC, "family": job.family}
    digests = {record.file: record.file_sha256 for record in read_records(destination, job)}
    shards, names = [], {}
    for shard, path in job.shards.items():
        file = path.removeprefix("tensors/")
        size = headers[shard].data_start + headers[shard].data_bytes
        shards.append({"file": file, "bytes": size, "sha256": digests[shard]})
        names.update(dict.fromkeys(headers[shard].tensors, file))
    write_file(destination / MANIFEST, dump_json({**common, "shards": shards}), work, MANIFEST)
    write_file(destination / CONTRACT, dump_json({**common, "source_names": names}), work, CONTRACT)

    sums = {job.shards[shard]: digest for shard, digest in digests.items()}
    files = [destination / MANIFEST, destination / CONTRACT]
    files += [path for folder in ("metadata", DIGESTS) for path in (destination / folder).rglob("*") if path.is_file()]
    sums |= {path.relative_to(destination).as_posix(): file_sha256(path) for path in files}
    text = "".join(f"{sums[name]}  {name}\n" for name in sorted(sums))
    write_file(destination / SUMS, text.encode(), work, SUMS)
