"""Instructions that Gluon does not offer: one wrapper for each, with the types that it takes and returns.

Functions named `*_text` return PTX: `$0` and on are the results, followed by the operands. Every wrapper has a test of
its own, which needs a GPU (tests/gemm/test_ptx.py).

An instruction that is needed for its effect returns an int32 that nobody reads, because Gluon requires a result.
"""

from __future__ import annotations

import triton.experimental.gluon.language as gl
from triton.experimental import gluon


@gluon.constexpr_function
def decode_text(count: int) -> str:
    """Decode `count` words of 8 codes, and store the bytes at shared address $1; $2 has the base in every byte.

    The base is added before the bytes are put in order: to the low nibbles (by one addition of three operands), and to
    the high nibbles shifted down (by one shift and addition).
    """
    lines = ["{", f".reg .b32 l, h, r<{2 * count}>;"]
    for i in range(count):
        lines += [f"and.b32 h, ${3 + i}, 0xF0F0F0F0;", f"sub.u32 l, ${3 + i}, h;", "add.u32 l, l, $2;"]
        lines += ["shr.u32 h, h, 4;", "add.u32 h, h, $2;"]
        lines += [f"prmt.b32 r{2 * i + half}, l, h, {order:#x};" for half, order in enumerate((0x5140, 0x7362))]
    registers = ", ".join([f"r{i}" for i in range(2 * count)])
    return "\n".join([*lines, f"st.shared.v{2 * count}.b32 [$1], {{{registers}}};", "mov.b32 $0, 0;", "}"])


