"""The swizzled scale layout (swizzle.py) as Triton and Gluon kernels read and write it."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def swizzled_offset(row, col, COL_TILES: tl.constexpr, UNIT: tl.constexpr):
    """Where column `col` of a row is in its plane. Columns are counted in UNIT bytes, 1 or 2, and so is the result."""
    COLS: tl.constexpr = 4 // UNIT  # of a tile
    tile = row // 128 * COL_TILES + col // COLS
    return tile * (128 * COLS) + row % 32 * (4 * COLS) + row // 32 % 4 * COLS + col % COLS
