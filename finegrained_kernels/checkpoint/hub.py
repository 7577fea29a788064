"""Checkpoints on the Hugging Face hub: reads headers without downloading shards, and uploads compressed checkpoints."""

from __future__ import annotations

import glob
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, hf_hub_download
from huggingface_hub.errors import HfHubHTTPError, SafetensorsParsingError

from finegrained_kernels.checkpoint.config import MARKED_ONLY, UNMARKED, marked_layers
from finegrained_kernels.checkpoint.errors import CheckpointError, Fault, raise_faults
from finegrained_kernels.checkpoint.headers import Header, TensorInfo, check_tensors
from finegrained_kernels.checkpoint.layouts import (
    CONFIG,
    CONTRACT,
    HF_LAYOUT,
    HF_QUANT_CONFIG,
    INDEX_SUFFIX,
    MANIFEST,
    Checkpoint,
    open_checkpoint,
    read_layout,
)
from finegrained_kernels.checkpoint.model_card import CARD, has_section, with_section
from finegrained_kernels.checkpoint.paths import own_files

_CONNECTIONS = 8


def open_hub_checkpoint(repo_id: str, *, revision: str | None = None) -> Checkpoint:
    """Open a model repository from its small JSON files and, by range requests, its shards' headers.

    The headers come without their text, so sizes are those of tensors alone.

    Raises:
        CheckpointError: the repository or revision does not exist, has no checkpoint, or a header cannot be read.
    """
    api = HfApi()
    with _hub_errors(repo_id):
        info = api.model_info(repo_id, revision=revision)
        files = {sibling.rfilename for sibling in info.siblings or ()}
        configs = {f"{folder}{name}" for folder in ("", "metadata/") for name in (CONFIG, HF_QUANT_CONFIG)}
        wanted = configs | {MANIFEST, CONTRACT} | {f for f in files if f.endswith(INDEX_SUFFIX)}
        root = None
        for file in sorted(wanted & files):
            local = Path(hf_hub_download(repo_id, file, revision=info.sha))
            root = local.parents[file.count("/")]
        layout = read_layout(root, files)
        missing = [shard for shard in layout.shards if shard not in files]
        raise_faults(Fault(layout.index or MANIFEST, None, f"shard {shard} does not exist") for shard in missing)

        def read(shard: str) -> Header:
            metadata = api.parse_safetensors_file_metadata(repo_id, shard, revision=info.sha)
            tensors = {
                name: TensorInfo(tensor.dtype, tuple(tensor.shape), *tensor.data_offsets)
                for name, tensor in metadata.tensors.items()
            }
            header = Header(b"", metadata.metadata, tensors)
            check_tensors(header, shard)
            return header

        with ThreadPoolExecutor(_CONNECTIONS) as pool:
            headers = dict(zip(layout.shards, pool.map(read, layout.shards), strict=True))
    return Checkpoint(root or Path(repo_id), layout, headers)


@contextmanager
def _hub_errors(repo_id: str) -> Iterator[None]:
    """Turn any error in accessing a repository into one line: no network, no such host, a broken answer."""
    http_error: Any = HfHubHTTPError.__bases__[0]  # the HTTP client's own base class: httpx or httpx2, by version
    try:
        yield
    except CheckpointError:
        raise
    except (http_error, SafetensorsParsingError, OSError, ValueError, KeyError, TypeError) as error:
        lines = str(error).strip().splitlines() or [""]
        raise CheckpointError(f"{repo_id}: {type(error).__name__}: {lines[0]}") from error


def push(
    checkpoint: str | Path,
    repo_id: str,
    *,
    revision: str | None = None,
    private: bool | None = None,
    message: str = "Upload NVFP4 checkpoint with compressed scales",
) -> str:
    """Upload a finished compressed checkpoint, with its digest records, to a model repository, creating it if needed.

    If the model card does not say what is compressed, because an earlier version or somebody else wrote it, it is
    uploaded with a section that does; the directory is not changed. Only the structure is checked: run `verify` first.
    Returns the commit's URL.

    Raises:
        CheckpointError: the directory is not finished or not consistent, has no compressed scales, or the hub refuses
            it.
    """
    root = Path(checkpoint)
    opened = open_checkpoint(root)
    files = list(own_files(root))
    marked, faults = marked_layers(opened.config)
    raise_faults(opened.faults + faults)
    compressed = {plane.layer_module for plane in opened.planes.values() if plane.compressed}
    if not compressed and not marked:
        raise CheckpointError(f"{root} is not compressed; do that first: finegrained-kernels compress")
    raise_faults(Fault(CONFIG, module, UNMARKED) for module in sorted(compressed - marked))
    raise_faults(Fault(CONFIG, module, MARKED_ONLY) for module in sorted(marked - compressed))
    path = root / CARD
    card = path.read_bytes() if path.exists() else b""
    add_section = opened.layout.kind == HF_LAYOUT and not has_section(
        card
    )  # in a container, SHA256SUMS lists each file
    if add_section:
        planes = [plane for plane in opened.planes.values() if plane.compressed]
        card = with_section(card, planes, {name: info for name, (_, info) in opened.located.items()})
        files = [name for name in files if name != CARD]
    api = HfApi()
    with _hub_errors(repo_id):
        api.create_repo(repo_id, private=private, exist_ok=True)
        commit = api.upload_folder(
            repo_id=repo_id,
            folder_path=root,
            revision=revision,
            commit_message=message,
            allow_patterns=[glob.escape(name) for name in files],
        )
        if add_section:
            message = "Say what reads the compressed scales"
            commit = api.upload_file(
                repo_id=repo_id, path_in_repo=CARD, path_or_fileobj=card, revision=revision, commit_message=message
            )
    return commit.commit_url
