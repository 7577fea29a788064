"""Routing: from each token's experts to rows sorted by expert."""

from __future__ import annotations

import numbers
from typing import Tuple

import torch

from .._ops import add_op_namespace_prefix, ops
from ..arguments import kind_of, no_dense_tensor
from ..plans import planned

INDEX_DTYPES = (torch.int32, torch.int64)


def compute_grouped_scheduling(
    expert_ids: torch.Tensor, num_experts: int, num_top_k: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sort the S = M * num_top_k (token, choice) pairs by expert; stable, no host sync.

    expert_ids: int [M, num_top_k] or flat [S]; an id outside 0..num_experts-1 (an expert-parallel sentinel, a padding
    token's -1) belongs to no expert and sorts last.
    Returns int32 (expert_start [E + 1], gather_idx [S], scatter_idx [S]): sorted row s of expert e, expert_start[e] <=
    s < expert_start[e + 1], is choice scatter_idx[s] % num_top_k of token gather_idx[s] = scatter_idx[s] // num_top_k.
    On a GPU, few rows take one launch, and up to 262,144 take three (routing_triton.py); more are sorted by torch.
    Raises TypeError if ids have another dtype, or a number is not an int; ValueError if num_top_k does not divide the
    number of ids, if there is no expert, and if the device is neither a CPU nor a GPU.
    """
    return planned(_compute_grouped_scheduling, (expert_ids, num_experts, num_top_k))


def _compute_grouped_scheduling(
    expert_ids: torch.Tensor, num_experts: int, num_top_k: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    if not isinstance(expert_ids, torch.Tensor) or expert_ids.dtype not in INDEX_DTYPES:
        raise TypeError(f"expert_ids: expected int32 or int64, got {kind_of(expert_ids)}")
    if got := no_dense_tensor(expert_ids):
        raise ValueError(f"expert_ids: expected a tensor on a CPU or GPU, got {got}")
    for name, value in (("num_experts", num_experts), ("num_top_k", num_top_k)):
        if not isinstance(value, int) and not isinstance(value, numbers.Integral):
            raise TypeError(f"{name}: expected an int, got {kind_of(value)}")
    if num_experts < 1:
        raise ValueError(f"num_experts: expected 1 or more, got {num_experts}")
    if num_top_k < 1 or expert_ids.numel() % num_top_k:
        raise ValueError(f"expert_ids: expected a multiple of num_top_k = {num_top_k} ids, got {expert_ids.numel()}")
    ids = expert_ids.reshape(-1)
    if ids.device.type == "cpu":
        return _schedule_by_sort(ids, num_experts, num_top_k)
    schedule = ops.grouped_scheduling if torch.compiler.is_compiling() else _schedule_on_device
    return schedule(ids, num_experts, num_top_k)


def _schedule_by_sort(
    ids: torch.Tensor, num_experts: int, top_k: int
) -> Tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    keys = torch.where((ids >= 0) & (ids < num_experts), ids, num_experts).int()
    keys, order = keys.sort(stable=True)
    experts = torch.arange(num_experts + 1, dtype=torch.int32, device=ids.device)
    expert_start = torch.searchsorted(keys, experts, out_int32=True)
    scatter_idx = order.int()
    return expert_start, scatter_idx // top_k, scatter_idx


def _schedule_on_device(
    ids: torch.Tensor, num_experts: int, top_k: int
) -> Tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    from .routing_triton import fits, schedule_on_gpu  # Triton may be absent where only the CPU is used

    schedule = schedule_on_gpu if fits(ids.numel(), num_experts) else _schedule_by_sort
    return schedule(ids, num_experts, top_k)


torch.library.custom_op(add_op_namespace_prefix("grouped_scheduling"), mutates_args=())(_schedule_on_device)


@torch.library.register_fake(add_op_namespace_prefix("grouped_scheduling"))
def _schedule_fake(ids, num_experts, top_k):
    return tuple(ids.new_empty(size, dtype=torch.int32) for size in (num_experts + 1, len(ids), len(ids)))
