"""The scales of one weight tile in a strip of shared memory: bytes [BLOCK_N, STRIDE], rows padded.

A strip holds a slice of the tile's columns: all of them or, if rows are long, one of several equal parts at a time.
Compressed scales are decoded into it: their codes, bases and exceptions are loaded (`load_windows`, `load_exceptions`),
and then stored as bytes, first every window and, after a barrier, the exceptions over them. Dense scales that are
loaded at once (`smem_plan.comes_whole`) are copied into it (`load_dense`); others arrive chunk by chunk, with the
weights, and need no strip. Products read the same bytes in every case (`strip_pairs`). A lane fills whole rows, or an
equal part of one, so that it needs few bases and addresses.

Exceptions are stored at computed addresses, and some are not stored at all. Gluon's shared memory does not support
that: Triton 3.6 has no such store, and 3.9 only a scatter along one axis, without a mask. So the strip is a separate
shared variable, declared and addressed in PTX.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton.experimental.gluon.language as gl
from triton.experimental import gluon

from ...csf.words_triton import OFFSET_TILE, exception_position, exception_value, offset_tiles
from . import ptx
from .unpack import barrier, group_layout


class ExceptionSpan(NamedTuple):
    """Where a tile's exceptions are: number p of `count` is word `first + p`, and from `of_gate` on `first_of_up + p`.

    The span may include other exceptions of the offset tiles at both ends.
    """

    first: Any
    of_gate: Any
    first_of_up: Any
    count: Any


class Slice(NamedTuple):
    """TILE.COLS columns of a tile's scales, from `first_col` on."""

    tile: Any
    exceptions: Any
    first_col: Any


class LoadedScales(NamedTuple):
    """A slice in registers, on its way to a strip. If scales are dense, only `words` is used, and the other fields are
    0."""

    words: Any  # of 8 scales, or of 8 codes
    bases: Any
    exceptions: Any


@gluon.constexpr_function
def row_parts(block_n: int, cols: int, num_warps: int) -> int:
    """The number of lanes that share a row."""
    parts = 1
    while 2 * parts * block_n <= 32 * num_warps and cols // 8 % (2 * parts) == 0:
        parts *= 2
    return parts


@gluon.constexpr_function
def word_vector(words: int) -> int:
    """How many of a lane's `words` of codes one load takes."""
    return min(4, words & -words)


@gluon.constexpr_function
def exception_block(block_n: int, cols: int, num_warps: int) -> int:
    """How many exceptions are held in registers: 1.25 % of a slice's scales. The others are loaded when they are
    stored."""
    block = 32 * num_warps
    while block < block_n * cols // 80:
        block *= 2
    return block


@gluon.constexpr_function
def lanes_layout(num_warps: int):
    """Layout [n] with one of 32 * num_warps elements in each lane."""
    return gl.BlockedLayout([1], [32], [num_warps], [0])


