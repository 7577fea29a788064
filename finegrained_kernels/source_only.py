"""Python files of some directories are compiled from their source at every import: no bytecode of theirs is read.

A digest covers the source of the bundle. A `__pycache__` beside it is covered by nothing, and Python takes a file there
for the source's bytecode if it has the source's size and time, which anybody can give it. `kernels` imports the bundle
with Python's own loader, so that is where this has to be said.
"""

from __future__ import annotations

from importlib.machinery import SourceFileLoader
from pathlib import Path

_directories: set[str] = set()
_path_stats = SourceFileLoader.path_stats


def import_from_source(directory: Path) -> None:
    """From now on, compile what is imported from below ``directory``."""
    _directories.add(str(directory.resolve()) + "/")
    SourceFileLoader.path_stats = _stats  # type: ignore[assignment, method-assign]


def _stats(loader: SourceFileLoader, path: str) -> dict:
    """Size and time of a source, which its bytecode has to match; a file without them has no bytecode."""
    if str(Path(path).resolve()).startswith(tuple(_directories)):
        raise OSError(f"{path} is compiled at every import")
    return dict(_path_stats(loader, path))
