"""The scales of one weight tile in a strip of shared memory: bytes [BLOCK_N, STRIDE], rows padded.

Compressed scales are decoded into it. A strip holds a slice of the tile's columns: all of them, or where rows are
long, an equal part at a time. Its codes, bases and exceptions are loaded (`load_windows`, `load_exceptions`) and become
bytes: every window first, then, after a barrier, the exceptions over them. Dense scales that come whole
(`config.comes_whole`) are copied into it (`load_plain`); others come chunk by chunk, with the weights. Products read
the same bytes from everywhere (`strip_pairs`). A lane fills whole rows, or an equal part of one, so that it needs few
bases and addresses.

Exceptions go to computed addresses, which Gluon's shared memory does not take, so the strip is a shared variable of its
own, declared and addressed in PTX.
"""

from __future__ import annotations

import triton.experimental.gluon.language as gl
from triton.experimental import gluon

from ...csf.scales import TILE_BYTES
from ...formats import NVFP4_CSF
from .. import config
from .unpack import barrier, group_layout

STRIP_LIMIT = gl.constexpr(config.MAX_STRIP_BYTES)
strip_stride = gluon.constexpr_function(config.strip_stride)
whole = gluon.constexpr_function(config.whole)

OFFSET_TILE = gl.constexpr(TILE_BYTES)
POSITION_BITS = gl.constexpr(NVFP4_CSF.position_bits)


def _decode_words(count: int) -> str:
    """PTX: the bytes of `count` words of 8 codes, to shared address $1; $2 is the base, in every byte.

    The base is added before bytes are put in order: to what is left of a word without its high nibbles (one addition
    of three), and to those shifted (one shift and addition).
    """
    lines = ["{", f".reg .b32 l, h, r<{2 * count}>;"]
    for i in range(count):
        lines += [f"and.b32 h, ${3 + i}, 0xF0F0F0F0;", f"sub.u32 l, ${3 + i}, h;", "add.u32 l, l, $2;"]
        lines += ["shr.u32 h, h, 4;", "add.u32 h, h, $2;"]
        lines += [f"prmt.b32 r{2 * i + half}, l, h, {order:#x};" for half, order in enumerate((0x5140, 0x7362))]
    registers = ", ".join(f"r{i}" for i in range(2 * count))
    return "\n".join([*lines, f"st.shared.v{2 * count}.b32 [$1], {{{registers}}};", "mov.b32 $0, 0;", "}"])


DECODE_ONE = gl.constexpr(_decode_words(1))
DECODE_TWO = gl.constexpr(_decode_words(2))
STORE_BYTE = gl.constexpr("""{
.reg .pred p;
setp.ne.s32 p, $3, 0;
@p st.shared.u8 [$1], $2;
mov.b32 $0, 0;
}""")
PREFETCH = gl.constexpr("prefetch.global.L2 [$1]; mov.b32 $0, 0;")
STORE_WORD = gl.constexpr("st.shared.b64 [$1], $2; mov.b32 $0, 0;")
STORE_ZERO = gl.constexpr("st.shared.b32 [$1], 0; mov.b32 $0, 0;")


@gluon.constexpr_function
def declaration(num_bytes: int) -> str:
    return f".shared .align 16 .b8 csf_strip[{num_bytes}];\nmov.u32 $0, csf_strip;"


@gluon.constexpr_function
def load_pairs(count: int) -> str:
    """PTX: $0.. <- `count` consecutive pairs of scale bytes."""
    if count == 1:
        return "ld.shared.b16 $0, [$1];"
    outputs = ", ".join(f"${i}" for i in range(count))
    return f"ld.shared.v{count}.b16 {{{outputs}}}, [${count}];"


@gluon.constexpr_function
def row_parts(BLOCK_N: int, COLS: int, num_warps: int) -> int:
    """Lanes that share a row."""
    parts = 1
    while 2 * parts * BLOCK_N <= 32 * num_warps and COLS // 8 % (2 * parts) == 0:
        parts *= 2
    return parts


@gluon.constexpr_function
def word_vector(words: int) -> int:
    """Of a lane's `words` of codes, how many one load takes."""
    return min(4, words & -words)


@gluon.constexpr_function
def exception_block(BLOCK_N: int, COLS: int, num_warps: int) -> int:
    """Exceptions held in registers: 1.25 % of a slice's scales; what is beyond is loaded when its turn comes."""
    block = 32 * num_warps
    while block < BLOCK_N * COLS // 80:
        block *= 2
    return block


