"""The swizzled scale layout (swizzle.py) as Triton and Gluon kernels read and write it."""

from __future__ import annotations

import triton
import triton.language as tl

from .swizzle import swizzled_shape

plane_shape = triton.constexpr_function(swizzled_shape)


@triton.constexpr_function
def col_tiles(num_cols: int) -> int:
    """Tiles side by side in a plane of `num_cols` columns."""
    return plane_shape(1, num_cols)[1]


@triton.constexpr_function
def swizzled_bytes(num_rows: int, num_cols: int) -> int:
    """Bytes of a swizzled plane."""
    row_tiles, col_tiles, *tile = plane_shape(num_rows, num_cols)
    return row_tiles * col_tiles * tile[0] * tile[1]


@triton.jit
def swizzled_offset(row, col, COL_TILES: tl.constexpr, UNIT: tl.constexpr):
    """The offset of column `col` of a row in its plane. Columns and the result are counted in units of UNIT bytes, 1 or
    2."""
    COLS: tl.constexpr = 4 // UNIT  # per tile
    tile = row // 128 * COL_TILES + col // COLS
    return tile * (128 * COLS) + row % 32 * (4 * COLS) + row // 32 % 4 * COLS + col % COLS
