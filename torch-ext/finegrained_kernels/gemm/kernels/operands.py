"""What every GEMM kernel takes: tensors in named groups, and at compile time the shape of the GEMM.

A launcher fills them with tensors; in a kernel the same fields are pointers. What a call does not have is None, which
is known at compile time. Integers in a group are specialized, so counts, which change from call to call, are not in
one. `Shape` and `TilePlan` (smem_plan.py) hold values alone, nothing that is computed when it is read: Triton tells
compiled kernels apart by the values that it is given, and does not see the code of a property.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple


class Scales(NamedTuple):
    """A weight's scales, in one of two forms.

    Dense, or swizzled: E4M3 bytes; for the tensor-core kernels in pairs (int16), or in words of 8 (int64) where a
    tile's come whole. Compressed: the tensors of NVFP4CSFScales, for the tensor-core kernels codes in words of 8
    (int32).
    """

    dense: Any = None
    bases: Any = None
    codes: Any = None
    exceptions: Any = None
    exception_offsets: Any = None


class Weight(NamedTuple):
    """E2M1 codes [E, N or 2N, K/2], as bytes or as int64 words of a group each, and their scales."""

    codes: Any
    scales: Scales
    scratch: Any = None
    """uint8: for each program of a kernel in Triton, what it decodes a tile's compressed scales into."""


class Routing(NamedTuple):
    """Whose rows are whose: problem.py. At most one of the first two is there."""

    expert_start: Any
    expert_ids: Any
    gather: Any
    scatter: Any


class Epilogue(NamedTuple):
    """What becomes of a tile's sums: they are multiplied, gated, perhaps requantized, and stored.

    A stride of 1 is of a value an expert, one of 0 of a value for all.
    """

    x_global: Any  # float32, one a row where Shape.GLOBAL_PER_ROW, else one an expert or one for all; or None
    x_expert_stride: Any
    w_global: Any  # float32 [E, 1], or [E, 2] of gate and up
    w_expert_stride: Any
    w_half_stride: Any
    alpha: Any  # silu(x) is x * sigmoid(alpha * x)
    limit: Any  # of gate and up, where Shape.HAS_LIMIT
    out: Any  # [S, N], or packed [S, N/2] with scales [S, N/16] in units of their global
    out_scales: Any
    out_global: Any
    out_expert_stride: Any


@dataclass(frozen=True)
class Shape:
    """What a kernel is compiled for, but its tile. Weight rows are N, or 2N with GATE: [gate; up]."""

    N: int
    """Columns of the output."""
    K: int
    C: int
    """Scale columns: groups of K."""
    GATE: bool
    HAS_LIMIT: bool
    SWIZZLED: bool
    COMPRESSED: bool
    GLOBAL_PER_ROW: bool
    ROUNDED: Any
    """The Triton dtype that results have before they are requantized."""
    BLOCK_E: int
    """A power of two, 2 or more, not below the number of experts."""


@dataclass(frozen=True)
class BlockTile:
    """Tile of the kernels in Triton: HALF weight rows, with a gate HALF of gate and HALF of up, by BLOCK_T routed rows,
    BLOCK_K deep a step."""

    HALF: int
    BLOCK_K: int
    BLOCK_T: int
    N_TILES: int
    """Tiles along the output's columns."""
    COLS: int
    """Scale columns that are decoded at a time, or, dense, all."""
