"""The two layouts of a checkpoint on disk: Hugging Face files, or the `lil-nvfp4-csf-checkpoint/1` container.

Opening a checkpoint reads small JSON files and the shards' headers, but no data.
"""

from __future__ import annotations

import gc
import json
import os
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import repeat
from operator import eq
from pathlib import Path
from typing import Any

from finegrained_kernels.checkpoint.claims import unfinished
from finegrained_kernels.checkpoint.errors import CheckpointError, Fault, raise_faults
from finegrained_kernels.checkpoint.headers import Header, TensorInfo, is_unicode, read_header
from finegrained_kernels.checkpoint.names import EXCEPTIONS, FIXED, Plane, find_planes, group_by_scale, replaced_by
from finegrained_kernels.checkpoint.paths import WORK, check_name, shown
from finegrained_kernels.checkpoint.quantization_config import (
    CONFIG,
    HF_QUANT_CONFIG,
    QuantizationConfig,
    read_quantization,
)
from finegrained_kernels.checkpoint.wire import CODEC

CONTAINER_SCHEMA = "lil-nvfp4-csf-checkpoint/1"
MANIFEST = "manifest.json"
CONTRACT = "build-contract.json"
SUMS = "SHA256SUMS"
INDEX_SUFFIX = ".safetensors.index.json"
HF_LAYOUT = "hf"
CONTAINER_LAYOUT = "container"


@dataclass(frozen=True)
class Layout:
    """The contents of a checkpoint's small JSON files.

    Attributes:
        kind: `HF_LAYOUT` or `CONTAINER_LAYOUT`.
        index: the index file's name; None for a single file or a container.
        listed: the shard of each tensor by name, as the index or the container has it; None if neither exists.
        shards: paths of the shards, relative to the checkpoint.
        config: contents of config.json; None if there is none.
        hf_quant_config: contents of hf_quant_config.json, which ModelOpt writes; None if there is none.
    """

    kind: str
    index: str | None
    listed: Mapping[str, str] | None
    shards: list[str]
    config: Mapping[str, Any] | None
    hf_quant_config: Mapping[str, Any] | None


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """A checkpoint in directory ``root``, its layout, and its shards' headers by path.

    Properties are computed once, so keep the object to read many layers.
    """

    root: Path
    layout: Layout
    headers: Mapping[str, Header]

    @property
    def config(self) -> Mapping[str, Any] | None:
        return self.layout.config

    @cached_property
    def quantization(self) -> QuantizationConfig | None:
        """What its config says about quantization; None if nothing. Raises `CheckpointError` if the config is wrong."""
        return read_quantization(self.layout.config, self.layout.hf_quant_config)

    @property
    def metadata_dir(self) -> Path:
        """The directory of config.json and similar files."""
        return self.root / "metadata" if self.layout.kind == CONTAINER_LAYOUT else self.root

    @cached_property
    def experts(self) -> dict[str, dict[tuple[int, str], Plane]]:
        """Scale planes by layer (`<prefix>.experts`), expert and projection."""
        layers: dict[str, dict[tuple[int, str], Plane]] = {}
        for plane in self.planes.values():
            if expert := plane.expert:
                layers.setdefault(expert[0], {})[expert[1:]] = plane
        return layers

    @cached_property
    def located(self) -> dict[str, tuple[str, TensorInfo]]:
        """Each tensor's shard and entry."""
        located: dict[str, tuple[str, TensorInfo]] = {}
        for shard, header in self.headers.items():
            located.update(zip(header.tensors, zip(repeat(shard), header.tensors.values()), strict=False))
        return located

    @cached_property
    def planes(self) -> dict[str, Plane]:
        """Every NVFP4 scale plane, by scale name."""
        return self._planes_and_faults[0]

    @cached_property
    def planes_of_scale(self) -> dict[str, list[Plane]]:
        """The same by the name of the tensor of dense scales; a stack of experts has only one."""
        return group_by_scale(self.planes.values())

    @cached_property
    def faults(self) -> list[Fault]:
        """Contradictions between shards, between shards and the index, and violations of the rules for NVFP4 scales."""
        faults = []
        if sum(len(header.tensors) for header in self.headers.values()) > len(self.located):
            faults = [
                Fault(shard, name, f"also in {self.located[name][0]}")
                for shard, header in self.headers.items()
                for name in header.tensors
                if self.located[name][0] != shard
            ]
        return faults + self._index_faults() + self._planes_and_faults[1]

    @cached_property
    def _planes_and_faults(self) -> tuple[dict[str, Plane], list[Fault]]:
        with without_gc():
            return find_planes(self.located)

    def _index_faults(self) -> list[Fault]:
        listed, located = self.layout.listed, self.located
        if listed is None:
            return []
        if len(listed) == len(located) and all(
            all(map(eq, repeat(shard), map(listed.get, header.tensors))) for shard, header in self.headers.items()
        ):
            return []  # every tensor is in its listed shard
        index = self.layout.index or CONTRACT
        missing, unlisted = listed.keys() - located.keys(), located.keys() - listed.keys()
        if self.layout.kind == CONTAINER_LAYOUT:  # may list a compressed scale by its old name
            scales = {n: replaced_by(n.removesuffix(FIXED).removesuffix(EXCEPTIONS), missing) for n in unlisted}
            unlisted = {name for name in unlisted if scales[name] not in missing}
            missing -= set(scales.values())
        faults = [Fault(index, n, f"said to be in {listed[n]}, which does not have it") for n in sorted(missing)]
        faults += [Fault(index, n, f"missing here, but {located[n][0]} has it") for n in sorted(unlisted)]
        return faults + [
            Fault(index, name, f"said to be in {listed[name]}, but is in {shard}")
            for shard, header in self.headers.items()
            for name in header.tensors
            if name in listed and listed[name] != shard
        ]


