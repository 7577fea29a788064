"""`compress`: turns an NVFP4 checkpoint into the same checkpoint with compressed scales."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from threading import Event

from finegrained_kernels.checkpoint.claims import Claim, claimed, finishing
from finegrained_kernels.checkpoint.errors import CheckpointError, Fault, raise_faults
from finegrained_kernels.checkpoint.headers import read_header
from finegrained_kernels.checkpoint.kinds import other_formats
from finegrained_kernels.checkpoint.layouts import CONFIG, CONTAINER_LAYOUT, HF_LAYOUT, Checkpoint, open_checkpoint
from finegrained_kernels.checkpoint.names import Plane, select
from finegrained_kernels.checkpoint.output import (
    DEFAULT_JOBS,
    check_request,
    check_space,
    for_each_shard,
    one_torch_thread,
)
from finegrained_kernels.checkpoint.publishing import marked_files, other_files, publish, rewritten_files
from finegrained_kernels.checkpoint.records import (
    Job,
    read_job,
    read_record,
    read_records,
    record_name,
    source_identity,
)
from finegrained_kernels.checkpoint.shards import ShardWork
from finegrained_kernels.checkpoint.stream import LOCK_SUFFIX, Progress, file_sha256, locked
from finegrained_kernels.checkpoint.wire import fixed_bytes, geometry_problem

_SHOWN = 3


@dataclass(frozen=True)
class Plan:
    """What `compress` would do, known from headers alone. ``planes`` are all NVFP4 scales, ``selected`` those to
    compress."""

    source: Checkpoint
    planes: Mapping[str, Plane]
    selected: Mapping[str, Plane]

    @property
    def source_bytes(self) -> int:
        """Size of all shards in bytes."""
        return sum(header.data_start + header.data_bytes for header in self.source.headers.values())

    @property
    def dense_bytes(self) -> int:
        """Bytes of the selected scales as they are now."""
        return sum(plane.nbytes for plane in self.selected.values())

    @property
    def least_bytes(self) -> int:
        """Bytes of the same scales when compressed, without exceptions. With them it is never more than
        `dense_bytes`."""
        return sum(
            plane.nbytes if geometry_problem(plane.rows, plane.cols) else fixed_bytes(plane.rows, plane.cols)
            for plane in self.selected.values()
        )


@dataclass(frozen=True)
class CompressReport:
    """What `compress` did: the number of shards, how many of them an earlier run had finished, how many scales were
    compressed, their bytes before and after, and for every other requested scale why it is still dense."""

    shards: int
    resumed: int
    compressed: int
    dense_bytes: int
    compressed_bytes: int
    left_dense: Mapping[str, str]


def plan_compression(
    source: str | Path, *, include: Sequence[str] = (), exclude: Sequence[str] = (), data_present: bool = True
) -> Plan:
    """Check a checkpoint's headers and choose its scales; reads no data and writes nothing.

    ``include`` and ``exclude`` are shell patterns for whole tensor names, such as
    ``*.layers.3.*``. Without ``include``, every NVFP4 scale is selected. ``data_present=False`` accepts shards that end
    after their headers.

    Raises:
        CheckpointError: the checkpoint is damaged, inconsistent or already compressed, or nothing matches.
    """
    checkpoint = open_checkpoint(source, data_present=data_present)
    planes = checkpoint.planes
    raise_faults(checkpoint.faults)
    raise_faults(
        Fault(checkpoint.located[plane.tensors[0]][0], plane.name, "compressed already")
        for plane in planes.values()
        if plane.compressed
    )
    selected = select(planes, include, exclude)
    if not planes:
        raise CheckpointError(f"{source} has no NVFP4 scales; {_what_is_quantized(checkpoint)}")
    if not selected:
        message = (
            f"no pattern matches any of its {len(planes)} NVFP4 scales, such as {next(iter(planes.values())).scale}"
        )
        raise CheckpointError(f"{source}: {message}")
    return Plan(checkpoint, planes, {name: planes[name] for name in selected})


def _what_is_quantized(checkpoint: Checkpoint) -> str:
    """Describes a checkpoint that has no NVFP4, by some of its tensors."""
    others = other_formats(checkpoint.located, checkpoint.planes)
    shown = []
    for name, stored in list(others.items())[:_SHOWN]:
        _, info = checkpoint.located[name]
        shown.append(f"{name}: {stored or f'{info.dtype} {list(info.shape)}'}")
    more = f" and {len(others) - _SHOWN} more" if len(others) > _SHOWN else ""
    return f"quantized otherwise are {', '.join(shown)}{more}" if shown else "make some: finegrained-kernels quantize"


def compress(
    source: str | Path,
    destination: str | Path,
    *,
    layout: str = HF_LAYOUT,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    family: str | None = None,
    jobs: int = DEFAULT_JOBS,
    device: str = "cpu",
    progress: Progress | None = None,
) -> CompressReport:
    """Compress the NVFP4 scales of the checkpoint in ``source`` into a new one in ``destination``, losslessly.

    Run it again after an interruption, with the same arguments, to resume: finished shards are checked against their
    digests and kept. Several processes with the same arguments share the work.

    Args:
        source: directory with a ModelOpt or compressed-tensors NVFP4 checkpoint; only read.
        destination: a new or empty directory, or one that an earlier run has begun to fill.
        layout: "hf" for shards with an index, or "container" for `lil-nvfp4-csf-checkpoint/1`.
        include, exclude: see `plan_compression`.
        family: the container's name for the kind of model; None takes `model_type` of config.json.
        jobs: how many shards to process at a time; by default half the number of cores, from 2 to 8.
        device: where scales are compressed, such as "cpu" or "cuda".
        progress: called with the number of source bytes each time some are done.

    Raises:
        CheckpointError: something is wrong; the message names file and tensor. Nothing is written before the source's
            headers and names are checked, and no file has its final name before it is complete.
    """
    from finegrained_kernels import load

    source, destination = Path(source), Path(destination)
    check_request(jobs, device)
    plan = plan_compression(source, include=include, exclude=exclude)
    job = _make_job(plan, layout, family, include, exclude)
    bundle = load()

    def has_record(shard: str) -> bool:
        return (destination / record_name(shard)).exists()

    known = _Known(plan.source, job, destination)
    claim = Claim.of("compress", source, plan.source.headers, job.to_json())
    with claimed(destination, source, claim, known.is_ours) as work:
        known.check_begun()
        begun = {shard for shard in job.shards if has_record(shard)}
        if not begun:
            check_space(destination, plan.source_bytes - plan.dense_bytes + plan.least_bytes)
        with locked(work / f"begin{LOCK_SUFFIX}", wait=True) as got:
            if got and read_job(destination) is None:
                job.write(destination, work)
        shards = ShardWork(
            bundle, plan.source, plan.selected, job, destination, work, device, progress or (lambda _: None)
        )
        resumed = []

        def handle(shard: str, stop: Event) -> None:
            if shard in begun and shards.is_finished(shard, stop):
                resumed.append(shard)
            elif shard in begun or not has_record(shard):  # otherwise, another process has just finished it
                shards.compress(shard, stop)

        with one_torch_thread():
            for_each_shard(list(job.shards), work, jobs, handle)
        with finishing(work) as unfinished:
            if unfinished:
                publish(plan.source, plan.planes, job, destination, work)
    return _report(job, plan, destination, len(resumed))


@dataclass(frozen=True)
class _Known:
    """Compares this source with the one from which a destination was made."""

    source: Checkpoint
    job: Job
    destination: Path
    digests: dict[str, str] = field(default_factory=dict)
    """SHA-256 of source shards; each is computed once."""

    def is_ours(self) -> bool:
        """Whether the destination is a result of this job, finished or not. Raises if it is a result of another."""
        begun = read_job(self.destination)
        if begun is None:
            return False
        if not begun.is_same(self.job):
            raise CheckpointError(
                f"{self.destination} was begun from another source or with other options: give a new directory"
            )
        self.check_begun()
        return True

    def check_begun(self) -> None:
        """Raise unless every shard that has a record was made from this very source. Job and headers may be equal even
        if weights differ."""
        for shard in self.job.shards:
            if not (self.destination / record_name(shard)).exists():
                continue
            try:
                record = read_record(self.destination, shard)
            except CheckpointError:
                continue  # it is damaged, so it proves nothing, and will be written again
            if shard not in self.digests:
                self.digests[shard] = file_sha256(self.source.root / shard)
            if record.sha256 != self.digests[shard]:
                message = f"was made from another source: {shard} had SHA-256 {record.sha256}, and now has another"
                raise CheckpointError(f"{self.destination} {message}. Give a new directory")


def _make_job(plan: Plan, layout: str, family: str | None, include: Sequence[str], exclude: Sequence[str]) -> Job:
    source = plan.source
    if source.config is None:
        raise CheckpointError([Fault(CONFIG, None, "does not exist: it is where compressed layers are marked")])
    marked_files(source, plan.planes, {plane.layer_module for plane in plan.selected.values()})  # raises if it cannot
    if layout == CONTAINER_LAYOUT:
        shards = {shard: f"tensors/{PurePosixPath(shard).name}" for shard in source.headers}
        if len(set(shards.values())) < len(shards):
            raise CheckpointError(f"a container needs shards of different names, got {sorted(shards)}")
        family = family or source.config.get("model_type")
        if not isinstance(family, str):
            raise CheckpointError([Fault(CONFIG, None, "has no model_type: name the container's family")])
    elif layout == HF_LAYOUT:
        shards, family = {shard: shard for shard in source.headers}, None
    else:
        raise CheckpointError(f"layout must be {HF_LAYOUT!r} or {CONTAINER_LAYOUT!r}, got {layout!r}")
    rewritten = rewritten_files(source)
    digests = {name: file_sha256(source.root / name) for name in other_files(source)}
    return Job(
        source_bytes=plan.source_bytes,
        source_headers=source_identity(source.headers),
        layout=layout,
        family=family,
        include=list(include),
        exclude=list(exclude),
        shards=shards,
        rewritten={name: digests[name] for name in rewritten},
        copied={name: digest for name, digest in digests.items() if name not in rewritten},
    )


def _report(job: Job, plan: Plan, destination: Path, resumed: int) -> CompressReport:
    left_dense = {name: why for record in read_records(destination, job) for name, why in record.dense.items()}
    compressed = [plane for plane in plan.selected.values() if plane.scale not in left_dense]
    names = {name for plane in plan.selected.values() for name in plane.as_compressed().tensors}
    after = sum(
        info.nbytes
        for path in job.shards.values()
        for name, info in read_header(destination / path, path).tensors.items()
        if name in names
    )
    dense = sum(plane.nbytes for plane in compressed)
    return CompressReport(len(job.shards), resumed, len(compressed), dense, after, left_dense)
