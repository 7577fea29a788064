"""The wire form of a stack of planes as one object. It can be validated, cut and stacked without decoding.

Source: docs/format.md, "One compressed plane".
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import operator
from collections.abc import Sequence

import torch

from ..arguments import kind_of, no_dense_tensor
from ..formats import NVFP4_CSF
from .exception_list import ExceptionList

MAX_EXCEPTIONS = 1 << 30
"""The most exceptions that a stack may hold, so that kernels can index them with int32, with room to spare."""

_BYTES = (torch.uint8,)
_WORDS = (torch.uint32, torch.int32)


class WireFault(ValueError):
    """A plane is malformed.

    Attributes:
        part: "fixed" or "exceptions".
        plane: its index.
    """

    def __init__(self, part: str, plane: int, num_planes: int, problem: str) -> None:
        super().__init__(f"{part if num_planes == 1 else f'{part}[{plane}]'}: {problem}")
        self.part, self.plane = part, plane


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class NVFP4CSFWire:
    """`E` compressed planes of `N` rows by `C` columns, on one device, in the form in which files store them.

    Attributes:
        fixed: uint8 `[E, bytes]`, each plane's fixed stream.
        words: int32 `[X]`, all planes' exceptions, plane after plane.
        ends: int64 `[E]` on the CPU, where each plane's words end.
        num_rows, num_cols: `N`, a multiple of 16, and `C`, even; `N * C` is at most 2^24.

    Raises:
        ValueError: sizes do not fit together. The content is validated by `check`.

    >>> wire = NVFP4CSFWire.of(torch.zeros(3, 48, dtype=torch.uint8), [torch.tensor([7])] * 3, num_rows=16, num_cols=4)
    Traceback (most recent call last):
    ValueError: exceptions[0] must be torch.uint32 or torch.int32, got torch.int64
    >>> words = [torch.tensor([7], dtype=torch.int32)] * 3
    >>> wire = NVFP4CSFWire.of(torch.zeros(3, 48, dtype=torch.uint8), words, num_rows=16, num_cols=4)
    >>> wire, wire.cut(cols=range(2, 4)).words.tolist(), wire.stack(wire).ends.tolist()
    (<NVFP4CSFWire of 3x16x4, 3 exceptions, cpu>, [3, 3, 3], [2, 4, 6])
    """

    fixed: torch.Tensor
    words: torch.Tensor
    ends: torch.Tensor
    num_rows: int
    num_cols: int

    def __post_init__(self) -> None:
        NVFP4_CSF.check_plane(self.num_rows, self.num_cols)
        shape = (len(self.ends), NVFP4_CSF.fixed_bytes(self.num_rows, self.num_cols))
        if tuple(self.fixed.shape) != shape:
            raise ValueError(f"fixed must have shape {shape}, got {tuple(self.fixed.shape)}")
        counts = self.counts
        if min(counts) < 0 or sum(counts) != len(self.words):
            raise ValueError(f"exceptions: {len(self.words)} words cannot be cut into planes of {counts}")
        if len(self.words) > MAX_EXCEPTIONS:
            raise ValueError(f"exceptions: a stack holds at most {MAX_EXCEPTIONS}, got {len(self.words)}: split it")

    def __repr__(self) -> str:
        shape = f"{len(self.ends)}x{self.num_rows}x{self.num_cols}"
        return f"<NVFP4CSFWire of {shape}, {len(self.words)} exceptions, {self.device}>"

    @classmethod
    def of(
        cls,
        fixed: torch.Tensor | Sequence[torch.Tensor],
        exceptions: torch.Tensor | Sequence[torch.Tensor],
        *,
        num_rows: int,
        num_cols: int,
    ) -> NVFP4CSFWire:
        """Make one from tensors as `prepare_nvfp4_csf_scales` takes them. Words are copied, and `fixed` if necessary.

        Raises:
            ValueError: a size, dtype, shape or device is wrong. The message names the tensor.
        """
        NVFP4_CSF.check_plane(num_rows, num_cols)
        num_rows, num_cols = int(num_rows), int(num_cols)
        slabs = num_rows // NVFP4_CSF.rows_per_slab, NVFP4_CSF.slab_bytes(num_cols)
        stream, words, counts = _gather(fixed, exceptions, slabs)
        ends = torch.tensor(list(itertools.accumulate(counts)), dtype=torch.int64, device="cpu")
        return cls(stream, words, ends, num_rows, num_cols)

    @classmethod
    def of_rows(
        cls, fixed: torch.Tensor, words: torch.Tensor, ends: torch.Tensor, rows: range, *, num_rows: int, num_cols: int
    ) -> NVFP4CSFWire:
        """Make one of some rows, in whole slabs, of planes of `num_rows`. `fixed` uint8 `[E, bytes]` has only the slabs
        of these rows; `words` and `ends` have all exceptions of the planes, since nothing tells where the rows' own
        begin.

        Raises:
            ValueError: sizes do not fit together.
            WireFault: as in `check`, also for exceptions outside of `rows`.
        """
        NVFP4_CSF.check_plane(num_rows, num_cols)
        _check_cut("rows", rows, num_rows, NVFP4_CSF.rows_per_slab)
        wire = cls(fixed, words, ends, len(rows), num_cols)
        wire.checked_keys(num_rows * num_cols)
        return wire._in_rows(rows)

    @property
    def device(self) -> torch.device:
        return self.fixed.device

    @functools.cached_property
    def counts(self) -> list[int]:
        """The number of exceptions of each plane."""
        ends = self.ends.tolist()
        return list(map(operator.sub, ends, [0, *ends[:-1]]))

    @property
    def exceptions(self) -> ExceptionList:
        """The words as a sequence with one uint32 tensor for each plane."""
        return ExceptionList(self.words.view(torch.uint32), self.ends)

    def to(self, device: torch.device | str) -> NVFP4CSFWire:
        return dataclasses.replace(self, fixed=self.fixed.to(device), words=self.words.to(device))

    def check(self) -> NVFP4CSFWire:
        """Return `self` if every plane is well-formed. One host sync on a GPU.

        Raises:
            WireFault: a base is above 240, or a position is out of range or not above the one before it.
        """
        self.checked_keys(self.num_rows * self.num_cols)
        return self

    def cut(self, rows: range | None = None, cols: range | None = None) -> NVFP4CSFWire:
        """Some rows of every plane, in whole slabs of 16, and an even number of its columns, starting at an even one.

        Raises:
            ValueError: the rows or columns cannot be cut out.
        """
        wire = self
        if rows is not None:
            _check_cut("rows", rows, self.num_rows, NVFP4_CSF.rows_per_slab)
            first, last = (NVFP4_CSF.fixed_bytes(row, self.num_cols) for row in (rows.start, rows.stop))
            wire = dataclasses.replace(self, fixed=self.fixed[:, first:last], num_rows=len(rows))._in_rows(rows)
        return wire if cols is None else wire._cut_cols(cols)

    def _cut_cols(self, cols: range) -> NVFP4CSFWire:
        _check_cut("cols", cols, self.num_cols, 2)
        slab_rows = NVFP4_CSF.rows_per_slab
        slabs = self.fixed.reshape(len(self.ends), self.num_rows // slab_rows, NVFP4_CSF.slab_bytes(self.num_cols))
        bases, codes = slabs.split([slab_rows, slab_rows * self.num_cols // 2], dim=2)
        codes = codes.unflatten(2, (slab_rows, -1))[..., cols.start // 2 : cols.stop // 2].flatten(2)
        positions = self._positions()
        row, col = positions // self.num_cols, positions % self.num_cols
        kept = (col >= cols.start) & (col < cols.stop)
        words = self.words - positions + (row * len(cols) + col - cols.start)
        fixed = torch.cat([bases, codes], dim=2).view(len(self.ends), -1)
        return dataclasses.replace(self, fixed=fixed, num_cols=len(cols))._keep(kept, words)

    def stack(self, below: NVFP4CSFWire) -> NVFP4CSFWire:
        """Each plane with the plane of `below` under it. Positions in the latter move up by the size of the former."""
        words = torch.cat([self.words, below.words + self.num_rows * self.num_cols])
        order = torch.cat([self._planes(), below._planes()]).argsort(stable=True)
        return NVFP4CSFWire(
            torch.cat([self.fixed, below.fixed], dim=1),
            words[order],
            self.ends + below.ends,
            self.num_rows + below.num_rows,
            self.num_cols,
        )

    def with_planes(self, others: NVFP4CSFWire, order: Sequence[int]) -> NVFP4CSFWire:
        """These planes and those of `others`, which have the same size, in a new order: plane i of the result is plane
        `order[i]` of both together."""
        exceptions = [*self.exceptions, *others.exceptions]
        fixed = torch.cat([self.fixed, others.fixed])[list(order)]
        ordered = [exceptions[plane] for plane in order]
        return NVFP4CSFWire.of(fixed, ordered, num_rows=self.num_rows, num_cols=self.num_cols)

    def _positions(self) -> torch.Tensor:
        return self.words & NVFP4_CSF.position_mask

    def _planes(self) -> torch.Tensor:
        """The plane of each word, int64 `[X]`."""
        counts = self._cpu_counts.to(self.device, non_blocking=True)
        return torch.repeat_interleave(counts, output_size=len(self.words))

    @functools.cached_property
    def _cpu_counts(self) -> torch.Tensor:
        """`counts` as a tensor that lives as long as this object, because a copy to a GPU may read it late."""
        return torch.tensor(self.counts, device="cpu")

    def _in_rows(self, rows: range) -> NVFP4CSFWire:
        """Keep only the exceptions in `rows`, and count positions from the first of these rows."""
        positions, begin = self._positions(), rows.start * self.num_cols
        return self._keep((positions >= begin) & (positions < rows.stop * self.num_cols), self.words - begin)

    def _keep(self, kept: torch.Tensor, words: torch.Tensor) -> NVFP4CSFWire:
        """Keep only some of `words`: `kept` is bool `[X]`."""
        sums = torch.nn.functional.pad(kept.cumsum(0), (1, 0))
        return dataclasses.replace(self, words=words[kept], ends=sums[self.ends.to(self.device)].cpu())

    def checked_keys(self, plane_bytes: int) -> torch.Tensor:
        """Like `check`, for exceptions in planes of `plane_bytes`. Returns their positions counted through all planes,
        int64 `[X]`; these increase if and only if they increase in every plane."""
        slabs = self.fixed.reshape(len(self.ends), self.num_rows // NVFP4_CSF.rows_per_slab, -1)
        bases = slabs[..., : NVFP4_CSF.rows_per_slab]
        keys = self._planes().mul_(plane_bytes).add_(self._positions())
        high, beyond = bases > NVFP4_CSF.max_base, self._positions() >= plane_bytes
        if torch.stack([high.any(), beyond.any(), (keys[1:] <= keys[:-1]).any()]).any():
            raise self._first_fault(plane_bytes)
        return keys

    def _first_fault(self, plane_bytes: int) -> WireFault:
        """Find the first fault. Only called when there is one."""
        num_planes = len(self.ends)
        slabs = self.fixed.reshape(num_planes, self.num_rows // NVFP4_CSF.rows_per_slab, -1)
        bases = slabs[..., : NVFP4_CSF.rows_per_slab].reshape(num_planes, -1)
        high = (bases > NVFP4_CSF.max_base).nonzero()
        if len(high):
            plane, row = high[0].tolist()
            problem = f"base {int(bases[plane, row])} at row {row} is above {NVFP4_CSF.max_base}"
            return WireFault("fixed", plane, num_planes, problem)
        for plane, own in enumerate(self._positions().split(self.counts)):
            beyond = (own >= plane_bytes).nonzero()
            if len(beyond):
                i = int(beyond[0])
                problem = f"position {int(own[i])} at index {i} is out of range for a plane of {plane_bytes} bytes"
                return WireFault("exceptions", plane, num_planes, problem)
            unordered = (own[1:] <= own[:-1]).nonzero()
            if len(unordered):
                i = int(unordered[0])
                problem = f"position {int(own[i + 1])} at index {i + 1} is not above {int(own[i])} before it"
                return WireFault("exceptions", plane, num_planes, problem)
        raise AssertionError("no fault found in scales that were rejected")


def _check_cut(name: str, part: range, size: int, unit: int) -> None:
    if part.step != 1 or not 0 <= part.start < part.stop <= size or part.start % unit or part.stop % unit:
        raise ValueError(f"{name} must be a range of multiples of {unit} in 0 to {size}, got {part}")


def _gather(
    fixed: torch.Tensor | Sequence[torch.Tensor],
    exceptions: torch.Tensor | Sequence[torch.Tensor],
    slabs: tuple[int, int],
) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
    """Check types, shapes and devices. Returns `stream [E, bytes]`, new words int32 `[X]`, and the number of exceptions
    of each plane.

    `slabs` is the shape of one plane's stream, `[slabs, bytes per slab]`; the stream may also be flat.
    """
    if isinstance(exceptions, torch.Tensor):
        fixed, exceptions = [fixed], [exceptions]  # type: ignore[list-item]  # whatever it is, it is checked below
    for name, tensors in (("fixed", fixed), ("exceptions", exceptions)):
        if not isinstance(tensors, (torch.Tensor, ExceptionList, list, tuple)) or not getattr(tensors, "ndim", 1):
            raise ValueError(f"{name} must be a list of one tensor per plane, got {kind_of(tensors)}")
    if not exceptions or len(fixed) != len(exceptions):
        raise ValueError(f"need one fixed and one exceptions tensor per plane, got {len(fixed)} and {len(exceptions)}")
    flat = (slabs[0] * slabs[1],)
    if isinstance(fixed, torch.Tensor):
        device = fixed.device
        _check_tensors("fixed", [fixed], _BYTES, [(len(fixed), *flat), (len(fixed), *slabs)], device)
        stream = fixed.reshape(len(fixed), -1)
    else:
        device = getattr(fixed[0], "device", None)  # type: ignore[assignment]  # anything but a tensor is refused below
        _check_tensors("fixed", fixed, _BYTES, [flat, slabs], device)
        if len({plane.ndim for plane in fixed}) > 1:
            fixed = [plane.reshape(-1) for plane in fixed]
        stream = torch.stack(tuple(fixed)).view(len(fixed), -1)
    if isinstance(exceptions, ExceptionList):
        counts, exceptions = exceptions.counts, [exceptions.words]
        _check_tensors("exceptions", exceptions, _WORDS, None, device)
    else:
        _check_tensors("exceptions", exceptions, _WORDS, None, device)
        counts = list(map(torch.Tensor.numel, exceptions))
    if len(set(map(operator.attrgetter("dtype"), exceptions))) > 1:
        exceptions = [words.view(torch.int32) for words in exceptions]
    return stream, torch.cat(tuple(exceptions)).view(torch.int32), counts


def _check_tensors(
    name: str,
    tensors: Sequence[torch.Tensor],
    dtypes: tuple[torch.dtype, ...],
    shapes: list[tuple[int, ...]] | None,
    device: torch.device | None,
) -> None:
    """Raise `ValueError`, naming the tensor, for the first that is not as asked for. If `shapes` is None, any 1-D shape
    will do."""
    if set(map(type, tensors)) == {torch.Tensor}:  # the usual case: hundreds of tensors, checked all at once
        extent, extents = ("ndim", [1]) if shapes is None else ("shape", shapes)
        kinds = set(map(operator.attrgetter("dtype", extent, "device"), tensors))
        if kinds <= set(itertools.product(dtypes, extents, [device])) and not no_dense_tensor(tensors[0]):
            return
    for i, tensor in enumerate(tensors):
        if not isinstance(tensor, torch.Tensor):
            fault = f"must be a tensor, got {kind_of(tensor)}"
        elif tensor.dtype not in dtypes:
            fault = f"must be {' or '.join(map(str, dtypes))}, got {tensor.dtype}"
        elif shapes is None and tensor.ndim != 1:
            fault = f"must be 1-D, got shape {tuple(tensor.shape)}"
        elif shapes is not None and tuple(tensor.shape) not in shapes:
            fault = f"must have shape {' or '.join(map(str, shapes))}, got {tuple(tensor.shape)}"
        elif tensor.device != device:
            fault = f"must be on {device} like the other tensors, got {tensor.device}"
        elif got := no_dense_tensor(tensor):
            fault = f"must be a tensor on a CPU or GPU, got {got}"
        else:
            continue
        raise ValueError(f"{name if len(tensors) == 1 else f'{name}[{i}]'} {fault}")
