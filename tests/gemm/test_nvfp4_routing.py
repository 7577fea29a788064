"""Scheduling, weighted reduction and the swizzled layout, against loops written from their definitions."""

from __future__ import annotations

import pytest
import torch

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize(("tokens", "top_k", "experts"), [(0, 2, 3), (1, 1, 1), (7, 3, 5), (64, 8, 300)])
def test_scheduling_is_a_stable_sort(bundle, device, dtype, tokens, top_k, experts):
    torch.manual_seed(tokens)
    ids = torch.randint(-2, experts + 2, (tokens, top_k), dtype=dtype)
    ids[: tokens // 4] = torch.iinfo(dtype).max
    start, gather, scatter = (t.cpu() for t in bundle.compute_grouped_scheduling(ids.to(device), experts, top_k))
    assert start.dtype == gather.dtype == scatter.dtype == torch.int32
    rows = [[slot for slot, e in enumerate(ids.flatten().tolist()) if e == expert] for expert in range(experts)]
    assert start.tolist() == [sum(map(len, rows[:e])) for e in range(experts + 1)]
    routed = [slot for of_expert in rows for slot in of_expert]
    assert scatter.tolist()[: len(routed)] == routed
    assert sorted(scatter.tolist()) == list(range(tokens * top_k))
    assert gather.tolist() == [slot // top_k for slot in scatter.tolist()]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(("tokens", "top_k", "cols"), [(0, 2, 16), (1, 1, 16), (5, 8, 2576)])
def test_weighted_reduce_never_reads_dropped_rows(bundle, device, dtype, tokens, top_k, cols):
    torch.manual_seed(7)
    experts = 6
    ids = torch.randint(-1, experts + 2, (tokens, top_k))
    weights = torch.rand(tokens, top_k)
    rows = torch.randn(tokens * top_k, cols).to(dtype)
    dropped = ((ids < 0) | (ids >= experts)).flatten()
    rows[dropped] = torch.nan
    out = bundle.weighted_reduce(rows.to(device), ids.to(device), weights.to(device), experts)
    terms = torch.where(dropped[:, None], 0, rows.double()).unflatten(0, (tokens, top_k)) * weights.double()[:, :, None]
    bound = terms.abs().sum(1) * top_k * 2.0**-23
    error = (out.cpu().double() - terms.sum(1)).abs()
    assert out.dtype == dtype and bool((error <= bound + torch.finfo(dtype).eps * terms.sum(1).abs() + 1e-30).all())


@pytest.mark.parametrize(("rows", "cols"), [(128, 4), (256, 8), (704, 10), (16, 2), (2880, 180)])
def test_swizzle_places_every_byte(bundle, rows, cols):
    scales = torch.arange(3 * rows * cols).remainder(251).add(1).to(torch.uint8).reshape(3, rows, cols)
    swizzled = bundle.swizzle_mx_scales(scales.view(torch.float8_e4m3fn))
    assert swizzled.shape == (3, -(-rows // 128), -(-cols // 4), 32, 16)
    row, col = torch.arange(rows)[:, None], torch.arange(cols)[None, :]
    offset = (row // 128 * -(-cols // 4) + col // 4) * 512 + row % 32 * 16 + row % 128 // 32 * 4 + col % 4
    flat = swizzled.view(torch.uint8).flatten(1)
    assert torch.equal(flat[:, offset], scales)
    assert int(flat.count_nonzero()) == scales.numel(), "padding must be 0"
    back = bundle.unswizzle_mx_scales(swizzled, num_rows=rows, num_cols=cols)
    assert torch.equal(back.view(torch.uint8), scales)


def test_wrong_arguments_are_named(bundle):
    ids = torch.zeros(3, 2, dtype=torch.int32)
    with pytest.raises(TypeError, match=r"expert_ids: expected int32 or int64, got torch.float32"):
        bundle.compute_grouped_scheduling(ids.float(), 4, 2)
    with pytest.raises(ValueError, match="expert_ids: expected a multiple of num_top_k = 4 ids, got 6"):
        bundle.compute_grouped_scheduling(ids, 4, 4)
    with pytest.raises(ValueError, match=r"rows: expected \(6, N\), got \(5, 16\)"):
        bundle.weighted_reduce(torch.zeros(5, 16), ids, torch.zeros(3, 2), 4)
    with pytest.raises(ValueError, match="swizzled: expected one-byte"):
        bundle.unswizzle_mx_scales(torch.zeros(1, 1, 32, 16, dtype=torch.uint8), num_rows=256, num_cols=4)