@gluon.jit
def new_strips(num_rows, TILE: gl.constexpr):
    """Shared address of the strips. Use it once per kernel, outside loops. `num_rows` is any int32 scalar."""
    strip = ptx.declare_shared(num_rows, TILE.STRIP_BYTES)
    if TILE.COLS % TILE.GROUPS != 0:  # what is past a row's end is multiplied by zeros, so it must not be NaN
        BYTES: gl.constexpr = TILE.STRIP_BYTES
        for i in gl.static_range(BYTES // 256):
            ptx.store_zero(strip + i * 256 + 4 * gl.arange(0, 64, lanes_layout(gl.num_warps())))
        barrier()
    return strip


@gluon.jit
def strip_row(row, half, TILE: gl.constexpr):
    """The strip's row for row `row` of a half: with a gate, 8 gate rows alternate with the 8 matching up rows."""
    return row // 8 * 16 + half * 8 + row % 8 if TILE.HALVES == 2 else row


@gluon.constexpr_function
def has_exact_spans(shape, tile) -> bool:
    """Whether the HALF rows of each half of a tile begin and end with an offset tile."""
    return tile.HALF * shape.C % OFFSET_TILE.value == 0 and shape.N % tile.HALF == 0


@gluon.jit
def exception_span(scales, tile, num_experts, SHAPE: gl.constexpr, TILE: gl.constexpr):
    """The exceptions of a tile's rows; for a tile without an expert, those of one that exists; empty for dense
    scales."""
    if SHAPE.COMPRESSED:
        N: gl.constexpr = SHAPE.N
        C: gl.constexpr = SHAPE.C
        HALF: gl.constexpr = TILE.HALF
        HALVES: gl.constexpr = TILE.HALVES
        plane = gl.minimum(tile.expert, num_experts - 1) * offset_tiles(TILE.HALVES * N * C)
        starts = ()
        counts = (0,)
        for half in gl.static_range(HALVES):
            if has_exact_spans(SHAPE, TILE):
                first_tile = plane + tile.n_tile * (HALF * C // OFFSET_TILE)
                first_ptr = scales.exception_offsets + first_tile + half * (N * C // OFFSET_TILE)
                end_ptr = first_ptr + HALF * C // OFFSET_TILE
            else:
                first = (half * N + tile.n_tile * HALF) * C
                first_ptr = scales.exception_offsets + (plane + first // OFFSET_TILE)
                end = gl.minimum(first + HALF * C, (half + 1) * N * C)
                end_ptr = scales.exception_offsets + (plane + offset_tiles(end))
            first = gl.load(first_ptr) - counts[half]
            starts = starts + (first,)  # noqa: RUF005 (Triton tuples do not unpack)
            counts = counts + (gl.load(end_ptr) - first,)  # noqa: RUF005
        return ExceptionSpan(starts[0], counts[1], starts[TILE.HALVES - 1], counts[TILE.HALVES])
    else:
        return ExceptionSpan(0, 0, 0, 0)


@gluon.jit
def first_lane_span(span):
    """`span`, in values that compilers know to be the same in every lane."""
    return ExceptionSpan(
        ptx.first_lane(span.first), ptx.first_lane(span.of_gate), ptx.first_lane(span.first_of_up),
        ptx.first_lane(span.count),
    )  # fmt: skip


class PlaneRows(NamedTuple):
    """Rows `first + offset` in the stack of planes, where `first` (int64) is the tile's, and whether they exist."""

    first: Any
    offset: Any
    ok: Any


@gluon.jit
def segment_rows(tile, segment, PARTS: gl.constexpr, SHAPE: gl.constexpr, TILE: gl.constexpr):
    """The rows of segments. PARTS segments are a row of the tile, and the segments of one half follow those of the
    other."""
    N: gl.constexpr = SHAPE.N
    HALF: gl.constexpr = TILE.HALF
    row = segment // PARTS % HALF
    offset = segment // (PARTS * HALF) * N + row
    first = tile.expert.to(gl.int64) * (TILE.HALVES * N) + tile.n_tile * HALF
    ok = tile.n_tile * HALF + row < N if N % HALF != 0 else row >= 0
    return PlaneRows(first, offset, ok)


@gluon.jit
def load_windows(scales, part, zero, SHAPE: gl.constexpr, TILE: gl.constexpr):
    """Load the bases and words of codes of a slice, without its exceptions. `zero` is 0 or `ptx.opaque_zero()`."""
    W: gl.constexpr = gl.num_warps()
    PARTS: gl.constexpr = row_parts(TILE.BLOCK_N, TILE.COLS, W)
    WORDS: gl.constexpr = TILE.COLS // 8 // PARTS
    V: gl.constexpr = word_vector(WORDS)
    VECTOR: gl.constexpr = gl.BlockedLayout([1, V], [32, 1], [W, 1], [1, 0])
    segment = gl.arange(0, TILE.BLOCK_N * PARTS, gl.SliceLayout(1, VECTOR)) + zero
    rows = segment_rows(part.tile, segment, PARTS, SHAPE, TILE)
    ok = rows.ok

    base = gl.load(scales.bases + rows.first + rows.offset, mask=ok, other=0)
    words_ptr = scales.codes + (rows.first * (SHAPE.C // 8) + part.first_col // 8)
    offsets = (rows.offset.to(gl.int64) * (SHAPE.C // 8) + segment % PARTS * WORDS)[:, None]
    offsets = offsets + gl.arange(0, V, gl.SliceLayout(0, VECTOR)).to(gl.int64)[None, :]
    words = ()
    for i in gl.static_range(WORDS // V):
        vector = gl.load(words_ptr + offsets + i * V, mask=ok[:, None], other=0)
        if V == 1:
            words = words + (vector.reshape([TILE.BLOCK_N * PARTS]),)  # noqa: RUF005
        elif V == 2:
            words = words + gl.split(vector)
        else:
            even, odd = gl.split(vector.reshape([TILE.BLOCK_N * PARTS, 2, 2]))
            first, third = gl.split(even)
            second, fourth = gl.split(odd)
            words = words + (first, second, third, fourth)  # noqa: RUF005
    return LoadedScales(words, base, 0)


@gluon.jit
def load_dense(scales, part, zero, SHAPE: gl.constexpr, TILE: gl.constexpr):
    """Load the dense scales of a tile's rows, in words of 8. A lane has those of a whole row, or of an equal part of
    one."""
    PARTS: gl.constexpr = row_parts(TILE.BLOCK_N, SHAPE.C, gl.num_warps())
    segment = gl.arange(0, TILE.BLOCK_N * PARTS, lanes_layout(gl.num_warps())) + zero
    rows = segment_rows(part.tile, segment, PARTS, SHAPE, TILE)
    start_ptr = scales.dense + rows.first * (SHAPE.C // 8)
    offsets = rows.offset.to(gl.int64) * (SHAPE.C // 8) + segment % PARTS * (SHAPE.C // 8 // PARTS)
    words = ()
    WORDS: gl.constexpr = SHAPE.C // 8 // PARTS
    for i in gl.static_range(WORDS):
        words = words + (gl.load(start_ptr + offsets + i, mask=rows.ok, other=0),)  # noqa: RUF005
    return LoadedScales(words, 0, 0)


@gluon.jit
def load_rows(scales, part, zero, SHAPE: gl.constexpr, TILE: gl.constexpr):
    """Load a slice, without exceptions. A slice of dense scales is whole rows."""
    if SHAPE.COMPRESSED:
        return load_windows(scales, part, zero, SHAPE, TILE)
    else:
        return load_dense(scales, part, zero, SHAPE, TILE)


@gluon.jit
def load_exceptions(scales, span, begin, SHAPE: gl.constexpr, TILE: gl.constexpr):
    """Load a tile's exception words from number `begin` on; 0 for dense scales."""
    if SHAPE.COMPRESSED:
        BLOCK_X: gl.constexpr = exception_block(TILE.BLOCK_N, TILE.COLS, gl.num_warps())
        place = begin + gl.arange(0, BLOCK_X, lanes_layout(gl.num_warps()))
        first = gl.where(place >= span.of_gate, span.first_of_up, span.first) if SHAPE.GATE else span.first
        return gl.load(scales.exceptions + (place + first), mask=place < span.count, other=0)
    else:
        return 0


@gluon.jit
def no_exceptions(SHAPE: gl.constexpr, TILE: gl.constexpr):
    """What `load_exceptions` returns if there are no exceptions."""
    if SHAPE.COMPRESSED:
        BLOCK_X: gl.constexpr = exception_block(TILE.BLOCK_N, TILE.COLS, gl.num_warps())
        return gl.zeros([BLOCK_X], gl.int32, lanes_layout(gl.num_warps()))
    else:
        return 0


@gluon.jit
def load_slice(scales, part, SHAPE: gl.constexpr, TILE: gl.constexpr):
    """Load a slice, with its first exceptions."""
    loaded = load_rows(scales, part, 0, SHAPE, TILE)
    return LoadedScales(loaded.words, loaded.bases, load_exceptions(scales, part.exceptions, 0, SHAPE, TILE))


@gluon.jit
def prefetch_windows(scales, part, SHAPE: gl.constexpr, TILE: gl.constexpr):
    """Prefetch the codes of a slice to L2, if there is such a slice."""
    row = gl.arange(0, TILE.BLOCK_N, lanes_layout(gl.num_warps()))
    rows = segment_rows(part.tile, row, 1, SHAPE, TILE)
    plane_row = rows.first + rows.offset
    if SHAPE.N % TILE.HALF != 0:
        plane_row = gl.where(rows.ok, plane_row, 0)
    if part.first_col < SHAPE.C:
        ptx.prefetch_to_l2(scales.codes + plane_row * (SHAPE.C // 8) + part.first_col // 8)


@gluon.jit
def segment_address(strip, LAYOUT: gl.constexpr, zero, COLS: gl.constexpr, TILE: gl.constexpr):
    """The address in the strip where a lane's part of a row begins; `row_parts` lanes share a row of COLS bytes."""
    PARTS: gl.constexpr = row_parts(TILE.BLOCK_N, COLS, gl.num_warps())
    segment = gl.arange(0, TILE.BLOCK_N * PARTS, LAYOUT) + zero
    row = strip_row(segment // PARTS % TILE.HALF, segment // (PARTS * TILE.HALF), TILE)
    return strip + row * TILE.STRIDE + segment % PARTS * (COLS // PARTS)


@gluon.jit
def store_rows(strip, loaded, zero, SHAPE: gl.constexpr, TILE: gl.constexpr):
    """Store what `load_rows` loaded, as bytes. Every warp must be done with the strip."""
    if SHAPE.COMPRESSED:
        LANES: gl.constexpr = loaded.bases.type.layout
        address = segment_address(strip, LANES, zero, TILE.COLS, TILE)
        base = loaded.bases.to(gl.int32) * 0x01010101
        STEP: gl.constexpr = 2 if len(loaded.words) % 2 == 0 and TILE.STRIDE % 16 == 0 else 1
        for i in gl.static_range(0, len(loaded.words), STEP):
            first = gl.convert_layout(loaded.words[i], LANES, assert_trivial=True)
            if STEP == 2:
                second = gl.convert_layout(loaded.words[i + 1], LANES, assert_trivial=True)
                ptx.store_decoded_twice(address + 8 * i, base, first, second)
            else:
                ptx.store_decoded(address + 8 * i, base, first)
    else:
        LAYOUT: gl.constexpr = loaded.words[0].type.layout
        address = segment_address(strip, LAYOUT, zero, SHAPE.C, TILE)
        for i in gl.static_range(len(loaded.words)):
            ptx.store_word(address + 8 * i, loaded.words[i])


@gluon.jit
def store_exceptions(strip, words, begin, part, SHAPE: gl.constexpr, TILE: gl.constexpr):
    """Store those of `words`, exceptions from number `begin` on, that are in the tile's rows and the strip's
    columns."""
    N: gl.constexpr = SHAPE.N
    C: gl.constexpr = SHAPE.C
    STRIDE: gl.constexpr = TILE.STRIDE
    place = begin + gl.arange(0, words.shape[0], lanes_layout(gl.num_warps()))
    is_up = place >= part.exceptions.of_gate if SHAPE.GATE else False
    exists = place < part.exceptions.count
    words = words.to(gl.uint32, bitcast=True)
    position = exception_position(words)
    if not has_exact_spans(SHAPE, TILE):
        first = part.tile.n_tile * (TILE.HALF * C)
        end = gl.minimum(TILE.HALF * C, N * C - first)
        if SHAPE.GATE:
            first = gl.where(is_up, first + N * C, first)
        exists = exists & (position - first.to(gl.uint32) < end.to(gl.uint32))
    # Computed from the row in the plane, minus the address of the tile's first row. Both are linear, because tiles
    # begin at multiples of 8 rows.
    row = position // C
    if TILE.COLS == C:
        address = position + row * (STRIDE - C)
    else:
        address = position - row * C - part.first_col.to(gl.uint32)
        exists = exists & (address < TILE.COLS)
        address += row * STRIDE
    start = strip - part.tile.n_tile * (TILE.BLOCK_N * STRIDE)
    if SHAPE.GATE:
        address = address + (row - row % 8) * STRIDE
        start = gl.where(is_up, start + (8 - 2 * N) * STRIDE, start)
    address = address.to(gl.int32, bitcast=True) + start
    ptx.store_byte(address, exception_value(words).to(gl.int32, bitcast=True), exists)


@gluon.jit
def patch_strip(strip, scales, exceptions, part, SHAPE: gl.constexpr, TILE: gl.constexpr):
    """Store the loaded exceptions over the windows, and then any others."""
    store_exceptions(strip, exceptions, 0, part, SHAPE=SHAPE, TILE=TILE)
    BLOCK_X: gl.constexpr = exceptions.shape[0]
    for begin in range(BLOCK_X, part.exceptions.count, BLOCK_X):
        late = load_exceptions(scales, part.exceptions, begin, SHAPE, TILE)
        store_exceptions(strip, late, begin, part, SHAPE=SHAPE, TILE=TILE)


@gluon.jit
def fill_strip(strip, scales, loaded, part, SHAPE: gl.constexpr, TILE: gl.constexpr):
    """Decode or copy what `load_slice` loaded. Every warp must be done with the strip, and a barrier must follow."""
    store_rows(strip, loaded, 0, SHAPE, TILE)
    if SHAPE.COMPRESSED:
        barrier()
        patch_strip(strip, scales, loaded.exceptions, part, SHAPE=SHAPE, TILE=TILE)


@gluon.jit
def strip_pairs(strip, chunk, ROWS: gl.constexpr, TILE: gl.constexpr):
    """Load the pairs of scale bytes of a chunk's groups, int16 [ROWS, G/2] in `group_layout`."""
    GROUPS: gl.constexpr = TILE.GROUPS
    QUAD: gl.constexpr = group_layout(ROWS, 4, gl.num_warps())
    row = gl.arange(0, ROWS, gl.SliceLayout(1, QUAD))
    lane = gl.arange(0, 4, gl.SliceLayout(0, QUAD))
    address = (strip + chunk * GROUPS) + ((row * TILE.STRIDE)[:, None] + (lane * (GROUPS // 4))[None, :])
    pairs = ptx.load_pairs(address, GROUPS // 8)
    if GROUPS == 8:
        pairs = pairs[0]
    elif GROUPS == 16:
        pairs = gl.join(pairs[0], pairs[1]).reshape([ROWS, 8])
    else:
        pairs = gl.join(gl.join(pairs[0], pairs[2]), gl.join(pairs[1], pairs[3])).reshape([ROWS, 16])
    return gl.convert_layout(pairs, group_layout(ROWS, GROUPS // 2, gl.num_warps()), assert_trivial=True)
