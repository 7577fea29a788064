"""The quantization law, compared with searches for the nearest value that share no arithmetic with it."""

from __future__ import annotations

import importlib

import pytest
import torch

E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=torch.float64)


@pytest.fixture(scope="module")
def quantize(bundle):
    return importlib.import_module(f"{bundle.__name__}.nvfp4.quantize")


@pytest.fixture(scope="module")
def reference(bundle):
    return importlib.import_module(f"{bundle.__name__}.nvfp4.reference")


def nearest_even(values: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Index of the table entry nearest to each float64 value; a tie goes to the even index (its mantissa ends in 0)."""
    distance = (values.unsqueeze(-1) - table).abs()
    index = torch.arange(len(table))
    tied = distance == distance.amin(-1, keepdim=True)
    return torch.where(tied, (index & 1) * len(table) + index, 1 << 30).argmin(-1)


def expected_bytes(values: torch.Tensor, global_scale: torch.Tensor, reference):
    """The law by search: float32 divisions, then the nearest entry of the value tables in float64."""
    groups = values.float().unflatten(-1, (-1, 16))
    ratio = groups.abs().amax(-1) / (torch.tensor(6.0) * global_scale)
    scales_table = reference.e4m3_values()[:0x7F]
    byte = nearest_even(ratio.double().clamp(2.0**-9, 448), scales_table)
    step = scales_table[byte].float() * global_scale
    code = nearest_even((groups.abs() / step.unsqueeze(-1)).double().clamp(max=6), E2M1)
    return byte.to(torch.uint8), (code + 8 * groups.signbit()).flatten(-2).to(torch.uint8)


def unpack(packed: torch.Tensor) -> torch.Tensor:
    return torch.stack([packed & 15, packed >> 4], -1).flatten(-2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("magnitude", [1e-30, 1e-3, 1.0, 3e4])
def test_weights_follow_the_law(quantize, reference, dtype, magnitude):
    torch.manual_seed(11)
    weight = (torch.randn(3, 32, 64) * torch.rand(3, 32, 64) * magnitude).clamp(-6e4, 6e4).to(dtype)
    weight[1, 4] = 0
    weight[2] = 0
    weight[0, 0, :4] = torch.tensor([-0.0, 0.0, -1e-3 * magnitude, 1e-3 * magnitude])
    packed, scales, global_scale = quantize.nvfp4_quantize_two_level(weight)
    amax = weight.abs().amax((1, 2)).float()
    assert torch.equal(global_scale, torch.where(amax == 0, 1.0, (amax / 2688).clamp(min=2.0**-117)))
    byte, code = expected_bytes(weight, global_scale[:, None, None], reference)
    assert torch.equal(scales.view(torch.uint8), byte)
    assert torch.equal(unpack(packed), code)


def test_every_e2m1_border_rounds_to_even(quantize):
    borders = (E2M1[1:] + E2M1[:-1]) / 2
    around = torch.cat([torch.nextafter(borders.float(), torch.tensor(0.0)), borders.float(), E2M1.float()])
    around = torch.cat([around, torch.nextafter(borders.float(), torch.tensor(9.0)), torch.tensor([5.99, 1e9])])
    assert torch.equal(quantize.round_to_e2m1(around).long(), nearest_even(around.double().clamp(max=6), E2M1))


def test_quantized_values_survive_requantization(quantize, reference):
    """Codes and scales of groups that contain a 6 are a fixed point: quantizing their values gives them again."""
    torch.manual_seed(5)
    codes = torch.randint(0, 16, (256, 16), dtype=torch.uint8)
    codes[:, 3] = 7
    codes = torch.where(codes == 8, 0, codes)
    byte = torch.arange(256, dtype=torch.uint8).clamp(1, 126).unsqueeze(1)
    packed = codes[:, 0::2] | codes[:, 1::2] << 4
    values = reference.dequantize_nvfp4(packed, byte, 0.25)
    again, scales, _ = quantize.nvfp4_quantize_two_level(values.float(), global_scale=0.25)
    assert torch.equal(scales.view(torch.uint8), byte)
    assert torch.equal(again, packed)


def test_reference_scale_table_is_torchs(reference):
    byte = torch.arange(256, dtype=torch.uint8)
    torch.testing.assert_close(
        reference.e4m3_values(), byte.view(torch.float8_e4m3fn).double(), equal_nan=True, rtol=0, atol=0
    )


def test_activations_are_independent_rows(quantize):
    torch.manual_seed(3)
    x = torch.randn(5, 64).bfloat16()
    alone = [quantize.nvfp4_act_quant(row) for row in x]
    x_poisoned = torch.cat(
        [x, torch.full((1, 64), torch.nan, dtype=x.dtype), torch.full((1, 64), torch.inf, dtype=x.dtype)]
    )
    packed, scales, global_scale = quantize.nvfp4_act_quant(x_poisoned)
    assert global_scale.shape == (7, 1)
    for i, (p, s, g) in enumerate(alone):
        assert torch.equal(packed[i], p) and torch.equal(scales[i].view(torch.uint8), s.view(torch.uint8))
        assert torch.equal(global_scale[i], g)
    assert global_scale[5].isnan().all() or scales[5].float().isnan().all()
    assert not torch.isfinite(scales[6].float() * global_scale[6]).any()


def test_calibrated_activations_saturate(quantize, reference):
    x = torch.tensor([[1e6] + [1.0] * 15])
    packed, scales, global_scale = quantize.nvfp4_act_quant(x, 1.0)
    assert scales.view(torch.uint8).item() == 0x7E and global_scale.item() == 1.0
    assert reference.dequantize_nvfp4(packed, scales, 1.0)[0, 0] == 448 * 6


@pytest.mark.parametrize(
    ("weight", "error", "names"),
    [
        (torch.zeros(16, 24), ValueError, "K % 16 == 0.*K = 24"),
        (torch.zeros(16), ValueError, "at least 2 dimensions"),
        (torch.zeros(16, 32, dtype=torch.int8), TypeError, "weight: expected a bfloat16.*torch.int8"),
        (torch.full((2, 16, 32), torch.nan), ValueError, "weight: expected finite.*tensor 0"),
        (torch.full((16, 32), torch.inf), ValueError, "weight: expected finite"),
    ],
)
def test_bad_weights_are_named(quantize, weight, error, names):
    with pytest.raises(error, match=names):
        quantize.nvfp4_quantize_two_level(weight)


@pytest.mark.parametrize("bad", [0.0, -1.0, float("inf"), float("nan")])
def test_bad_globals_are_named(quantize, bad):
    with pytest.raises(ValueError, match="global_scale"):
        quantize.nvfp4_quantize_two_level(torch.ones(16, 32), global_scale=bad)
    with pytest.raises(TypeError, match=r"global_scale: expected float32, got torch.bfloat16"):
        quantize.nvfp4_quantize_two_level(torch.ones(16, 32), global_scale=torch.ones((), dtype=torch.bfloat16))


def test_empty_stacks(quantize):
    packed, scales, global_scale = quantize.nvfp4_quantize_two_level(torch.zeros(0, 16, 32))
    assert packed.shape == (0, 16, 16) and scales.shape == (0, 16, 2) and global_scale.shape == (0,)


GLOBALS = [None, 0.01, 1.0, 0.1 * 2**-70, 0.3 * 2**70, 3e38, 1e-38, 3e-44, 0.0, -0.0, -0.01, float("inf"), float("nan")]


@pytest.mark.gpu
@pytest.mark.parametrize("global_scale", GLOBALS, ids=str)
def test_gpu_gives_the_cpus_bytes(quantize, global_scale):
    """Every bf16 and fp16, together with similar ones and with any others, and float32 values next to where a code
    changes."""
    torch.manual_seed(1)
    bits = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)
    inputs = [values.view(-1, 256) for dtype in (torch.bfloat16, torch.float16) for values in (
        bits.view(dtype), bits.view(dtype)[torch.randperm(1 << 16)])]  # fmt: skip
    scale = 1.0 if global_scale is None else global_scale
    amax = (torch.rand(1 << 18, 1) * 2000 + 4) * scale
    step = quantize.nvfp4_act_quant(amax.expand(-1, 16).contiguous(), scale)[1].float() * scale
    near = torch.cat([amax, step * (E2M1[1:] + E2M1[:-1]).float() / 2], -1)
    near = torch.cat([near, -near], -1)
    near = (near.view(torch.int32) + torch.randint(-2, 3, near.shape, dtype=torch.int32)).view(torch.float32)
    for x in [*inputs, near.view(-1, 2048), inputs[0].float()]:
        got, want = quantize.nvfp4_act_quant(x.cuda(), global_scale), quantize.nvfp4_act_quant(x, global_scale)
        assert torch.equal(got[0].cpu(), want[0])
        for got_scales, want_scales in zip(got[1:], want[1:], strict=True):
            torch.testing.assert_close(got_scales.float().cpu(), want_scales.float(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("magnitude", [1e-30, 1e-3, 1.0, 3e30])
@pytest.mark.parametrize("kind", ["normal", "heavy"])
def test_scales_of_least_squared_error(quantize, reference, kind, magnitude):
    """Every neighbour of the law's scale is tried in float64: none is better by more than float32 can distinguish."""
    torch.manual_seed(12)
    weight = torch.randn(2, 48, 64)
    weight = (weight**3 if kind == "heavy" else weight) * magnitude
    weight[0, 3] = 0
    packed, scales, global_scale = quantize.nvfp4_quantize_two_level(weight, scales="mse")
    _, law, same_global = quantize.nvfp4_quantize_two_level(weight)
    assert torch.equal(global_scale, same_global)
    exact = weight.double() / global_scale[:, None, None].double()
    groups = exact.unflatten(-1, (-1, 16)).abs()
    table = reference.e4m3_values()[:0x7F]
    tried = (law.view(torch.uint8).long().unsqueeze(-1) + torch.arange(-1, 6)).clamp(1, 0x7E)  # [.., C, candidates]
    steps = table[tried].unsqueeze(-1)
    code = nearest_even((groups.unsqueeze(-2) / steps).clamp(max=6), E2M1)
    errors = (E2M1[code] * steps - groups.unsqueeze(-2)).square().sum(-1)
    least = errors.amin(-1)
    error = (dequantized(packed, scales, table) - exact).square().unflatten(-1, (-1, 16)).sum(-1)
    assert (error <= least * (1 + 1e-5)).all()
    clear = errors.sort(-1).values[..., :2]
    clear = (clear[..., 1] > clear[..., 0] * (1 + 1e-5)) & (tried.diff() != 0).all(-1)
    chosen = tried.gather(-1, errors.argmin(-1, keepdim=True)).squeeze(-1)
    assert torch.equal(scales.view(torch.uint8).long()[clear], chosen[clear]) and clear.float().mean() > 0.7
    plain = errors[..., 1]
    assert (error <= plain * (1 + 1e-5)).all() and error.sum() < 0.9 * plain.sum()
    assert scales.view(torch.uint8)[0, 3].tolist() == [1] * 4  # all zeros: the law's own byte


def dequantized(packed: torch.Tensor, scales: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """float64 values in units of the global."""
    code = unpack(packed).long()
    values = E2M1[code & 7] * (1 - 2 * (code >> 3))
    return (values.unflatten(-1, (-1, 16)) * table[scales.view(torch.uint8).long()].unsqueeze(-1)).flatten(-2)


@pytest.mark.gpu
def test_scales_of_least_squared_error_are_the_same_on_a_gpu(quantize):
    torch.manual_seed(13)
    for dtype in (torch.float32, torch.bfloat16):
        weight = (torch.randn(300, 4096) ** 3).to(dtype)
        here, there = (quantize.nvfp4_quantize_two_level(w, scales="mse") for w in (weight, weight.cuda()))
        for a, b in zip(here, there, strict=True):
            assert torch.equal(a.reshape(-1).view(torch.uint8), b.cpu().reshape(-1).view(torch.uint8))


def test_an_unknown_rule_for_scales_is_refused(quantize):
    with pytest.raises(ValueError, match="scales: expected 'amax' or 'mse', got 'max'"):
        quantize.nvfp4_quantize_two_level(torch.ones(16, 32), scales="max")
