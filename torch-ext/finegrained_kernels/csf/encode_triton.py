"""Encode scale planes on a GPU: one kernel chooses bases and writes codes, a second collects the exceptions in order.

Bytes moved: every scale byte twice (once a kernel), 0.5 and a base a row written, 4 an exception. The host waits
once, to learn how many exceptions there are.

A row's base is the lowest of 241 whose window of 16 values covers the most bytes. The kernel ranks the 16 windows whose
top values are `top`, `top - 1`, ..., `top - 15`, with `top` a little above the row's mean, and counts what others could
cover at most: further up, the bytes of at least `top - 14`; further down, those below `top - 15`. Nearly always
neither beats the best of the 16. Where it does not hold, a tile of rows tries all 241.

Bytes are compared four at a time in an int32. Bytes above 127 count as 127, which no window up to `top <= 126` covers;
then `byte >= t` is bit 7 of `byte + (128 - t)`, and no sum carries into its neighbour.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..device import on_device
from ..formats import NVFP4_CSF

EACH = tl.constexpr(0x01010101)
"""Multiplier that puts one value into each of four bytes."""
TOP_BITS = tl.constexpr(0x80808080)


@triton.jit
def load_words(planes_ptr, rows, mask_r, i_chunk, NUM_COLS: tl.constexpr, BLOCK_W: tl.constexpr):
    """Bytes of four columns a word, uint32 `[rows, BLOCK_W]`; where C ends inside a word, 255."""
    word = i_chunk * BLOCK_W + tl.arange(0, BLOCK_W)[None, :]
    offs = rows[:, None] * NUM_COLS + word * 4
    mask = mask_r[:, None] & (word * 4 < NUM_COLS)
    if NUM_COLS % 4 == 0:
        return tl.load((planes_ptr + offs).to(tl.pointer_type(tl.uint32)), mask=mask, other=0xFFFFFFFF)
    pair_ptr = (planes_ptr + offs).to(tl.pointer_type(tl.uint16))
    low = tl.load(pair_ptr, mask=mask, other=0xFFFF).to(tl.uint32)
    high = tl.load(pair_ptr + 1, mask=mask & (word * 4 + 2 < NUM_COLS), other=0xFFFF).to(tl.uint32)
    return low | (high << 16)


@triton.jit
def sum_bytes(words):
    """Sum of all bytes along axis 1, int32."""
    pairs = (words & 0x00FF00FF) + ((words >> 8) & 0x00FF00FF)
    return tl.sum((pairs & 0xFFFF) + (pairs >> 16), axis=1).to(tl.int32)


@triton.jit
def at_least(words, threshold):
    """One in each byte of `words`, at most 127, that is at least `threshold`, 1 to 128."""
    return ((words + (128 - threshold).to(tl.uint32) * EACH) & TOP_BITS) >> 7


@triton.jit
def split_codes(words, base, column, NUM_COLS: tl.constexpr):
    """Codes above `base [rows]`, a byte each, zero for exceptions, and one in each byte that is an exception.

    `column` is that of each word's first byte; bytes past the last column are no exceptions.
    """
    bases = base.to(tl.uint32)[:, None] * EACH
    # Bytewise subtraction: bit 7 is set to keep borrows from the neighbour, then put right.
    above = ((words | TOP_BITS) - (bases & 0x7F7F7F7F)) ^ ((words ^ ~bases) & TOP_BITS)
    outside = ((((above >> 4) & 0x0F0F0F0F) + 0x0F0F0F0F) >> 4) & EACH
    if NUM_COLS % 4 != 0:
        outside = tl.where(column + 2 < NUM_COLS, outside, outside & 0x0101)
    outside = tl.where(column < NUM_COLS, outside, 0)
    return above & 0x0F0F0F0F & ~(outside * 15), outside


@triton.jit
def try_all_bases(planes_ptr, rows, mask_r, NUM_COLS: tl.constexpr, BLOCK_W: tl.constexpr, MAX_BASE: tl.constexpr):
    """The lowest base with the best coverage of each row, by trying each."""
    best = tl.full(rows.shape, -1, tl.int32)
    base = tl.zeros(rows.shape, tl.int32)
    for other in range(MAX_BASE + 1):
        covered = tl.zeros(rows.shape, tl.int32)
        for i_chunk in range((NUM_COLS + 4 * BLOCK_W - 1) // (4 * BLOCK_W)):
            words = load_words(planes_ptr, rows, mask_r, i_chunk, NUM_COLS, BLOCK_W)
            column = (i_chunk * BLOCK_W + tl.arange(0, BLOCK_W)[None, :]) * 4
            for i_byte in tl.static_range(4):
                code = ((words >> (8 * i_byte)) & 0xFF).to(tl.int32) - other
                covered += tl.sum(((code >= 0) & (code < 16) & (column + i_byte < NUM_COLS)).to(tl.int32), axis=1)
        base = tl.where(covered > best, other, base)
        best = tl.maximum(best, covered)
    return base


@triton.jit
def rank_bases(planes_ptr, rows, mask_r, NUM_COLS: tl.constexpr, BLOCK_W: tl.constexpr):
    """The lowest best base among 16 near the row's mean, and whether it is the lowest best of all."""
    CHUNKS: tl.constexpr = (NUM_COLS + 4 * BLOCK_W - 1) // (4 * BLOCK_W)
    PADDING: tl.constexpr = CHUNKS * BLOCK_W * 4 - NUM_COLS  # bytes of 255
    mean = sum_bytes(load_words(planes_ptr, rows, mask_r, 0, NUM_COLS, BLOCK_W)) // (4 * BLOCK_W)
    top = tl.minimum(tl.maximum(mean + 15, 30), 126)

    slot = tl.arange(0, 16)
    window_top = top[:, None, None] - slot[None, None, :]
    # Counted in each byte on its own: at most one a chunk.
    inside = tl.zeros((rows.shape[0], BLOCK_W, 16), tl.uint32)
    from_14 = tl.zeros((rows.shape[0], BLOCK_W), tl.uint32)
    from_15 = tl.zeros((rows.shape[0], BLOCK_W), tl.uint32)
    for i_chunk in range(CHUNKS):
        words = load_words(planes_ptr, rows, mask_r, i_chunk, NUM_COLS, BLOCK_W)
        high = words & TOP_BITS
        words = (words & 0x7F7F7F7F) | (high - (high >> 7))
        from_14 += at_least(words, top[:, None] - 14)
        from_15 += at_least(words, top[:, None] - 15)
        inside += at_least(words[:, :, None], window_top - 15) ^ at_least(words[:, :, None], window_top + 1)
    coverage = sum_bytes(inside)
    best = tl.max(coverage * 16 + slot[None, :], axis=1)  # of equals the highest slot, the lowest base
    covered = best >> 4
    proven = (covered >= sum_bytes(from_14) - PADDING) & (covered > NUM_COLS + PADDING - sum_bytes(from_15))
    return top - 15 - (best & 15), proven | (mask_r == 0)


