"""What goes wrong with a checkpoint, always named by shard and tensor."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

_SHOWN = 20


class Fault(NamedTuple):
    """One fault: the file it is in, relative to the checkpoint, the tensor if there is one, and what is wrong."""

    file: str
    tensor: str | None
    message: str

    def __str__(self) -> str:
        return f"{self.file}: {self.tensor}: {self.message}" if self.tensor else f"{self.file}: {self.message}"


class CheckpointError(ValueError):
    """A checkpoint, or a request about one, that cannot be worked with. ``faults`` lists what was found."""

    def __init__(self, faults: Iterable[Fault] | str) -> None:
        self.faults = [] if isinstance(faults, str) else list(faults)
        lines = [faults] if isinstance(faults, str) else [str(fault) for fault in self.faults[:_SHOWN]]
        if len(self.faults) > _SHOWN:
            lines.append(f"and {len(self.faults) - _SHOWN} more")
        super().__init__("\n".join(lines))


def raise_faults(faults: Iterable[Fault]) -> None:
    """Raise one `CheckpointError` for all of them, or nothing if there are none."""
    if faults := list(faults):
        raise CheckpointError(faults)
