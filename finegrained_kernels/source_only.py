"""Makes Python compile the files of some directories from source at every import, without reading their bytecode.

The bundle's digest covers its source, but not a `__pycache__` beside it. Python takes a file there for the source's
bytecode if it has the source's size and time, which anybody can forge. `kernels` imports the bundle with Python's own
loader, so the change has to be made there.
"""

from __future__ import annotations

from importlib.machinery import SourceFileLoader
from pathlib import Path

_directories: set[str] = set()
_path_stats = SourceFileLoader.path_stats


def import_from_source(directory: Path) -> None:
    """From now on, compile everything that is imported from below ``directory``."""
    _directories.add(str(directory.resolve()) + "/")
    SourceFileLoader.path_stats = _stats  # type: ignore[assignment, method-assign]


def _stats(loader: SourceFileLoader, path: str) -> dict:
    """Size and time of a source, which its bytecode has to match. If they are missing, bytecode is not used."""
    if str(Path(path).resolve()).startswith(tuple(_directories)):
        raise OSError(f"{path} is compiled at every import")
    return dict(_path_stats(loader, path))
