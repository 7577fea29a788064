"""`verify`: checks whether a compressed checkpoint is complete, consistent and exact."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from threading import Event
from typing import Any

from finegrained_kernels.checkpoint.config import MARKED_ONLY, NOTICE, UNMARKED, WEIGHTS, dump_json, marked_layers
from finegrained_kernels.checkpoint.contents import ContentCheck
from finegrained_kernels.checkpoint.errors import CheckpointError, Fault, raise_faults
from finegrained_kernels.checkpoint.layouts import (
    CONFIG,
    CONTAINER_LAYOUT,
    HF_QUANT_CONFIG,
    INDEX_SUFFIX,
    SUMS,
    Checkpoint,
    open_checkpoint,
    read_json,
)
from finegrained_kernels.checkpoint.names import group_by_scale
from finegrained_kernels.checkpoint.output import DEFAULT_JOBS, check_request, one_torch_thread, run_shards
from finegrained_kernels.checkpoint.paths import DIGESTS, check_inside, shown
from finegrained_kernels.checkpoint.publishing import new_index
from finegrained_kernels.checkpoint.quantization_config import find_section
from finegrained_kernels.checkpoint.records import (
    WRITTEN,
    Job,
    Record,
    read_job,
    read_record,
    read_written,
    source_name,
)
from finegrained_kernels.checkpoint.stream import Progress, file_sha256


@dataclass(frozen=True)
class VerifyReport:
    """What was checked, and every fault. If there is none, the checkpoint is good as far as it could be checked.

    Without digests (``has_digests`` is false if another program wrote the checkpoint), structure, pairing, config and
    decoding are checked, but bytes that changed within the rules can only be found by comparing with the source.
    """

    faults: list[Fault]
    shards: int
    tensors: int
    planes: int
    has_digests: bool
    compared: bool


def verify(
    checkpoint: str | Path,
    *,
    against: str | Path | None = None,
    jobs: int = DEFAULT_JOBS,
    device: str = "cpu",
    progress: Progress | None = None,
) -> VerifyReport:
    """Check a compressed checkpoint of either layout: structure, digests, pairing, config, and every plane decoded.

    ``against`` is the uncompressed source to compare with, bit for bit. Faults are collected, not raised; each names
    shard and tensor.

    Raises:
        CheckpointError: ``against`` is not a sound checkpoint, or ``jobs`` or ``device`` cannot be used.
    """
    from finegrained_kernels import load

    check_request(jobs, device)
    root = Path(checkpoint)
    faults: list[Fault] = []
    source = None
    if against is not None:
        source = open_checkpoint(against)
        raise_faults(source.faults)
    try:
        opened = open_checkpoint(root, faults=faults)
    except CheckpointError as error:
        own = error.faults or [Fault(".", None, str(error))]
        return VerifyReport(faults + own, 0, 0, 0, False, False)
    damaged = {fault.file for fault in faults}
    faults += [fault for fault in opened.faults if not _follows_from(fault, damaged)]
    faults += _config_faults(opened, damaged)
    job, records, more = _read_records(root)
    faults += more
    check = ContentCheck(
        bundle=load(),
        checkpoint=opened,
        expected={name: value for record in records for name, value in record.expected_tensors().items()},
        decoded={name: value for record in records for name, value in record.tensors.items()},
        file_digests={
            path: digest for path, digest in _read_sums(opened, damaged, faults).items() if path in opened.headers
        },
        source=source,
        device=device,
        progress=progress or (lambda _: None),
    )
    if job is not None:
        faults += _file_faults(opened, job)
        faults += _rewritten_faults(opened, job, records, damaged)
        sound = [record for record in records if job.shards[record.file] not in damaged]
        faults += _missing(check, sound, job)
        faults += _header_differences(opened, sound, job)
    if source is not None:
        faults += _structure_differences(opened, source, damaged)
    unproven = []

    def prove(record: Record, stop: Event) -> None:
        if not check.prove(record, stop):
            unproven.append(
                Fault(record.file, None, f"the tensors here do not make up its source, SHA-256 {record.sha256}")
            )

    with one_torch_thread():
        run_shards(records, jobs, prove)
        run_shards(list(opened.headers), jobs, check.check_shard)
    faults += check.faults
    faults += [] if faults else unproven  # other faults say more, if there are any
    compressed = sum(plane.compressed for plane in opened.planes.values())
    return VerifyReport(
        faults, len(opened.headers), len(opened.located), compressed, job is not None, source is not None
    )


def bytes_to_check(checkpoint: str | Path) -> int:
    """How many bytes `verify` processes: all shards and, if there are records, also the source's shards made from
    them."""
    root = Path(checkpoint)
    job = read_job(root)
    return sum(path.stat().st_size for path in root.rglob("*.safetensors")) + (job.source_bytes if job else 0)


def _follows_from(fault: Fault, damaged: set[str]) -> bool:
    """Whether a fault only repeats that tensors of a damaged shard cannot be read."""
    return any(f"said to be in {shard}," in fault.message for shard in damaged)


def _config_faults(checkpoint: Checkpoint, damaged: set[str]) -> Iterator[Fault]:
    if checkpoint.config is None:
        yield Fault(CONFIG, None, "does not exist")
        return
    marked, faults = marked_layers(checkpoint.config)
    yield from faults
    compressed = {plane.layer_module for plane in checkpoint.planes.values() if plane.compressed}
    for module in sorted(compressed - marked):
        yield Fault(CONFIG, module, UNMARKED)
    for module in sorted(marked - compressed) if not damaged else ():  # their scales may be in a damaged one
        yield Fault(CONFIG, module, MARKED_ONLY)


def _read_records(root: Path) -> tuple[Job | None, list[Record], list[Fault]]:
    records, faults = [], []
    try:
        job = read_job(root)
    except CheckpointError as error:
        return None, [], error.faults
    for shard in job.shards if job is not None else ():
        try:
            records.append(read_record(root, shard))
        except CheckpointError as error:
            faults += error.faults
    return job, records, faults


def _read_sums(checkpoint: Checkpoint, damaged: set[str], faults: list[Fault]) -> dict[str, str]:
    """Read the container's SHA256SUMS. Files are checked here, unless they are shards or known to be damaged."""
    if checkpoint.layout.kind != CONTAINER_LAYOUT:
        return {}
    try:
        text = (checkpoint.root / SUMS).read_bytes().decode()
        sums = {name: digest for digest, name in (line.split("  ", 1) for line in text.splitlines())}
        for name in sums:
            check_inside(name, SUMS)
    except CheckpointError as error:
        faults += error.faults
        return {}
    except (OSError, ValueError) as error:
        faults.append(Fault(SUMS, None, f"cannot be read: {error}"))
        return {}
    if text != "".join(f"{digest}  {name}\n" for name, digest in sums.items()):
        faults.append(Fault(SUMS, None, "is not made of lines of a digest and a name"))
    faults += [Fault(SUMS, None, f"does not list {shard}") for shard in checkpoint.headers if shard not in sums]
    for name, digest in sums.items():
        if name not in checkpoint.headers and name not in damaged:
            faults += _digest_fault(checkpoint.root / name, name, digest)
    return sums


