"""Faults of a checkpoint, which always name shard and tensor."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

_SHOWN = 5
_MAX_TEXT = 400


def printable(text: str) -> str:
    """A text from a checkpoint as messages show it: on one line, whatever it contains, and cut if it is long."""
    text = text if text.isprintable() else ascii(text)[1:-1]
    return text if len(text) <= _MAX_TEXT else f"{text[:_MAX_TEXT]}... ({len(text)} characters)"


class Fault(NamedTuple):
    """One fault: its file, relative to the checkpoint ("." for the checkpoint as a whole), the tensor if there is one,
    and what is wrong."""

    file: str
    tensor: str | None
    message: str

    def __str__(self) -> str:
        where = [self.file] if self.file != "." else []
        parts = [*where, self.tensor, self.message] if self.tensor else [*where, self.message]
        return ": ".join(map(printable, parts))


class CheckpointError(ValueError):
    """A checkpoint is faulty, or cannot be used as requested. The message has the first faults, in one line; ``faults``
    has all."""

    def __init__(self, faults: Iterable[Fault] | str) -> None:
        self.faults = [] if isinstance(faults, str) else list(faults)
        parts = [faults] if isinstance(faults, str) else [str(fault) for fault in self.faults[:_SHOWN]]
        if len(self.faults) > _SHOWN:
            parts.append(f"and {len(self.faults) - _SHOWN} more")
        text = "; ".join(parts)
        super().__init__(text if text.isprintable() else ascii(text)[1:-1])


def raise_faults(faults: Iterable[Fault]) -> None:
    """Raise one `CheckpointError` for all of them, or nothing if there are none."""
    if faults := list(faults):
        raise CheckpointError(faults)
