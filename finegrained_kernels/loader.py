"""Loads the bundle as a model does, through ``kernels.get_kernel``, and keeps working when the hub cannot serve it."""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import torch
from huggingface_hub import constants
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
from kernels import get_kernel, get_loaded_kernels, get_local_kernel

from finegrained_kernels.source_only import import_from_source

try:
    from kernels._rust import Digest, DigestValidationError, Metadata
except ImportError:  # kernels 0.16 has them in a separate package
    from kernels_data import Digest, DigestValidationError, Metadata

logger = logging.getLogger(__name__)

REPO_ID = "kernels-community/finegrained-kernels"
VERSION = 1

_PACKAGE = Path(__file__).parent
_FALLBACKS = {"the copy in this package": _PACKAGE / "_bundle" / "build", "this checkout": _PACKAGE.parent / "build"}

# If the hub or its cache answers but does not have what was asked for, kernels raises a plain ValueError or
# FileNotFoundError, which only its text distinguishes from others. If that text changes, load() raises instead of
# falling back.
_ABSENT = (
    "is not available in the local cache",
    "not found, available versions",
    "Cannot find a local snapshot",
    "Cannot find a build variant",
)

_lock = threading.Lock()
_loaded: dict[tuple, ModuleType] = {}


class BundleUnavailableError(RuntimeError):
    """Neither the hub, its cache nor a local copy has a bundle for this machine."""


class BundleIntegrityError(RuntimeError):
    """A copy of the bundle is not what was built: its files do not match its digest."""


def load(
    *,
    repo_id: str = REPO_ID,
    version: int | None = None,
    revision: str | None = None,
    backend: str | None = None,
    trust_remote_code: bool = False,
) -> ModuleType:
    """Return the bundle as a module; later calls with the same arguments return the same one.

    The arguments are those of ``kernels.get_kernel``, with the released version as default, and ``LOCAL_KERNELS`` works
    as it does there. If the hub is out of reach, or has no bundle for this machine, the released version is loaded from
    the copy in this package, or from ``build/`` in a checkout. That is not done for another repository, version or
    revision, because the local copy would not be what was asked for. Everything else is an error: a copy named by
    ``LOCAL_KERNELS`` that does not load, an untrusted publisher, or a bundle that fails to import.

    Raises:
        BundleUnavailableError: none of these has it. The message lists what was tried, and what to do.
        BundleIntegrityError: the files are not those that were built. Local copies are checked before they run. What
            ``get_kernel`` returns is checked afterwards, because it finds and imports the bundle in one step.

    >>> csf = load()
    >>> csf is load()
    True
    >>> csf.csf_workspace_size.__name__ in csf.__all__
    True
    """
    if version is None and revision is None:
        version = VERSION
    key = (repo_id, version, revision, backend, trust_remote_code)
    with _lock:
        if key not in _loaded:
            _loaded[key] = _load(*key)
        return _loaded[key]


def _load(
    repo_id: str, version: int | None, revision: str | None, backend: str | None, trust_remote_code: bool
) -> ModuleType:
    handled = sys.exc_info()[1]
    for directory in (*_overrides(repo_id), Path(constants.HF_HUB_CACHE) / f"kernels--{repo_id.replace('/', '--')}"):
        import_from_source(directory)
    try:
        module = get_kernel(
            repo_id, version=version, revision=revision, backend=backend, trust_remote_code=trust_remote_code
        )
    except Exception as error:
        if is_overridden(repo_id) or not _is_absent(error, handled):
            raise
        hub_error, *_, cause = [error, *_chain(error, handled)]
    else:
        _verify(Path(module.__file__).parent)
        return module

    request = f"get_kernel({repo_id!r}, " + (f"revision={revision!r})" if revision else f"version={version})")
    tried = [f"{request}: {_summary(hub_error)}" + ("" if cause is hub_error else f" ({_summary(cause)})")]
    if (repo_id, version) == (REPO_ID, VERSION):
        backend = backend or _torch_backend()
        for name, build in _FALLBACKS.items():
            variant = build / f"torch-{backend}"
            if variant.is_dir():
                logger.info("%s; using %s, %s", tried[0], name, variant)
                return _load_local(variant, backend)
            tried.append(f"{name}: no {variant}")
    raise BundleUnavailableError(
        "\n  ".join(["the finegrained-kernels bundle was found nowhere. Tried:", *tried])
        + "\nConnect to the hub, or install the finegrained-kernels wheel, which carries the released version, or run "
        f"`make bundle` in a checkout, or name a built copy: LOCAL_KERNELS={repo_id}=/path/to/build"
    ) from hub_error


