"""The digest records that `compress` leaves beside a checkpoint, in `csf_digests/`, for `verify` and `restore`.

- `job.json`: what was compressed and how; SHA-256 of every other file.
- `shards/<shard>.json`, one a source shard, written when that shard is finished: the source file's SHA-256 and header,
  CRC-32 of every source tensor and of every tensor that replaced one, and the scales that were left dense.
- `source/`: the small files that were rewritten (config.json, the index), as they were.

Nothing in them depends on a clock, a machine or how often a run was interrupted.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from finegrained_kernels.checkpoint.errors import CheckpointError, Fault
from finegrained_kernels.checkpoint.headers import Header, parse_header
from finegrained_kernels.checkpoint.layouts import read_json
from finegrained_kernels.checkpoint.names import FIXED, replaced_by
from finegrained_kernels.checkpoint.stream import write_file

DIGESTS = "csf_digests"
SCHEMA = "finegrained-kernels-csf-digests/2"
_JOB = f"{DIGESTS}/job.json"


@dataclass(frozen=True)
class Job:
    """One compression.

    Attributes:
        source_bytes: of all source shards.
        layout, family, include, exclude: as asked for.
        shards: path of each compressed shard, by path of its source.
        rewritten: SHA-256 of the source's files that `csf_digests/source/` keeps, by path.
        copied: SHA-256 of all other files, by path in the source.
    """

    source_bytes: int
    layout: str
    family: str | None
    include: list[str]
    exclude: list[str]
    shards: dict[str, str]
    rewritten: dict[str, str]
    copied: dict[str, str]

    def write(self, root: Path, work: Path) -> None:
        write_file(root / _JOB, _dump({"schema": SCHEMA, **asdict(self)}), work, _JOB)


@dataclass(frozen=True)
class Record:
    """What is known of one source shard.

    Attributes:
        file, nbytes, sha256: the source file's path, size and SHA-256.
        header: its header's text with padding, which with the data makes the file.
        tensors: CRC-32 of every tensor of the source, by name.
        components: CRC-32 of the tensors that took the compressed scales' place, by name.
        dense: why each tensor of scales that was asked for is not compressed, by name.
        file_sha256: SHA-256 of the compressed file, for the container's `SHA256SUMS`; None in the other layout.
    """

    file: str
    nbytes: int
    sha256: str
    header: str
    tensors: dict[str, int]
    components: dict[str, int]
    dense: dict[str, str]
    file_sha256: str | None

    def expected_tensors(self) -> dict[str, int]:
        """CRC-32 of every tensor of this shard once compressed."""
        replaced = {replaced_by(name, self.tensors) for name in self.components if name.endswith(FIXED)}
        return {name: value for name, value in self.tensors.items() if name not in replaced} | self.components

    def source_header(self) -> Header:
        text = self.header.encode()
        return parse_header(len(text).to_bytes(8, "little") + text, self.file)

    def write(self, root: Path, work: Path) -> None:
        name = record_name(self.file)
        write_file(root / name, _dump({"schema": SCHEMA, **asdict(self)}), work, name)


def record_name(shard: str) -> str:
    return f"{DIGESTS}/shards/{shard}.json"


def source_name(file: str) -> str:
    return f"{DIGESTS}/source/{file}"


def read_job(root: Path) -> Job | None:
    """The job of the checkpoint in ``root``, None if it has no records."""
    return Job(**_read(root, _JOB)) if (root / _JOB).exists() else None


def read_record(root: Path, shard: str) -> Record:
    """The record of source shard ``shard``; a `CheckpointError` says if it does not exist."""
    name = record_name(shard)
    if not (root / name).exists():
        raise CheckpointError([Fault(name, None, "does not exist: compress has not finished this shard")])
    return Record(**_read(root, name))


def read_records(root: Path, job: Job) -> Iterator[Record]:
    for shard in job.shards:
        yield read_record(root, shard)


def _read(root: Path, name: str) -> Mapping:
    document = read_json(root / name, name)
    if document.pop("schema", None) != SCHEMA:
        raise CheckpointError([Fault(name, None, f"not a record of schema {SCHEMA}")])
    kind = Job if name == _JOB else Record
    if document.keys() != kind.__dataclass_fields__.keys():
        raise CheckpointError([Fault(name, None, f"expected the keys {sorted(kind.__dataclass_fields__)}")])
    return document


def _dump(document: Mapping) -> bytes:
    return (json.dumps(document, indent=1, ensure_ascii=False) + "\n").encode()
