"""Offsets beyond 2^31 and 2^32: of experts in a stack of weights, of rows of activations, and of rows of the output."""

from __future__ import annotations

import importlib

import pytest
import torch

pytestmark = pytest.mark.gpu
GIB = 1 << 30


@pytest.fixture(autouse=True)
def enough_memory():
    free = torch.cuda.mem_get_info()[0]
    if free < 24 * GIB:
        pytest.skip(f"needs a GPU with 24 GiB of free memory, {free / GIB:.0f} GiB are")
    yield
    torch.cuda.empty_cache()


@pytest.fixture
def reference(bundle):
    return importlib.import_module(f"{bundle.__name__}.nvfp4.reference")


def assert_close(actual: torch.Tensor, values: torch.Tensor, weight: torch.Tensor) -> None:
    """Compare bf16 `actual` [rows, N] with float64 values [rows, K] and weight [N, K]: rounding, and K truncated
    sums."""
    expected = values @ weight.T
    bound = (values.shape[1] + 4) * 2.0**-23 * (values.abs() @ weight.abs().T)
    assert bool(((actual.double() - expected).abs() <= bound + 2.0**-8 * (expected.abs() + bound)).all())


@pytest.mark.parametrize("depth", [16384, 16352], ids=["tensor_cores", "portable"])
def test_experts_past_2_31_and_2_32(bundle, reference, depth):
    """A stack of 5.4 GB, in which all scales are NaN except those of the experts that are used."""
    experts, rows = 40, 16384
    plane = rows * depth // 2
    used = [0, (1 << 31) // plane + 1, (1 << 32) // plane + 1, experts - 1]
    assert used == sorted(set(used))
    torch.manual_seed(depth)
    packed = torch.zeros(experts, rows, depth // 2, dtype=torch.uint8, device="cuda")
    scales = torch.full((experts, rows, depth // 16), 0x7F, dtype=torch.uint8, device="cuda")
    for expert in used:
        packed[expert].random_(0, 256)
        scales[expert].random_(0x20, 0x40)
    scales = scales.view(torch.float8_e4m3fn)
    last_cols = slice(rows - 64, rows)
    for rows_each in (3, 350):  # few, and as many as fill the warpgroup tiles
        ids = torch.tensor(used, dtype=torch.int32, device="cuda").repeat_interleave(rows_each)
        x = torch.randn(len(ids), depth, device="cuda").bfloat16()
        start = torch.searchsorted(ids, torch.arange(experts + 1, dtype=torch.int32, device="cuda"), out_int32=True)
        outputs = [bundle.matmul_grouped(x, packed, None, scales, expert_start=start, activation_format="bf16")]
        if rows_each < 10:
            outputs.append(bundle.matmul_batched(x, packed, None, scales, expert_ids=ids, activation_format="bf16"))
        for out in outputs:
            for expert in used:
                own = ids == expert
                weight = reference.dequantize_nvfp4(packed[expert, last_cols], scales[expert, last_cols])
                assert_close(out[own][:, last_cols], x[own].double(), weight)


@pytest.mark.parametrize("activation_format", ["bf16", None], ids=["w4a16", "w4a4"])
@pytest.mark.parametrize(("cols", "depth"), [(16384, 64), (64, 16384), (16, 16352)])
def test_rows_past_2_31(bundle, reference, cols, depth, activation_format):
    """131,400 rows, of which the output or the activations have more than 2^31 values."""
    num_rows = 131_400
    assert num_rows * max(cols, depth) > 1 << 31
    packed, scales, b_global = bundle.nvfp4_quantize_two_level(torch.randn(cols, depth, device="cuda"))
    x = torch.empty(num_rows, depth, dtype=torch.bfloat16, device="cuda").normal_()
    out = bundle.matmul_2d(x, packed, None, scales, activation_format=activation_format, b_global_scale=b_global)
    weight = reference.dequantize_nvfp4(packed, scales, b_global)
    for part in (slice(0, 32), slice(num_rows - 32, num_rows)):
        values = x[part].double()
        if activation_format is None:
            codes, row_scales, row_global = bundle.nvfp4_act_quant(x[part])
            values = reference.dequantize_nvfp4(codes, row_scales) * row_global
        assert_close(out[part], values, weight)