@gluon.jit
def call(asm: gl.constexpr, constraints: gl.constexpr, operands):
    """For its effect on shared memory."""
    gl.inline_asm_elementwise(asm, constraints, operands, dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def new_strip(num_rows, BLOCK_N: gl.constexpr, COLS: gl.constexpr, GROUPS: gl.constexpr, WARPGROUP: gl.constexpr):
    """Shared address of the strip. Once a kernel, outside loops. `num_rows`: any int32 scalar."""
    BYTES: gl.constexpr = whole(BLOCK_N * strip_stride(COLS, GROUPS), WARPGROUP)
    strip = gl.inline_asm_elementwise(declaration(BYTES), "=r,r", [num_rows], dtype=gl.int32, is_pure=False, pack=1)
    if COLS % GROUPS != 0:  # what lies past a row's end is multiplied by zeros, and must not be NaN
        LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
        for i in gl.static_range(BYTES // 256):
            call(STORE_ZERO, "=r,r", [strip + i * 256 + 4 * gl.arange(0, 64, LAYOUT)])
    return strip


@gluon.jit
def strip_row(row, half, GATE: gl.constexpr):
    """Row of the strip of a row of its half: with GATE, 8 rows of gate alternate with their 8 rows of up."""
    return row // 8 * 16 + half * 8 + row % 8 if GATE else row


@gluon.constexpr_function
def has_exact_ranges(N: int, C: int, HALF: int) -> bool:
    """Whether offset tiles begin and end where a tile's HALF rows of each half do."""
    return HALF * C % TILE_BYTES == 0 and N % HALF == 0


@gluon.jit
def exception_ranges(
    scales, tile, num_experts, N: gl.constexpr, C: gl.constexpr, GATE: gl.constexpr, BLOCK_N: gl.constexpr
):
    """Where the exceptions of a tile's rows are, give or take those of an offset tile: (first, how many), and with GATE
    (first of gate, how many of gate, the first of up less that, how many in all).

    Nothing for scales that are not compressed; something that exists for a tile of no expert.
    """
    ranges = ()
    if len(scales) == 4:
        HALF: gl.constexpr = BLOCK_N // 2 if GATE else BLOCK_N
        PLANE: gl.constexpr = 2 * N * C if GATE else N * C
        plane = gl.minimum(tile[0], num_experts - 1) * ((PLANE + OFFSET_TILE - 1) // OFFSET_TILE)
        gate_count = 0
        for half in gl.static_range(2 if GATE else 1):
            if has_exact_ranges(N, C, HALF):
                first_ptr = scales[3] + (plane + tile[3] * (HALF * C // OFFSET_TILE)) + half * (N * C // OFFSET_TILE)
                end_ptr = first_ptr + HALF * C // OFFSET_TILE
            else:
                first = (half * N + tile[3] * HALF) * C
                first_ptr = scales[3] + (plane + first // OFFSET_TILE)
                end = gl.minimum(first + HALF * C, (half + 1) * N * C)
                end_ptr = scales[3] + (plane + (end + OFFSET_TILE - 1) // OFFSET_TILE)
            first = gl.load(first_ptr) - gate_count
            gate_count = gl.load(end_ptr) - first
            ranges = ranges + (first, gate_count)  # noqa: RUF005 (Triton tuples do not unpack)
    return ranges


@gluon.jit
def load_windows(
    csf, tile, first_col, N: gl.constexpr, C: gl.constexpr, COLS: gl.constexpr, GATE: gl.constexpr,
    BLOCK_N: gl.constexpr, zero=0,
):  # fmt: skip
    """(bases, words of codes) of COLS columns of a tile's rows, in registers. `zero`: 0 or `opaque_zero()`."""
    expert, _, _, n_tile = tile
    W: gl.constexpr = gl.num_warps()
    PARTS: gl.constexpr = row_parts(BLOCK_N, COLS, W)
    WORDS: gl.constexpr = COLS // 8 // PARTS
    V: gl.constexpr = word_vector(WORDS)
    HALF: gl.constexpr = BLOCK_N // 2 if GATE else BLOCK_N
    HALVES: gl.constexpr = 2 if GATE else 1
    VECTOR: gl.constexpr = gl.BlockedLayout([1, V], [32, 1], [W, 1], [1, 0])
    segment = gl.arange(0, BLOCK_N * PARTS, gl.SliceLayout(1, VECTOR)) + zero
    row = segment // PARTS % HALF
    plane_row = segment // (PARTS * HALF) * N + row
    first_row = expert.to(gl.int64) * (HALVES * N) + n_tile * HALF
    ok = n_tile * HALF + row < N if N % HALF != 0 else row >= 0

    base = gl.load(csf[0] + first_row + plane_row, mask=ok, other=0)
    words_ptr = csf[1] + (first_row * (C // 8) + first_col // 8)
    offsets = (plane_row.to(gl.int64) * (C // 8) + segment % PARTS * WORDS)[:, None]
    offsets = offsets + gl.arange(0, V, gl.SliceLayout(0, VECTOR)).to(gl.int64)[None, :]
    words = ()
    for i in gl.static_range(WORDS // V):
        vector = gl.load(words_ptr + offsets + i * V, mask=ok[:, None], other=0)
        if V == 1:
            words = words + (vector.reshape([BLOCK_N * PARTS]),)  # noqa: RUF005 (Triton tuples do not unpack)
        elif V == 2:
            words = words + gl.split(vector)
        else:
            even, odd = gl.split(vector.reshape([BLOCK_N * PARTS, 2, 2]))
            first, third = gl.split(even)
            second, fourth = gl.split(odd)
            words = words + (first, second, third, fourth)  # noqa: RUF005
    return base, words


@gluon.jit
def load_plain(scales_ptr, tile, N: gl.constexpr, C: gl.constexpr, GATE: gl.constexpr, BLOCK_N: gl.constexpr, zero=0):
    """The dense scales of a tile's rows, int64 words in registers; a lane's are a row's, or an equal part of one's."""
    expert, _, _, n_tile = tile
    PARTS: gl.constexpr = row_parts(BLOCK_N, C, gl.num_warps())
    HALF: gl.constexpr = BLOCK_N // 2 if GATE else BLOCK_N
    HALVES: gl.constexpr = 2 if GATE else 1
    LANES: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    segment = gl.arange(0, BLOCK_N * PARTS, LANES) + zero
    row = segment // PARTS % HALF
    ok = n_tile * HALF + row < N if N % HALF != 0 else row >= 0
    start_ptr = scales_ptr + (expert.to(gl.int64) * (HALVES * N) + n_tile * HALF) * (C // 8)
    plane_row = segment // (PARTS * HALF) * N + row
    offsets = plane_row.to(gl.int64) * (C // 8) + segment % PARTS * (C // 8 // PARTS)
    words = ()
    for i in gl.static_range(C // 8 // PARTS):
        words = words + (gl.load(start_ptr + offsets + i, mask=ok, other=0),)  # noqa: RUF005
    return words


@gluon.jit
def store_plain(strip, words, C: gl.constexpr, GROUPS: gl.constexpr, GATE: gl.constexpr, BLOCK_N: gl.constexpr, zero=0):
    """Store what `load_plain` holds. Every warp must be done with the strip."""
    PARTS: gl.constexpr = row_parts(BLOCK_N, C, gl.num_warps())
    HALF: gl.constexpr = BLOCK_N // 2 if GATE else BLOCK_N
    segment = gl.arange(0, BLOCK_N * PARTS, words[0].type.layout) + zero
    row = strip_row(segment // PARTS % HALF, segment // (PARTS * HALF), GATE)
    address = strip + row * strip_stride(C, GROUPS) + segment % PARTS * (C // PARTS)
    for i in gl.static_range(len(words)):
        call(STORE_WORD, "=r,r,l", [address + 8 * i, words[i]])


@gluon.jit
def prefetch_windows(
    csf, tile, first_col, N: gl.constexpr, C: gl.constexpr, COLS: gl.constexpr, GATE: gl.constexpr,
    BLOCK_N: gl.constexpr,
):  # fmt: skip
    """Bring the codes of a slice, if there is one, to L2."""
    expert, _, _, n_tile = tile
    HALF: gl.constexpr = BLOCK_N // 2 if GATE else BLOCK_N
    HALVES: gl.constexpr = 2 if GATE else 1
    row = gl.arange(0, BLOCK_N, gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    plane_row = expert.to(gl.int64) * (HALVES * N) + n_tile * HALF + row // HALF * N + row % HALF
    if N % HALF != 0:
        plane_row = gl.where(n_tile * HALF + row % HALF < N, plane_row, 0)
    if first_col < C:
        address = csf[1] + plane_row * (C // 8) + first_col // 8
        gl.inline_asm_elementwise(PREFETCH, "=r,l", [address], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def exception_places(ranges, begin, BLOCK_X: gl.constexpr):
    """(places, whether they are of up, whether they exist) from place `begin` on of a tile's exceptions, gate first."""
    place = begin + gl.arange(0, BLOCK_X, gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    return place, place >= ranges[1] if len(ranges) == 4 else False, place < ranges[len(ranges) - 1]


@gluon.jit
def load_exceptions(csf, ranges, begin, BLOCK_N: gl.constexpr, COLS: gl.constexpr):
    """Exception words from place `begin` on of a tile's."""
    place, is_up, exists = exception_places(ranges, begin, exception_block(BLOCK_N, COLS, gl.num_warps()))
    place = place + (gl.where(is_up, ranges[2], ranges[0]) if len(ranges) == 4 else ranges[0])
    return gl.load(csf[2] + place, mask=exists, other=0)


@gluon.jit
def no_exceptions(BLOCK_N: gl.constexpr, COLS: gl.constexpr):
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    return gl.zeros([exception_block(BLOCK_N, COLS, gl.num_warps())], gl.int32, LAYOUT)


@gluon.jit
def load_rows(
    scales, tile, first_col, N: gl.constexpr, C: gl.constexpr, COLS: gl.constexpr, GATE: gl.constexpr,
    BLOCK_N: gl.constexpr, zero=0,
):  # fmt: skip
    """A slice's scales in registers, but for exceptions. Dense ones are whole rows."""
    if len(scales) == 4:
        return load_windows(scales, tile, first_col, N, C, COLS, GATE, BLOCK_N, zero)
    else:
        return load_plain(scales[0], tile, N, C, GATE, BLOCK_N, zero)


@gluon.jit
def load_scales(
    scales, tile, ranges, first_col, N: gl.constexpr, C: gl.constexpr, COLS: gl.constexpr, GATE: gl.constexpr,
    BLOCK_N: gl.constexpr,
):  # fmt: skip
    """What `fill_strip` needs of a slice, in registers."""
    rows = load_rows(scales, tile, first_col, N, C, COLS, GATE, BLOCK_N)
    if len(scales) == 4:
        return rows, load_exceptions(scales, ranges, 0, BLOCK_N, COLS)
    else:
        return (rows,)


@gluon.jit
def store_windows(
    strip, windows, COLS: gl.constexpr, GROUPS: gl.constexpr, GATE: gl.constexpr, BLOCK_N: gl.constexpr, zero=0
):
    """Store what `load_windows` holds as bytes. Every warp must be done with the strip."""
    base, words = windows
    LANES: gl.constexpr = base.type.layout
    PARTS: gl.constexpr = row_parts(BLOCK_N, COLS, gl.num_warps())
    HALF: gl.constexpr = BLOCK_N // 2 if GATE else BLOCK_N
    segment = gl.arange(0, BLOCK_N * PARTS, LANES) + zero
    row = strip_row(segment // PARTS % HALF, segment // (PARTS * HALF), GATE)
    address = strip + row * strip_stride(COLS, GROUPS) + segment % PARTS * (COLS // PARTS)
    base = base.to(gl.int32) * 0x01010101
    STEP: gl.constexpr = 2 if len(words) % 2 == 0 and strip_stride(COLS, GROUPS) % 16 == 0 else 1
    for i in gl.static_range(0, len(words), STEP):
        first = gl.convert_layout(words[i], LANES, assert_trivial=True)
        if STEP == 2:
            second = gl.convert_layout(words[i + 1], LANES, assert_trivial=True)
            call(DECODE_TWO, "=r,r,r,r,r", [address + 8 * i, base, first, second])
        else:
            call(DECODE_ONE, "=r,r,r,r", [address + 8 * i, base, first])


@gluon.jit
def store_rows(
    strip, scales, rows, COLS: gl.constexpr, GROUPS: gl.constexpr, GATE: gl.constexpr, BLOCK_N: gl.constexpr, zero=0
):
    """Store what `load_rows` holds. Every warp must be done with the strip."""
    if len(scales) == 4:
        store_windows(strip, rows, COLS, GROUPS, GATE, BLOCK_N, zero)
    else:
        store_plain(strip, rows, COLS, GROUPS, GATE, BLOCK_N, zero)


@gluon.jit
def store_exceptions(
    strip, words, ranges, begin, n_tile, first_col, N: gl.constexpr, C: gl.constexpr, COLS: gl.constexpr,
    GROUPS: gl.constexpr, GATE: gl.constexpr, BLOCK_N: gl.constexpr,
):  # fmt: skip
    """Store those of `words`, exceptions from place `begin` on, that lie in the tile's rows and the strip's columns."""
    HALF: gl.constexpr = BLOCK_N // 2 if GATE else BLOCK_N
    STRIDE: gl.constexpr = strip_stride(COLS, GROUPS)
    _, is_up, exists = exception_places(ranges, begin, words.shape[0])
    words = words.to(gl.uint32, bitcast=True)
    position = words & ((1 << POSITION_BITS) - 1)
    if not has_exact_ranges(N, C, HALF):
        first = n_tile * (HALF * C)
        end = gl.minimum(HALF * C, N * C - first)
        if GATE:
            first = gl.where(is_up, first + N * C, first)
        exists = exists & (position - first.to(gl.uint32) < end.to(gl.uint32))
    # Of rows in the plane, and the first one's address taken off: both are linear, as tiles begin at whole 8 rows.
    row = position // C
    if COLS == C:
        address = position + row * (STRIDE - C)
    else:
        address = position - row * C - first_col.to(gl.uint32)
        exists = exists & (address < COLS)
        address += row * STRIDE
    start = strip - n_tile * (BLOCK_N * STRIDE)
    if GATE:
        address = address + (row - row % 8) * STRIDE
        start = gl.where(is_up, start + (8 - 2 * N) * STRIDE, start)
    address = address.to(gl.int32, bitcast=True) + start
    call(STORE_BYTE, "=r,r,r,r", [address, (words >> POSITION_BITS).to(gl.int32, bitcast=True), exists.to(gl.int32)])


@gluon.jit
def patch_strip(
    strip, csf, exceptions, ranges, n_tile, first_col, N: gl.constexpr, C: gl.constexpr, COLS: gl.constexpr,
    GROUPS: gl.constexpr, GATE: gl.constexpr, BLOCK_N: gl.constexpr,
):  # fmt: skip
    """Store the loaded exceptions over the windows, and what further ones there are."""
    store_exceptions(strip, exceptions, ranges, 0, n_tile, first_col, N, C, COLS, GROUPS, GATE, BLOCK_N)
    BLOCK_X: gl.constexpr = exceptions.shape[0]
    for begin in range(BLOCK_X, ranges[len(ranges) - 1], BLOCK_X):
        late = load_exceptions(csf, ranges, begin, BLOCK_N, COLS)
        store_exceptions(strip, late, ranges, begin, n_tile, first_col, N, C, COLS, GROUPS, GATE, BLOCK_N)


@gluon.jit
def fill_strip(
    strip, scales, held, ranges, n_tile, first_col, N: gl.constexpr, C: gl.constexpr, COLS: gl.constexpr,
    GROUPS: gl.constexpr, GATE: gl.constexpr, BLOCK_N: gl.constexpr,
):  # fmt: skip
    """Decode or copy what `load_scales` holds. Every warp must be done with the strip; a barrier must follow."""
    store_rows(strip, scales, held[0], COLS, GROUPS, GATE, BLOCK_N)
    if len(scales) == 4:
        barrier()
        patch_strip(strip, scales, held[1], ranges, n_tile, first_col, N, C, COLS, GROUPS, GATE, BLOCK_N)


@gluon.jit
def strip_pairs(strip, chunk, BLOCK_N: gl.constexpr, GROUPS: gl.constexpr, COLS: gl.constexpr):
    """The pairs of scale bytes of a chunk's groups, int16 [BLOCK_N, G/2] in `group_layout`."""
    OWN: gl.constexpr = GROUPS // 8
    QUAD: gl.constexpr = group_layout(BLOCK_N, 4, gl.num_warps())
    row = gl.arange(0, BLOCK_N, gl.SliceLayout(1, QUAD))
    lane = gl.arange(0, 4, gl.SliceLayout(0, QUAD))
    address = (strip + chunk * GROUPS) + ((row * strip_stride(COLS, GROUPS))[:, None] + (lane * (GROUPS // 4))[None, :])
    asm: gl.constexpr = load_pairs(OWN)
    if OWN == 1:
        pairs = gl.inline_asm_elementwise(asm, "=h,r", [address], dtype=gl.int16, is_pure=False, pack=1)
    elif OWN == 2:
        a, b = gl.inline_asm_elementwise(asm, "=h,=h,r", [address], dtype=(gl.int16,) * 2, is_pure=False, pack=1)
        pairs = gl.join(a, b).reshape([BLOCK_N, 8])
    else:
        a, b, c, d = gl.inline_asm_elementwise(
            asm, "=h,=h,=h,=h,r", [address], dtype=(gl.int16,) * 4, is_pure=False, pack=1
        )
        pairs = gl.join(gl.join(a, c), gl.join(b, d)).reshape([BLOCK_N, 16])
    return gl.convert_layout(pairs, group_layout(BLOCK_N, GROUPS // 2, gl.num_warps()), assert_trivial=True)
