"""Gluon building blocks that turn a tile of NVFP4 weights into tensor-core operands without moving data between
threads.

One lane owns whole 16-groups. In a chunk of G groups, lane t of a quad owns groups [t * G/4, (t + 1) * G/4): it reads
them, their scales and the activations under them as contiguous vectors. The K order inside a product is free as long
as weights and activations agree, so the groups are relabelled to the slots the tensor core gives each lane
(`to_slots`), and the 16 values of a group feed 8 products of two values each. In the 32-bit word `a` of a group
(8 codes, low nibble first) product p takes codes p and p + 4, which a shift leaves in the two halves of a register:

    product 4a + p   <-   k = 8a + p  and  k = 8a + p + 4        a in 0..1, p in 0..3

E2M1 to bf16: sign to bit 15, the 3 magnitude bits to 8..6, which reads as value * 2^-126, subnormals included; times
the scale as bf16(scale * 2^119) that is exactly code * scale * 2^-7 (6 significant bits). To fp16: magnitude bits to
11..9, value * 2^-14, times the scale itself: code * scale * 2^-14. `operand_shift` undoes the power after the sum.
"""

from __future__ import annotations

import triton.experimental.gluon.language as gl
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia import ampere

from . import ptx

barrier = getattr(gl, "barrier", None) or gl.thread_barrier
load_async = getattr(ampere.async_copy, "async_load", ampere.async_copy.async_copy_global_to_shared)


@gluon.constexpr_function
def operand_shift(dtype) -> float:
    """The factor by which sums of products of `dtype` operands have to be multiplied."""
    return 2.0**14 if dtype == gl.float16 else 2.0**7


@gluon.constexpr_function
def powers(low: int, high: int) -> list:
    """The powers of two in [low, high)."""
    return [1 << i for i in range(high.bit_length()) if low <= 1 << i < high]


@gluon.constexpr_function
def mma_layout(num_warps: int):
    """Layout of sums [BLOCK_N, BLOCK_T]: warps along weight rows, 8 tokens per instruction."""
    return gl.NVMMADistributedLayout([2, 0], [num_warps, 1], [16, 8])


@gluon.constexpr_function
def group_layout(block_n: int, elements: int, num_warps: int):
    """Layout of weight words or scale pairs [BLOCK_N, elements]: each lane of a quad has a quarter of a row."""
    own = elements // 4
    registers = [[0, b] for b in powers(1, own)] + [[8, 0]] + [[b, 0] for b in powers(16 * num_warps, block_n)]
    lanes = [[0, own], [0, 2 * own], [1, 0], [2, 0], [4, 0]]
    warps = [[b, 0] for b in powers(16, 16 * num_warps)]
    return gl.DistributedLinearLayout(registers, lanes, warps, [], [block_n, elements])


