"""Decodes one tile: first the words of the fixed stream, then, after a barrier, the exceptions among them.

A program owns its tile's output bytes and writes nothing else. No other program touches them, so the order of writes is
settled inside the program. The first exceptions are loaded before anything is stored. So are bases and codes, except
those of a wide swizzled tile, which takes several passes, and those of the bytes at the ends of an unaligned tile.

A workspace may start at any byte, but words are stored at aligned addresses. If the workspace starts `shift` bytes past
an aligned address, each stored word is the end of one decoded word and the start of the next, and the bytes at the two
ends of the tile are stored one by one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import triton
import triton.language as tl

from ..swizzle_triton import col_tiles, swizzled_bytes, swizzled_offset
from .words_triton import OFFSET_TILE, exception_position, exception_value, offset_tiles


class Stream(NamedTuple):
    """The tensors of NVFP4CSFScales; in a kernel, pointers to them."""

    bases: Any
    codes: Any
    exceptions: Any
    exception_offsets: Any


@dataclass(frozen=True)
class Plane:
    """What every plane of a stack has in common."""

    ROWS: int
    COLS: int
    BYTES: int
    """Size of a decoded plane."""


class Span(NamedTuple):
    """Exceptions `[begin, end)`, which include those at positions `[first, last)` of a plane, and perhaps others of the
    offset tiles at both ends."""

    begin: Any
    end: Any
    first: Any
    last: Any


@triton.jit
def plane_span(offsets_ptr, plane, first, last, PLANE: tl.constexpr):
    offsets_ptr += plane * offset_tiles(PLANE.BYTES)
    begin = tl.load(offsets_ptr + first // OFFSET_TILE)
    end = tl.load(offsets_ptr + offset_tiles(last))
    return Span(begin, end, first, last)


@triton.jit
def store_exceptions(out_ptr, words, mask, span, PLANE: tl.constexpr, SWIZZLED: tl.constexpr):
    """Store those exceptions of `words` whose position is in the span, into the plane at `out_ptr`."""
    position = exception_position(words)
    mask = mask & (position >= span.first) & (position < span.last)
    if SWIZZLED:
        row, col = position // PLANE.COLS, position % PLANE.COLS
        position = swizzled_offset(row, col, col_tiles(PLANE.COLS), UNIT=1)
    tl.store(out_ptr + position, exception_value(words).to(tl.uint8), mask=mask, cache_modifier=".cg")


@triton.jit
def finish_with_exceptions(
    out_ptr, exceptions_ptr, words, span, PLANE: tl.constexpr, BLOCK_X: tl.constexpr, SWIZZLED: tl.constexpr
):  # fmt: skip
    """Once the whole tile is stored, store its exceptions over it: `words`, which were loaded before, then any
    others."""
    tl.debug_barrier()
    offs_x = span.begin + tl.arange(0, BLOCK_X)
    store_exceptions(out_ptr, words, offs_x < span.end, span, PLANE=PLANE, SWIZZLED=SWIZZLED)
    for i_x in range(span.begin + BLOCK_X, span.end, BLOCK_X):
        offs_x = i_x + tl.arange(0, BLOCK_X)
        words = tl.load(exceptions_ptr + offs_x, mask=offs_x < span.end, other=0)
        store_exceptions(out_ptr, words, offs_x < span.end, span, PLANE=PLANE, SWIZZLED=SWIZZLED)


@triton.jit
def spread_codes(x):
    """Spread the four 4-bit codes in the lower half of every 32 bits to one byte each."""
    x = (x | (x << 8)) & 0x00FF00FF00FF00FF
    return (x | (x << 4)) & 0x0F0F0F0F0F0F0F0F


@triton.jit
def row_words(bases_ptr, codes_ptr, offs, mask, NUM_COLS: tl.constexpr):
    """Bytes `8 * offs` to `8 * offs + 7` of a row-major plane as uint64, before its exceptions are stored.

    If 8 divides C, the eight columns are in one row. Otherwise the two columns of each pair are, because C is even.
    """
    x = tl.load(codes_ptr.to(tl.pointer_type(tl.uint32)) + offs, mask=mask, other=0).to(tl.uint64)
    x = spread_codes((x | (x << 16)) & 0x0000FFFF0000FFFF)
    # Adding bases never carries from one byte to the next: base + code < 256.
    if NUM_COLS % 8 == 0:
        base = tl.load(bases_ptr + offs // (NUM_COLS // 8), mask=mask, other=0).to(tl.uint64)
        x += base * 0x0101010101010101
    else:
        for i_pair in tl.static_range(4):
            base = tl.load(bases_ptr + (offs * 4 + i_pair) // (NUM_COLS // 2), mask=mask, other=0).to(tl.uint64)
            x += (base * 0x0101) << (16 * i_pair)
    return x


@triton.jit
def decode_row_tile(
    out_ptr, stream, plane, i_tile, shift,
    PLANE: tl.constexpr, BLOCK: tl.constexpr, BLOCK_X: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Decode `BLOCK` words of 8 bytes of a row-major plane, from byte `i_tile * 8 * BLOCK`."""
    NUM_ROWS: tl.constexpr = PLANE.ROWS
    NUM_COLS: tl.constexpr = PLANE.COLS
    PLANE_BYTES: tl.constexpr = PLANE.BYTES
    plane = plane.to(tl.int64)
    out_ptr += plane * PLANE_BYTES
    bases_ptr = stream.bases + plane * NUM_ROWS
    codes_ptr = stream.codes + plane * (PLANE_BYTES // 2)
    first = i_tile * (8 * BLOCK)
    last = min(first + 8 * BLOCK, PLANE_BYTES)
    span = plane_span(stream.exception_offsets, plane, first, last, PLANE)
    offs_x = span.begin + tl.arange(0, BLOCK_X)
    words = tl.load(stream.exceptions + offs_x, mask=offs_x < span.end, other=0)

    offs = i_tile * BLOCK + tl.arange(0, BLOCK)
    mask = offs < PLANE_BYTES // 8
    value = row_words(bases_ptr, codes_ptr, offs, mask, NUM_COLS)
    if ALIGNED:
        tl.store(out_ptr.to(tl.pointer_type(tl.uint64)) + offs, value, mask=mask, cache_modifier=".cg")
    else:
        mask = mask & (offs > i_tile * BLOCK)
        before = row_words(bases_ptr, codes_ptr, offs - 1, mask, NUM_COLS)
        bits = (8 * shift).to(tl.uint64)
        aligned_ptr = (out_ptr - shift).to(tl.pointer_type(tl.uint64))
        tl.store(aligned_ptr + offs, (before >> (64 - bits)) | (value << bits), mask=mask)
        end = tl.arange(0, 8)
        offs_b = tl.where(end < 8 - shift, first + end, last - 8 + end)
        value = row_words(bases_ptr, codes_ptr, offs_b // 8, end < 8, NUM_COLS)
        tl.store(out_ptr + offs_b, (value >> (offs_b % 8 * 8).to(tl.uint64)).to(tl.uint8))

    finish_with_exceptions(
        out_ptr, stream.exceptions, words, span, PLANE=PLANE, BLOCK_X=BLOCK_X, SWIZZLED=False
    )  # fmt: skip


@triton.constexpr_function
def code_parts(num_cols: int) -> int:
    """The number of parts in a group of column tiles."""
    return 2 if num_cols % 32 == 0 else 1


@triton.constexpr_function
def code_width(num_cols: int) -> int:
    """The number of column tiles in each part. A row's codes in one part are one word."""
    return 4 if num_cols % 16 == 0 else 2 if num_cols % 8 == 0 else 1


@triton.jit
def load_codes(codes_ptr, row, group, mask, NUM_COLS: tl.constexpr):
    """A row's codes in one group of column tiles: a word for each part, with 16 bits for each tile; zero where the mask
    is false."""
    WIDTH: tl.constexpr = code_width(NUM_COLS)
    if code_parts(NUM_COLS) == 2:
        offs = (row * (NUM_COLS // 16) + group * 2)[:, None] + tl.arange(0, 2)[None, :]
        codes = tl.load(codes_ptr.to(tl.pointer_type(tl.uint64)) + offs, mask=mask[:, None], other=0)
        first, second = tl.split(codes)
    elif NUM_COLS % 4 == 0:
        kind: tl.constexpr = tl.uint64 if WIDTH == 4 else tl.uint32 if WIDTH == 2 else tl.uint16
        offs = row * (NUM_COLS // 4 // WIDTH) + group
        first = tl.load(codes_ptr.to(tl.pointer_type(kind)) + offs, mask=mask, other=0).to(tl.uint64)
        second = first
    else:
        offs = row * (NUM_COLS // 2) + group * 2
        first = tl.load(codes_ptr + offs, mask=mask, other=0).to(tl.uint64)
        first |= tl.load(codes_ptr + offs + 1, mask=mask & (group * 4 + 2 < NUM_COLS), other=0).to(tl.uint64) << 8
        second = first
    return first, second


@triton.jit
def load_two_rows(codes_ptr, row, group, mask, num_rows, NUM_COLS: tl.constexpr):
    """`load_codes` for `row` and for the row 32 below it."""
    upper = load_codes(codes_ptr, row, group, mask & (row < num_rows), NUM_COLS)
    lower = load_codes(codes_ptr, row + 32, group, mask & (row + 32 < num_rows), NUM_COLS)
    return upper, lower


@triton.jit
def tiles_before(codes, carried, is_first, PARTS: tl.constexpr, WIDTH: tl.constexpr):
    """`codes`; where `is_first`, they are shifted by one column tile and begin with the last one of `carried`."""
    last: tl.constexpr = 16 * (WIDTH - 1)
    first_part = tl.where(is_first, (codes[0] << 16) | (carried[PARTS - 1] >> last), codes[0])
    second_part = tl.where(is_first, (codes[1] << 16) | (codes[0] >> last), codes[1])
    return first_part, second_part


@triton.jit
def load_bases(bases_ptr, row, num_rows):
    """The base of `row` in each of the lower four bytes, and that of the row 32 below it in the upper four; zero past
    the last row."""
    upper = tl.load(bases_ptr + row, mask=row < num_rows, other=0).to(tl.uint64)
    lower = tl.load(bases_ptr + row + 32, mask=row + 32 < num_rows, other=0).to(tl.uint64)
    return (upper | (lower << 32)) * 0x01010101


@triton.jit
def add_bases(upper, lower, bases, col_tile, NUM_COLS: tl.constexpr):
    """Four columns of two rows as uint64, from 16 bits of codes for each row; zero past the last column."""
    x = spread_codes((upper & 0xFFFF) | ((lower & 0xFFFF) << 32))
    if NUM_COLS % 4 == 0:
        return x + bases
    return x + tl.where(col_tile * 4 + 2 < NUM_COLS, bases, bases & 0x0000FFFF0000FFFF)


@triton.jit
def decode_swizzled_tile(
    out_ptr, stream, plane, i_tile, shift,
    PLANE: tl.constexpr, BLOCK: tl.constexpr, BLOCK_X: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Decode rows `[128 * i_tile, ...)` of a plane to `[ceil(C / 4), 32, 16]`.

    The output's 8-byte words are numbered in the order in which they lie in memory: the two halves of 16 bytes, then 32
    rows, then column tiles. A word holds bytes of two rows, 32 apart. Neighbouring words hold bytes of distant rows, so
    codes are loaded for a whole group of column tiles at once.
    """
    NUM_ROWS: tl.constexpr = PLANE.ROWS
    NUM_COLS: tl.constexpr = PLANE.COLS
    PLANE_BYTES: tl.constexpr = PLANE.BYTES
    COL_TILES: tl.constexpr = col_tiles(NUM_COLS)
    PARTS: tl.constexpr = code_parts(NUM_COLS)
    WIDTH: tl.constexpr = code_width(NUM_COLS)
    GROUPS: tl.constexpr = COL_TILES // (PARTS * WIDTH)
    plane = plane.to(tl.int64)
    out_ptr += plane * swizzled_bytes(NUM_ROWS, NUM_COLS)
    bases_ptr = stream.bases + plane * NUM_ROWS + i_tile * 128
    codes_ptr = stream.codes + plane * (PLANE_BYTES // 2) + i_tile * (64 * NUM_COLS)
    first = i_tile * (128 * NUM_COLS)
    last = min(first + 128 * NUM_COLS, PLANE_BYTES)
    span = plane_span(stream.exception_offsets, plane, first, last, PLANE)
    offs_x = span.begin + tl.arange(0, BLOCK_X)
    words = tl.load(stream.exceptions + offs_x, mask=offs_x < span.end, other=0)

    tile_ptr = out_ptr + i_tile * (COL_TILES * 512)
    words_ptr = (tile_ptr - shift).to(tl.pointer_type(tl.uint64))
    num_rows = NUM_ROWS - i_tile * 128
    nth = tl.arange(0, BLOCK)
    row = nth % 2 * 64 + nth // 2 % 32
    bases = load_bases(bases_ptr, row, num_rows)
    if not ALIGNED:
        # A column tile's first word is preceded by the last word of the tile before it.
        is_first = nth % 64 == 0
        nth_before = (nth + 63) % 64
        row_before = nth_before % 2 * 64 + nth_before // 2
        bases_before = load_bases(bases_ptr, row_before, num_rows)
        bits = (8 * shift).to(tl.uint64)
    for i_group in range(0, GROUPS, BLOCK // 64):
        group = i_group + nth // 64
        mask = group < GROUPS
        upper, lower = load_two_rows(codes_ptr, row, group, mask, num_rows, NUM_COLS=NUM_COLS)
        if not ALIGNED:
            codes = load_two_rows(codes_ptr, row_before, group, mask, num_rows, NUM_COLS=NUM_COLS)
            mask_carried = mask & is_first & (group > 0)
            carried = load_two_rows(codes_ptr, row_before, group - 1, mask_carried, num_rows, NUM_COLS=NUM_COLS)
            upper_before = tiles_before(codes[0], carried[0], is_first, PARTS, WIDTH)
            lower_before = tiles_before(codes[1], carried[1], is_first, PARTS, WIDTH)
        for i_part in tl.static_range(PARTS):
            for i_width in tl.static_range(WIDTH):
                bit = 16 * i_width
                col_tile = (group * PARTS + i_part) * WIDTH + i_width
                value = add_bases(upper[i_part] >> bit, lower[i_part] >> bit, bases, col_tile, NUM_COLS)
                offs = col_tile * 64 + nth % 64
                if ALIGNED:
                    tl.store(words_ptr + offs, value, mask=mask, cache_modifier=".cg")
                else:
                    col_tile_before = tl.where(is_first, col_tile - 1, col_tile)
                    upper_word, lower_word = upper_before[i_part] >> bit, lower_before[i_part] >> bit
                    before = add_bases(upper_word, lower_word, bases_before, col_tile_before, NUM_COLS)
                    value = (before >> (64 - bits)) | (value << bits)
                    tl.store(words_ptr + offs, value, mask=mask & (offs > 0))
    if not ALIGNED:
        end = tl.arange(0, 8)
        offs = tl.where(end < 8 - shift, end, COL_TILES * 512 - 8 + end)
        row = offs // 8 % 2 * 64 + offs // 16 % 32
        group = offs // 512 // (PARTS * WIDTH)
        in_group = offs // 512 % (PARTS * WIDTH)
        upper, lower = load_two_rows(codes_ptr, row, group, end < 8, num_rows, NUM_COLS=NUM_COLS)
        is_second = in_group >= WIDTH
        bit = (16 * (in_group % WIDTH)).to(tl.uint64)
        value = add_bases(
            tl.where(is_second, upper[1], upper[0]) >> bit, tl.where(is_second, lower[1], lower[0]) >> bit,
            load_bases(bases_ptr, row, num_rows), offs // 512, NUM_COLS,
        )  # fmt: skip
        tl.store(tile_ptr + offs, (value >> (offs % 8 * 8).to(tl.uint64)).to(tl.uint8))

    finish_with_exceptions(
        out_ptr, stream.exceptions, words, span, PLANE=PLANE, BLOCK_X=BLOCK_X, SWIZZLED=True
    )  # fmt: skip
