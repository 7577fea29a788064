"""The oracle: CSF byte by byte as docs/format.md describes it, in slow plain integers, sharing no code with the rest.

Tests and `verify` compare everything else with these two functions.
"""

from __future__ import annotations

import torch


def reference_encode(plane: torch.Tensor) -> tuple[bytes, list[int]]:
    """Encode one `[R, C]` byte plane. Returns the fixed stream and the exception words, in wire order."""
    rows = [[int(byte) for byte in row] for row in plane.view(torch.uint8).tolist()]
    num_cols = len(rows[0])
    bases, codes, exceptions = [], [], []
    for i_row, row in enumerate(rows):
        # max() returns the first of equal maxima, so this is the lowest base with the best coverage.
        base = max(range(241), key=lambda candidate: sum(candidate <= byte <= candidate + 15 for byte in row))
        bases.append(base)
        row_codes = []
        for i_col, byte in enumerate(row):
            inside = base <= byte <= base + 15
            row_codes.append(byte - base if inside else 0)
            if not inside:
                exceptions.append(byte << 24 | (i_row * num_cols + i_col))
        codes.append(row_codes)
    fixed = bytearray()
    for first in range(0, len(rows), 16):
        fixed += bytes(bases[first : first + 16])
        for row_codes in codes[first : first + 16]:
            fixed += bytes(row_codes[c] | row_codes[c + 1] << 4 for c in range(0, num_cols, 2))
    return bytes(fixed), exceptions


def reference_decode(fixed: bytes, exceptions: list[int], num_rows: int, num_cols: int) -> bytes:
    """Decode one plane, row-major. Raises `ValueError` for every fault that docs/format.md lists."""
    if num_rows <= 0 or num_rows % 16 or num_cols <= 0 or num_cols % 2 or num_rows * num_cols > 2**24:
        raise ValueError(f"no such plane: {num_rows} x {num_cols}")
    slab_bytes = 16 + 16 * (num_cols // 2)
    if len(fixed) != num_rows // 16 * slab_bytes:
        raise ValueError(f"fixed has {len(fixed)} bytes")
    plane = bytearray()
    for i_row in range(num_rows):
        slab = fixed[i_row // 16 * slab_bytes :][:slab_bytes]
        base = slab[i_row % 16]
        if base > 240:
            raise ValueError(f"base {base} at row {i_row}")
        for i_col in range(num_cols):
            pair = slab[16 + (i_row % 16) * (num_cols // 2) + i_col // 2]
            plane.append(base + (pair >> 4 if i_col % 2 else pair & 15))
    previous = -1
    for word in exceptions:
        value, position = word >> 24, word & 0xFFFFFF
        if position >= num_rows * num_cols:
            raise ValueError(f"position {position} out of range")
        if position <= previous:
            raise ValueError(f"position {position} after {previous}")
        plane[position] = value
        previous = position
    return bytes(plane)