def _file_faults(checkpoint: Checkpoint, job: Job) -> Iterator[Fault]:
    for name, digest in job.copied.items():
        yield from _digest_fault(checkpoint.metadata_dir / name, name, digest)
    for name, digest in job.rewritten.items():
        yield from _digest_fault(checkpoint.root / source_name(name), source_name(name), digest)


def _rewritten_faults(checkpoint: Checkpoint, job: Job, records: list[Record], damaged: set[str]) -> Iterator[Fault]:
    """Where a file that compress rewrote is not what it would make from the original, of which it kept a copy."""
    try:
        written = read_written(checkpoint.root)
    except CheckpointError as error:
        yield from error.faults
        written = {}
    for name, digest in (written or {}).items():
        yield from _digest_fault(checkpoint.metadata_dir / name, name, digest)
    if written is None and job.source_headers is not None:
        yield Fault(WRITTEN, None, "does not exist: compress has not finished")
    for name in job.rewritten:
        kept = checkpoint.root / source_name(name)
        if name in damaged or not name.endswith(".json") or not kept.is_file():
            continue
        try:
            original = read_json(kept, source_name(name))
            if name.endswith(INDEX_SUFFIX):
                if _is_sharded_as_written(
                    checkpoint, job, records
                ):  # otherwise, its entries are checked against the shards
                    yield from _index_differences(checkpoint, name, original)
                continue
            here = read_json(checkpoint.metadata_dir / name, name)
            original, here = (_without_quantization(name, document) for document in (original, here))
        except CheckpointError as error:
            yield from error.faults
            continue
        for key in sorted(original.keys() | here.keys()):
            if (key in original, original.get(key)) != (key in here, here.get(key)):
                yield Fault(name, None, f"{shown(key)} is not what it was in the source")


