"""Encode scale planes on a GPU: one kernel chooses bases and writes codes, two sum the exceptions, along a plane's rows
and along the planes, and one collects them in order.

Bytes moved: every scale byte twice, 0.5 and a base a row written, 4 an exception. The host waits once, to learn how
many exceptions there are, and the GPU idles until it has launched the last kernel: what can be done before it waits, or
after that launch, is done there.

A row's base is the lowest of 241 whose window of 16 values covers the most bytes. Windows are ranked eight at a time,
from around the row's mean, and further down or up until counts prove that no other can win: one further down covers at
most the bytes not above its top, one further up at most those not below its base. Nearly always the first eight do.

Where bytes are compared or subtracted four at a time in a word, nothing ever carries from byte to byte.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

from ..device import cdiv, next_power_of_2
from ..formats import NVFP4_CSF
from ..launching import BoundKernel, bind

EACH = tl.constexpr(0x01010101)
"""Multiplier that puts one value into each of four bytes."""
TOP_BITS = tl.constexpr(0x80808080)


@triton.jit
def load_bytes(planes_ptr, rows, mask_r, i_chunk, NUM_COLS: tl.constexpr, BLOCK_W: tl.constexpr):
    """Bytes `[rows, 4 * BLOCK_W]` of columns from `4 * BLOCK_W * i_chunk`, int32, and their mask."""
    cols = i_chunk * (4 * BLOCK_W) + tl.arange(0, 4 * BLOCK_W)[None, :]
    mask = mask_r[:, None] & (cols < NUM_COLS)
    return tl.load(planes_ptr + rows[:, None] * NUM_COLS + cols, mask=mask, other=0).to(tl.int32), mask


@triton.jit
def load_words(planes_ptr, rows, mask_r, word, NUM_COLS: tl.constexpr):
    """Four columns a word, from column `4 * word`, uint32; zero past the last column."""
    # Compared in words: Triton loads several at once only where it sees that they share their mask.
    mask = mask_r[:, None] & (word < (NUM_COLS + 3) // 4)
    if NUM_COLS % 4 == 0:
        words_ptr = planes_ptr.to(tl.pointer_type(tl.uint32)) + rows[:, None] * (NUM_COLS // 4)
        words = tl.load(words_ptr + word, mask=mask, other=0)
    else:
        pairs_ptr = planes_ptr.to(tl.pointer_type(tl.uint16)) + rows[:, None] * (NUM_COLS // 2)
        words = tl.load(pairs_ptr + 2 * word, mask=mask, other=0).to(tl.uint32)
        mask = mask & (word * 4 + 2 < NUM_COLS)
        words |= tl.load(pairs_ptr + 2 * word + 1, mask=mask, other=0).to(tl.uint32) << 16
    return words


@triton.jit
def sum_bytes(words):
    """Sum of all bytes along axis 1, int32."""
    pairs = (words & 0x00FF00FF) + ((words >> 8) & 0x00FF00FF)
    return tl.sum((pairs & 0xFFFF) + (pairs >> 16), axis=1).to(tl.int32)


@triton.jit
def split_codes(words, base, word, NUM_COLS: tl.constexpr):
    """Codes above `base [rows]`, a byte each, zero for exceptions, and one in each byte that is an exception.

    `word` numbers the words of a row; bytes past the last column are no exceptions.
    """
    bases = base.to(tl.uint32)[:, None] * EACH
    # Bytewise subtraction: bit 7 is set to keep borrows from the neighbour, then put right.
    above = ((words | TOP_BITS) - (bases & 0x7F7F7F7F)) ^ ((words ^ ~bases) & TOP_BITS)
    outside = ((((above >> 4) & 0x0F0F0F0F) + 0x0F0F0F0F) >> 4) & EACH
    if NUM_COLS % 4 != 0:
        outside = tl.where(word * 4 + 2 < NUM_COLS, outside, outside & 0x0101)
    outside = tl.where(word * 4 < NUM_COLS, outside, 0)
    return above & 0x0F0F0F0F & ~(outside * 15), outside


@triton.jit
def rank_windows(planes_ptr, rows, mask_r, top, NUM_COLS: tl.constexpr, BLOCK_W: tl.constexpr):
    """The best of the windows with top values `top` to `top - 7`, of equals the lowest: its base and coverage.

    Also the most that a window further up can cover, the bytes of at least `top - 14`, and the most that one further
    down can, those of at most `top - 8`.

    With `depth = top - byte`, lowering the window by one loses the bytes of depth s and gains those of depth 16 + s.
    Depths 0 to 7 and 15 to 22 are counted in 8-bit counters, eight an int64, over at most 248 columns at a time.
    """
    CHUNKS: tl.constexpr = (NUM_COLS + 4 * BLOCK_W - 1) // (4 * BLOCK_W)
    GROUP: tl.constexpr = 62 // BLOCK_W
    slot = tl.arange(0, 8)[None, :]
    gained = tl.zeros((rows.shape[0], 8), tl.int32)
    num_inside = tl.zeros(rows.shape, tl.int32)
    num_above = tl.zeros(rows.shape, tl.int32)
    num_edge = tl.zeros(rows.shape, tl.int32)
    num_high = tl.zeros(rows.shape, tl.int32)
    for i_group in range(0, CHUNKS, GROUP):
        high = tl.zeros(rows.shape, tl.int64)
        low = tl.zeros(rows.shape, tl.int64)
        for i_chunk in range(i_group, min(i_group + GROUP, CHUNKS)):
            value, mask = load_bytes(planes_ptr, rows, mask_r, i_chunk, NUM_COLS, BLOCK_W)
            depth = top[:, None] - value
            if NUM_COLS % (4 * BLOCK_W) != 0:
                depth = tl.where(mask, depth, 256)
            num_above += tl.sum((depth < 0).to(tl.int32), axis=1)
            num_inside += tl.sum(((depth >= 0) & (depth < 16)).to(tl.int32), axis=1)
            one = tl.full((1, 1), 1, tl.int64) << ((depth & 7) * 8).to(tl.int64)
            high += tl.sum(tl.where((depth >= 0) & (depth < 8), one, 0), axis=1)
            low += tl.sum(tl.where((depth >= 15) & (depth < 23), one, 0), axis=1)
        num_edge += ((low >> 56) & 0xFF).to(tl.int32)  # depth 15 is the last counter
        # Multiplying by 0x01...01 puts into each counter the sum of those up to it; shifted by one, of those before it.
        high *= 0x0101010101010101
        low *= 0x0101010101010101
        num_high += ((high >> 56) & 0xFF).to(tl.int32)
        gained += (((low << 8)[:, None] >> (8 * slot).to(tl.int64)) & 0xFF).to(tl.int32)
        gained -= (((high << 8)[:, None] >> (8 * slot).to(tl.int64)) & 0xFF).to(tl.int32)
    exists = top[:, None] - slot >= 15
    best = tl.max(tl.where(exists, (num_inside[:, None] + gained) * 8 + slot, -8), axis=1)
    return top - 15 - (best & 7), best >> 3, num_above + num_inside - num_edge, NUM_COLS - num_above - num_high


@triton.jit
def can_lose(mask_r, covered, reach_up, reach_down, highest, lowest):
    """Whether a window above `highest` or below `lowest - 7` may still win: 0 or 1 a row. Of equals, the lower wins."""
    down = (reach_down >= covered) & (lowest >= 23)
    up = (reach_up > covered) & (highest < 255)
    return (mask_r & (down | up)).to(tl.int32)


@triton.jit
def choose_bases(planes_ptr, rows, mask_r, NUM_COLS: tl.constexpr, BLOCK_W: tl.constexpr):
    """The lowest base with the best coverage of each row, int32."""
    total = tl.zeros(rows.shape, tl.int32)
    for i_word in range(0, (NUM_COLS + 3) // 4, BLOCK_W):
        word = i_word + tl.arange(0, BLOCK_W)[None, :]
        total += sum_bytes(load_words(planes_ptr, rows, mask_r, word, NUM_COLS))
    # Bases from 4 to 11 below the mean: a wide row's best lies about 8 below, a narrow one's 15 below its top.
    top = tl.minimum(tl.maximum(total // NUM_COLS + 11, 15), 255)
    base, covered, reach_up, reach_down = rank_windows(planes_ptr, rows, mask_r, top, NUM_COLS, BLOCK_W)
    highest = top
    lowest = top
    searching = tl.max(can_lose(mask_r, covered, reach_up, reach_down, highest, lowest))
    while searching > 0:
        down = mask_r & (reach_down >= covered) & (lowest >= 23)
        top = tl.where(down, lowest - 8, tl.minimum(highest + 8, 255))
        new_base, new_covered, new_up, new_down = rank_windows(planes_ptr, rows, mask_r, top, NUM_COLS, BLOCK_W)
        wins = (new_covered > covered) | ((new_covered == covered) & (new_base < base))
        base = tl.where(wins, new_base, base)
        covered = tl.where(wins, new_covered, covered)
        reach_down = tl.where(down, new_down, reach_down)
        reach_up = tl.where(down, reach_up, new_up)
        lowest = tl.where(down, top, lowest)
        highest = tl.where(down, highest, top)
        searching = tl.max(can_lose(mask_r, covered, reach_up, reach_down, highest, lowest))
    return base


@triton.jit(do_not_specialize=["num_rows"])
def encode_kernel(
    planes_ptr, fixed_ptr, row_counts_ptr, num_rows,
    NUM_COLS: tl.constexpr, SLAB_BYTES: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_W: tl.constexpr,
):  # fmt: skip
    """Bases and codes of `BLOCK_R` rows, counted through all planes, and how many exceptions each has."""
    rows = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    mask_r = rows < num_rows
    base = choose_bases(planes_ptr, rows, mask_r, NUM_COLS, BLOCK_W)
    slab_offs = rows // 16 * SLAB_BYTES
    tl.store(fixed_ptr + slab_offs + rows % 16, base.to(tl.uint8), mask=mask_r)
    codes_offs = slab_offs + 16 + rows % 16 * (NUM_COLS // 2)
    num_outside = tl.zeros((BLOCK_R,), tl.int32)
    for i_word in range(0, (NUM_COLS + 3) // 4, BLOCK_W):
        word = i_word + tl.arange(0, BLOCK_W)[None, :]
        words = load_words(planes_ptr, rows, mask_r, word, NUM_COLS)
        codes, outside = split_codes(words, base, word, NUM_COLS)
        num_outside += sum_bytes(outside)
        codes = (codes | (codes >> 4)) & 0x00FF00FF
        codes |= codes >> 8
        mask = mask_r[:, None] & (word < (NUM_COLS + 3) // 4)
        if NUM_COLS % 4 == 0:
            pairs_ptr = (fixed_ptr + codes_offs[:, None]).to(tl.pointer_type(tl.uint16))
            tl.store(pairs_ptr + word, codes.to(tl.uint16), mask=mask)
        else:
            pairs_ptr = fixed_ptr + codes_offs[:, None] + 2 * word
            tl.store(pairs_ptr, codes.to(tl.uint8), mask=mask)
            tl.store(pairs_ptr + 1, (codes >> 8).to(tl.uint8), mask=mask & (word * 4 + 2 < NUM_COLS))
    tl.store(row_counts_ptr + rows, num_outside, mask=mask_r)


@triton.jit
def scan_kernel(row_counts_ptr, plane_counts_ptr, NUM_ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Turn a plane's exceptions a row into where each row's end, from the plane's first on, and store their sum."""
    plane = tl.program_id(0).to(tl.int64)
    row_counts_ptr += plane * NUM_ROWS
    seen = 0
    for first in range(0, NUM_ROWS, BLOCK):
        rows = first + tl.arange(0, BLOCK)
        counts = tl.load(row_counts_ptr + rows, mask=rows < NUM_ROWS, other=0)
        tl.store(row_counts_ptr + rows, seen + tl.cumsum(counts), mask=rows < NUM_ROWS)
        seen += tl.sum(counts)
    tl.store(plane_counts_ptr + plane, seen)