@contextmanager
def without_gc() -> Iterator[None]:
    """Switch the garbage collector off while many small objects are created, none of which is garbage: it would go
    through them again and again."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@without_gc()
def open_checkpoint(root: str | Path, *, data_present: bool = True, faults: list[Fault] | None = None) -> Checkpoint:
    """Open the checkpoint in directory ``root``, of either layout.

    ``data_present=False`` accepts shards that end after their headers. If a list is passed as ``faults``, it collects
    what is wrong with single shards, which are then left out, instead of raising it.

    Raises:
        CheckpointError: there is no checkpoint, a shard's name is unsafe, a shard is missing or damaged, or JSON files
            of the container contradict each other. The message names the file.
    """
    root = Path(root)
    if not root.is_dir():
        raise CheckpointError(f"{root} is not a directory")
    if message := unfinished(root):
        if faults is None:
            raise CheckpointError(message)
        faults.append(Fault(WORK, None, message))
    layout = read_layout(root, [path.name for path in root.iterdir()])
    missing = [shard for shard in layout.shards if not os.path.isfile(root / shard)]
    raise_faults(Fault(layout.index or MANIFEST, None, f"shard {shard} does not exist") for shard in missing)
    headers = {}
    for shard in layout.shards:
        try:
            headers[shard] = read_header(root / shard, shard, data_present=data_present)
        except CheckpointError as error:
            if faults is None:
                raise
            faults.extend(error.faults)
    return Checkpoint(root, layout, headers)


def read_layout(root: Path | None, files: Collection[str]) -> Layout:
    """What the small JSON files in ``root`` say about a checkpoint whose top directory, there or elsewhere, has
    ``files``. ``root`` is None if there are no JSON files."""
    is_container = CONTRACT in files or (MANIFEST in files and not any(map(_is_shard_or_index, files)))
    if is_container and root is not None:
        listed, shards = _read_container(root)
        return Layout(CONTAINER_LAYOUT, None, listed, shards, *_read_configs(root / "metadata"))
    indices = sorted(name for name in files if "/" not in name and name.endswith(INDEX_SUFFIX))
    if len(indices) > 1:
        raise CheckpointError(f"{root} has several indices: {', '.join(indices)}")
    if indices and root is not None:
        return Layout(HF_LAYOUT, indices[0], *_read_index(root, indices[0]), *_read_configs(root))
    shards = sorted(name for name in files if "/" not in name and name.endswith(".safetensors"))
    if len(shards) != 1:
        found = ", ".join(shards) or "no safetensors file"
        raise CheckpointError(f"{root} has no index (*{INDEX_SUFFIX}), and not a single shard but {found}")
    return Layout(HF_LAYOUT, None, None, shards, *_read_configs(root))


def _is_shard_or_index(name: str) -> bool:
    """Whether a file in the top directory shows that the layout is Hugging Face's, in which manifest.json may be
    anything."""
    return "/" not in name and name.endswith((".safetensors", INDEX_SUFFIX))


def read_json(path: Path, name: str) -> dict[str, Any]:
    """The JSON object in a file called ``name`` in messages."""
    if path.exists() and not path.is_file():  # reading a pipe, for example, would never end
        raise CheckpointError([Fault(name, None, "cannot be read: it is not a file")])
    try:
        text = path.read_bytes().decode()
        document = json.loads(text)
    except OSError as error:
        raise CheckpointError([Fault(name, None, f"cannot be read: {error.strerror}")]) from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError([Fault(name, None, f"cannot be read: {error}")]) from error
    if not isinstance(document, dict):
        raise CheckpointError([Fault(name, None, f"expected a JSON object, got {type(document).__name__}")])
    if not is_unicode(text, document):
        raise CheckpointError([Fault(name, None, "cannot be read: it has half of a Unicode character")])
    return document


def check_shard_name(shard: object, file: str) -> str:
    """``shard``, if it is the name of a safetensors file inside the checkpoint on every system."""
    shard = check_name(shard, file)
    if not shard.endswith(".safetensors"):
        raise CheckpointError([Fault(file, None, f"shard {shown(shard)} is not a safetensors file")])
    return shard


def container_faults(manifest: Mapping[str, Any], contract: Mapping[str, Any]) -> list[Fault]:
    """Where the container's two descriptions violate its rules about schema, codec, family, and the set of shards."""
    faults = []
    for key, expected in (("schema", CONTAINER_SCHEMA), ("codec", CODEC), ("family", None)):
        values = manifest.get(key), contract.get(key)
        if values[0] != values[1]:
            faults.append(Fault(CONTRACT, None, f"{key} {values[1]!r} differs from {values[0]!r} in {MANIFEST}"))
        elif not isinstance(values[0], str) or (expected is not None and values[0] != expected):
            faults.append(Fault(MANIFEST, None, f"{key} is {values[0]!r}, expected {expected or 'a string'!r}"))
    shards = manifest.get("shards")
    names = contract.get("source_names")
    if not isinstance(shards, list) or not all(isinstance(shard, dict) and "file" in shard for shard in shards):
        faults.append(Fault(MANIFEST, None, "shards must be a list of objects with a file each"))
    elif not isinstance(names, dict) or not all(isinstance(file, str) for file in names.values()):
        faults.append(Fault(CONTRACT, None, "source_names must map texts to texts"))
    else:
        files = [shard["file"] for shard in shards]
        bare = [file for file in files if not isinstance(file, str) or "/" in file or "\\" in file]
        faults += [Fault(MANIFEST, None, f"shard {file!r} is not a bare file name") for file in bare]
        if not bare and set(names.values()) != set(files):
            differing = sorted(map(str, set(names.values()) ^ set(files)))
            faults.append(Fault(CONTRACT, None, f"source_names and {MANIFEST} name different shards: {differing}"))
    return faults


