"""Compressed scales in plain Triton: a program decodes those of its tile into memory of its own, and reads them there.

A tile's exceptions are stored at computed addresses. Plain Triton cannot address shared memory (scale_strip.py does, in
PTX), so the bytes go to a piece of global memory that the program uses for one tile after the other. All pieces
together are tens of MB at most, however large the weights are, and those in use stay in the cache. The loop then reads
them like dense scales. A barrier orders a program's accesses to them: on NVIDIA by definition, and on AMD's MI300
because they all go through the cache of one compute unit.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...csf.words_triton import OFFSET_TILE, exception_position, exception_value, offset_tiles

BLOCK_PAIRS = tl.constexpr(16)
"""Pairs of columns that are decoded at a time: `config.DECODED_COLS` columns."""
GROUP_PAIRS = tl.constexpr(80)
"""Pairs of columns whose codes are held in registers at a time."""
BLOCK_X = tl.constexpr(128)
"""Exceptions that are stored at a time."""


@triton.jit
def find_exceptions(scales, expert, first_row, HALF: tl.constexpr, SHAPE: tl.constexpr):
    """Where the exceptions of the tile's rows begin and end, for each half. May include others of the offset tiles at
    both ends."""
    HALVES: tl.constexpr = 2 if SHAPE.GATE else 1
    PLANE: tl.constexpr = HALVES * SHAPE.N * SHAPE.C
    offsets_ptr = scales.exception_offsets + expert * offset_tiles(PLANE)
    first = (tl.arange(0, HALVES) * SHAPE.N + first_row) * SHAPE.C
    last = tl.minimum(first + HALF * SHAPE.C, PLANE)
    return tl.load(offsets_ptr + first // OFFSET_TILE), tl.load(offsets_ptr + offset_tiles(last))


@triton.jit
def load_exceptions(exceptions_ptr, place, end):
    return tl.load(exceptions_ptr + place, mask=place < end[:, None], other=0)


@triton.jit
def store_windows(
    out_ptr, scales, expert, first_row, first_col, HALF: tl.constexpr, COLS: tl.constexpr, SHAPE: tl.constexpr
):
    """Store base + code of every byte, two columns at a time, because a byte has the codes of two columns."""
    N: tl.constexpr = SHAPE.N
    C: tl.constexpr = SHAPE.C
    HALVES: tl.constexpr = 2 if SHAPE.GATE else 1
    row = tl.arange(0, HALVES * HALF)
    plane_row = row // HALF * N + first_row + row % HALF
    ok = first_row + row % HALF < N
    pair = tl.arange(0, BLOCK_PAIRS)
    base = tl.load(scales.bases + expert * (HALVES * N) + plane_row, mask=ok, other=0).to(tl.uint16) * 0x0101
    codes_ptr = scales.codes + (expert * (HALVES * N * (C // 2)) + first_col // 2)
    pairs_ptr = out_ptr.to(tl.pointer_type(tl.uint16)) + row[:, None] * (COLS // 2) + pair[None, :]
    for group in tl.static_range(0, COLS // 2, GROUP_PAIRS):
        blocks = ()  # all blocks of a group are loaded before any is stored
        for i in tl.static_range(group, min(group + GROUP_PAIRS, COLS // 2), BLOCK_PAIRS):
            mask = ok[:, None] & (first_col // 2 + i + pair < C // 2)[None, :]
            codes = tl.load(codes_ptr + plane_row[:, None] * (C // 2) + (i + pair)[None, :], mask=mask, other=0)
            blocks = blocks + (codes,)  # noqa: RUF005 (Triton tuples do not unpack)
        for i in tl.static_range(group, min(group + GROUP_PAIRS, COLS // 2), BLOCK_PAIRS):
            codes = blocks[(i - group) // BLOCK_PAIRS].to(tl.uint16)
            tl.store(pairs_ptr + i, ((codes | (codes << 4)) & 0x0F0F) + base[:, None])  # neither byte's sum carries


@triton.jit
def store_exceptions(
    out_ptr, words, exists, first_row, first_col, HALF: tl.constexpr, COLS: tl.constexpr, SHAPE: tl.constexpr
):
    """Store those of `words`, exceptions of each half, that are in the tile."""
    half = tl.arange(0, words.shape[0])[:, None]
    position = exception_position(words)
    row = position // SHAPE.C - half * SHAPE.N - first_row
    col = position % SHAPE.C - first_col
    mask = exists & (row >= 0) & (row < HALF) & (col >= 0) & (col < COLS)
    value = exception_value(words.to(tl.uint32, bitcast=True)).to(tl.uint8)
    tl.store(out_ptr + (half * HALF + row) * COLS + col, value, mask=mask)


@triton.jit
def decode_tile(weight, tile, first_col, HALF: tl.constexpr, COLS: tl.constexpr, SHAPE: tl.constexpr):
    """Decode columns [first_col, first_col + COLS) of a tile's HALF rows (with a gate, also HALF rows of up) to bytes
    [HALF or 2 * HALF, COLS] in the program's own memory. Returns the address where column 0 would be.

    Stores windows first, then the exceptions over them. Bytes past the plane's end are undefined.
    """
    HALVES: tl.constexpr = 2 if SHAPE.GATE else 1
    STEP: tl.constexpr = BLOCK_X // HALVES
    scales = weight.scales
    expert = tile.expert.to(tl.int64)
    first_row = tile.n_tile * HALF
    out_ptr = weight.scratch + tl.program_id(0).to(tl.int64) * (HALVES * HALF * COLS)
    begin, end = find_exceptions(scales, expert, first_row, HALF=HALF, SHAPE=SHAPE)
    place = begin[:, None] + tl.arange(0, STEP)[None, :]
    words = load_exceptions(scales.exceptions, place, end)
    tl.debug_barrier()  # until all threads are done with the previous tile
    store_windows(out_ptr, scales, expert, first_row, first_col, HALF=HALF, COLS=COLS, SHAPE=SHAPE)
    tl.debug_barrier()
    for _ in range(0, tl.max(end - begin, axis=0), STEP):
        exists = place < end[:, None]
        store_exceptions(out_ptr, words, exists, first_row, first_col, HALF=HALF, COLS=COLS, SHAPE=SHAPE)
        place += STEP
        words = load_exceptions(scales.exceptions, place, end)
    tl.debug_barrier()
    return out_ptr - first_col
