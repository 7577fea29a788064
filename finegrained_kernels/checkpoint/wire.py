"""Sizes of compressed planes, and cutting and stacking them in wire form (docs/format.md), without decoding a byte.

Tensors are those of `E` planes at once: ``fixed`` uint8 `[E, bytes]`, ``words`` int64 `[X]` (all planes' exceptions,
plane after plane, `value << 24 | position`) and ``counts`` int64 `[E]`, exceptions a plane.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch

CODEC = "byte-window4-fixed-stream-u24-exceptions/1"
SLAB_ROWS = 16
MAX_BASE = 240
POSITION_BITS = 24
POSITION_MASK = (1 << POSITION_BITS) - 1


def slab_bytes(cols: int) -> int:
    return SLAB_ROWS * (1 + cols // 2)


def fixed_bytes(rows: int, cols: int) -> int:
    return rows // SLAB_ROWS * slab_bytes(cols)


def geometry_problem(rows: int, cols: int) -> str | None:
    """Why a plane of this geometry cannot be compressed, or None."""
    if rows == 0 or rows % SLAB_ROWS:
        return f"{rows} rows are not a positive multiple of {SLAB_ROWS}"
    if cols == 0 or cols % 2:
        return f"{cols} columns are not a positive even number"
    if rows * cols > 1 << POSITION_BITS:
        return f"{rows} x {cols} is more than 2^{POSITION_BITS} bytes"
    return None


class Wire(NamedTuple):
    """`E` compressed planes of ``rows`` by ``cols``; see the module's docstring."""

    fixed: torch.Tensor
    words: torch.Tensor
    counts: torch.Tensor
    rows: int
    cols: int

    def cut_cols(self, first: int, last: int) -> Wire:
        """Columns ``first`` to ``last``, both even: bytes of every row's codes; exceptions move with their columns."""
        import torch

        num_planes, cols = len(self.counts), last - first
        slabs = self.fixed.view(num_planes, self.rows // SLAB_ROWS, slab_bytes(self.cols))
        bases, codes = slabs.split([SLAB_ROWS, SLAB_ROWS * self.cols // 2], dim=2)
        codes = codes.unflatten(2, (SLAB_ROWS, -1))[..., first // 2 : last // 2].flatten(2)
        position = self.words & POSITION_MASK
        row, col = position // self.cols, position % self.cols
        keep = (col >= first) & (col < last)
        words = (self.words - position + row * cols + col - first)[keep]
        fixed = torch.cat([bases, codes], dim=2).view(num_planes, -1)
        return Wire(fixed, words, _count(keep, self.counts), self.rows, cols)

    def stack(self, below: Wire) -> Wire:
        """Each plane with the plane of ``below`` under it, whose positions move on by this plane's bytes."""
        import torch

        num_planes = len(self.counts)
        halves = [self.words, below.words + self.rows * self.cols]
        planes = [torch.repeat_interleave(torch.arange(num_planes), wire.counts) for wire in (self, below)]
        order = torch.cat(planes).argsort(stable=True)
        fixed = torch.cat([self.fixed, below.fixed], dim=1)
        return Wire(fixed, torch.cat(halves)[order], self.counts + below.counts, self.rows + below.rows, self.cols)


def words_in_rows(
    words: torch.Tensor, counts: torch.Tensor, cols: int, rows: range
) -> tuple[torch.Tensor, torch.Tensor]:
    """The exceptions in some rows, positions counted from the first of them, and how many each plane has."""
    position = words & POSITION_MASK
    keep = (position >= rows.start * cols) & (position < rows.stop * cols)
    return words[keep] - rows.start * cols, _count(keep, counts)


def _count(keep: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """How many of each plane's words are kept."""
    import torch

    sums = torch.nn.functional.pad(keep.to(torch.int64).cumsum(0), (1, 0))
    ends = counts.cumsum(0)
    return sums[ends] - sums[ends - counts]