def _read_container(root: Path) -> tuple[dict[str, str], list[str]]:
    manifest, contract = (read_json(root / name, name) for name in (MANIFEST, CONTRACT))
    if faults := container_faults(manifest, contract):
        raise CheckpointError(faults)
    shards = [f"tensors/{check_shard_name(shard['file'], MANIFEST)}" for shard in manifest["shards"]]
    return {name: f"tensors/{shard}" for name, shard in contract["source_names"].items()}, shards


def _read_index(root: Path, index: str) -> tuple[dict[str, str], list[str]]:
    document = read_json(root / index, index)
    listed, metadata = document.get("weight_map"), document.get("metadata")
    if not isinstance(metadata, dict | None):
        raise CheckpointError([Fault(index, None, f"metadata must be an object, got {shown(metadata)}")])
    if not isinstance(listed, dict) or not listed:
        raise CheckpointError([Fault(index, None, "weight_map must be an object that is not empty")])
    shards = {str(shard): shard for shard in listed.values()}  # as text, so that anything but a string is refused below
    return listed, [check_shard_name(shard, index) for shard in shards.values()]


def _read_configs(directory: Path | None) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
    config, hf_quant_config = (
        read_json(directory / name, name) if directory is not None and (directory / name).exists() else None
        for name in (CONFIG, HF_QUANT_CONFIG)
    )
    return config, hf_quant_config