@triton.jit(do_not_specialize=["num_planes"])
def ends_kernel(plane_counts_ptr, host_ends_ptr, num_planes, BLOCK: tl.constexpr):
    """Turn exceptions a plane into where each plane's end, and store that where the host reads it, too. One program."""
    seen = tl.full((), 0, tl.int64)
    for first in range(0, num_planes, BLOCK):
        planes = first + tl.arange(0, BLOCK)
        counts = tl.load(plane_counts_ptr + planes, mask=planes < num_planes, other=0)
        ends = seen + tl.cumsum(counts)
        tl.store(plane_counts_ptr + planes, ends, mask=planes < num_planes)
        tl.store(host_ends_ptr + planes, ends, mask=planes < num_planes)
        seen += tl.sum(counts)


@triton.jit(do_not_specialize=["num_rows"])
def collect_kernel(
    planes_ptr, fixed_ptr, row_ends_ptr, plane_ends_ptr, words_ptr, num_rows,
    NUM_ROWS: tl.constexpr, NUM_COLS: tl.constexpr, SLAB_BYTES: tl.constexpr, POSITION_BITS: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_W: tl.constexpr,
):  # fmt: skip
    """Write the exception words of `BLOCK_R` rows, each row's from where the row before it ends, in order.

    32 columns of a row become a mask, whose bits, few as they are, are taken one by one.
    """
    rows = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    mask_r = rows < num_rows
    begin = tl.load(row_ends_ptr + rows - 1, mask=mask_r & (rows % NUM_ROWS > 0), other=0)
    mask_r = mask_r & (tl.load(row_ends_ptr + rows, mask=mask_r, other=0) > begin)
    plane = rows // NUM_ROWS
    begin += tl.load(plane_ends_ptr + plane - 1, mask=mask_r & (plane > 0), other=0)
    base = tl.load(fixed_ptr + rows // 16 * SLAB_BYTES + rows % 16, mask=mask_r, other=0).to(tl.int32)
    position = (rows % NUM_ROWS).to(tl.int32) * NUM_COLS
    row_ptr = planes_ptr + rows * NUM_COLS
    for i_word in range(0, (NUM_COLS + 3) // 4, 8):
        left = tl.zeros((BLOCK_R,), tl.uint32)
        for i_part in tl.static_range(8 // BLOCK_W):
            nth = i_part * BLOCK_W + tl.arange(0, BLOCK_W)[None, :]
            words = load_words(planes_ptr, rows, mask_r, i_word + nth, NUM_COLS)
            _, outside = split_codes(words, base, i_word + nth, NUM_COLS)
            # The product brings bits 0, 8, 16 and 24 to 24, 25, 26 and 27; no two others meet.
            left |= tl.sum(((outside * 0x01020408) >> 24 & 15) << (4 * nth).to(tl.uint32), axis=1)
        left = tl.where(mask_r, left, 0)
        while tl.max((left != 0).to(tl.int32)) > 0:
            some = left != 0
            lowest = left & (~left + 1)
            col = 4 * i_word + (lowest.to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127
            value = tl.load(row_ptr + col, mask=some, other=0).to(tl.uint32)
            exception = (value << POSITION_BITS) | (position + col).to(tl.uint32)
            tl.store(words_ptr + begin, exception, mask=some)
            begin += some.to(tl.int32)
            left ^= lowest


def _block_words(num_cols: int, limit: int) -> int:
    """Words of a row to work on at a time: a power of two that wastes little of a row."""
    num_words = cdiv(num_cols, 4)
    exact = num_words & -num_words
    return min(limit, exact if exact > 1 else next_power_of_2(num_words))


def encode_config(num_cols: int) -> dict[str, int]:
    """Constants of `encode_kernel`: one warp, so no barrier in its search. Wide rows are read four times, so fewer
    of them at once, or they leave L1; nor do registers hold 32 rows of four words on every architecture."""
    block_w = _block_words(num_cols, 8)
    return {"BLOCK_R": 32 if block_w <= 2 else 16, "BLOCK_W": block_w, "num_warps": 1}


def scan_config(num_rows: int) -> dict[str, int]:
    """Constants of `scan_kernel`."""
    return {"BLOCK": min(1024, next_power_of_2(num_rows)), "num_warps": 4}


def ends_config() -> dict[str, int]:
    """Constants of `ends_kernel`: most stacks are one block."""
    return {"BLOCK": 1024, "num_warps": 4}


def collect_config(num_cols: int) -> dict[str, int]:
    """Constants of `collect_kernel`: one warp, so that a vote, and no barrier, ends its inner loop."""
    return {"BLOCK_R": 32, "BLOCK_W": _block_words(num_cols, 4), "num_warps": 1}


@functools.lru_cache(maxsize=None)
def encode_launch(num_planes: int, num_rows: int, num_cols: int, **overrides: int) -> tuple[tuple[int], BoundKernel]:
    """Grid and kernel of one kind of launch. `overrides` replace entries of `encode_config`, for tuning."""
    config = {**encode_config(num_cols), **overrides}
    kernel = bind(encode_kernel, NUM_COLS=num_cols, SLAB_BYTES=NVFP4_CSF.slab_bytes(num_cols), **config)
    return (cdiv(num_planes * num_rows, config["BLOCK_R"]),), kernel


@functools.lru_cache(maxsize=None)
def scan_launch(num_planes: int, num_rows: int) -> tuple[tuple[int], BoundKernel]:
    """Grid and kernel of one kind of launch."""
    return (num_planes,), bind(scan_kernel, NUM_ROWS=num_rows, **scan_config(num_rows))


@functools.lru_cache(maxsize=None)
def ends_launch() -> tuple[tuple[int], BoundKernel]:
    """Grid and kernel of every launch."""
    return (1,), bind(ends_kernel, **ends_config())


@functools.lru_cache(maxsize=None)
def collect_launch(num_planes: int, num_rows: int, num_cols: int, **overrides: int) -> tuple[tuple[int], BoundKernel]:
    """Grid and kernel of one kind of launch. `overrides` replace entries of `collect_config`, for tuning."""
    config = {**collect_config(num_cols), **overrides}
    kernel = bind(
        collect_kernel,
        NUM_ROWS=num_rows, NUM_COLS=num_cols, SLAB_BYTES=NVFP4_CSF.slab_bytes(num_cols),
        POSITION_BITS=NVFP4_CSF.position_bits,
        **config,
    )  # fmt: skip
    return (cdiv(num_planes * num_rows, config["BLOCK_R"]),), kernel


def encode_gpu(planes: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Encode uint8 `[E, N, C]`: `fixed [E, bytes]`, words uint32 `[X]` and, on the CPU, planes' ends int64 `[E]`."""
    num_planes, num_rows, num_cols = planes.shape
    if planes.data_ptr() % 4:
        planes = planes.clone()
    fixed = planes.new_empty(num_planes, NVFP4_CSF.fixed_bytes(num_rows, num_cols))
    row_ends = planes.new_empty(num_planes, num_rows, dtype=torch.int32)
    launch_encode(planes, fixed, row_ends)
    plane_ends = planes.new_empty(num_planes, dtype=torch.int64)
    launch_scan(row_ends, plane_ends)
    # Kernels for NVIDIA and AMD write to page-locked memory; for others the host copies, and waits, when it reads.
    pinned = planes.is_cuda
    device = "cpu" if pinned else planes.device
    host_ends = torch.empty(num_planes, dtype=torch.int64, device=device, pin_memory=pinned)
    num_words = host_ends[-1]
    launch_ends(plane_ends, host_ends)
    if pinned:
        torch.cuda.current_stream(planes.device).synchronize()
    words = planes.new_empty(int(num_words), dtype=torch.uint32)
    launch_collect(planes, fixed, row_ends, plane_ends, words)
    return fixed, words, host_ends.to("cpu", copy=True)  # page-locked memory is scarce: it is not kept


def launch_encode(planes: torch.Tensor, fixed: torch.Tensor, row_counts: torch.Tensor, **overrides: int) -> None:
    """Write `fixed [E, bytes]`, and how many exceptions each row has, `row_counts` int32 `[E, N]`."""
    num_planes, num_rows, num_cols = planes.shape
    grid, kernel = encode_launch(num_planes, num_rows, num_cols, **overrides)
    kernel(grid, planes, fixed, row_counts, num_planes * num_rows)


def launch_scan(row_counts: torch.Tensor, plane_counts: torch.Tensor) -> None:
    """Sum `row_counts` along each plane, in place, and put the planes' sums into `plane_counts` int64 `[E]`."""
    grid, kernel = scan_launch(*row_counts.shape)
    kernel(grid, row_counts, plane_counts)


def launch_ends(plane_counts: torch.Tensor, host_ends: torch.Tensor) -> None:
    """Sum `plane_counts` int64 `[E]` in place, and into `host_ends` int64 `[E]`, which may be page-locked memory."""
    grid, kernel = ends_launch()
    kernel(grid, plane_counts, host_ends, len(plane_counts))


def launch_collect(
    planes: torch.Tensor,
    fixed: torch.Tensor,
    row_ends: torch.Tensor,
    plane_ends: torch.Tensor,
    words: torch.Tensor,
    **overrides: int,
) -> None:
    """Write the exception `words`, uint32; `plane_ends` int64 `[E]` sums the planes' counts."""
    num_planes, num_rows, num_cols = planes.shape
    grid, kernel = collect_launch(num_planes, num_rows, num_cols, **overrides)
    kernel(grid, planes, fixed, row_ends, plane_ends, words, num_planes * num_rows)