def _load_local(variant: Path, backend: str) -> ModuleType:
    """Import a local variant, unless a module with the same id, and thus the same content, is already loaded.

    Two modules with the same id would share a ``torch.ops`` namespace.
    """
    import_from_source(variant)
    _verify(variant)
    metadata = Metadata.read_from_file(variant / "metadata.json")
    if metadata.version != VERSION:
        raise BundleIntegrityError(
            f"{variant}: metadata.json says version {metadata.version}, expected {VERSION}; remove this copy, then "
            "install or download it again, or rebuild it"
        )
    identifier = metadata.id
    for loaded in get_loaded_kernels():
        if loaded.metadata.id == identifier:
            return loaded.module
    return get_local_kernel(variant, backend=backend)


def _verify(variant: Path) -> None:
    """Raise BundleIntegrityError unless the variant's files are those its metadata lists, byte for byte."""
    advice = "remove this copy, then install or download it again, or rebuild it"
    try:
        digest = Metadata.read_from_file(variant / "metadata.json").digest
    except (OSError, ValueError) as error:
        raise BundleIntegrityError(f"{variant}: {error}; {advice}") from error
    if digest is None:
        raise BundleIntegrityError(f"{variant}: metadata.json carries no digest to check the files against; {advice}")
    try:
        digest.validate(Digest.hash_variant(digest.algorithm, variant))
    except DigestValidationError as error:
        raise BundleIntegrityError(f"{variant}: {'; '.join(map(str, error.violations))}; {advice}") from error


def _torch_backend() -> str:
    """The variant that this torch needs. If there is none for its hardware, that is the CPU variant."""
    for backend, build in (("cuda", "cuda"), ("rocm", "hip"), ("xpu", "xpu")):
        if getattr(torch.version, build, None):
            return backend
    return "cpu"


def is_overridden(repo_id: str = REPO_ID) -> bool:
    """Whether ``LOCAL_KERNELS`` names a copy of this repository."""
    return bool(_overrides(repo_id))


def _overrides(repo_id: str) -> list[Path]:
    """The copies of this repository that ``LOCAL_KERNELS`` names."""
    entries = (entry.partition("=") for entry in os.environ.get("LOCAL_KERNELS", "").split(":"))
    return [Path(path) for name, _, path in entries if name == repo_id]


def _is_absent(error: Exception, handled: BaseException | None) -> bool:
    """Whether the bundle could not be served at all, in contrast to one that was served but must not be used.

    kernels hides a failed connection behind "could not verify publisher trust status", so the chain of exceptions is
    searched, up to ``handled``, the exception that the caller was already handling.
    """
    http_error = HfHubHTTPError.__bases__[0]  # the HTTP client's own base class: httpx or httpx2, by version
    for cause in _chain(error, handled):
        if isinstance(cause, (http_error, ConnectionError, TimeoutError, LocalEntryNotFoundError)):
            return True
    return isinstance(error, (ValueError, FileNotFoundError)) and any(text in str(error) for text in _ABSENT)


def _summary(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


def _chain(error: BaseException | None, end: BaseException | None) -> Iterator[BaseException]:
    while error is not None and error is not end:
        yield error
        error = error.__cause__ or error.__context__
