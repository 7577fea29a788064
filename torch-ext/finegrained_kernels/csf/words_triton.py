"""How Triton and Gluon kernels read and write exceptions: words of a position and a value, and the tiles of positions
for which offsets into their list are stored."""

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
    """The uint32 word of a position in a plane and the byte there, both uint32."""
    return (value << POSITION_BITS) | position


@triton.jit
def exception_position(word):
    return word & POSITION_MASK


@triton.jit
def exception_value(word):
    """The byte of a uint32 word."""
    return word >> POSITION_BITS


@triton.jit
def offset_tiles(positions):
    """The number of offset tiles that the first `positions` positions begin."""
    return (positions + OFFSET_TILE - 1) // OFFSET_TILE
