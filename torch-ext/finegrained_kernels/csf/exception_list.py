"""The exceptions of a stack's planes in wire form, as one tensor that reads like a list."""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterator, Sequence
from typing import Any

import torch


class ExceptionList(Sequence[torch.Tensor]):
    """One uint32 tensor of exceptions for each plane. All are views of one storage, made when they are asked for.

    Making 512 tensors takes longer on the CPU than encoding their planes does on a GPU. The tensors may be written to,
    but not replaced. A copied or pickled `ExceptionList` becomes a plain list, because its class is in a module whose
    name changes with every build. To save it, save `list(exceptions)`, which `torch.load` reads as it is.

    Attributes:
        words: uint32 `[X]`, plane after plane, as `torch.cat` of the list would give it.
        ends: int64 `[E]` on the CPU, where each plane's words end.

    >>> exceptions = ExceptionList(torch.tensor([7, 8, 9], dtype=torch.uint32), torch.tensor([2, 2, 3]))
    >>> exceptions[-1].tolist(), [len(words) for words in exceptions]
    ([9], [2, 0, 1])
    >>> exceptions
    <3 tensors of 3 exceptions on cpu>
    """

    def __init__(self, words: torch.Tensor, ends: torch.Tensor) -> None:
        if words.dtype != torch.uint32 or words.ndim != 1:
            raise ValueError(f"words must be torch.uint32 [X], got {words.dtype} {list(words.shape)}")
        if ends.dtype != torch.int64 or ends.ndim != 1 or ends.device.type != "cpu":
            given = f"{ends.dtype} {list(ends.shape)} on {ends.device}"
            raise ValueError(f"ends must be torch.int64 [E] on cpu, got {given}")
        self.words = words
        self.ends = ends

    @functools.cached_property
    def _offsets(self) -> list[int]:
        """Where each plane's words begin, and where the last ones end."""
        return [0, *self.ends.tolist()]

    @property
    def counts(self) -> list[int]:
        """The number of exceptions of each plane."""
        return list(map(operator.sub, self._offsets[1:], self._offsets))

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return list(self)[index]
        plane = range(len(self))[index]  # as for a list: counts from the end, takes any index type, raises IndexError
        return self.words[self._offsets[plane] : self._offsets[plane + 1]]

    def __iter__(self) -> Iterator[torch.Tensor]:
        # Unsafe only with gradients, and a third faster than split.
        return iter(torch.unsafe_split_with_sizes(self.words, self.counts))

    def __add__(self, other: Any) -> list[torch.Tensor]:
        return list(self) + list(other) if isinstance(other, (list, ExceptionList)) else NotImplemented

    def __radd__(self, other: Any) -> list[torch.Tensor]:
        return other + list(self) if isinstance(other, list) else NotImplemented

    def __copy__(self) -> list[torch.Tensor]:
        return list(self)

    def __reduce__(self) -> tuple:
        return list, (), None, map(_PickledWords, self)

    def __repr__(self) -> str:
        return f"<{len(self)} tensors of {len(self.words)} exceptions on {self.words.device}>"


class _PickledWords:
    """A uint32 tensor that can be pickled; torch on its own would write one that it cannot load."""

    def __init__(self, words: torch.Tensor) -> None:
        self.words = words.view(torch.int32).clone()  # a view would be stored with its whole storage

    def __reduce__(self) -> tuple:
        return torch.Tensor.view, (self.words, torch.uint32)
