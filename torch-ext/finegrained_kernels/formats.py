"""The compressed-scale format as one frozen descriptor. Every size and limit is read from here, never from a dtype.

Source: docs/format.md, "One compressed plane".
"""

from __future__ import annotations

import numbers
from dataclasses import dataclass


@dataclass(frozen=True)
class CSFFormat:
    """Constants of one CSF codec and the plane geometry they imply (`R` rows, `C` columns, one byte each)."""

    codec: str
    rows_per_slab: int
    code_bits: int
    max_base: int
    position_bits: int

    @property
    def window(self) -> int:
        """How many byte values, from a row's base on, its codes can express."""
        return 1 << self.code_bits

    @property
    def position_mask(self) -> int:
        """Mask of the low bits of an exception word, which hold the position; the value is above them."""
        return (1 << self.position_bits) - 1

    def check_plane(self, num_rows: int, num_cols: int) -> None:
        """Raise `ValueError` unless planes of `num_rows` x `num_cols` bytes can be stored."""
        for name, value in (("num_rows", num_rows), ("num_cols", num_cols)):
            if not isinstance(value, numbers.Integral) or isinstance(value, bool):
                raise ValueError(f"{name} must be an int, got {value!r}")
        if num_rows <= 0 or num_rows % self.rows_per_slab:
            raise ValueError(f"num_rows must be a positive multiple of {self.rows_per_slab}, got {num_rows}")
        if num_cols <= 0 or num_cols % 2:
            raise ValueError(f"num_cols must be a positive even number, got {num_cols}")
        if num_rows * num_cols > 1 << self.position_bits:
            limit = f"a plane holds at most 2^{self.position_bits} bytes"
            raise ValueError(f"{limit}, got {num_rows} x {num_cols} = {num_rows * num_cols}")

    def slab_bytes(self, num_cols: int) -> int:
        """Bytes of one slab: a base for each row, then the rows' codes."""
        return self.rows_per_slab * (1 + num_cols * self.code_bits // 8)

    def fixed_bytes(self, num_rows: int, num_cols: int) -> int:
        """Bytes of one plane's fixed stream.

        >>> NVFP4_CSF.fixed_bytes(640, 160), 640 * 160
        (51840, 102400)
        """
        return num_rows // self.rows_per_slab * self.slab_bytes(num_cols)


NVFP4_CSF = CSFFormat(
    codec="byte-window4-fixed-stream-u24-exceptions/1",
    rows_per_slab=16,
    code_bits=4,
    max_base=240,
    position_bits=24,
)
