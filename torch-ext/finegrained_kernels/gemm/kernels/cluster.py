"""Adds up sums over the programs of a cluster: neighbours in the grid that run at the same time and can access each
other's shared memory.

Triton does not know of the cluster, which is requested by the launch (launching.py), so everything that crosses it is
PTX. Sums travel through the start of the memory that Triton allocated for the ring, when no program uses its ring any
more.
"""

from __future__ import annotations

import triton.experimental.gluon.language as gl
from triton.experimental import gluon

from .epilogue import token_shares
from .unpack import barrier

MEET = gl.constexpr("""{
barrier.cluster.arrive.aligned;
barrier.cluster.wait.aligned;
mov.b32 $0, 0; // $1
}""")
OWN_ADDRESS = gl.constexpr("mov.u32 $0, global_smem; // $1")
ADDRESS_OF = gl.constexpr("mapa.shared::cluster.u32 $0, $1, $2;")
SEND = gl.constexpr("st.shared::cluster.f32 [$1], $2; mov.b32 $0, 0;")
RECEIVE = gl.constexpr("ld.shared.f32 $0, [$1];")


@gluon.jit
def meet(scalar):
    """Wait for every program of the cluster; afterwards, what each wrote before is visible. `scalar` is any int32;
    Gluon requires one."""
    gl.inline_asm_elementwise(MEET, "=r,r", [scalar], dtype=gl.int32, is_pure=False, pack=1)


@gluon.constexpr_function
def num_owners(tile) -> int:
    """The number of programs that store results; each stores a share of at least 8 tokens."""
    return min(tile.PROGRAMS, tile.BLOCK_T // 8)


@gluon.jit
def word_offsets(values):
    """The offset (int32, in words) at which each of `values` [BLOCK_N, T], in the layout of products, is stored:
    ordered by lanes, then warps, then registers, so that a warp writes one line."""
    LAYOUT: gl.constexpr = values.type.layout
    row = gl.arange(0, values.shape[0], gl.SliceLayout(1, LAYOUT))[:, None]
    token = gl.arange(0, values.shape[1], gl.SliceLayout(0, LAYOUT))[None, :]
    register = token // 8 * 4 + token % 2 * 2 + row // 8 % 2
    return (register * (values.shape[0] // 16) + row // 16) * 32 + row % 8 * 4 + token // 2 % 4


@gluon.jit
def exchange_sums(acc, program, TILE: gl.constexpr):
    """The share of tokens [BLOCK_N, T] that this program owns, summed over all programs' `acc` [BLOCK_N, BLOCK_T] in
    the order of programs, so that every run gives the same bits. Undefined if the program owns no tokens."""
    OWNERS: gl.constexpr = num_owners(TILE)
    PROGRAMS: gl.constexpr = TILE.PROGRAMS
    BYTES: gl.constexpr = acc.shape[0] * acc.shape[1] // OWNERS * 4
    shares = token_shares(acc, OWNERS)
    offsets = word_offsets(shares[0]) * 4
    start = gl.inline_asm_elementwise(OWN_ADDRESS, "=r,r", [program], dtype=gl.int32, is_pure=False, pack=1)
    slot = start + program * BYTES
    meet(program)
    for owner in gl.static_range(OWNERS):
        there = gl.inline_asm_elementwise(
            ADDRESS_OF, "=r,r,r", [slot, program * 0 + owner], dtype=gl.int32, is_pure=True, pack=1
        )  # fmt: skip
        gl.inline_asm_elementwise(
            SEND, "=r,r,f", [there + offsets, shares[owner]], dtype=gl.int32, is_pure=False, pack=1
        )  # fmt: skip
    meet(program)
    sums = gl.zeros_like(shares[0])
    for i in gl.static_range(PROGRAMS):
        sums += gl.inline_asm_elementwise(
            RECEIVE, "=f,r", [start + i * BYTES + offsets], dtype=gl.float32, is_pure=False, pack=1
        )  # fmt: skip
    barrier()  # results are then stored through the same memory
    return sums
