"""`restore`: writes the original checkpoint, byte for byte, from a compressed one and its digest records."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from types import ModuleType

from finegrained_kernels.checkpoint.claims import Claim, claimed, finishing, unfinished
from finegrained_kernels.checkpoint.contents import TensorReader, send_source
from finegrained_kernels.checkpoint.errors import CheckpointError, Fault, raise_faults
from finegrained_kernels.checkpoint.headers import Header, read_header
from finegrained_kernels.checkpoint.layouts import Checkpoint, open_checkpoint
from finegrained_kernels.checkpoint.output import (
    DEFAULT_JOBS,
    check_request,
    check_space,
    for_each_shard,
    one_torch_thread,
)
from finegrained_kernels.checkpoint.paths import DIGESTS, WORK, check_link
from finegrained_kernels.checkpoint.records import Job, Record, read_job, read_records, source_name
from finegrained_kernels.checkpoint.stream import (
    AtomicFile,
    Fanout,
    Progress,
    TensorChecksums,
    copy_file,
    file_sha256,
    opened,
)


@dataclass(frozen=True)
class RestoreReport:
    """What `restore` did: the number of shards, how many of them an earlier run had restored, and the bytes of all."""

    shards: int
    resumed: int
    nbytes: int


def restore(
    checkpoint: str | Path,
    destination: str | Path,
    *,
    jobs: int = DEFAULT_JOBS,
    device: str = "cpu",
    progress: Progress | None = None,
) -> RestoreReport:
    """Write the checkpoint from which ``checkpoint`` was compressed, every file byte for byte as it was.

    Tensors are found by name, so a compressed checkpoint may have been resharded. No file gets its name before its
    SHA-256 is that of the original. Run it again after an interruption to resume.

    Raises:
        CheckpointError: there are no digest records, a tensor is missing or malformed, or a file's SHA-256 is not that
            of the original; the message then names the tensors that differ. Such a file is not kept.
    """
    from finegrained_kernels import load

    root, destination = Path(checkpoint), Path(destination)
    check_request(jobs, device)
    job = _read_job(root)
    opened_checkpoint = open_checkpoint(root)
    raise_faults(opened_checkpoint.faults)
    records = {record.file: record for record in read_records(root, job)}
    _check_complete(records.values(), opened_checkpoint)
    for name in (*opened_checkpoint.headers, *_sources(opened_checkpoint, job).values()):
        check_link(root, name)
    digests = {record.file: record.sha256 for record in records.values()} | job.rewritten | job.copied

    def is_ours() -> bool:
        """Whether everything in the destination is what would be restored, so that an earlier run has restored it."""
        files = {path.relative_to(destination).as_posix(): path for path in destination.rglob("*") if not path.is_dir()}
        return all(
            name in digests and path.is_file() and file_sha256(path) == digests[name]
            for name, path in files.items()
            if not name.startswith(f"{WORK}/")
        )

    claim = Claim.of("restore", root, opened_checkpoint.headers, [job.to_json(), digests])
    with claimed(destination, root, claim, is_ours) as work:
        if not any((destination / shard).exists() for shard in job.shards):
            check_space(destination, job.source_bytes)
        restoring = _Restoring(load(), opened_checkpoint, job, destination, work, device, progress or (lambda _: None))
        resumed = []

        def handle(shard: str, stop: Event) -> None:
            record = records[shard]
            if (destination / shard).exists() and file_sha256(destination / shard) == record.sha256:
                resumed.append(shard)
            else:
                restoring.restore_shard(record, stop)

        with one_torch_thread():
            for_each_shard(list(job.shards), work, jobs, handle)
        with finishing(work) as alone:
            if alone:
                _restore_files(opened_checkpoint, job, destination, work)
    return RestoreReport(len(job.shards), len(resumed), job.source_bytes)


def restored_bytes(checkpoint: str | Path) -> int:
    """Size of the shards that `restore` would write, in bytes."""
    return _read_job(Path(checkpoint)).source_bytes


def _read_job(root: Path) -> Job:
    if not root.is_dir():
        raise CheckpointError(f"{root} is not a directory")
    if message := unfinished(root):
        raise CheckpointError(message)
    job = read_job(root)
    if job is None:
        raise CheckpointError(f"{root} has no {DIGESTS}/: it was not made by compress, so there is nothing to restore")
    return job


@dataclass(frozen=True)
class _Restoring:
    """What is needed to restore any shard."""

    bundle: ModuleType
    checkpoint: Checkpoint
    job: Job
    destination: Path
    work: Path
    device: str
    progress: Progress

    def restore_shard(self, record: Record, stop: Event) -> None:
        header = record.source_header()
        digest = hashlib.sha256()
        here = self.checkpoint.root / self.job.shards[record.file]  # does not exist if the checkpoint was resharded
        with (
            TensorReader(self.checkpoint) as reader,
            AtomicFile(
                self.destination / record.file, self.work, record.file, like=here if here.exists() else None
            ) as file,
        ):
            with Fanout([file.write, digest.update], stop, self.progress) as stream:
                stream.send(memoryview(header.raw))
                send_source(header, reader, stream, self.bundle, self.device)
            if digest.hexdigest() != record.sha256:
                raise CheckpointError(_differing(file.temporary, header, record, stop))
            file.commit()


def _check_complete(records: Iterable[Record], checkpoint: Checkpoint) -> None:
    raise_faults(
        Fault(record.file, name, "neither it nor its compressed form is in the checkpoint")
        for record in records
        for name in record.tensors
        if name not in checkpoint.located and name not in checkpoint.planes_of_scale
    )


def _differing(path: Path, header: Header, record: Record, stop: Event) -> list[Fault]:
    """The tensors of a file that do not match the record, once it is known that the file as a whole does not."""
    read_header(path, record.file)
    sums = TensorChecksums(header.in_data_order())
    with opened(path, record.file) as fd, Fanout([sums.update], stop, lambda _: None) as stream:
        stream.read(fd, header.data_start, header.data_start + header.data_bytes, record.file)
    message = "has changed since it was compressed: its CRC-32 is not the source's"
    faults = [
        Fault(record.file, name, message) for name, value in sums.checksums.items() if record.tensors.get(name) != value
    ]
    return faults or [Fault(record.file, None, f"SHA-256 is not {record.sha256}, and no tensor's CRC-32 tells why")]


def _restore_files(checkpoint: Checkpoint, job: Job, destination: Path, work: Path) -> None:
    digests = job.copied | job.rewritten
    for name, kept in _sources(checkpoint, job).items():
        source = checkpoint.root / kept
        if not source.is_file() or file_sha256(source) != digests[name]:
            message = f"its copy is missing or has changed: SHA-256 is not {digests[name]}"
            raise CheckpointError([Fault(name, None, message)])
        copy_file(source, destination / name, work, name)


def _sources(checkpoint: Checkpoint, job: Job) -> dict[str, str]:
    """Where in the checkpoint each file is that can be restored as it is."""
    metadata = checkpoint.metadata_dir.relative_to(checkpoint.root)
    return {name: (metadata / name).as_posix() for name in job.copied} | {
        name: source_name(name) for name in job.rewritten
    }
