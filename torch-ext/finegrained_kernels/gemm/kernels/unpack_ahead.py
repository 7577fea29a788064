"""Unpacks weights to bf16 in memory, for a GEMM with many tokens that reads them so. Each product of code and scale is
exact in bf16.

Bytes moved: for each weight, 4.5 bits are read and 2 bytes written; the roof is a copy of as many bytes. A program
unpacks the weights of one offset tile of scales. If scales are compressed, it first uses bases and codes, and then,
after a barrier, unpacks the groups of the tile's exceptions again.
"""

from __future__ import annotations

import triton.experimental.gluon.language as gl
from triton.experimental import gluon

from ...csf.words_triton import OFFSET_TILE, exception_position, exception_value
from ...nvfp4.rounding import e2m1_to_float, e4m3_to_float
from .unpack import barrier


@gluon.jit
def unpacked(words, scales):
    """Turn words of 8 codes [B] and their scales, float32 [B], into pairs of bf16, int32 [B, 4]."""
    PARENT: gl.constexpr = words.type.layout.parent
    shift = 8 * gl.arange(0, 4, gl.SliceLayout(0, PARENT))
    codes = words[:, None] >> shift[None, :]
    low = (e2m1_to_float(codes) * scales[:, None]).to(gl.int32, bitcast=True)
    high = (e2m1_to_float(codes >> 4) * scales[:, None]).to(gl.int32, bitcast=True)
    return ((low >> 16) & 0xFFFF) | (high & ~0xFFFF)


@gluon.jit
def patch_exceptions(out_ptr, words_ptr, scales, tile, PAIRS: gl.constexpr):
    """Unpack the groups of a tile's exceptions again, with the right scales."""
    BLOCK_X: gl.constexpr = 32 * gl.num_warps()
    lane = gl.arange(0, BLOCK_X, gl.SliceLayout(1, PAIRS))
    pair = gl.arange(0, 4, gl.SliceLayout(0, PAIRS))
    end = gl.load(scales.exception_offsets + tile + 1)
    for first in range(gl.load(scales.exception_offsets + tile), end, BLOCK_X):
        exists = first + lane < end
        word = gl.load(scales.exceptions + first + lane, mask=exists, other=0).to(gl.uint32, bitcast=True)
        group = exception_position(word).to(gl.int32, bitcast=True) - tile * OFFSET_TILE
        scale = e4m3_to_float(exception_value(word).to(gl.int32, bitcast=True))
        for half in gl.static_range(2):
            codes = gl.load(words_ptr + (2 * group + half), mask=exists, other=0)
            offsets = (2 * group + half)[:, None] * 4 + pair[None, :]
            gl.store(out_ptr + offsets, unpacked(codes, scale), mask=exists[:, None])


@gluon.jit(do_not_specialize=["first_tile"])
def unpack_kernel(out_ptr, weight, factor_ptr, factors_ptr, first_tile, C: gl.constexpr, PLANE: gl.constexpr):
    """Unpack a weight with PLANE scales, C in a row, from offset tile `first_tile` on. Each program does one tile.

    out: pairs of bf16, as int32. weight: see operands.py; its codes are words of 8 (int32), its scales bytes.
    `factors` is set to (factor, 0), the multipliers that the following GEMM reads.
    """
    PAIRS: gl.constexpr = gl.BlockedLayout([1, 4], [32, 1], [gl.num_warps(), 1], [1, 0])
    scales = weight.scales
    pid = gl.program_id(0)
    if pid == 0:
        gl.store(factors_ptr, gl.load(factor_ptr))
        gl.store(factors_ptr + 1, 0.0)
    tile = first_tile + pid
    word = gl.arange(0, 2 * OFFSET_TILE, gl.SliceLayout(1, PAIRS))
    pair = gl.arange(0, 4, gl.SliceLayout(0, PAIRS))
    position = tile * OFFSET_TILE + word // 2
    mask = position < PLANE
    words_ptr = weight.codes + tile.to(gl.int64) * (2 * OFFSET_TILE)
    out_ptr += pid.to(gl.int64) * (8 * OFFSET_TILE)
    words = gl.load(words_ptr + word, mask=mask, other=0)
    if scales.dense is not None:
        byte = gl.load(scales.dense + position, mask=mask, other=0).to(gl.int32)
    else:
        code = gl.load(scales.codes + position // 2, mask=mask, other=0).to(gl.int32)
        byte = gl.load(scales.bases + position // C, mask=mask, other=0).to(gl.int32)
        byte += (code >> (position % 2 * 4)) & 15
    gl.store(out_ptr + (word[:, None] * 4 + pair[None, :]), unpacked(words, e4m3_to_float(byte)), mask=mask[:, None])
    if scales.dense is None:
        barrier()
        patch_exceptions(out_ptr, words_ptr, scales, tile, PAIRS)
