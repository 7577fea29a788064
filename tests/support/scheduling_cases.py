"""Ids to be sorted by expert, and their stable sort by numpy."""

from __future__ import annotations

import numpy as np
import torch

CASES = [  # tokens, top_k, experts, dtype, the kind of ids
    (1, 1, 1, torch.int64, "any"),
    (1, 10, 512, torch.int32, "any"),
    (3, 2, 16, torch.int64, "sentinels"),
    (16, 1, 15, torch.int32, "one"),
    (17, 3, 7, torch.int64, "huge"),
    (64, 8, 300, torch.int32, "sentinels"),
    (65, 8, 33, torch.int32, "none"),
    (150, 4, 5, torch.int64, "descending"),
    # three launches
    (4097, 1, 1, torch.int64, "any"),
    (513, 8, 512, torch.int64, "sentinels"),
    (1100, 4, 510, torch.int32, "any"),
    (1024, 8, 15, torch.int32, "one"),
    (2050, 3, 7, torch.int64, "huge"),
    (600, 7, 33, torch.int32, "none"),
    (9001, 1, 300, torch.int64, "descending"),
]


def make_ids(tokens: int, top_k: int, num_experts: int, dtype: torch.dtype, kind: str):
    generator = torch.Generator().manual_seed(tokens)
    low, high = {"sentinels": (-2, num_experts + 3), "one": (num_experts - 1, num_experts)}.get(kind, (0, num_experts))
    ids = torch.randint(low, high, (tokens, top_k), generator=generator).to(dtype)
    if kind == "huge":  # ids that are only valid in their low 32 bits
        ids += torch.randint(-1, 2, ids.shape, generator=generator) << 32
        ids[0, 0], ids[-1, -1] = torch.iinfo(dtype).max, torch.iinfo(dtype).min
    elif kind == "none":
        ids.fill_(-1)
    elif kind == "descending":
        ids = ids.flatten().sort(descending=True).values.view(tokens, top_k)
    return ids, num_experts, top_k


def check(scheduling, ids: torch.Tensor, num_experts: int, top_k: int) -> None:
    """Check that `scheduling` is the stable sort of `ids`, with numpy."""
    keys = ids.cpu().numpy().astype(np.int64).ravel()
    keys[(keys < 0) | (keys >= num_experts)] = num_experts
    scatter = np.argsort(keys, kind="stable")
    start = np.array([np.count_nonzero(keys < expert) for expert in range(num_experts + 1)])
    for name, got, want in zip(
        ("expert_start", "gather_idx", "scatter_idx"), scheduling, (start, scatter // top_k, scatter), strict=True
    ):
        assert got.dtype == torch.int32 and got.shape == want.shape, (name, got.dtype, got.shape)
        np.testing.assert_array_equal(got.cpu().numpy(), want, err_msg=name)