@gluon.jit
def store_decoded(address, base, codes):
    """Store 8 bytes at shared `address` (int32): `base` (int32, one byte four times) plus each of 8 codes (int32)."""
    asm: gl.constexpr = decode_text(1)
    gl.inline_asm_elementwise(asm, "=r,r,r,r", [address, base, codes], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def store_decoded_twice(address, base, first, second):
    """`store_decoded` for two words, at an address that is a multiple of 16."""
    asm: gl.constexpr = decode_text(2)
    gl.inline_asm_elementwise(
        asm, "=r,r,r,r,r", [address, base, first, second], dtype=gl.int32, is_pure=False, pack=1
    )  # fmt: skip


STORE_BYTE = gl.constexpr("""{
.reg .pred p;
setp.ne.s32 p, $3, 0;
@p st.shared.u8 [$1], $2;
mov.b32 $0, 0;
}""")


@gluon.jit
def store_byte(address, value, mask):
    """Store the low byte of `value` (int32) at shared `address` (int32) where `mask` (bool) is true."""
    operands = [address, value, mask.to(gl.int32)]
    gl.inline_asm_elementwise(STORE_BYTE, "=r,r,r,r", operands, dtype=gl.int32, is_pure=False, pack=1)


STORE_WORD = gl.constexpr("st.shared.b64 [$1], $2; mov.b32 $0, 0;")


@gluon.jit
def store_word(address, word):
    """Store `word` (int64) at shared `address` (int32)."""
    gl.inline_asm_elementwise(STORE_WORD, "=r,r,l", [address, word], dtype=gl.int32, is_pure=False, pack=1)


STORE_ZERO = gl.constexpr("st.shared.b32 [$1], 0; mov.b32 $0, 0;")


@gluon.jit
def store_zero(address):
    """Store 4 zero bytes at shared `address` (int32)."""
    gl.inline_asm_elementwise(STORE_ZERO, "=r,r", [address], dtype=gl.int32, is_pure=False, pack=1)


GRID_WAIT = gl.constexpr("griddepcontrol.wait; mov.b32 $0, 0; // $1")


@gluon.jit
def wait_for_last_launch():
    """If this launch was allowed to begin before the end of the previous one, wait for that end. Hopper and later."""
    gl.inline_asm_elementwise(GRID_WAIT, "=r,r", [gl.num_programs(0)], dtype=gl.int32, is_pure=False, pack=1)


PREFETCH = gl.constexpr("prefetch.global.L2 [$1]; mov.b32 $0, 0;")


@gluon.jit
def prefetch_to_l2(pointer):
    """Prefetch the line that contains `pointer` to L2."""
    gl.inline_asm_elementwise(PREFETCH, "=r,l", [pointer], dtype=gl.int32, is_pure=False, pack=1)


@gluon.constexpr_function
def declare_text(num_bytes: int) -> str:
    return f".shared .align 16 .b8 csf_strip[{num_bytes}];\nmov.u32 $0, csf_strip;"


@gluon.jit
def declare_shared(scalar, NUM_BYTES: gl.constexpr):
    """Address (int32) of NUM_BYTES of shared memory unknown to Triton. Use it once per kernel, outside loops.

    `scalar` is any int32; Gluon requires an operand.
    """
    asm: gl.constexpr = declare_text(NUM_BYTES)
    return gl.inline_asm_elementwise(asm, "=r,r", [scalar], dtype=gl.int32, is_pure=False, pack=1)


@gluon.constexpr_function
def load_pairs_text(count: int) -> str:
    """Load `count` consecutive pairs of bytes into $0 and on."""
    if count == 1:
        return "ld.shared.b16 $0, [$1];"
    outputs = ", ".join([f"${i}" for i in range(count)])
    return f"ld.shared.v{count}.b16 {{{outputs}}}, [${count}];"


@gluon.jit
def load_pairs(address, COUNT: gl.constexpr):
    """Load a tuple of COUNT (1, 2 or 4) consecutive int16 from shared `address` (int32)."""
    asm: gl.constexpr = load_pairs_text(COUNT)
    if COUNT == 1:
        pair = gl.inline_asm_elementwise(asm, "=h,r", [address], dtype=gl.int16, is_pure=False, pack=1)
        return (pair,)
    elif COUNT == 2:
        return gl.inline_asm_elementwise(asm, "=h,=h,r", [address], dtype=(gl.int16,) * 2, is_pure=False, pack=1)
    else:
        return gl.inline_asm_elementwise(
            asm, "=h,=h,=h,=h,r", [address], dtype=(gl.int16,) * 4, is_pure=False, pack=1
        )  # fmt: skip


FIRST_LANE = gl.constexpr("shfl.sync.idx.b32 $0, $1, 0, 31, -1;")


@gluon.jit
def first_lane(value):
    """`value`, an int32 scalar that is the same in every lane. This tells compilers, which then use one register per
    warp instead of one per lane."""
    return gl.inline_asm_elementwise(FIRST_LANE, "=r,r", [value], dtype=gl.int32, is_pure=True, pack=1)


ZERO = gl.constexpr("mov.u32 $0, 0; // $1")


@gluon.jit
def opaque_zero():
    """0, without the compilers knowing it. So they compute the value to which it is added where it is needed, instead
    of before the loop over tiles, where it would occupy registers all along."""
    return gl.inline_asm_elementwise(ZERO, "=r,r", [gl.num_programs(0)], dtype=gl.int32, is_pure=False, pack=1)


@gluon.constexpr_function
def row_address_text(num_bytes: int) -> str:
    return f"mad.wide.s32 $0, $1, {num_bytes}, $2;"


@gluon.jit
def row_address(start, row, NUM_BYTES: gl.constexpr):
    """start (int64) + row (int32) * NUM_BYTES. Compilers would keep every row's product in two registers instead of its
    index in one."""
    asm: gl.constexpr = row_address_text(NUM_BYTES)
    return gl.inline_asm_elementwise(asm, "=l,r,l", [row, start], dtype=gl.int64, is_pure=True, pack=1)


# Sets $0 to the two scale bytes in $1 as a pair of operands.
SCALES_BF16 = gl.constexpr("""{
.reg .b16 h<2>; .reg .b32 p, k, z; .reg .f32 f<2>;
cvt.rn.f16x2.e4m3x2 p, $1;
mov.b32 {h0, h1}, p;
cvt.f32.f16 f0, h0;
cvt.f32.f16 f1, h1;
cvt.rn.bf16x2.f32 p, f1, f0;
mov.b32 k, 0x7B007B00;
mov.b32 z, 0x80008000;
fma.rn.bf16x2 $0, p, k, z;
}""")
SCALES_FP16 = gl.constexpr("cvt.rn.f16x2.e4m3x2 $0, $1;")


@gluon.jit
def scale_factors(pairs, IS_FP16: gl.constexpr):
    """Convert pairs of E4M3 bytes (int16) to pairs of factors (int32): the scales in fp16, or times 2^119 in bf16."""
    asm: gl.constexpr = SCALES_FP16 if IS_FP16 else SCALES_BF16
    return gl.inline_asm_elementwise(asm, "=r,h", [pairs], dtype=gl.int32, is_pure=True, pack=1)


@gluon.constexpr_function
def unpack_text(word: int, odd_group: int, is_fp16: bool) -> str:
    """Set $0 to $7 to the 8 values of 32-bit word `word` of the 64-bit group in $8, scaled by half `odd_group` of $9.

    One `and` isolates codes p and p + 4, and one multiply-add (not on the ALU pipe) puts sign and magnitude in place.
    Copying the scale to both halves of `s` takes no instruction: multiplications select halves of their operands.
    """
    lines = ["{", ".reg .b32 w<2>, t, u, v, z, s;", ".reg .b16 h<2>;", "mov.b64 {w0, w1}, $8;"]
    lines += ["mov.b32 z, 0x80008000;", "mov.b32 {h0, h1}, $9;", f"mov.b32 s, {{h{odd_group}, h{odd_group}}};"]
    lines.append(f"shr.u32 t, w{word}, 8;")
    for product in range(4):
        source, odd = ("t" if product >= 2 else f"w{word}"), product % 2
        if is_fp16:
            magnitude, sign = (0x00700070, 0x00800080) if odd else (0x00070007, 0x00080008)
            to_magnitude, to_sign = (0x20, 0x100) if odd else (0x200, 0x1000)
            lines += [
                f"and.b32 u, {source}, {magnitude:#x};",
                f"mul.lo.u32 u, u, {to_magnitude:#x};",
                f"and.b32 v, {source}, {sign:#x};",
                f"mad.lo.u32 u, v, {to_sign:#x}, u;",
                "mul.rn.f16x2 u, u, s;",
            ]
        else:
            codes, to_both = (0x00F000F0, 0x104) if odd else (0x000F000F, 0x1040)
            lines += [
                f"and.b32 u, {source}, {codes:#x};",
                f"mul.lo.u32 u, u, {to_both:#x};",
                "and.b32 u, u, 0x81C081C0;",
                "fma.rn.bf16x2 u, u, s, z;",
            ]
        lines.append(f"mov.b32 {{${2 * product}, ${2 * product + 1}}}, u;")
    return "\n".join([*lines, "}"])


UNPACK_REGISTERS = gl.constexpr(",".join(["=h"] * 8) + ",l,r")


@gluon.jit
def unpack_word(groups, factors, WORD: gl.constexpr, ODD: gl.constexpr, IS_FP16: gl.constexpr):
    """The 8 values (a tuple of fp16 or bf16) of word WORD (0 or 1) of `groups` (int64, 16 codes each), scaled by half
    ODD of their pair of `factors` (int32)."""
    asm: gl.constexpr = unpack_text(WORD, ODD, IS_FP16)
    if IS_FP16:
        return gl.inline_asm_elementwise(
            asm, UNPACK_REGISTERS, [groups, factors], dtype=(gl.float16,) * 8, is_pure=True, pack=1
        )  # fmt: skip
    else:
        return gl.inline_asm_elementwise(
            asm, UNPACK_REGISTERS, [groups, factors], dtype=(gl.bfloat16,) * 8, is_pure=True, pack=1
        )  # fmt: skip