@triton.jit(do_not_specialize=["num_rows"])
def encode_kernel(
    planes_ptr, fixed_ptr, row_counts_ptr, num_rows,
    NUM_COLS: tl.constexpr, SLAB_BYTES: tl.constexpr, MAX_BASE: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_W: tl.constexpr,
):  # fmt: skip
    """Bases and codes of `BLOCK_R` rows, counted through all planes, and how many exceptions each has."""
    rows = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    mask_r = rows < num_rows
    base, proven = rank_bases(planes_ptr, rows, mask_r, NUM_COLS, BLOCK_W)
    if tl.min(proven.to(tl.int32)) == 0:
        base = try_all_bases(planes_ptr, rows, mask_r, NUM_COLS, BLOCK_W, MAX_BASE)
    slab_ptr = fixed_ptr + rows // 16 * SLAB_BYTES
    tl.store(slab_ptr + rows % 16, base.to(tl.uint8), mask=mask_r)
    codes_ptr = slab_ptr + 16 + rows % 16 * (NUM_COLS // 2)
    num_outside = tl.zeros((BLOCK_R,), tl.int32)
    for i_chunk in range((NUM_COLS + 4 * BLOCK_W - 1) // (4 * BLOCK_W)):
        words = load_words(planes_ptr, rows, mask_r, i_chunk, NUM_COLS, BLOCK_W)
        column = (i_chunk * BLOCK_W + tl.arange(0, BLOCK_W)[None, :]) * 4
        codes, outside = split_codes(words, base, column, NUM_COLS)
        num_outside += sum_bytes(outside)
        codes = (codes | (codes >> 4)) & 0x00FF00FF
        codes |= codes >> 8
        mask = mask_r[:, None] & (column < NUM_COLS)
        pair_ptr = codes_ptr[:, None] + column // 2
        if NUM_COLS % 4 == 0:
            tl.store(pair_ptr.to(tl.pointer_type(tl.uint16)), codes.to(tl.uint16), mask=mask)
        else:
            tl.store(pair_ptr, codes.to(tl.uint8), mask=mask)
            tl.store(pair_ptr + 1, (codes >> 8).to(tl.uint8), mask=mask & (column + 2 < NUM_COLS))
    tl.store(row_counts_ptr + rows, num_outside, mask=mask_r)


@triton.jit(do_not_specialize=["num_rows"])
def collect_kernel(
    planes_ptr, fixed_ptr, row_ends_ptr, words_ptr, num_rows,
    NUM_ROWS: tl.constexpr, NUM_COLS: tl.constexpr, SLAB_BYTES: tl.constexpr, POSITION_BITS: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_W: tl.constexpr,
):  # fmt: skip
    """Write the exception words of `BLOCK_R` rows, each row's from where the row before it ends, in order."""
    rows = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    mask_r = rows < num_rows
    begin = tl.load(row_ends_ptr + rows - 1, mask=mask_r & (rows > 0), other=0)
    mask_r = mask_r & (tl.load(row_ends_ptr + rows, mask=mask_r, other=0) > begin)
    base = tl.load(fixed_ptr + rows // 16 * SLAB_BYTES + rows % 16, mask=mask_r, other=0).to(tl.int32)
    for i_chunk in range((NUM_COLS + 4 * BLOCK_W - 1) // (4 * BLOCK_W)):
        words = load_words(planes_ptr, rows, mask_r, i_chunk, NUM_COLS, BLOCK_W)
        column = (i_chunk * BLOCK_W + tl.arange(0, BLOCK_W)[None, :]) * 4
        _, outside = split_codes(words, base, column, NUM_COLS)
        outside = tl.where(mask_r[:, None], outside, 0)
        count = ((outside * EACH) >> 24).to(tl.int32)
        rank = begin[:, None] + tl.cumsum(count, axis=1) - count
        position = ((rows % NUM_ROWS).to(tl.int32) * NUM_COLS)[:, None] + column
        for i_byte in tl.static_range(4):
            is_outside = (outside >> (8 * i_byte)) & 1
            value = (words >> (8 * i_byte)) & 0xFF
            word = (value << POSITION_BITS) | (position + i_byte).to(tl.uint32)
            tl.store(words_ptr + rank, word.to(tl.int32, bitcast=True), mask=is_outside > 0)
            rank += is_outside.to(tl.int32)
        begin += tl.sum(count, axis=1)


def encode_config(num_cols: int) -> dict[str, int]:
    """Rows, and words of a row, that a program works on at a time: a power of two of words that wastes little."""
    num_words = triton.cdiv(num_cols, 4)
    exact = num_words & -num_words
    few = num_words <= 128 and exact > 1
    return {
        "BLOCK_R": 64,
        "BLOCK_W": min(8, exact if few else triton.next_power_of_2(num_words)),
        "num_warps": 4,
    }


def encode_cuda(planes: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
    """Encode uint8 `[E, N, C]`, `C` at most 8160: `fixed [E, bytes]`, exception words int32 `[X]`, exceptions a plane."""
    num_planes, num_rows, num_cols = planes.shape
    if planes.data_ptr() % 4:
        planes = planes.clone()
    fixed = planes.new_empty(num_planes, NVFP4_CSF.fixed_bytes(num_rows, num_cols))
    row_counts = planes.new_empty(num_planes, num_rows, dtype=torch.int32)
    launch_encode(planes, fixed, row_counts)
    counts = row_counts.sum(1)
    row_ends = row_counts.view(-1).cumsum(0)
    counts = counts.tolist()
    words = planes.new_empty(sum(counts), dtype=torch.int32)
    launch_collect(planes, fixed, row_ends, words)
    return fixed, words, counts


def launch_encode(planes: torch.Tensor, fixed: torch.Tensor, row_counts: torch.Tensor, **overrides: int) -> None:
    num_planes, num_rows, num_cols = planes.shape
    config = encode_config(num_cols) | overrides
    with on_device(planes.device):
        encode_kernel[(triton.cdiv(num_planes * num_rows, config["BLOCK_R"]),)](
            planes, fixed, row_counts, num_planes * num_rows,
            NUM_COLS=num_cols, SLAB_BYTES=NVFP4_CSF.slab_bytes(num_cols), MAX_BASE=NVFP4_CSF.max_base,
            **config,
        )  # fmt: skip


def launch_collect(
    planes: torch.Tensor, fixed: torch.Tensor, row_ends: torch.Tensor, words: torch.Tensor, **overrides: int
) -> None:
    num_planes, num_rows, num_cols = planes.shape
    config = encode_config(num_cols) | overrides
    with on_device(planes.device):
        collect_kernel[(triton.cdiv(num_planes * num_rows, config["BLOCK_R"]),)](
            planes, fixed, row_ends, words, num_planes * num_rows,
            NUM_ROWS=num_rows, NUM_COLS=num_cols, SLAB_BYTES=NVFP4_CSF.slab_bytes(num_cols),
            POSITION_BITS=NVFP4_CSF.position_bits,
            **config,
        )  # fmt: skip
