"""Sizes and limits of compressed planes (docs/format.md), for code that reads headers and never loads torch.

The bundle has them too, in its formats.py, because it cannot import this package.
"""

from __future__ import annotations

CODEC = "byte-window4-fixed-stream-u24-exceptions/1"
SLAB_ROWS = 16
MAX_BASE = 240
POSITION_BITS = 24


def slab_bytes(cols: int) -> int:
    return SLAB_ROWS * (1 + cols // 2)


def fixed_bytes(rows: int, cols: int) -> int:
    return rows // SLAB_ROWS * slab_bytes(cols)


def geometry_problem(rows: int, cols: int) -> str | None:
    """Why a plane of this geometry cannot be compressed; None if it can."""
    if rows == 0 or rows % SLAB_ROWS:
        return f"{rows} rows are not a positive multiple of {SLAB_ROWS}"
    if cols == 0 or cols % 2:
        return f"{cols} columns are not a positive even number"
    if rows * cols > 1 << POSITION_BITS:
        return f"{rows} x {cols} is more than 2^{POSITION_BITS} bytes"
    return None
