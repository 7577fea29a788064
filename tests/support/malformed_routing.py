"""Entries of `expert_start` that are out of order, and the rows of a result that are still defined."""

from __future__ import annotations

import torch

from experts import dequantize

E, N, K, S = 3, 32, 64, 6


def make_problem(bundle, device: str = "cpu"):
    generator = torch.Generator().manual_seed(0)
    packed, scales, factors = bundle.nvfp4_quantize_two_level(torch.randn(E, N, K, generator=generator))
    x = torch.randn(S, K, generator=generator).bfloat16()
    products = x.double() @ dequantize(packed, scales, factors[:, None]).transpose(1, 2)  # [E, S, N]
    return x.to(device), packed.to(device), scales.to(device), factors.to(device), products


def check_rows(out: torch.Tensor, rows: dict[int, torch.Tensor]) -> None:
    """Check the rows of the result that are defined, `rows`."""
    for row, expected in rows.items():
        assert torch.allclose(out[row].double().cpu(), expected, rtol=2**-7, atol=2**-7), row


STARTS = {  # with the rows that exactly one expert owns, or that are past the last entry and owned by none
    "too large": ([0, 2, 4, 9], {0: 0, 1: 0, 2: 1, 3: 1, 4: 2, 5: 2}),
    "all too large": ([7, 8, 9, 10], {}),
    "negative": ([-3, 2, 4, 6], {0: 0, 1: 0, 2: 1, 3: 1, 4: 2, 5: 2}),
    "negative inside": ([0, 2, -5, 6], {}),
    "decreasing": ([0, 4, 2, 6], {0: 0, 1: 0, 4: 2, 5: 2}),
    "falling": ([6, 4, 2, 0], {}),
    "extreme": ([0, 2, 4, 2**31 - 1], {0: 0, 1: 0, 2: 1, 3: 1, 4: 2, 5: 2}),
    "all negative": ([-9, -8, -7, -6], {}),
}


def check_expert_starts(bundle, device, name, indices):
    """Check that rows with one owner, as documented, are right, and that nothing outside is read or written."""
    x, packed, scales, factors, products = make_problem(bundle, device)
    entries, owners = STARTS[name]
    start = torch.tensor(entries, dtype=torch.int32, device=device)
    options = {"activation_format": "bf16", "b_global_scale": factors}
    order = list(range(S))
    if indices != "none":
        order = [3, 0, 5, 1, 4, 2]
        index = torch.tensor(order, device=device)
        options |= {"gather_idx": index, "scatter_idx": index}
    out = bundle.matmul_grouped(x, packed, None, scales, expert_start=start, **options)
    assert out.shape == (S, N)
    check_rows(out, {order[row]: products[expert, order[row]] for row, expert in owners.items()})
