"""Which names files in a checkpoint may have: one rule for all indices, manifests, records and jobs, and one for links.

A checkpoint comes from strangers. Every file name in it is checked here before it is joined to a directory.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator
from pathlib import Path, PurePosixPath, PureWindowsPath

from finegrained_kernels.checkpoint.errors import CheckpointError, Fault, printable

WORK = ".incomplete"
"""A folder in directories that are not finished. Its contents belong to the command that fills the directory."""
DIGESTS = "csf_digests"
"""The folder of the records that `compress` leaves."""

_MAX_BYTES = 1024
_MAX_PART_BYTES = 240
"""The most bytes in one part of a path: the 255 that file systems allow, minus what is added while a file is
written."""


def check_inside(name: object, file: str) -> str:
    """``name``, which occurs in ``file``, if it is the plain path of a file inside the checkpoint.

    A plain path is relative, has no part that is empty, `.` or `..`, and means the same on every system.

    Raises:
        CheckpointError: it is not. The message names ``file`` and ``name``.
    """
    if problem := _problem(name):
        raise CheckpointError([Fault(printable(file), None, f"names the file {shown(name)}, which {problem}")])
    assert isinstance(name, str)
    return name


def check_name(name: object, file: str) -> str:
    """`check_inside` for a checkpoint's own files, which are neither hidden nor in one of our folders."""
    name = check_inside(name, file)
    parts = name.split("/")
    if parts[0] in (WORK, DIGESTS):
        message = f"names the file {shown(name)}, which is in {parts[0]}/, a folder that compress keeps for itself"
    elif any(part.startswith(".") for part in parts):
        message = f"names the file {shown(name)}, which is hidden"
    else:
        return name
    raise CheckpointError([Fault(printable(file), None, message)])


def _problem(name: object) -> str | None:
    if not isinstance(name, str):
        return "is not a text"
    if not name:
        return "is empty"
    try:
        encoded = name.encode()
    except UnicodeEncodeError:
        return "is not valid Unicode"
    if any(unicodedata.category(char) == "Cc" for char in name):
        return "has a control character"
    if "\\" in name or PureWindowsPath(name).drive or name.startswith("/"):
        return "is not a path inside the checkpoint, with forward slashes"
    parts = name.split("/")
    if any(part in ("", ".", "..") for part in parts):
        return "is not a path inside the checkpoint, in its plain form"
    if len(encoded) > _MAX_BYTES or any(len(part.encode()) > _MAX_PART_BYTES for part in parts):
        return "is too long"
    return None


def shown(value: object) -> str:
    """A value from a checkpoint as messages show it: on one line, quoted, and cut if it is long."""
    text = ascii(value)[:2000] if isinstance(value, str) and not value.isprintable() else repr(value)[:2000]
    return text if len(text) <= 120 else f"{text[:100]}..."


def own_files(root: Path) -> Iterator[str]:
    """Paths of all files below ``root`` that are not hidden, in a fixed order. A copy of a checkpoint consists of
    these.

    Raises:
        CheckpointError: `check_inside` refuses a name, `check_link` refuses a link, or something is neither a file nor
            a directory.
    """
    for path in sorted(root.rglob("*")):
        name = path.relative_to(root).as_posix()
        if any(part.startswith(".") for part in name.split("/")) or (path.is_dir() and not path.is_symlink()):
            continue
        check_inside(name, str(root))
        check_link(root, name)
        if not path.is_file():
            raise CheckpointError([Fault(name, None, "is neither a file nor a directory")])
        yield name


def check_link(root: Path, name: str) -> None:
    """Raise if a file of the checkpoint, or a folder that contains it, is a link that leads out of the checkpoint.

    The target of such a link would become part of every copy. The hub's cache is an exception: there, a snapshot's
    files are links into `blobs`, beside `snapshots`.
    """
    path = root / name
    if not any(part.is_symlink() for part in (path, *_between(root, name))):
        return
    try:
        target, inside = path.resolve(strict=True), root.resolve()
    except (OSError, RuntimeError) as error:
        raise CheckpointError([Fault(printable(name), None, "is a link that leads nowhere")]) from error
    if target.is_dir():
        raise CheckpointError([Fault(printable(name), None, "is a link to a directory: put its files there")])
    blobs = inside.parent.parent / "blobs" if inside.parent.name == "snapshots" else None
    if inside not in target.parents and (blobs is None or target.parent != blobs):
        message = f"is a link to {printable(str(target))}, outside the checkpoint: put the file there"
        raise CheckpointError([Fault(printable(name), None, message)])


def _between(root: Path, name: str) -> Iterator[Path]:
    for parent in PurePosixPath(name).parents:
        if parent != PurePosixPath("."):
            yield root / parent
