"""The digest records that `compress` writes into `csf_digests/` of a checkpoint, for `verify` and `restore`.

- `job.json`: what was compressed and how; SHA-256 of every other file.
- `shards/<shard>.json`, one a source shard, written when that shard is finished: the source file's SHA-256 and header,
  CRC-32 of every source tensor and of every tensor that replaced one, and the scales that were left dense.
- `source/`: the small files that were rewritten (config.json, the index), as they were.
- `written.json`, once all is done: SHA-256 of config.json and hf_quant_config.json as they are now.

Nothing in them depends on a clock, a machine, or how often a run was interrupted. Each ends with a digest of itself, so
that a flipped bit is noticed even if nothing else contradicts it.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any

from finegrained_kernels.checkpoint.errors import CheckpointError, Fault
from finegrained_kernels.checkpoint.headers import Header, parse_header
from finegrained_kernels.checkpoint.layouts import CONTAINER_LAYOUT, HF_LAYOUT, read_json
from finegrained_kernels.checkpoint.names import FIXED, replaced_by
from finegrained_kernels.checkpoint.paths import DIGESTS, check_name, shown
from finegrained_kernels.checkpoint.stream import write_file

SCHEMA = "finegrained-kernels-csf-digests/3"
_BEFORE = "finegrained-kernels-csf-digests/2"
"""The schema of an earlier version, without digests of the records themselves and without `source_headers`."""
_JOB = f"{DIGESTS}/job.json"
WRITTEN = f"{DIGESTS}/written.json"


@dataclass(frozen=True)
class Job:
    """One compression.

    Attributes:
        source_bytes: size of all source shards.
        source_headers: SHA-256 of names, sizes and headers of all source shards; None in records of an earlier version.
        layout, family, include, exclude: the options of the call.
        shards: path of each compressed shard, by the path of its source.
        rewritten: SHA-256 of the source's files that are kept in `csf_digests/source/`, by path.
        copied: SHA-256 of all other files, by path in the source.
    """

    source_bytes: int
    source_headers: str | None
    layout: str
    family: str | None
    include: list[str]
    exclude: list[str]
    shards: dict[str, str]
    rewritten: dict[str, str]
    copied: dict[str, str]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def is_same(self, other: Job) -> bool:
        """Whether both have the same options and, as far as a job tells, the same source."""
        if None in (self.source_headers, other.source_headers):
            return replace(self, source_headers=None) == replace(other, source_headers=None)
        return self == other

    def write(self, root: Path, work: Path) -> None:
        write_file(root / _JOB, _dump(self), work, _JOB)


@dataclass(frozen=True)
class Record:
    """What is known about one source shard.

    Attributes:
        file, nbytes, sha256: the source file's path, size and SHA-256.
        header: text and padding of its header, which together with the data makes up the file.
        tensors: CRC-32 of every tensor of the source, by name.
        components: CRC-32 of the tensors that replaced compressed scales, by name.
        dense: for every requested tensor of scales that is not compressed, by name, the reason.
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
        """CRC-32 of every tensor of this shard after compression."""
        replaced = {replaced_by(name, self.tensors) for name in self.components if name.endswith(FIXED)}
        return {name: value for name, value in self.tensors.items() if name not in replaced} | self.components

    def source_header(self) -> Header:
        text = self.header.encode()
        return parse_header(len(text).to_bytes(8, "little") + text, self.file)

    def write(self, root: Path, work: Path) -> None:
        name = record_name(self.file)
        write_file(root / name, _dump(self), work, name)


def record_name(shard: str) -> str:
    return f"{DIGESTS}/shards/{shard}.json"


def source_name(file: str) -> str:
    return f"{DIGESTS}/source/{file}"


def source_identity(headers: Mapping[str, Header]) -> str:
    """SHA-256 of all shards' names, sizes and headers. Their data is covered by the records' digests."""
    digest = hashlib.sha256()
    for shard, header in sorted(headers.items()):
        own = hashlib.sha256(header.raw).hexdigest()
        digest.update(f"{shard}\0{header.data_start + header.data_bytes}\0{own}\n".encode())
    return digest.hexdigest()


def read_job(root: Path) -> Job | None:
    """The job of the checkpoint in ``root``, checked; None if it has no records.

    Raises:
        CheckpointError: it is damaged, or names a file outside of the checkpoint or in one of our folders.
    """
    if not (root / _JOB).exists():
        return None
    document = _read(root, _JOB, tuple(Job.__dataclass_fields__))
    _check_types(document, _JOB, _JOB_TYPES)
    job = Job(**document)
    for name in (*job.shards, *job.rewritten, *job.copied):
        check_name(name, _JOB)
    for shard, path in job.shards.items():
        expected = f"tensors/{PurePosixPath(shard).name}" if job.layout == CONTAINER_LAYOUT else shard
        if path != expected or not shard.endswith(".safetensors"):
            raise CheckpointError([Fault(_JOB, None, f"shard {shown(shard)} is said to be in {shown(path)}")])
    files = [*job.shards, *job.rewritten, *job.copied]
    if len(set(files)) < len(files):
        raise CheckpointError([Fault(_JOB, None, "names a file twice")])
    for digest in (*job.rewritten.values(), *job.copied.values()):
        _check_digest(digest, _JOB)
    return job


