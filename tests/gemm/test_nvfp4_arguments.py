"""Every wrong argument of the GEMMs is refused, with its name, what was expected, and what it was."""

from __future__ import annotations

import importlib
import inspect

import pytest
import torch

E, N, K, M = 3, 32, 64, 4
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture
def call(bundle):
    """matmul_grouped with correct arguments, any of which may be replaced."""

    def run(**changes):
        arguments = {
            "A": torch.ones(M, K, dtype=torch.bfloat16),
            "B": torch.zeros(E, N, K // 2, dtype=torch.uint8),
            "As": None,
            "Bs": torch.zeros(E, N, K // 16, dtype=torch.float8_e4m3fn),
            "expert_start": torch.tensor([0, 1, 2, 4], dtype=torch.int32),
            "activation_format": "bf16",
        } | changes
        return bundle.matmul_grouped(**arguments)

    return run


packed_a = {"A": torch.zeros(M, K // 2, dtype=torch.uint8), "activation_format": None}

WRONG = [
    ({"activation_format": "fp8"}, ValueError, "activation_format: expected None or 'bf16', got 'fp8'"),
    ({"act_fn": "gelu"}, ValueError, "act_fn: expected 'silu', got 'gelu'"),
    ({"swiglu_limit": 7.0}, ValueError, "swiglu_alpha and swiglu_limit: expected None without gate"),
    ({"A": torch.ones(M, K)}, TypeError, "A: expected one of .*bfloat16.*float16, got torch.float32"),
    ({"A": torch.ones(M, K // 2, dtype=torch.uint8)}, TypeError, r"A: .*packed activations need As"),
    ({"A": torch.ones(M, K - 16, dtype=torch.bfloat16)}, ValueError, "A: expected K = 64 columns"),
    ({"A": torch.ones(K, dtype=torch.bfloat16)}, ValueError, r"A: expected shape \(M, K\)"),
    ({"B": torch.zeros(E, N, K // 2)}, TypeError, "B: expected packed uint8 or int8, got torch.float32"),
    ({"B": torch.zeros(E, 24, K // 2, dtype=torch.uint8)}, ValueError, "B: expected N rows a multiple of 16"),
    ({"B": torch.zeros(E, 16, 32, dtype=torch.uint8), "gate": True}, ValueError, "B: expected N rows a multiple of 32"),
    ({"B": torch.zeros(E, N, 24, dtype=torch.uint8)}, ValueError, "B: .*K a positive multiple of 32, got K = 48"),
    ({"Bs": torch.zeros(E, N, 5, dtype=torch.uint8)}, ValueError, r"Bs: expected shape \(3, 32, 4\) or swizzled"),
    ({"Bs": torch.zeros(E, N, K // 16)}, TypeError, "Bs: expected float8_e4m3fn or its uint8 bytes, got torch.float32"),
    ({"Bs": None}, TypeError, "Bs: expected a tensor of scale bytes or NVFP4CSFScales, got NoneType"),
    ({"As": torch.zeros(M, K // 16, dtype=torch.uint8)}, ValueError, "As: expected None with activation_format='bf16'"),
    (packed_a | {"As": torch.zeros(M, 3, dtype=torch.uint8)}, ValueError, r"As: expected shape \(4, 4\), got \(4, 3\)"),
    ({"B": torch.zeros(0, N, K // 2, dtype=torch.uint8)}, ValueError, "B: expected one expert or more"),
    ({"expert_start": torch.zeros(E, dtype=torch.int32)}, ValueError, "expert_start .* at least 4 entries .* 3 planes"),
    ({"expert_start": torch.zeros(E + 1, dtype=torch.int64)}, ValueError, r"expert_start must be torch\.int32, got"),
    ({"gather_idx": torch.zeros(M)}, TypeError, "gather_idx: expected int32 or int64"),
    ({"scatter_idx": torch.zeros(M + 1, dtype=torch.int32)}, ValueError, "scatter_idx: expected 4 entries"),
    ({"a_global_scale": 1.0}, ValueError, "a_global_scale: expected None with activation_format='bf16'"),
    ({"b_global_scale": torch.ones(E, dtype=torch.bfloat16)}, TypeError, "b_global_scale: expected float32, got"),
    ({"b_global_scale": torch.ones(E + 1)}, ValueError, "b_global_scale: expected a scalar or a shape of"),
    ({"output_global_scale": 1.0}, ValueError, "output_global_scale: expected None without quantize_output"),
    ({"output_dtype": torch.int32}, TypeError, "output_dtype: expected one of"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "error", "message"), WRONG, ids=[message[:40] for _, _, message in WRONG])
def test_wrong_argument_is_named(call, changes, error, message):
    with pytest.raises(error, match=message):
        call(**changes)


@pytest.mark.parametrize("name", ["matmul_2d", "matmul_batched", "matmul_grouped"])
def test_arguments_arrive_under_their_names(bundle, monkeypatch, name):
    """Calls pass them on in a tuple, in which the checks have to find each of them."""
    api, arrived = importlib.import_module(f"{bundle.__name__}.gemm.api"), []
    monkeypatch.setattr(api, "check_gemm", arrived.append)
    monkeypatch.setattr(api, "_run", lambda gemm: None)
    given = {parameter: object() for parameter in inspect.signature(getattr(bundle, name)).parameters}
    getattr(bundle, name)(**given)
    assert {field: value for field, value in arrived[0]._asdict().items() if value is not None} == given


def test_the_right_problem_passes(call):
    assert call().shape == (M, N)


def test_gate_and_up_keep_their_own_globals(bundle):
    """Doubling only the up half's global doubles the result; doubling only the gate's does not."""
    weight, scales, _ = bundle.nvfp4_quantize_two_level(torch.randn(1, 2 * N, K))
    a = torch.randn(M, K).bfloat16()
    start = torch.tensor([0, M], dtype=torch.int32)

    def run(gate_global: float, up_global: float) -> torch.Tensor:
        globals_ = torch.tensor([[gate_global, up_global]])
        return bundle.matmul_grouped(
            a, weight, None, scales, expert_start=start, activation_format="bf16", gate=True,
            b_global_scale=globals_, output_dtype=torch.float32,
        )  # fmt: skip

    assert torch.equal(run(1e-3, 2e-3), 2 * run(1e-3, 1e-3))
    assert not torch.equal(run(2e-3, 1e-3), 2 * run(1e-3, 1e-3))


def test_one_weight_without_scales(bundle):
    """`Bs` has a default because it comes after `As`; if it is left out, the message names it."""
    weight, _, _ = bundle.nvfp4_quantize_two_level(torch.randn(N, K))
    with pytest.raises(TypeError, match="Bs: expected a tensor of scale bytes or NVFP4CSFScales, got NoneType"):
        bundle.matmul_2d(torch.ones(M, K).bfloat16(), weight)


def test_nan_scales_stay_nan(bundle):
    """A scale byte 0x7F poisons exactly the outputs of its weight row."""
    weight, scales, b_global = bundle.nvfp4_quantize_two_level(torch.randn(N, K))
    scales.view(torch.uint8)[5, 2] = 0x7F
    out = bundle.matmul_2d(
        torch.ones(M, K).bfloat16(), weight, None, scales, activation_format="bf16", b_global_scale=b_global
    )
    assert out[:, 5].isnan().all() and not out[:, :5].isnan().any() and not out[:, 6:].isnan().any()


@pytest.mark.parametrize("device", DEVICES)
def test_views_give_what_copies_give(bundle, device):
    """Indices with strides, and activations whose rows are neither dense nor aligned."""
    torch.manual_seed(0)
    weight, scales, b_global = bundle.nvfp4_quantize_two_level(torch.randn(E, N, K, device=device))
    a = torch.randn(M * 2 * K + 1, device=device).bfloat16()
    ids = torch.randint(0, E, (M, 2), dtype=torch.int32).to(device)
    gather = torch.randint(0, M, (M, 3)).to(device)

    def run(a: torch.Tensor, ids: torch.Tensor, gather: torch.Tensor) -> torch.Tensor:
        return bundle.matmul_batched(
            a,
            weight,
            None,
            scales,
            expert_ids=ids,
            gather_idx=gather,
            activation_format="bf16",
            b_global_scale=b_global,
        )

    for view in (a[1 : 1 + M * K].view(M, K), a[: M * 2 * K].view(M, 2 * K)[:, K:]):
        want = run(view.clone(), ids[:, 1].clone(), gather[:, 2].clone())
        assert torch.equal(run(view, ids[:, 1], gather[:, 2]), want)


@pytest.mark.parametrize("device", DEVICES)
def test_wide_indices_are_not_wrapped(bundle, device):
    """int64 indices that would be valid if they were cut to 32 bits."""
    weight, scales, _ = bundle.nvfp4_quantize_two_level(torch.ones(E, N, K, device=device))
    a = torch.ones(M, K, dtype=torch.bfloat16, device=device)
    right = torch.zeros(M, dtype=torch.int64, device=device)
    wide = right + (1 << 32)
    for ids, gather in ((wide, right), (right, wide)):
        out = bundle.matmul_batched(
            a, weight, None, scales, expert_ids=ids, gather_idx=gather, activation_format="bf16"
        )
        assert not out.any()


@pytest.mark.gpu
def test_weights_in_pieces_are_refused(bundle):
    """Weights and scales are never copied before a kernel."""
    weight, scales, b_global = bundle.nvfp4_quantize_two_level(torch.randn(N, 2 * K, device="cuda"))
    a = torch.ones(M, K, dtype=torch.bfloat16, device="cuda")
    shifted = torch.zeros(N * K // 2 + 1, dtype=torch.uint8, device="cuda")[1:].view(N, K // 2)
    half = scales[:, : K // 16]
    for b, bs, message in (
        (weight[:, : K // 2], half.clone(), "B: expected a contiguous tensor, got strides"),
        (weight[:, : K // 2].clone(), half, "Bs: expected a contiguous tensor, got strides"),
        (shifted, half.clone(), "B: expected 16-byte alignment"),
    ):
        with pytest.raises(ValueError, match=message):
            bundle.matmul_2d(a, b, None, bs, activation_format="bf16", b_global_scale=b_global)
