"""Encodes scale planes on a GPU, with four kernels. The first chooses bases and counts exceptions, two sum these
counts, within each plane and over the planes, and the last writes codes and exceptions.

Bytes moved: every scale byte is read twice; half a byte for each scale, one for each row (its base) and 4 for each
exception are written. The host waits once, to learn how many exceptions there are, and the GPU is idle until the host
has launched the last kernel. So everything that can be done before the host waits, or after that launch, is done then.
The last kernel writes the codes too, so that it runs longer than the host needs to launch the next stack's first
kernel.

A row's base is the lowest of 241 whose window of 16 values covers the most bytes. Windows are ranked eight at a time,
starting around the row's mean and going down or up until counts prove that no other window can win: a lower one covers
at most the bytes not above its top, and a higher one at most those not below its base. Nearly always the first eight
are enough. They are ranked bit by bit: each of eight words holds one bit of 32 bytes, so that one operation handles all
32.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

from ..device import cdiv, next_power_of_2
from ..formats import NVFP4_CSF
from ..launching import BoundKernel, bind
from .words_triton import exception_word

EACH = tl.constexpr(0x01010101)
"""Multiplier that copies one value into each of four bytes."""
TOP_BITS = tl.constexpr(0x80808080)
LAST = tl.constexpr(233)
"""The highest first base of eight windows: bases end at 240."""


@triton.jit
def load_words(planes_ptr, rows, mask_r, word, NUM_COLS: tl.constexpr):
    """Columns `4 * word` to `4 * word + 3` as uint32; zero past the last column."""
    # The mask compares words: Triton loads several at once only if it sees that they share a mask.
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
def load_four_words(planes_ptr, rows, mask_r, first, NUM_COLS: tl.constexpr, LANES: tl.constexpr):
    """Four words of a row for each lane, from word `first` on, as four `[rows, LANES]`. A lane's words are in one
    thread.

    If planes start at a multiple of 16 bytes, they are loaded four at a time, or two at a time if rows do not.
    """
    if NUM_COLS % 16 == 0:
        words = load_words(planes_ptr, rows, mask_r, first + tl.arange(0, 4 * LANES)[None, :], NUM_COLS)
        even, odd = tl.split(tl.reshape(words, (rows.shape[0], LANES, 2, 2)))
        a, b = tl.split(even)
        c, d = tl.split(odd)
    else:
        word = first + tl.arange(0, 2 * LANES)[None, :]
        words = load_words(planes_ptr, rows, mask_r, word, NUM_COLS)
        a, b = tl.split(tl.reshape(words, (rows.shape[0], LANES, 2)))
        words = load_words(planes_ptr, rows, mask_r, word + 2 * LANES, NUM_COLS)
        c, d = tl.split(tl.reshape(words, (rows.shape[0], LANES, 2)))
    return a, b, c, d


@triton.jit
def trade(a, b, SHIFT: tl.constexpr, LOW: tl.constexpr):
    """From every `2 * SHIFT` bits of two words, collect the lower halves in one word and the upper halves in
    another."""
    HIGH: tl.constexpr = 0xFFFFFFFF ^ LOW
    return (a & LOW) | ((b << SHIFT) & HIGH), ((a >> SHIFT) & LOW) | (b & HIGH)


@triton.jit
def trade_four(a, b, c, d):
    """Turn words in which four bits of a byte alternate with four bits of another into words of one bit each, the
    lowest first."""
    a, c = trade(a, c, 2, 0x33333333)
    b, d = trade(b, d, 2, 0x33333333)
    a, b = trade(a, b, 1, 0x55555555)
    c, d = trade(c, d, 1, 0x55555555)
    return a, b, c, d


@triton.jit
def bit_planes(first, second):
    """Eight words, as two times four, each with one bit of 32 bytes, from the lowest bit on. All have the bytes in the
    same order."""
    a, e = trade(first[0], second[0], 4, 0x0F0F0F0F)
    b, f = trade(first[1], second[1], 4, 0x0F0F0F0F)
    c, g = trade(first[2], second[2], 4, 0x0F0F0F0F)
    d, h = trade(first[3], second[3], 4, 0x0F0F0F0F)
    return trade_four(a, b, c, d), trade_four(e, f, g, h)


@triton.jit
def subtract_bit(bit, value, NTH: tl.constexpr, borrow):
    """Bit `NTH` of the bytes minus `value`, and what it borrows from the next bit."""
    other = (0 - ((value >> NTH) & 1)).to(tl.uint32)[:, None]
    return bit ^ other ^ borrow, (~bit & (other | borrow)) | (other & borrow)


@triton.jit
def count_bits(x):
    """The number of bits set in each word."""
    x = x - ((x >> 1) & 0x55555555)
    x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
    return (((x + (x >> 4)) & 0x0F0F0F0F) * EACH) >> 24


@triton.jit
def rank_windows(planes_ptr, rows, mask_r, first, NUM_COLS: tl.constexpr, LANES: tl.constexpr):
    """Base and coverage of the best window with a base from `first` to `first + 7`; the lowest one in a tie.

    Also returns two bounds: the most that a higher window can cover, which is the number of bytes of at least
    `first + 8`, and the most that a lower one can, the number of bytes of at most `first + 14`.

    Handles 32 bytes at a time, as words of bits: `d0` to `d7`, the bits of their differences to `first`, tell which
    bytes are in a window.
    """
    CHUNKS: tl.constexpr = (NUM_COLS + 32 * LANES - 1) // (32 * LANES)
    PADDING: tl.constexpr = CHUNKS * 32 * LANES - NUM_COLS  # its zeros are only covered by the window with base 0
    c0 = tl.zeros((rows.shape[0], LANES), tl.uint32)
    c1, c2, c3, c4, c5, c6, c7, num_up, num_down = c0, c0, c0, c0, c0, c0, c0, c0, c0
    for i_chunk in range(CHUNKS):
        word = i_chunk * (8 * LANES)
        half = load_four_words(planes_ptr, rows, mask_r, word, NUM_COLS, LANES=LANES)
        rest = load_four_words(planes_ptr, rows, mask_r, word + 4 * LANES, NUM_COLS, LANES=LANES)
        low, high = bit_planes(half, rest)
        d0, borrow = subtract_bit(low[0], first, 0, tl.zeros_like(c0))
        d1, borrow = subtract_bit(low[1], first, 1, borrow)
        d2, borrow = subtract_bit(low[2], first, 2, borrow)
        d3, borrow = subtract_bit(low[3], first, 3, borrow)
        d4, borrow = subtract_bit(high[0], first, 4, borrow)
        d5, borrow = subtract_bit(high[1], first, 5, borrow)
        d6, borrow = subtract_bit(high[2], first, 6, borrow)
        d7, below = subtract_bit(high[3], first, 7, borrow)
        near = ~(d5 | d6 | d7 | below)  # differences from 0 to 31
        # Window n covers differences n to n + 15: from n to 15 without bit 4, and below n in the low four bits with it.
        c0 += count_bits(near & ~d4)
        c1 += count_bits(near & (d4 ^ (d3 | d2 | d1 | d0)))
        c2 += count_bits(near & (d4 ^ (d3 | d2 | d1)))
        c3 += count_bits(near & (d4 ^ (d3 | d2 | (d1 & d0))))
        c4 += count_bits(near & (d4 ^ (d3 | d2)))
        c5 += count_bits(near & (d4 ^ (d3 | (d2 & (d1 | d0)))))
        c6 += count_bits(near & (d4 ^ (d3 | (d2 & d1))))
        c7 += count_bits(near & (d4 ^ (d3 | (d2 & d1 & d0))))
        num_up += count_bits(~(below | (near & ~d4 & ~d3)))
        num_down += count_bits(below | (near & ~d4 & ~(d3 & d2 & d1 & d0)))
    covered = tl.sum(c0, axis=1).to(tl.int32) - tl.where(first == 0, PADDING, 0)
    best = covered * 8 + 7
    best = tl.maximum(best, tl.sum(c1, axis=1).to(tl.int32) * 8 + 6)
    best = tl.maximum(best, tl.sum(c2, axis=1).to(tl.int32) * 8 + 5)
    best = tl.maximum(best, tl.sum(c3, axis=1).to(tl.int32) * 8 + 4)
    best = tl.maximum(best, tl.sum(c4, axis=1).to(tl.int32) * 8 + 3)
    best = tl.maximum(best, tl.sum(c5, axis=1).to(tl.int32) * 8 + 2)
    best = tl.maximum(best, tl.sum(c6, axis=1).to(tl.int32) * 8 + 1)
    best = tl.maximum(best, tl.sum(c7, axis=1).to(tl.int32) * 8)
    reach_up = tl.sum(num_up, axis=1).to(tl.int32)
    reach_down = tl.sum(num_down, axis=1).to(tl.int32) - PADDING
    return first + 7 - (best & 7), best >> 3, reach_up, reach_down


@triton.jit
def can_lose(mask_r, covered, reach_up, reach_down, highest, lowest):
    """Whether a window above those from `highest` on, or below `lowest`, may still win: 0 or 1 for each row. The lower
    window wins a tie."""
    down = (reach_down >= covered) & (lowest > 0)
    up = (reach_up > covered) & (highest < LAST)
    return (mask_r & (down | up)).to(tl.int32)


@triton.jit
def choose_bases(planes_ptr, rows, mask_r, NUM_COLS: tl.constexpr, LANES: tl.constexpr):
    """Each row's lowest base with the best coverage, and that coverage, int32."""
    total = tl.zeros(rows.shape, tl.int32)
    for i_word in range(0, (NUM_COLS + 3) // 4, 4 * LANES):
        word = i_word + tl.arange(0, 4 * LANES)[None, :]
        total += sum_bytes(load_words(planes_ptr, rows, mask_r, word, NUM_COLS))
    # Bases from 4 to 11 below the mean: the best is about 8 below it in a wide row, and 15 below the largest value in a
    # narrow one.
    first = tl.minimum(tl.maximum(total // NUM_COLS - 11, 0), LAST)
    base, covered, reach_up, reach_down = rank_windows(planes_ptr, rows, mask_r, first, NUM_COLS, LANES=LANES)
    highest = first
    lowest = first
    searching = tl.max(can_lose(mask_r, covered, reach_up, reach_down, highest, lowest=lowest))
    while searching > 0:
        down = mask_r & (reach_down >= covered) & (lowest > 0)
        first = tl.where(down, tl.maximum(lowest - 8, 0), tl.minimum(highest + 8, LAST))
        new_base, new_covered, new_up, new_down = rank_windows(planes_ptr, rows, mask_r, first, NUM_COLS, LANES=LANES)
        wins = (new_covered > covered) | ((new_covered == covered) & (new_base < base))
        base = tl.where(wins, new_base, base)
        covered = tl.where(wins, new_covered, covered)
        reach_down = tl.where(down, new_down, reach_down)
        reach_up = tl.where(down, reach_up, new_up)
        lowest = tl.where(down, first, lowest)
        highest = tl.where(down, highest, first)
        searching = tl.max(can_lose(mask_r, covered, reach_up, reach_down, highest, lowest=lowest))
    return base, covered


@triton.jit
def split_codes(words, base):
    """(codes above `base`, one in each byte, zero for exceptions; one in each byte that is an exception)."""
    bases = base * EACH
    # Bytewise subtraction: bit 7 is set, so that nothing borrows from the next byte, and then corrected.
    above = ((words | TOP_BITS) - (bases & 0x7F7F7F7F)) ^ ((words ^ ~bases) & TOP_BITS)
    outside = ((((above >> 4) & 0x0F0F0F0F) + 0x0F0F0F0F) >> 4) & EACH  # carries stay inside a byte
    return above & 0x0F0F0F0F & ~(outside * 15), outside


@triton.jit(do_not_specialize=["num_rows"])
def choose_kernel(
    planes_ptr, fixed_ptr, slab_counts_ptr, num_rows,
    NUM_COLS: tl.constexpr, SLAB_BYTES: tl.constexpr, BLOCK_R: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Write the bases of `BLOCK_R` rows, numbered through all planes, and count the exceptions of each slab of 16
    rows."""
    rows = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    mask_r = rows < num_rows
    base, covered = choose_bases(planes_ptr, rows, mask_r, NUM_COLS, LANES=LANES)
    tl.store(fixed_ptr + rows // 16 * SLAB_BYTES + rows % 16, base.to(tl.uint8), mask=mask_r)
    slabs = tl.program_id(0) * (BLOCK_R // 16) + tl.arange(0, BLOCK_R // 16)
    num_exceptions = tl.sum(tl.reshape(NUM_COLS - covered, (BLOCK_R // 16, 16)), axis=1)
    tl.store(slab_counts_ptr + slabs, num_exceptions, mask=slabs < num_rows // 16)


@triton.jit
def scan_kernel(slab_counts_ptr, plane_counts_ptr, NUM_SLABS: tl.constexpr, BLOCK: tl.constexpr):
    """Replace the number of exceptions of each slab by where they end, counted from the plane's first one, and store
    the plane's sum."""
    plane = tl.program_id(0).to(tl.int64)
    slab_counts_ptr += plane * NUM_SLABS
    seen = 0
    for first in range(0, NUM_SLABS, BLOCK):
        slabs = first + tl.arange(0, BLOCK)
        counts = tl.load(slab_counts_ptr + slabs, mask=slabs < NUM_SLABS, other=0)
        tl.store(slab_counts_ptr + slabs, seen + tl.cumsum(counts), mask=slabs < NUM_SLABS)
        seen += tl.sum(counts)
    tl.store(plane_counts_ptr + plane, seen)


@triton.jit(do_not_specialize=["num_planes"])
def ends_kernel(plane_counts_ptr, host_ends_ptr, num_planes, BLOCK: tl.constexpr):
    """Replace the number of exceptions of each plane by where they end, and also store that where the host reads it.
    One program."""
    seen = tl.full((), 0, tl.int64)
    for first in range(0, num_planes, BLOCK):
        planes = first + tl.arange(0, BLOCK)
        counts = tl.load(plane_counts_ptr + planes, mask=planes < num_planes, other=0)
        ends = seen + tl.cumsum(counts)
        tl.store(plane_counts_ptr + planes, ends, mask=planes < num_planes)
        tl.store(host_ends_ptr + planes, ends, mask=planes < num_planes)
        seen += tl.sum(counts)


@triton.jit(do_not_specialize=["num_slabs"])
def write_kernel(
    planes_ptr, fixed_ptr, slab_ends_ptr, plane_ends_ptr, words_ptr, num_slabs,
    NUM_SLABS: tl.constexpr, NUM_COLS: tl.constexpr, SLAB_BYTES: tl.constexpr,
    SLABS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write codes and exception words of `SLABS` slabs of 16 rows, `BLOCK` times eight units at a time.

    A unit is four bytes, or two if a row's length is not a multiple of four. Codes are in memory in the same order as
    the bytes, through rows and slabs. The exceptions of eight units are a mask, whose few bits are taken one by one.
    """
    UNIT: tl.constexpr = 4 if NUM_COLS % 4 == 0 else 2
    SLAB_UNITS: tl.constexpr = 16 * NUM_COLS // UNIT
    first_slab = tl.program_id(0).to(tl.int64) * SLABS
    num_units = tl.minimum(num_slabs - first_slab, SLABS).to(tl.int32) * SLAB_UNITS
    plane = first_slab // NUM_SLABS
    seen = tl.load(plane_ends_ptr + plane - 1, mask=plane > 0, other=0)
    seen += tl.load(slab_ends_ptr + first_slab - 1, mask=first_slab % NUM_SLABS > 0, other=0)
    planes_ptr += first_slab * (16 * NUM_COLS)
    fixed_ptr += first_slab * SLAB_BYTES
    for i_unit in range(0, SLABS * SLAB_UNITS, 8 * BLOCK):
        nth = tl.arange(0, 8)[None, :]
        unit = i_unit + tl.arange(0, BLOCK)[:, None] * 8 + nth
        mask = unit < num_units
        slab_ptr = fixed_ptr + unit // SLAB_UNITS * SLAB_BYTES
        in_slab = unit % SLAB_UNITS
        base = tl.load(slab_ptr + in_slab // (NUM_COLS // UNIT), mask=mask, other=0).to(tl.uint32)
        kind: tl.constexpr = tl.uint32 if UNIT == 4 else tl.uint16
        values = tl.load(planes_ptr.to(tl.pointer_type(kind)) + unit, mask=mask, other=0).to(tl.uint32)
        codes, outside = split_codes(values, base)
        codes = (codes | (codes >> 4)) & 0x00FF00FF
        if UNIT == 4:
            codes = (codes | (codes >> 8)).to(tl.uint16)
            tl.store((slab_ptr + 16).to(tl.pointer_type(tl.uint16)) + in_slab, codes, mask=mask)
        else:
            tl.store(slab_ptr + 16 + in_slab, codes.to(tl.uint8), mask=mask)
            outside = outside & 0x0101
        outside = tl.where(mask, outside, 0)
        counts = sum_bytes(outside)
        place = seen + tl.cumsum(counts) - counts
        seen += tl.sum(counts)
        # The product moves bits 0, 8, 16 and 24 to 24, 25, 26 and 27, and no other two bits meet.
        left = tl.sum(((outside * 0x01020408) >> 24 & 15) << (UNIT * nth).to(tl.uint32), axis=1)
        first = UNIT * (i_unit + 8 * tl.arange(0, BLOCK))
        while tl.max((left != 0).to(tl.int32)) > 0:
            some = left != 0
            lowest = left & (~left + 1)
            at = first + (lowest.to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127
            value = tl.load(planes_ptr + at, mask=some, other=0).to(tl.uint32)
            position = (first_slab % NUM_SLABS).to(tl.int32) * (16 * NUM_COLS) + at
            position = position % (16 * NUM_COLS * NUM_SLABS)
            tl.store(words_ptr + place, exception_word(position.to(tl.uint32), value), mask=some)
            place += some.to(tl.int32)
            left ^= lowest


def choose_config(num_cols: int) -> dict[str, int]:
    """Constants of `choose_kernel`. One warp, so that its search needs no barrier. Each thread handles 32 bytes of a
    row at a time; two threads share a row if its words can be loaded four at a time."""
    lanes = 2 if num_cols % 16 == 0 else 1
    return {"BLOCK_R": 32 // lanes, "LANES": lanes, "num_warps": 1}


def scan_config(num_rows: int) -> dict[str, int]:
    """Constants of `scan_kernel`. Most planes fit in one block."""
    num_slabs = num_rows // NVFP4_CSF.rows_per_slab
    return {"NUM_SLABS": num_slabs, "BLOCK": min(1024, next_power_of_2(num_slabs)), "num_warps": 4}


def ends_config() -> dict[str, int]:
    """Constants of `ends_kernel`. Most stacks fit in one block."""
    return {"BLOCK": 1024, "num_warps": 4}


def write_config(num_cols: int) -> dict[str, int]:
    """Constants of `write_kernel`. One warp, so that its inner loop ends with a vote instead of a barrier."""
    slab_units = 16 * num_cols // (4 if num_cols % 4 == 0 else 2)
    return {"SLABS": max(1, 1280 // slab_units), "BLOCK": 32, "num_warps": 1}


@functools.lru_cache(maxsize=None)
def choose_launch(num_planes: int, num_rows: int, num_cols: int, **overrides: int) -> tuple[tuple[int], BoundKernel]:
    """Grid and kernel for one kind of launch. `overrides` replace entries of `choose_config`, for tuning."""
    config = {**choose_config(num_cols), **overrides}
    kernel = bind(choose_kernel, NUM_COLS=num_cols, SLAB_BYTES=NVFP4_CSF.slab_bytes(num_cols), **config)
    return (cdiv(num_planes * num_rows, config["BLOCK_R"]),), kernel


@functools.lru_cache(maxsize=None)
def scan_launch(num_planes: int, num_rows: int) -> tuple[tuple[int], BoundKernel]:
    """Grid and kernel for one kind of launch."""
    return (num_planes,), bind(scan_kernel, **scan_config(num_rows))


@functools.lru_cache(maxsize=None)
def ends_launch() -> tuple[tuple[int], BoundKernel]:
    """Grid and kernel for every launch."""
    return (1,), bind(ends_kernel, **ends_config())


@functools.lru_cache(maxsize=None)
def write_launch(num_planes: int, num_rows: int, num_cols: int, **overrides: int) -> tuple[tuple[int], BoundKernel]:
    """Grid and kernel for one kind of launch. `overrides` replace entries of `write_config`, for tuning."""
    config = {**write_config(num_cols), **overrides}
    num_slabs = num_rows // NVFP4_CSF.rows_per_slab
    kernel = bind(
        write_kernel,
        NUM_SLABS=num_slabs, NUM_COLS=num_cols, SLAB_BYTES=NVFP4_CSF.slab_bytes(num_cols),
        **config,
    )  # fmt: skip
    return (cdiv(num_planes * num_slabs, config["SLABS"]),), kernel


def encode_gpu(planes: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Encode uint8 `[E, N, C]`. Returns `fixed [E, bytes]`, words uint32 `[X]`, and where each plane's words end, int64
    `[E]` on the CPU."""
    num_planes, num_rows, num_cols = planes.shape
    if planes.data_ptr() % 4:
        planes = planes.clone()
    fixed = planes.new_empty(num_planes, NVFP4_CSF.fixed_bytes(num_rows, num_cols))
    slab_ends = planes.new_empty(num_planes, num_rows // NVFP4_CSF.rows_per_slab, dtype=torch.int32)
    launch_choose(planes, fixed, slab_ends)
    plane_ends = planes.new_empty(num_planes, dtype=torch.int64)
    launch_scan(slab_ends, plane_ends)
    # On NVIDIA and AMD, kernels write to page-locked memory. On others the host copies the result, and waits for it.
    pinned = planes.is_cuda
    device = "cpu" if pinned else planes.device
    host_ends = torch.empty(num_planes, dtype=torch.int64, device=device, pin_memory=pinned)
    num_words = host_ends[-1]
    launch_ends(plane_ends, host_ends)
    if pinned:
        torch.cuda.current_stream(planes.device).synchronize()
    words = planes.new_empty(int(num_words), dtype=torch.uint32)
    launch_write(planes, fixed, slab_ends, plane_ends, words)
    return fixed, words, host_ends.cpu().clone()  # page-locked memory is scarce, so it is not kept


def launch_choose(planes: torch.Tensor, fixed: torch.Tensor, slab_counts: torch.Tensor, **overrides: int) -> None:
    """Write the bases into `fixed [E, bytes]`, and the number of exceptions of each slab into `slab_counts` int32
    `[E, S]`."""
    num_planes, num_rows, num_cols = planes.shape
    grid, kernel = choose_launch(num_planes, num_rows, num_cols, **overrides)
    kernel(grid, planes, fixed, slab_counts, num_planes * num_rows)


def launch_scan(slab_counts: torch.Tensor, plane_counts: torch.Tensor) -> None:
    """Replace `slab_counts` by their running sums in each plane, and put the planes' sums into `plane_counts` int64
    `[E]`."""
    num_planes, num_slabs = slab_counts.shape
    grid, kernel = scan_launch(num_planes, num_slabs * NVFP4_CSF.rows_per_slab)
    kernel(grid, slab_counts, plane_counts)


def launch_ends(plane_counts: torch.Tensor, host_ends: torch.Tensor) -> None:
    """Replace `plane_counts` int64 `[E]` by their running sums, and also write these to `host_ends` int64 `[E]`, which
    may be page-locked memory."""
    grid, kernel = ends_launch()
    kernel(grid, plane_counts, host_ends, len(plane_counts))


def launch_write(
    planes: torch.Tensor,
    fixed: torch.Tensor,
    slab_ends: torch.Tensor,
    plane_ends: torch.Tensor,
    words: torch.Tensor,
    **overrides: int,
) -> None:
    """Write the codes into `fixed`, which already holds the bases, and the exceptions into `words`, uint32."""
    num_planes, num_rows, num_cols = planes.shape
    grid, kernel = write_launch(num_planes, num_rows, num_cols, **overrides)
    num_slabs = num_planes * (num_rows // NVFP4_CSF.rows_per_slab)
    kernel(grid, planes, fixed, slab_ends, plane_ends, words, num_slabs)
