"""Records which command fills a directory, and from which source, from before its first file until after its last.

`.incomplete/` in a directory means that it is not finished. It holds this record, called the claim, locks, and files
that are being written. Only files that this module and `stream.py` have named are ever removed from it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import shlex
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from finegrained_kernels.checkpoint.errors import CheckpointError, printable
from finegrained_kernels.checkpoint.headers import Header
from finegrained_kernels.checkpoint.paths import WORK
from finegrained_kernels.checkpoint.stream import LOCK_SUFFIX, TEMPORARY_SUFFIX, locked, write_file

_CLAIM = "claim.json"
_COMMANDS = ("compress", "quantize", "restore")
"""The commands that fill a directory. A claim may come from a stranger, so no other command in it is shown to the
user."""


@dataclass(frozen=True)
class Claim:
    """Says that ``command`` fills a directory from ``source``, an absolute path. ``identity`` differs if sources or
    options do."""

    command: str
    source: str
    identity: str

    @property
    def shown(self) -> str:
        """The command that a message tells the user to type, without the directory."""
        return f"{self.command} {shlex.quote(printable(self.source))}"

    @classmethod
    def of(cls, command: str, source: Path, headers: Mapping[str, Header], options: Any) -> Claim:
        """The claim of a command that works on ``source``, whose shards have ``headers``, with ``options`` (JSON).

        Raises:
            CheckpointError: a shard is gone, or cannot be accessed.
        """
        shards = {}
        for shard, header in headers.items():
            try:
                status = (source / shard).stat()
            except OSError as error:
                raise CheckpointError(f"{printable(str(source / shard))} cannot be read: {error.strerror}") from error
            shards[shard] = [status.st_size, status.st_mtime_ns, hashlib.sha256(header.raw).hexdigest()]
        where = str(source.resolve())
        text = json.dumps([command, where, shards, options], sort_keys=True)
        return cls(command, where, hashlib.sha256(text.encode()).hexdigest())


def unfinished(root: Path) -> str | None:
    """What to tell somebody who opens ``root`` as a checkpoint before it is finished; None if it is finished."""
    if not (root / WORK).exists():
        return None
    claim = _read(root / WORK)
    finish = f"run `{claim.shown}` on it again" if claim else "run what began it again"
    return f"{root} is not finished ({WORK}/ is there): {finish}, or remove it"


@contextmanager
def claimed(root: Path, source: Path, claim: Claim, is_ours: Callable[[], bool]) -> Iterator[Path]:
    """Create ``root``, claim it, and give a folder in it for files that are not complete yet.

    The claim stays until `finishing`, even after an interruption. While it exists, another command, source or options
    are refused; processes with the same ones share it. If a directory has no claim but has files, ``is_ours()`` tells
    whether they are a result of this very claim; it may raise to say why not.

    Raises:
        CheckpointError: the directory is refused. Nothing in ``root`` has been changed.
    """
    inside, outside = root.resolve(), source.resolve()
    if inside == outside or inside in outside.parents or outside in inside.parents:
        raise CheckpointError(f"{root} and {source} must be separate directories, none inside the other")
    if root.exists() and not root.is_dir():
        raise CheckpointError(f"{root} is not a directory")
    work = root / WORK
    _check(root, work, claim, is_ours)
    made = not work.exists()
    try:
        work.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(f"{root} cannot be made: {error.strerror}") from error
    while True:
        with locked(work / f"claim{LOCK_SUFFIX}", wait=True) as got:
            if got:
                try:
                    _check(root, work, claim, is_ours)
                except CheckpointError:
                    if made and _read(work) is None:  # another process finished this directory in between
                        _remove(work)
                    raise
                if _read(work) is None:
                    text = json.dumps({"command": claim.command, "source": claim.source, "identity": claim.identity})
                    write_file(work / _CLAIM, text.encode(), work, _CLAIM)
                break
        made = True  # another process has just finished
        work.mkdir(parents=True, exist_ok=True)
    yield work


def _check(root: Path, work: Path, claim: Claim, is_ours: Callable[[], bool]) -> None:
    present = [work, *root.rglob("*")]
    for path in present:
        if path.is_symlink() and path.is_dir():  # files written there would be outside
            raise CheckpointError(f"{path} is a link to a directory: give a new directory")
    found = _read(work)
    if found is not None:
        if found != claim:
            raise CheckpointError(
                f"{root} was begun by `{found.shown}` with another source, source files or options: run that again, "
                f"or give a new directory"
            )
        return
    if foreign := sorted(path.name for path in work.iterdir() if not _is_own(path)) if work.is_dir() else []:
        raise CheckpointError(f"{work} holds files of somebody else ({printable(foreign[0])}): give a new directory")
    others = (path for path in present if path.is_symlink() or (path.exists() and not path.is_dir()))
    if any(work not in path.parents for path in others) and not is_ours():
        raise CheckpointError(f"{root} holds other files: give a new directory, or the one that was begun")


def _read(work: Path) -> Claim | None:
    try:
        document = json.loads((work / _CLAIM).read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    fields = ("command", "source", "identity")
    if not isinstance(document, dict) or not all(isinstance(document.get(name), str) for name in fields):
        return None
    if document["command"] not in _COMMANDS:
        return None
    return Claim(*(document[name] for name in fields))


def _is_own(path: Path) -> bool:
    return path.name == _CLAIM or path.name.endswith((LOCK_SUFFIX, TEMPORARY_SUFFIX))


def _remove(work: Path) -> None:
    """Remove our files in ``work``, the claim last, and then the folder if nothing else is in it."""
    for path in sorted(work.iterdir(), key=lambda path: path.name == _CLAIM):
        if _is_own(path):
            path.unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # another process may just have made a lock; then it will remove the folder
        work.rmdir()


@contextmanager
def finishing(work: Path, *, wait: bool = True) -> Iterator[bool]:
    """Let one process at a time do the last steps; then remove ``work``, with everything that earlier runs left there.

    Yields False if another process has finished meanwhile, or is doing so and ``wait`` is false.

    Raises:
        CheckpointError: ``work`` contains something that is not ours. It stays, and so does the claim.
    """
    with locked(work / f"finish{LOCK_SUFFIX}", wait=wait) as got:
        yield got
        if got:
            if foreign := sorted(path.name for path in work.iterdir() if not _is_own(path)):
                raise CheckpointError(
                    f"{work} holds {printable(foreign[0])}, which is not ours: move it, and run again"
                )
            _remove(work)
