"""`compute_grouped_scheduling` of few rows in one launch: a stable counting sort without a scan.

Slot i of expert k has the key `k * S + i`; slots of no expert take k = E. All keys differ, so a slot's place in the
sorted order is the number of smaller keys, and an expert's first row is the number of keys below `e * S`. Each program
counts them for its own slots or experts, alone: no order between programs, no atomics, the same result every time.
Work grows with S * (S + E), so `MAX_ROWS` bounds S. Bytes moved: the ids once a program, from L2, and 4 * (2S + E) out.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..device import cdiv
from ..launching import bind

MAX_ROWS = 4096
MAX_KEY = 1 << 31
BLOCK_I = 16
BLOCK_J = 512


def fits(num_rows: int, num_experts: int) -> bool:
    """Whether the kernel takes the call: few rows, and keys that are int32."""
    return 0 < num_rows <= MAX_ROWS and (num_experts + 1) * num_rows < MAX_KEY


@triton.jit
def sort_keys(ids_ptr, slot, num_slots, num_rows, num_experts):
    """Keys of slots below `num_slots`. Ids are compared in their own width, before they are narrowed."""
    ids = tl.load(ids_ptr + slot, mask=slot < num_slots, other=-1)
    expert = tl.where((ids >= 0) & (ids < num_experts), ids, num_experts).to(tl.int32)
    return expert * num_rows + slot


@triton.jit(do_not_specialize=["num_rows", "num_experts", "top_k"])
def schedule_kernel(
    ids_ptr, expert_start_ptr, gather_ptr, scatter_ptr, num_rows, num_experts, top_k,
    BLOCK_I: tl.constexpr, BLOCK_J: tl.constexpr,
):  # fmt: skip
    """Rank BLOCK_I items: programs of the first rows take slots, those after them entries of `expert_start`."""
    slot_programs = tl.cdiv(num_rows, BLOCK_I)
    is_slots = tl.program_id(0) < slot_programs
    num_slots = tl.where(is_slots, num_rows, 0)
    num_entries = tl.where(is_slots, 0, num_experts + 1)
    first = (tl.program_id(0) - tl.where(is_slots, 0, slot_programs)) * BLOCK_I
    item = first + tl.arange(0, BLOCK_I)
    own = sort_keys(ids_ptr, item, num_slots, num_rows, num_experts)
    bound = tl.where(item < num_slots, own, item * num_rows)
    rank = tl.zeros((BLOCK_I,), tl.int32)
    for first_slot in range(0, num_rows, BLOCK_J):
        slot = first_slot + tl.arange(0, BLOCK_J)
        keys = sort_keys(ids_ptr, slot, num_rows, num_rows, num_experts)
        smaller = (keys[None, :] < bound[:, None]) & (slot < num_rows)[None, :]
        rank += tl.sum(smaller.to(tl.int32), 1)
    tl.store(expert_start_ptr + item, rank, mask=item < num_entries)
    tl.store(scatter_ptr + rank, item, mask=item < num_slots)
    tl.store(gather_ptr + rank, item // top_k, mask=item < num_slots)


def schedule_on_gpu(ids: torch.Tensor, num_experts: int, top_k: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(expert_start [E + 1], gather_idx [S], scatter_idx [S]) of ids [S] that `fits` accepts."""
    num_rows = ids.numel()
    expert_start, gather_idx, scatter_idx = (
        torch.empty(size, dtype=torch.int32, device=ids.device) for size in (num_experts + 1, num_rows, num_rows)
    )
    grid = cdiv(num_rows, BLOCK_I) + cdiv(num_experts + 1, BLOCK_I)
    bind(schedule_kernel, BLOCK_I=BLOCK_I, BLOCK_J=BLOCK_J)(
        (grid,), ids.contiguous(), expert_start, gather_idx, scatter_idx, num_rows, num_experts, top_k
    )
    return expert_start, gather_idx, scatter_idx
