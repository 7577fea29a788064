"""One tile of decoding: the words of the fixed stream first, then, after a barrier, the exceptions among them.

A program owns its tile's output bytes and writes nothing else, so no other program touches them and the order is
settled inside it. Bases, codes and exceptions are all asked for before anything is stored.

A workspace may start at any byte. Words are stored at aligned addresses: with the workspace `shift` bytes past one,
each stored word is the end of one decoded word and the start of the next, and the bytes at the tile's two ends are
stored one by one.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def plane_exceptions(offsets_ptr, plane, first, last, PLANE_BYTES: tl.constexpr, OFFSET_TILE: tl.constexpr):
    """Where the exceptions of positions `[first, last)` of a plane lie, give or take those of an offset tile."""
    offsets_ptr += plane * ((PLANE_BYTES + OFFSET_TILE - 1) // OFFSET_TILE)
    begin = tl.load(offsets_ptr + first // OFFSET_TILE)
    end = tl.load(offsets_ptr + (last + OFFSET_TILE - 1) // OFFSET_TILE)
    return begin, end


@triton.jit
def store_exceptions(
    out_ptr, words, mask, first, last, NUM_COLS: tl.constexpr, POSITION_BITS: tl.constexpr, SWIZZLED: tl.constexpr
):
    """Store the exceptions whose position is in `[first, last)` of the plane at `out_ptr`."""
    position = words & ((1 << POSITION_BITS) - 1)
    mask = mask & (position >= first) & (position < last)
    if SWIZZLED:
        COL_TILES: tl.constexpr = (NUM_COLS + 3) // 4
        row = position // NUM_COLS
        col = position % NUM_COLS
        position = (row // 128 * COL_TILES + col // 4) * 512 + row % 32 * 16 + row // 32 % 4 * 4 + col % 4
    tl.store(out_ptr + position, (words >> POSITION_BITS).to(tl.uint8), mask=mask, cache_modifier=".cg")


@triton.jit
def row_words(bases_ptr, codes_ptr, offs, mask, NUM_COLS: tl.constexpr):
    """Bytes `8 * offs` to `8 * offs + 7` of a row-major plane, without its exceptions, as uint64.

    Eight columns lie in one row if 8 divides C, else each of the four pairs does, as C is even.
    """
    x = tl.load(codes_ptr.to(tl.pointer_type(tl.uint32)) + offs, mask=mask, other=0).to(tl.uint64)
    x = (x | (x << 16)) & 0x0000FFFF0000FFFF
    x = (x | (x << 8)) & 0x00FF00FF00FF00FF
    x = (x | (x << 4)) & 0x0F0F0F0F0F0F0F0F
    # Adding bases never carries from byte to byte: base + code < 256.
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
    out_ptr, bases_ptr, codes_ptr, exceptions_ptr, offsets_ptr, plane, i_tile, shift,
    NUM_ROWS: tl.constexpr, NUM_COLS: tl.constexpr, OFFSET_TILE: tl.constexpr, POSITION_BITS: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_X: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Decode `BLOCK` words of 8 bytes of a row-major plane, from byte `i_tile * 8 * BLOCK`."""
    PLANE_BYTES: tl.constexpr = NUM_ROWS * NUM_COLS
    plane = plane.to(tl.int64)
    out_ptr += plane * PLANE_BYTES
    bases_ptr += plane * NUM_ROWS
    codes_ptr += plane * (PLANE_BYTES // 2)
    first = i_tile * (8 * BLOCK)
    last = min(first + 8 * BLOCK, PLANE_BYTES)
    x_begin, x_end = plane_exceptions(offsets_ptr, plane, first, last, PLANE_BYTES, OFFSET_TILE)
    offs_x = x_begin + tl.arange(0, BLOCK_X)
    words = tl.load(exceptions_ptr + offs_x, mask=offs_x < x_end, other=0)

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

    tl.debug_barrier()
    store_exceptions(out_ptr, words, offs_x < x_end, first, last, NUM_COLS, POSITION_BITS, SWIZZLED=False)
    for i_x in range(x_begin + BLOCK_X, x_end, BLOCK_X):
        offs_x = i_x + tl.arange(0, BLOCK_X)
        words = tl.load(exceptions_ptr + offs_x, mask=offs_x < x_end, other=0)
        store_exceptions(out_ptr, words, offs_x < x_end, first, last, NUM_COLS, POSITION_BITS, SWIZZLED=False)


@triton.jit
def swizzled_words(bases_ptr, codes_ptr, row, col, mask, NUM_ROWS: tl.constexpr, NUM_COLS: tl.constexpr):
    """Four columns from `col`, a multiple of 4, of `row`, without exceptions, as uint32; zero where there are none."""
    mask = mask & (row < NUM_ROWS) & (col < NUM_COLS)
    codes_ptr += (row * NUM_COLS + col) // 2
    if NUM_COLS % 4 == 0:
        x = tl.load(codes_ptr.to(tl.pointer_type(tl.uint16)), mask=mask, other=0).to(tl.uint32)
        spread = 0x01010101
    else:
        second = mask & (col + 2 < NUM_COLS)
        x = tl.load(codes_ptr, mask=mask, other=0).to(tl.uint32)
        x |= tl.load(codes_ptr + 1, mask=second, other=0).to(tl.uint32) << 8
        spread = tl.where(second, 0x01010101, 0x0101).to(tl.uint32)
    x = (x | (x << 8)) & 0x00FF00FF
    x = (x | (x << 4)) & 0x0F0F0F0F
    return x + tl.load(bases_ptr + row, mask=mask, other=0).to(tl.uint32) * spread


@triton.jit
def decode_swizzled_tile(
    out_ptr, bases_ptr, codes_ptr, exceptions_ptr, offsets_ptr, plane, i_tile, shift,
    NUM_ROWS: tl.constexpr, NUM_COLS: tl.constexpr, OFFSET_TILE: tl.constexpr, POSITION_BITS: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_X: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Decode rows `[128 * i_tile, ...)` of a plane to `[ceil(C / 4), 32, 16]`, `BLOCK` column tiles at a time."""
    PLANE_BYTES: tl.constexpr = NUM_ROWS * NUM_COLS
    ROW_TILES: tl.constexpr = (NUM_ROWS + 127) // 128
    COL_TILES: tl.constexpr = (NUM_COLS + 3) // 4
    plane = plane.to(tl.int64)
    out_ptr += plane * (ROW_TILES * COL_TILES * 512)
    bases_ptr += plane * NUM_ROWS
    codes_ptr += plane * (PLANE_BYTES // 2)
    first = i_tile * (128 * NUM_COLS)
    last = min(first + 128 * NUM_COLS, PLANE_BYTES)
    x_begin, x_end = plane_exceptions(offsets_ptr, plane, first, last, PLANE_BYTES, OFFSET_TILE)

    tile_ptr = out_ptr + i_tile * (COL_TILES * 512)
    row = tl.arange(0, 128)[:, None]
    for i_col in range(0, COL_TILES, BLOCK):
        col = i_col + tl.arange(0, BLOCK)[None, :]
        value = swizzled_words(
            bases_ptr, codes_ptr, i_tile * 128 + row, col * 4, col < COL_TILES, NUM_ROWS, NUM_COLS
        )  # fmt: skip
        if ALIGNED:
            offs = col * 128 + row % 32 * 4 + row // 32
            mask = (col < COL_TILES) & (row >= 0)
        else:
            # The word before (row, col) in the output is 32 rows up, or the last of the 32x4x4 row or tile before.
            row_before = tl.where(row >= 32, row - 32, tl.where(row > 0, row + 95, 127))
            col_before = tl.where(row > 0, col, col - 1)
            offs = col * 128 + row % 32 * 4 + row // 32
            mask = (col < COL_TILES) & (offs > 0)
            before = swizzled_words(
                bases_ptr, codes_ptr, i_tile * 128 + row_before, col_before * 4, mask, NUM_ROWS, NUM_COLS
            )  # fmt: skip
            bits = (8 * shift).to(tl.uint32)
            value = (before >> (32 - bits)) | (value << bits)
        # In the order of the output, so that the stores are whole lines.
        value = tl.permute(tl.reshape(value, (4, 32, BLOCK)), (2, 1, 0))
        offs = tl.permute(tl.reshape(offs, (4, 32, BLOCK)), (2, 1, 0))
        mask = tl.permute(tl.reshape(mask, (4, 32, BLOCK)), (2, 1, 0))
        tl.store((tile_ptr - shift).to(tl.pointer_type(tl.uint32)) + offs, value, mask=mask)
    if not ALIGNED:
        end = tl.arange(0, 4)
        offs_b = tl.where(end < 4 - shift, end, COL_TILES * 512 - 4 + end)
        row_b = i_tile * 128 + offs_b // 4 % 4 * 32 + offs_b // 16 % 32
        value = swizzled_words(bases_ptr, codes_ptr, row_b, offs_b // 512 * 4, end < 4, NUM_ROWS, NUM_COLS)
        tl.store(tile_ptr + offs_b, (value >> (offs_b % 4 * 8).to(tl.uint32)).to(tl.uint8))

    tl.debug_barrier()
    for i_x in range(x_begin, x_end, BLOCK_X):
        offs_x = i_x + tl.arange(0, BLOCK_X)
        words = tl.load(exceptions_ptr + offs_x, mask=offs_x < x_end, other=0)
        store_exceptions(out_ptr, words, offs_x < x_end, first, last, NUM_COLS, POSITION_BITS, SWIZZLED=True)
