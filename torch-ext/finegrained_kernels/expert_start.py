"""`expert_start` says which routed rows belong to which expert. It is an int32 tensor of at least E + 1 entries; expert
e has rows `[expert_start[e], expert_start[e + 1])`, so the first entry is 0, and the entries never decrease.

The entries are on the device and are never checked, because that would take a host sync. Whatever their values are,
nothing outside of the inputs and results is touched: rows that do not exist are ignored. gemm/kernels/schedule.py shows
how kernels read them.
"""

from __future__ import annotations

import torch

from .arguments import kind_of


def check_expert_start(expert_start: object, num_experts: int, device: torch.device) -> torch.Tensor:
    """`expert_start` itself, if its type, shape and device are right.

    Raises:
        ValueError: it is not a contiguous 1-D int32 tensor on `device`, or it is too short.
    """
    if not isinstance(expert_start, torch.Tensor) or expert_start.dtype != torch.int32:
        raise ValueError(f"expert_start must be torch.int32, got {kind_of(expert_start)}")
    if expert_start.device != device:
        raise ValueError(f"expert_start must be on {device} like the scales, got {expert_start.device}")
    if expert_start.dim() != 1 or not expert_start.is_contiguous() or len(expert_start) <= num_experts:
        raise ValueError(
            f"expert_start must be 1-D and contiguous with at least {num_experts + 1} entries for {num_experts} "
            f"planes, got shape {tuple(expert_start.shape)}"
        )
    return expert_start


def rows_of_experts(expert_start: torch.Tensor, num_experts: int, num_rows: int) -> list[tuple[int, range]]:
    """Every expert that has some of `num_rows` rows, with those rows. Reads the tensor, so it is for the CPU."""
    start = expert_start[: num_experts + 1].tolist()
    rows = [range(max(start[e], 0), min(start[e + 1], num_rows)) for e in range(num_experts)]
    return [(e, own) for e, own in enumerate(rows) if own]


def active_experts(expert_start: torch.Tensor, num_experts: int) -> list[int]:
    """Every expert that has any rows. Reads the tensor, so it is for the CPU."""
    start = expert_start[: num_experts + 1]
    return (start[1:] > start[:-1]).nonzero().view(-1).tolist()


def expert_of_rows(expert_start: torch.Tensor, num_experts: int, num_rows: int) -> torch.Tensor:
    """The expert of each row, int64 `[num_rows]`, on the device. Rows that belong to no expert get the last one."""
    rows = torch.arange(num_rows, dtype=torch.int32, device=expert_start.device)
    return torch.searchsorted(expert_start[1:num_experts], rows, right=True)