@gluon.constexpr_function
def token_layout(block_t: int, own: int, num_warps: int):
    """Layout of activations [4 * BLOCK_T, own]: row 4 * token + t holds what lane t of the token's quad reads."""
    registers = [[0, b] for b in powers(1, own)] + [[b, 0] for b in powers(32, 4 * block_t)]
    lanes = [[1, 0], [2, 0], [4, 0], [8, 0], [16, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [[0, 0]] * len(powers(1, num_warps)), [], [4 * block_t, own])


@gluon.constexpr_function
def copy_layout(cols: int, vector: int, num_warps: int):
    """Layout of copies of [rows, cols] from global to shared memory: `vector` elements per lane."""
    across = min(32, cols // vector)
    return gl.BlockedLayout([1, vector], [32 // across, across], [num_warps, 1], [1, 0])


@gluon.constexpr_function
def store_layout(block_n: int, vector: int, num_warps: int):
    """Layout of results [block_n, BLOCK_T]: each lane has `vector` consecutive columns of the output, and neighbouring
    lanes have neighbouring columns."""
    across = min(32, block_n // vector)
    return gl.BlockedLayout([vector, 1], [across, 32 // across], [1, num_warps], [0, 1])


@gluon.jit
def to_slots(values, BLOCK_N: gl.constexpr, GROUPS: gl.constexpr):
    """Relabel the groups [.., G] of a quad, which are ordered by lane, to tensor-core slots, where the lane is the
    fastest index."""
    return values.reshape([BLOCK_N, 4, GROUPS // 4]).permute([0, 2, 1]).reshape([BLOCK_N, GROUPS])


@gluon.jit
def weight_operand(first, second, BLOCK_N: gl.constexpr, GROUPS: gl.constexpr, MMA: gl.constexpr):
    """One product's left operand [BLOCK_N, 2G], from its two values of every group."""
    pairs = gl.join(to_slots(first, BLOCK_N, GROUPS), to_slots(second, BLOCK_N, GROUPS)).reshape([BLOCK_N, 2 * GROUPS])
    return gl.convert_layout(pairs, gl.DotOperandLayout(0, MMA, 2), assert_trivial=True)


@gluon.jit
def token_operand(pairs, BLOCK_T: gl.constexpr, GROUPS: gl.constexpr, MMA: gl.constexpr):
    """One product's right operand [2G, BLOCK_T], from activation pairs [BLOCK_T, 4, G/4, 2]."""
    pairs = pairs.permute([0, 2, 1, 3]).reshape([BLOCK_T, 2 * GROUPS]).permute([1, 0])
    return gl.convert_layout(pairs, gl.DotOperandLayout(1, MMA, 2), assert_trivial=True)


@gluon.jit
def word_values(words, factors, WORD: gl.constexpr, IS_FP16: gl.constexpr):
    """The 8 scaled values of word `WORD` of every group, as 8 tensors [BLOCK_N, G]. `factors` has the factors of pairs
    of groups, int32 [BLOCK_N, G/2]."""
    BLOCK_N: gl.constexpr = words.shape[0]
    GROUPS: gl.constexpr = words.shape[1]
    PAIRS: gl.constexpr = group_layout(BLOCK_N, GROUPS // 2, gl.num_warps())
    GROUP: gl.constexpr = group_layout(BLOCK_N, GROUPS, gl.num_warps())
    even, odd = gl.split(words.reshape([BLOCK_N, GROUPS // 2, 2]))
    even = ptx.unpack_word(gl.convert_layout(even, PAIRS, assert_trivial=True), factors, WORD, 0, IS_FP16)
    odd = ptx.unpack_word(gl.convert_layout(odd, PAIRS, assert_trivial=True), factors, WORD, 1, IS_FP16)
    values = ()
    for i in gl.static_range(8):
        both = gl.join(even[i], odd[i]).reshape([BLOCK_N, GROUPS])
        values = values + (gl.convert_layout(both, GROUP, assert_trivial=True),)  # noqa: RUF005
    return values


@gluon.jit
def token_pairs(x, BLOCK_T: gl.constexpr, GROUPS: gl.constexpr):
    """Activations [4 * BLOCK_T, 4G] as pairs for the 8 products, in order, each [BLOCK_T, 4, G/4, 2]."""
    x = x.reshape([BLOCK_T, 4, GROUPS // 4, 2, 2, 2, 2])  # token, lane, own group, word a, pair half, p >> 1, p & 1
    even, odd = gl.split(x)
    x0, x2 = gl.split(even)
    x1, x3 = gl.split(odd)
    x0, x4 = gl.split(x0.permute([0, 1, 2, 4, 3]))
    x1, x5 = gl.split(x1.permute([0, 1, 2, 4, 3]))
    x2, x6 = gl.split(x2.permute([0, 1, 2, 4, 3]))
    x3, x7 = gl.split(x3.permute([0, 1, 2, 4, 3]))
    return x0, x1, x2, x3, x4, x5, x6, x7