def read_record(root: Path, shard: str) -> Record:
    """The record of source shard ``shard``, checked. Raises `CheckpointError` if it does not exist or is damaged."""
    name = record_name(shard)
    if not (root / name).exists():
        raise CheckpointError([Fault(name, None, "does not exist: compress has not finished this shard")])
    document = _read(root, name, tuple(Record.__dataclass_fields__))
    _check_types(document, name, _RECORD_TYPES)
    record = Record(**document)
    if record.file != shard:
        raise CheckpointError([Fault(name, None, f"is of the file {shown(record.file)}, expected {shown(shard)}")])
    for digest in (record.sha256, *([] if record.file_sha256 is None else [record.file_sha256])):
        _check_digest(digest, name)
    record.source_header()  # raises if it is not a header
    return record


def write_written(digests: Mapping[str, str], root: Path, work: Path) -> None:
    """Store the SHA-256, by name, of the files that say which layers are compressed, as they were written."""
    write_file(root / WRITTEN, _dump_fields({"files": dict(digests)}), work, WRITTEN)


def read_written(root: Path) -> dict[str, str] | None:
    """What `write_written` stored; None if there is nothing."""
    if not (root / WRITTEN).exists():
        return None
    files = _read(root, WRITTEN, ("files",))["files"]
    if not isinstance(files, dict):
        raise CheckpointError([Fault(WRITTEN, None, f"files has an invalid value: {shown(files)}")])
    for name, digest in files.items():
        check_name(name, WRITTEN)
        _check_digest(digest, WRITTEN)
    return files


def read_records(root: Path, job: Job) -> Iterator[Record]:
    for shard in job.shards:
        yield read_record(root, shard)


_JOB_TYPES: dict[str, Callable[[Any], bool]] = {
    "source_bytes": lambda value: _is_count(value, 1 << 63),
    "source_headers": lambda value: value is None or _is_digest(value),
    "layout": lambda value: value in (HF_LAYOUT, CONTAINER_LAYOUT),
    "family": lambda value: value is None or isinstance(value, str),
    "include": lambda value: _is_list_of_texts(value),
    "exclude": lambda value: _is_list_of_texts(value),
    "shards": lambda value: _maps_texts_to(value, str),
    "rewritten": lambda value: _maps_texts_to(value, str),
    "copied": lambda value: _maps_texts_to(value, str),
}
_RECORD_TYPES: dict[str, Callable[[Any], bool]] = {
    "file": lambda value: isinstance(value, str),
    "nbytes": lambda value: _is_count(value, 1 << 63),
    "sha256": lambda value: isinstance(value, str),
    "header": lambda value: isinstance(value, str) and _is_unicode(value),
    "tensors": lambda value: _maps_texts_to(value, int) and all(_is_count(v, 1 << 32) for v in value.values()),
    "components": lambda value: _maps_texts_to(value, int) and all(_is_count(v, 1 << 32) for v in value.values()),
    "dense": lambda value: _maps_texts_to(value, str),
    "file_sha256": lambda value: value is None or isinstance(value, str),
}


def _is_count(value: Any, limit: int) -> bool:
    return type(value) is int and 0 <= value < limit


def _is_digest(value: Any) -> bool:
    return isinstance(value, str) and re.fullmatch("[0-9a-f]{64}", value) is not None


def _is_unicode(text: str) -> bool:
    return not any("\ud800" <= char <= "\udfff" for char in text)


def _is_list_of_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _maps_texts_to(value: Any, kind: type) -> bool:
    return isinstance(value, dict) and all(type(item) is kind for item in value.values())


def _check_types(document: Mapping[str, Any], name: str, types: Mapping[str, Callable[[Any], bool]]) -> None:
    for key, is_right in types.items():
        if not is_right(document[key]):
            raise CheckpointError([Fault(name, None, f"{key} has an invalid value: {shown(document[key])}")])


def _check_digest(value: Any, name: str) -> None:
    if not _is_digest(value):
        raise CheckpointError([Fault(name, None, f"{shown(value)} is not a SHA-256")])


def _read(root: Path, name: str, fields: tuple[str, ...]) -> dict[str, Any]:
    """The fields of a job or record, after checking that its bytes are those that were written."""
    document = read_json(root / name, name)
    schema = document.pop("schema", None)
    digest = document.pop("digest", None)  # compared below, with everything else
    if schema == _BEFORE and digest is not None:  # the two schemas differ by a single bit
        raise CheckpointError([Fault(name, None, f"schema {schema}, but with a digest, which came with {SCHEMA}")])
    if schema not in (SCHEMA, _BEFORE):
        raise CheckpointError([Fault(name, None, f"schema {shown(schema)}, expected {SCHEMA}")])
    if schema == _BEFORE and name == _JOB:
        document = {"source_headers": None, **document}
    if document.keys() != set(fields):
        raise CheckpointError([Fault(name, None, f"expected the keys {sorted(fields)}")])
    if schema == SCHEMA and (root / name).read_bytes() != _dump_fields({field: document[field] for field in fields}):
        raise CheckpointError([Fault(name, None, "has changed: it is not what its own digest says")])
    return document


def _dump(document: Job | Record) -> bytes:
    return _dump_fields(asdict(document))


def _dump_fields(fields: Mapping[str, Any]) -> bytes:
    content = {"schema": SCHEMA, **fields}
    digest = hashlib.sha256(json.dumps(content, ensure_ascii=False).encode()).hexdigest()
    return (json.dumps({**content, "digest": digest}, indent=1, ensure_ascii=False) + "\n").encode()
