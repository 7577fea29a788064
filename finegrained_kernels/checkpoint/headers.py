"""Reads, checks and writes safetensors headers without touching the data.

The safetensors library only returns whole tensors, and lays a file out anew when it saves one. To stream a shard by
byte ranges, and to restore the exact bytes of a file, the header is needed as it is. So this is a small reader and
writer; in the tests, the library's own parser checks every file that it writes.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from finegrained_kernels.checkpoint.errors import CheckpointError, Fault

MAX_HEADER_BYTES = 100_000_000  # the library's own limit
_ALIGNMENT = 8
_MAX_BITS = 1 << 63
_MAX_DIMENSIONS = 64

DTYPE_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "U16": 16, "I16": 16, "F16": 16, "BF16": 16,
    "U32": 32, "I32": 32, "F32": 32, "U64": 64, "I64": 64, "F64": 64, "C64": 64,
}  # fmt: skip


class TensorInfo(NamedTuple):
    """A tensor's entry; ``begin`` and ``end`` are byte offsets from the start of the data."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        return self.end - self.begin


NewTensor = tuple[str, str, Sequence[int]]
"""Name, dtype and shape."""


@dataclass(frozen=True)
class Header:
    """One shard's header. ``raw`` is all of it: length, text and padding. ``tensors`` are in the order of the text."""

    raw: bytes
    metadata: Mapping[str, str] | None
    tensors: Mapping[str, TensorInfo]

    @property
    def data_start(self) -> int:
        return len(self.raw)

    @property
    def data_bytes(self) -> int:
        return max((info.end for info in self.tensors.values()), default=0)

    def in_data_order(self) -> list[tuple[str, TensorInfo]]:
        return sorted(self.tensors.items(), key=lambda item: item[1][2:])


def read_header(path: Path, name: str, *, data_present: bool = True) -> Header:
    """The checked header of the shard at ``path``, called ``name`` in messages.

    ``data_present=False`` accepts a file that ends right after its header.

    Raises:
        CheckpointError: there is no such file, it is cut short or has bytes left over, its text is not a header, a
            dtype is unknown, or offsets do not fit the shape, leave a gap or overlap.
    """
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            raw = file.read(8)
            length = int.from_bytes(raw, "little")
            if len(raw) < 8 or length > MAX_HEADER_BYTES or 8 + length > size:
                raise CheckpointError([Fault(name, None, f"{size} bytes do not hold the header they announce")])
            raw += file.read(length)
    except OSError as error:
        raise CheckpointError([Fault(name, None, f"cannot be read: {error.strerror}")]) from error
    header = parse_header(raw, name)
    if size != len(raw) + header.data_bytes and (data_present or size != len(raw)):
        raise CheckpointError([_wrong_size(header, size, name)])
    return header


def parse_header(raw: bytes, name: str) -> Header:
    """Check the text of a header and return it; see `read_header`."""
    try:
        entries = json.loads(raw[8:].decode(), parse_float=_refuse_number, parse_constant=_refuse_number)
    except (ValueError, RecursionError) as error:
        raise CheckpointError([Fault(name, None, f"not a safetensors header: {error}")]) from error
    if b"\\u" in raw and not is_unicode(raw[8:].decode(), entries):
        raise CheckpointError([Fault(name, None, "not a safetensors header: it has half of a Unicode character")])
    if not isinstance(entries, dict):
        message = f"not a safetensors header: expected a JSON object, got {type(entries).__name__}"
        raise CheckpointError([Fault(name, None, message)])
    metadata = entries.pop("__metadata__", None)
    if metadata is not None and not (
        isinstance(metadata, dict) and all(isinstance(value, str) for value in metadata.values())
    ):
        raise CheckpointError([Fault(name, None, f"__metadata__ must map texts to texts, got {metadata!r:.300}")])

    tensors: dict[str, TensorInfo] = {}
    # There are many tensors, but few dtypes and shapes, so equal ones are shared.
    kinds: dict[tuple[str, tuple[int, ...]], tuple[str, tuple[int, ...]]] = {}
    for tensor, entry in entries.items():
        try:
            dtype, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
            if not (type(shape) is list and type(begin) is type(end) is int):
                raise TypeError
            kind = dtype, tuple(shape)
            tensors[tensor] = TensorInfo(*kinds.setdefault(kind, kind), begin, end)
        except (TypeError, ValueError, KeyError) as error:
            got = f"{entry!r:.300}"
            message = f"expected a dtype, a list of sizes for shape and two integers for data_offsets, got {got}"
            raise CheckpointError([Fault(name, tensor, message)]) from error
    header = Header(raw, metadata, tensors)
    check_tensors(header, name)
    return header


def is_unicode(text: str, document: object) -> bool:
    """Whether no text in a JSON document has a lone surrogate, which cannot be written to a file."""
    if not re.search(r"\\u[dD][89a-fA-F]", text):
        return True
    try:
        json.dumps(document, ensure_ascii=False).encode()
    except (UnicodeEncodeError, ValueError, RecursionError):
        return False
    return True


def _refuse_number(text: str) -> NoReturn:
    raise ValueError(f"{text} is not an integer")


