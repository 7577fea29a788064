"""`compute_grouped_scheduling` on a GPU: a stable counting sort, without atomics or any order between programs.

Few rows take one launch. Slot i with expert k has the key `k * S + i`; slots without an expert have k = E. All keys
differ, so a slot's place in the sorted order is the number of smaller keys, and the first row of expert e is the number
of keys below `e * S`. Each program counts these for its own slots or experts. Work grows with S * (S + E), so
`MAX_ROWS` bounds S. Bytes moved: the ids once per program, from L2, and 4 * (2S + E) out.

More rows take three launches. First, each program counts the experts of its own BLOCK slots. Then, one program sums
these counts to find where each expert's rows begin, and among them those of each program. Finally, each program places
its slots there, by counting the slots of the same expert that it has before. Bytes moved: the ids twice, 16 * (E + 2)
per program, and 4 * (2S + E) out.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..device import cdiv, next_power_of_2
from ..launching import bind

MAX_ROWS = 4096
MAX_KEY = 1 << 31
BLOCK_I = 16
BLOCK_J = 512
BLOCK = 512
MAX_BLOCKS = 512
MAX_BINS = 2048
SUMMED = 16384
"""How many counts are summed at a time."""


def takes_one_launch(num_rows: int, num_experts: int) -> bool:
    """Whether there are few enough rows for one launch, and their keys fit in int32."""
    return num_rows <= MAX_ROWS and (num_experts + 1) * num_rows < MAX_KEY


def fits(num_rows: int, num_experts: int) -> bool:
    """Whether the kernels can do the call."""
    takes_three = num_rows <= BLOCK * MAX_BLOCKS and num_experts + 2 <= MAX_BINS
    return num_rows > 0 and (takes_one_launch(num_rows, num_experts) or takes_three)


@triton.jit
def expert_of(ids_ptr, slot, num_slots, num_experts):
    """The experts of slots; E for slots without an expert, and for those from `num_slots` on. Ids are compared in their
    own width before they are narrowed."""
    ids = tl.load(ids_ptr + slot, mask=slot < num_slots, other=-1)
    return tl.where((ids >= 0) & (ids < num_experts), ids, num_experts).to(tl.int32)


@triton.jit(do_not_specialize=["num_rows", "num_experts", "top_k"])
def schedule_kernel(
    ids_ptr, expert_start_ptr, gather_ptr, scatter_ptr, num_rows, num_experts, top_k,
    BLOCK_I: tl.constexpr, BLOCK_J: tl.constexpr,
):  # fmt: skip
    """Rank BLOCK_I items each: the first programs rank slots, and the others entries of `expert_start`."""
    slot_programs = tl.cdiv(num_rows, BLOCK_I)
    is_slots = tl.program_id(0) < slot_programs
    num_slots = tl.where(is_slots, num_rows, 0)
    num_entries = tl.where(is_slots, 0, num_experts + 1)
    first = (tl.program_id(0) - tl.where(is_slots, 0, slot_programs)) * BLOCK_I
    item = first + tl.arange(0, BLOCK_I)
    own = expert_of(ids_ptr, item, num_slots, num_experts) * num_rows + item
    bound = tl.where(item < num_slots, own, item * num_rows)
    rank = tl.zeros((BLOCK_I,), tl.int32)
    for first_slot in range(0, num_rows, BLOCK_J):
        slot = first_slot + tl.arange(0, BLOCK_J)
        keys = expert_of(ids_ptr, slot, num_rows, num_experts) * num_rows + slot
        smaller = (keys[None, :] < bound[:, None]) & (slot < num_rows)[None, :]
        rank += tl.sum(smaller.to(tl.int32), 1)
    tl.store(expert_start_ptr + item, rank, mask=item < num_entries)
    tl.store(scatter_ptr + rank, item, mask=item < num_slots)
    tl.store(gather_ptr + rank, item // top_k, mask=item < num_slots)


@triton.jit(do_not_specialize=["num_rows", "num_experts"])
def count_kernel(ids_ptr, counts_ptr, num_rows, num_experts, BINS: tl.constexpr, BLOCK: tl.constexpr):
    """Each program counts BLOCK slots into counts [programs, BINS]: a bin for each expert, bin E for slots without one.
    The last bin is for what is past the end."""
    slot = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    expert = tl.where(slot < num_rows, expert_of(ids_ptr, slot, num_rows, num_experts), BINS - 1)
    tl.store(counts_ptr + tl.program_id(0) * BINS + tl.arange(0, BINS), tl.histogram(expert, BINS))


@triton.jit(do_not_specialize=["num_blocks", "num_experts"])
def sum_kernel(
    counts_ptr, firsts_ptr, expert_start_ptr, num_blocks, num_experts, BINS: tl.constexpr, ROWS: tl.constexpr
):
    """One program writes `expert_start`, and into firsts [num_blocks, BINS] the place of each block's first slot of
    each bin."""
    bins = tl.arange(0, BINS)
    total = tl.zeros((BINS,), tl.int32)
    for first in range(0, num_blocks, ROWS):
        block = first + tl.arange(0, ROWS)
        offs = block[:, None] * BINS + bins[None, :]
        total += tl.sum(tl.load(counts_ptr + offs, mask=(block < num_blocks)[:, None], other=0), 0)
    place = tl.cumsum(total, 0) - total
    tl.store(expert_start_ptr + bins, place, mask=bins <= num_experts)
    for first in range(0, num_blocks, ROWS):
        block = first + tl.arange(0, ROWS)
        offs = block[:, None] * BINS + bins[None, :]
        counts = tl.load(counts_ptr + offs, mask=(block < num_blocks)[:, None], other=0)
        tl.store(firsts_ptr + offs, place[None, :] + tl.cumsum(counts, 0) - counts, mask=(block < num_blocks)[:, None])
        place += tl.sum(counts, 0)


@triton.jit(do_not_specialize=["num_rows", "num_experts", "top_k"])
def place_kernel(
    ids_ptr, firsts_ptr, gather_ptr, scatter_ptr, num_rows, num_experts, top_k,
    BINS: tl.constexpr, BLOCK: tl.constexpr, BLOCK_J: tl.constexpr,
):  # fmt: skip
    """Each program places BLOCK slots: at the place of the block's first slot of their expert, plus the number of such
    slots before them."""
    begin = tl.program_id(0) * BLOCK
    slot = begin + tl.arange(0, BLOCK)
    expert = expert_of(ids_ptr, slot, num_rows, num_experts)
    place = tl.load(firsts_ptr + tl.program_id(0) * BINS + expert, mask=slot < num_rows, other=0)
    for first in range(0, BLOCK, BLOCK_J):
        other = begin + first + tl.arange(0, BLOCK_J)
        same = expert_of(ids_ptr, other, num_rows, num_experts)[None, :] == expert[:, None]
        place += tl.sum((same & (other[None, :] < slot[:, None])).to(tl.int32), 1)
    tl.store(scatter_ptr + place, slot, mask=slot < num_rows)
    tl.store(gather_ptr + place, slot // top_k, mask=slot < num_rows)


def schedule_on_gpu(ids: torch.Tensor, num_experts: int, top_k: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(expert_start [E + 1], gather_idx [S], scatter_idx [S]) for ids [S] that `fits` accepts."""
    num_rows, ids = ids.numel(), ids.contiguous()
    expert_start, gather_idx, scatter_idx = (
        torch.empty(size, dtype=torch.int32, device=ids.device) for size in (num_experts + 1, num_rows, num_rows)
    )
    if takes_one_launch(num_rows, num_experts):
        grid = cdiv(num_rows, BLOCK_I) + cdiv(num_experts + 1, BLOCK_I)
        bind(schedule_kernel, BLOCK_I=BLOCK_I, BLOCK_J=BLOCK_J)(
            (grid,), ids, expert_start, gather_idx, scatter_idx, num_rows, num_experts, top_k
        )
        return expert_start, gather_idx, scatter_idx
    bins, num_blocks = next_power_of_2(num_experts + 2), cdiv(num_rows, BLOCK)
    counts, firsts = (torch.empty(num_blocks, bins, dtype=torch.int32, device=ids.device) for _ in range(2))
    bind(count_kernel, BINS=bins, BLOCK=BLOCK)((num_blocks,), ids, counts, num_rows, num_experts)
    bind(sum_kernel, BINS=bins, ROWS=SUMMED // bins, num_warps=8)(
        (1,), counts, firsts, expert_start, num_blocks, num_experts
    )
    bind(place_kernel, BINS=bins, BLOCK=BLOCK, BLOCK_J=16, num_warps=8)(
        (num_blocks,), ids, firsts, gather_idx, scatter_idx, num_rows, num_experts, top_k
    )
    return expert_start, gather_idx, scatter_idx
