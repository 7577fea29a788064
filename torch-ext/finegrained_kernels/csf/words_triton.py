"""Exceptions as Triton and Gluon kernels read and write them: words of a position and a value, and where in their list
those of a plane's offset tiles begin."""

from __future__ import annotations

import triton
import triton.language as tl

from ..formats import NVFP4_CSF
from .scales import TILE_BYTES

POSITION_BITS = tl.constexpr(NVFP4_CSF.position_bits)
POSITION_MASK = tl.constexpr(NVFP4_CSF.position_mask)
OFFSET_TILE = tl.constexpr(TILE_BYTES)


@triton.jit
def exception_word(position, value):
    """uint32, of a position in a plane and the byte there, both uint32."""
    return (value << POSITION_BITS) | position


@triton.jit
def exception_position(word):
    return word & POSITION_MASK


@triton.jit
def exception_value(word):
    """Of a uint32."""
    return word >> POSITION_BITS


@triton.jit
def offset_tiles(positions):
    """Offset tiles that so many positions begin, from the first on."""
    return (positions + OFFSET_TILE - 1) // OFFSET_TILE