def build_header(
    entries: Sequence[NewTensor],
    data_order: Sequence[str],
    metadata: Mapping[str, str] | None,
) -> Header:
    """The header for tensors ``(name, dtype, shape)`` in the order of its text, whose data is in ``data_order``."""
    shapes = {name: (dtype, tuple(shape)) for name, dtype, shape in entries}
    tensors, end = {}, 0
    for name in data_order:
        dtype, shape = shapes[name]
        begin, end = end, end + num_bytes(dtype, shape)
        tensors[name] = TensorInfo(dtype, shape, begin, end)
    tensors = {name: tensors[name] for name, _, _ in entries}
    document: dict[str, Any] = {} if metadata is None else {"__metadata__": metadata}
    for name, info in tensors.items():
        offsets = [info.begin, info.end]
        document[name] = {"dtype": info.dtype, "shape": list(info.shape), "data_offsets": offsets}
    text = json.dumps(document, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return Header(len(text).to_bytes(8, "little") + text, metadata, tensors)


def replace_tensors(
    header: Header, replacements: Mapping[str, Sequence[NewTensor]]
) -> tuple[Header, list[tuple[int, int] | str]]:
    """The header of a shard in which some tensors are replaced by others, and the parts of its data, in order.

    Parts are ranges of the old data, and names of new tensors. Tensors keep their order, in the text and in the data,
    except that new tensors of 4-byte values are put together before the first replaced tensor, or before an earlier
    tensor if only that begins at a multiple of 4: safetensors allows no gaps, and one-byte tensors may begin anywhere.
    """
    order = header.in_data_order()
    replaced = [name for name, _ in order if name in replacements]
    if not replaced:
        return header, [(0, header.data_bytes)]
    block = next(i for i, (name, _) in enumerate(order) if name == replaced[0])
    while order[block][1].begin % 4:
        block -= 1

    parts: list[tuple[int, int] | str] = []
    data_order: list[str] = []

    def insert(names: Sequence[str], words: bool) -> None:
        new = [tensor[0] for name in names for tensor in replacements[name] if (DTYPE_BITS[tensor[1]] == 32) == words]
        data_order.extend(new)
        parts.extend(new)

    for i, (name, info) in enumerate(order):
        if i == block:
            insert(replaced, words=True)
        if name in replacements:
            insert([name], words=False)
            continue
        data_order.append(name)
        if parts and isinstance(parts[-1], tuple):
            parts[-1] = (parts[-1][0], info.end)
        else:
            parts.append((info.begin, info.end))
    entries: list[NewTensor] = []
    for name, info in header.tensors.items():
        entries += replacements.get(name, [(name, info.dtype, info.shape)])
    return build_header(entries, data_order, header.metadata), parts


def num_bytes(dtype: str, shape: Sequence[int]) -> int:
    return math.prod(shape) * DTYPE_BITS[dtype] // 8


def check_tensors(header: Header, name: str) -> None:
    """Raise unless every tensor has a known dtype, and the bytes that its shape needs, without gap or overlap."""
    sizes: dict[tuple, int] = {}  # a shard has many tensors of few kinds
    spans = []
    for tensor, (dtype, shape, begin, end) in header.tensors.items():
        size = sizes.get((dtype, shape))
        if size is None:
            size = sizes[dtype, shape] = _checked_size(dtype, shape, name, tensor)
        if end - begin != size:
            message = f"{dtype} {list(shape)} does not fill bytes {begin} to {end}"
            raise CheckpointError([Fault(name, tensor, message)])
        spans.append((begin, end))
    spans.sort()
    expected = 0
    for begin, end in spans:
        if begin != expected:
            tensor = next(tensor for tensor, info in header.tensors.items() if info[2:] == (begin, end))
            raise CheckpointError([Fault(name, tensor, f"begins at byte {begin}, expected {expected}")])
        expected = end


def _checked_size(dtype: str, shape: tuple[int, ...], name: str, tensor: str) -> int:
    if dtype not in DTYPE_BITS:
        raise CheckpointError([Fault(name, tensor, f"unknown dtype {dtype!r}")])
    if len(shape) > _MAX_DIMENSIONS or not all(type(extent) is int and extent >= 0 for extent in shape):
        raise CheckpointError([Fault(name, tensor, f"shape {list(shape)!r:.300} is not made of sizes")])
    if max(shape, default=0) >= _MAX_BITS:  # before any product of such numbers
        raise CheckpointError([Fault(name, tensor, f"{dtype} {list(shape)!r:.300} is more than any file holds")])
    bits = math.prod(shape) * DTYPE_BITS[dtype]
    if bits % 8:
        raise CheckpointError([Fault(name, tensor, f"{dtype} {list(shape)} does not fill whole bytes")])
    if bits >= _MAX_BITS:
        raise CheckpointError([Fault(name, tensor, f"{dtype} {list(shape)} is more than any file holds")])
    return bits // 8


def _wrong_size(header: Header, size: int, name: str) -> Fault:
    expected = header.data_start + header.data_bytes
    message = f"{size} bytes, expected {expected} by its header"
    for tensor, info in header.in_data_order():
        if header.data_start + info.end > size:
            return Fault(name, tensor, f"cut short: the file holds {message}")
    return Fault(name, None, f"bytes left over: the file holds {message}")
