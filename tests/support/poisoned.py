"""Problems in which unused tokens, experts and padding are poisoned, and must not reach a result."""

from __future__ import annotations

import torch

from gemm_scenarios import poisoned_memory

E, TOP_K, TOKENS = 7, 2, 6
UNUSED = (2, E - 1)


def problem(bundle, device: str, cols: int, depth: int, swizzled: bool, gate: bool):
    """Weights, activations and ids. The ids of the last two tokens, and one of another token, belong to no expert."""
    torch.manual_seed(cols)
    rows = 2 * cols if gate else cols
    packed, scales, b_global = bundle.nvfp4_quantize_two_level(torch.randn(E, rows, depth, device=device))
    x = torch.randn(TOKENS, depth, device=device).bfloat16()
    ids = torch.tensor([0, 1, 3, 4, 5])[torch.randint(0, 5, (TOKENS, TOP_K))].int()
    ids[0, 1], ids[-2], ids[-1] = E, E + 3, -1
    return x, packed, bundle.swizzle_mx_scales(scales) if swizzled else scales, b_global, ids.to(device)


def poison(x, packed, scales, b_global, num_rows: int):
    """The same, with NaN or 0x7F in every row, expert and padding byte that is not used."""
    x, packed, scales, b_global = x.clone(), packed.clone(), scales.clone(), b_global.clone()
    x[-2:] = torch.nan
    unused = list(UNUSED)
    packed[unused], b_global[unused] = 0x7F, torch.nan
    planes = scales.view(torch.uint8)
    planes[unused] = 0x7F
    if planes.ndim == 5:  # [E, row tiles, column tiles, 32, 4 quarters of 32 rows by 4 columns]
        row_tiles, col_tiles = planes.shape[1:3]
        tile, row, quarter = torch.meshgrid(*map(torch.arange, (row_tiles, 32, 4)), indexing="ij")
        padding = (tile * 128 + quarter * 32 + row >= num_rows).to(x.device)
        cells = planes.view(E, row_tiles, col_tiles, 32, 4, 4)
        cells.masked_fill_(padding[None, :, None, :, :, None], 0x7F)
        used_cols = x.shape[1] // 16 - 4 * (col_tiles - 1)
        cells[:, :, -1, :, :, used_cols:] = 0x7F
    return x, packed, scales, b_global


def check_unused_values(bundle, device, gate, activation_format, swizzled, cols, depth):
    x, packed, scales, b_global, ids = problem(bundle, device, cols, depth, swizzled, gate)
    start, gather, scatter = bundle.compute_grouped_scheduling(ids, E, TOP_K)
    tail = torch.full((8,), 1 << 30, dtype=torch.int32, device=device)  # nobody reads entries past E
    own_token = torch.arange(TOKENS * TOP_K, device=device) // TOP_K
    grouped = {"expert_start": torch.cat([start, tail]), "gather_idx": gather, "scatter_idx": scatter}
    batched = {"expert_ids": ids.flatten(), "gather_idx": own_token}
    of_none = ((ids < 0) | (ids >= E)).flatten()
    for op, routing in (("matmul_grouped", grouped), ("matmul_batched", batched)):
        for quantize_output in (False, True):
            results = []
            for a, b, bs, b_scale in (
                (x, packed, scales, b_global),
                poison(x, packed, scales, b_global, packed.shape[1]),
            ):
                with poisoned_memory():
                    out = getattr(bundle, op)(
                        a, b, None, bs, activation_format=activation_format, gate=gate, b_global_scale=b_scale,
                        quantize_output=quantize_output, **routing,
                    )  # fmt: skip
                results.append([t.view(torch.uint8) for t in (out if quantize_output else [out])])
            for clean, poisoned in zip(*results, strict=True):
                assert torch.equal(clean, poisoned), (op, quantize_output)
            assert not results[1][0][of_none].any(), "rows of no expert are 0"
