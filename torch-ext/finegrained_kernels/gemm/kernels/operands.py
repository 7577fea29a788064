"""The arguments of every GEMM kernel: tensors in named groups, and the shape of the GEMM at compile time.

A launcher fills the groups with tensors; in a kernel the same fields are pointers. Optional tensors that a call does
not have are None, which kernels know at compile time. Triton specializes integers in a group, so counts, which change
from call to call, are arguments of their own. `Shape` and `TilePlan` (smem_plan.py) hold only values and no properties:
Triton distinguishes compiled kernels by the values it is given, and does not see the code of a property.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple


class Scales(NamedTuple):
    """A weight's scales, in one of two forms.

    Dense or swizzled scales are E4M3 bytes. The tensor-core kernels read them in pairs (int16), or in words of 8
    (int64) if a tile's scales are loaded at once. Compressed scales are the tensors of NVFP4CSFScales; the tensor-core
    kernels read their codes in words of 8 (int32).
    """

    dense: Any = None
    bases: Any = None
    codes: Any = None
    exceptions: Any = None
    exception_offsets: Any = None


class Weight(NamedTuple):
    """E2M1 codes [E, N or 2N, K/2], as bytes or as one int64 word for each group, and their scales."""

    codes: Any
    scales: Scales
    scratch: Any = None
    """uint8: memory into which each program of a kernel in Triton decodes a tile's compressed scales."""


class Routing(NamedTuple):
    """Which rows belong to which expert, as in problem.py. At most one of `expert_start` and `expert_ids` is given."""

    expert_start: Any
    expert_ids: Any
    gather: Any
    scatter: Any


class Epilogue(NamedTuple):
    """How a tile's sums become output: they are multiplied, gated, perhaps requantized, and stored.

    A stride is 1 if every expert has its own value, and 0 if there is one value for all.
    """

    x_global: Any  # float32, one per row if Shape.GLOBAL_PER_ROW, else one per expert or one for all; or None
    x_expert_stride: Any
    w_global: Any  # float32 [E, 1], or [E, 2] for gate and up
    w_expert_stride: Any
    w_half_stride: Any
    alpha: Any  # silu(x) is x * sigmoid(alpha * x)
    limit: Any  # of gate and up, if Shape.HAS_LIMIT
    out: Any  # [S, N], or packed [S, N/2] with scales [S, N/16] in units of their global
    out_scales: Any
    out_global: Any
    out_expert_stride: Any


@dataclass(frozen=True)
class Shape:
    """What a kernel is compiled for, apart from its tile. There are N weight rows; with GATE 2N of them, [gate; up]."""

    N: int
    """The number of columns of the output."""
    K: int
    C: int
    """The number of scale columns, which are groups of K."""
    GATE: bool
    HAS_LIMIT: bool
    SWIZZLED: bool
    COMPRESSED: bool
    GLOBAL_PER_ROW: bool
    ROUNDED: Any
    """The Triton dtype of results before they are requantized."""
    BLOCK_E: int
    """A power of two, 2 or more, not below the number of experts."""


@dataclass(frozen=True)
class BlockTile:
    """Tile of the kernels in Triton: HALF weight rows (with a gate, HALF rows each of gate and up) by BLOCK_T routed
    rows, in steps of BLOCK_K."""

    HALF: int
    BLOCK_K: int
    BLOCK_T: int
    N_TILES: int
    """Tiles along the output's columns."""
    COLS: int
    """Scale columns that are decoded at a time; all of them if scales are dense."""
