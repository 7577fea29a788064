"""`expert_start`: which routed rows are whose. int32, E + 1 entries or more; expert e has rows
`[expert_start[e], expert_start[e + 1])`, so the entries begin with 0, and none is below the one before it.

The entries lie on the device, and are checked nowhere, as that would take a host sync. Whatever they are, nothing
outside of inputs and results is touched: of an expert's rows, those count that exist. What kernels make of them is in
gemm/kernels/schedule.py.
"""

from __future__ import annotations

import torch

from .arguments import kind_of


def check_expert_start(expert_start: object, num_experts: int, device: torch.device) -> torch.Tensor:
    """`expert_start` itself, if its form is right.

    Raises:
        ValueError: no int32 tensor on `device`, not 1-D and contiguous, or too short.
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
    """Every expert that has some of `num_rows` rows, and which. Reads the tensor: for the CPU."""
    start = expert_start[: num_experts + 1].tolist()
    rows = [range(max(start[e], 0), min(start[e + 1], num_rows)) for e in range(num_experts)]
    return [(e, own) for e, own in enumerate(rows) if own]


def active_experts(expert_start: torch.Tensor, num_experts: int) -> list[int]:
    """Every expert that has rows at all. Reads the tensor: for the CPU."""
    start = expert_start[: num_experts + 1]
    return (start[1:] > start[:-1]).nonzero().view(-1).tolist()


def expert_of_rows(expert_start: torch.Tensor, num_experts: int, num_rows: int) -> torch.Tensor:
    """The expert int64 `[num_rows]` of each row; of a row of none, the last. On the device."""
    rows = torch.arange(num_rows, dtype=torch.int32, device=expert_start.device)
    return torch.searchsorted(expert_start[1:num_experts], rows, right=True)