def _without_quantization(name: str, document: Mapping[str, Any]) -> dict[str, Any]:
    """A config without the parts that compress changes, wherever they are."""
    path = ("quantization",) if name == HF_QUANT_CONFIG else find_section(document)[0] or ("quantization_config",)
    *outer, key = path
    copied = inner = dict(document)
    for part in outer:
        inner[part] = inner = dict(inner[part])
    inner.pop(key, None)
    if copied.get(WEIGHTS) == NOTICE:
        del copied[WEIGHTS]
    return copied


def _is_sharded_as_written(checkpoint: Checkpoint, job: Job, records: list[Record]) -> bool:
    """Whether each shard has the tensors that compress wrote to it, so that the index should be the one that it
    wrote."""
    written = {job.shards[record.file]: record.expected_tensors().keys() for record in records}
    here = {shard: header.tensors.keys() for shard, header in checkpoint.headers.items()}
    return checkpoint.layout.kind != CONTAINER_LAYOUT and written == here


def _index_differences(checkpoint: Checkpoint, name: str, original: Mapping[str, Any]) -> Iterator[Fault]:
    try:
        expected = dump_json(new_index(original, checkpoint.headers, group_by_scale(checkpoint.planes.values())))
    except (KeyError, TypeError, AttributeError):  # the source's index, which its digest covers, had another form
        expected = b""
    if (checkpoint.root / name).read_bytes() != expected:
        yield Fault(name, None, "is not what compress makes of the source's index")


def _digest_fault(path: Path, name: str, digest: str) -> list[Fault]:
    if not path.is_file():
        return [Fault(name, None, "does not exist")]
    return [] if file_sha256(path) == digest else [Fault(name, None, f"has changed: SHA-256 is not {digest}")]


def _missing(check: ContentCheck, records: list[Record], job: Job) -> Iterator[Fault]:
    """Tensors that are in the records but in no shard, and the other way round."""
    located = check.checkpoint.located
    for record in records:
        for name in record.expected_tensors().keys() - located.keys():
            yield Fault(job.shards[record.file], name, f"missing: {DIGESTS} records it")
    if len(records) == len(job.shards):
        for name in located.keys() - check.expected.keys():
            yield Fault(located[name][0], name, f"unexpected: {DIGESTS} does not record it")


def _header_differences(checkpoint: Checkpoint, records: list[Record], job: Job) -> Iterator[Fault]:
    """Dtypes, shapes and metadata that differ from those of the source according to the records."""
    for record in records:
        recorded = record.source_header()
        for name in recorded.tensors.keys() & checkpoint.located.keys():
            (shard, here), expected = checkpoint.located[name], recorded.tensors[name]
            if here[:2] != expected[:2]:
                message = f"{here.dtype} {list(here.shape)}, recorded as {expected.dtype} {list(expected.shape)}"
                yield Fault(shard, name, message)
        shard = job.shards[record.file]
        header = checkpoint.headers.get(shard)
        here_as_written = header is not None and header.tensors.keys() == record.expected_tensors().keys()
        if header is not None and here_as_written and header.metadata != recorded.metadata:
            yield Fault(shard, None, "its metadata is not the source's")


def _structure_differences(checkpoint: Checkpoint, source: Checkpoint, damaged: set[str]) -> Iterator[Fault]:
    """Names, dtypes, shapes and metadata that differ from the source's."""
    located = checkpoint.located
    planes = [plane for plane in checkpoint.planes.values() if plane.compressed]
    compressed = {plane.scale for plane in planes}
    components = {tensor for plane in planes for tensor in plane.tensors}
    damaged_names = {PurePosixPath(shard).name for shard in damaged}
    for name, (shard, info) in source.located.items():
        if name in compressed or PurePosixPath(shard).name in damaged_names:
            continue
        if name not in located:
            yield Fault(shard, name, "is in the source, and missing here")
        elif located[name][1][:2] != info[:2]:
            here = located[name][1]
            message = f"{here.dtype} {list(here.shape)}, in the source {info.dtype} {list(info.shape)}"
            yield Fault(located[name][0], name, message)
    for name in located.keys() - source.located.keys() - components:
        yield Fault(located[name][0], name, "is not in the source")
    for shard, header in checkpoint.headers.items():
        if shard in source.headers and header.metadata != source.headers[shard].metadata:
            yield Fault(shard, None, "its metadata differs from the source's")
