"""Arguments that nobody intends: refused in one line, or with the same result on a CPU and a GPU; and settings that
must not matter."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from experts import compressed, make_call, make_experts
from malformed_routing import STARTS, E, K, N, S, check_expert_starts, make_problem
from numeric import DEVICES

every_device = pytest.mark.parametrize("device", DEVICES)


@every_device
@pytest.mark.parametrize("indices", ["none", "gather and scatter"])
@pytest.mark.parametrize("name", STARTS)
def test_expert_starts_that_are_no_sequence(bundle, device, name, indices):
    """Rows that have one owner, as documented, are right, and nothing outside is read or written."""
    check_expert_starts(bundle, device, name, indices)


@every_device
@pytest.mark.parametrize("gate", [False, True])
@pytest.mark.parametrize("bad", [S, S + 3, -1, -S, 2**40])
def test_targets_outside_the_result_are_dropped(bundle, device, bad, gate):
    x, packed, scales, factors, _ = make_problem(bundle, device)
    options = {"activation_format": "bf16", "b_global_scale": factors, "gate": gate}
    start = torch.tensor([0, 2, 4, 6], dtype=torch.int32, device=device)
    whole = bundle.matmul_grouped(x, packed, None, scales, expert_start=start, **options)
    scatter = torch.tensor([1, bad, 3, 4, bad, 0], device=device)
    out = bundle.matmul_grouped(x, packed, None, scales, expert_start=start, scatter_idx=scatter, **options)
    for row, target in ((0, 1), (2, 3), (3, 4), (5, 0)):
        assert torch.equal(out[target], whole[row])


@every_device
def test_decoding_takes_starts_as_they_are(bundle, device):
    planes = torch.randint(40, 50, (E, N, K // 16), dtype=torch.uint8, device=device)
    scales = bundle.prepare_nvfp4_csf_scales(*bundle.compress_nvfp4_csf_scales(planes), num_rows=N, num_cols=K // 16)
    for entries, active in (([5, 2, 9, -4], [1]), ([-9, -8, -8, 2**31 - 1], [0, 2]), ([3, 2, 1, 0], [])):
        workspace = torch.zeros(planes.numel(), dtype=torch.uint8, device=device)
        start = torch.tensor(entries, dtype=torch.int32, device=device)
        bundle.decompress_nvfp4_csf_scales(scales, workspace=workspace, expert_start=start)
        expected = torch.zeros_like(planes)
        expected[active] = planes[active]
        assert torch.equal(workspace.view(planes.shape), expected)


@every_device
@pytest.mark.parametrize("part", ["bases", "codes", "exceptions", "exception_offsets", "expert_start"])
def test_workspaces_that_overlap_what_is_read(bundle, device, part):
    """Even if they only end in it, or begin in its last byte; directly beside it they are accepted."""
    planes = torch.randint(0, 256, (E, 16, 32), dtype=torch.uint8, device=device)
    scales = bundle.prepare_nvfp4_csf_scales(*bundle.compress_nvfp4_csf_scales(planes), num_rows=16, num_cols=32)
    start = torch.arange(E + 1, dtype=torch.int32, device=device)
    tensors = {**scales.state_dict(), "expert_start": start}
    used, size = tensors[part].nbytes, planes.numel()
    memory = torch.zeros(2 * size + used + 64, dtype=torch.uint8, device=device)
    inside = memory[size : size + used].view(tensors[part].dtype).view(tensors[part].shape)
    inside.copy_(tensors[part])
    tensors[part] = inside
    start = tensors.pop("expert_start")
    scales = type(scales)(**tensors)
    before = memory.clone()
    for first in (1, size // 2, size + used - 1):
        with pytest.raises(ValueError, match=f"workspace must be memory of its own, got bytes of {part}"):
            bundle.decompress_nvfp4_csf_scales(scales, workspace=memory[first:], expert_start=start)
    assert torch.equal(memory, before)
    for first in (0, size + used):
        decoded = bundle.decompress_nvfp4_csf_scales(scales, workspace=memory[first:], expert_start=start)
        assert torch.equal(decoded.view(torch.uint8), planes)


def test_scratches_that_overlap_the_experts(bundle):
    experts = make_experts(bundle, "cpu")
    staged = compressed(bundle, experts)
    for name, memory in (("down", experts.down), ("gate_up_scales.codes", staged.gate_up_scales.codes)):
        shared = torch.zeros(staged.scratch_size + memory.nbytes, dtype=torch.uint8)
        inside = shared[-memory.nbytes :].view(memory.shape)
        inside.copy_(memory)
        changed = {name: inside} if name == "down" else {}
        if not changed:
            changed = {"gate_up_scales": dataclasses.replace(staged.gate_up_scales, codes=inside)}
        dataclasses.replace(staged, scratch=shared, **changed)
        with pytest.raises(ValueError, match=f"scratch must be memory of its own, got bytes of {name}"):
            dataclasses.replace(staged, scratch=shared[1:], **changed)


def test_meta_tensors_are_refused(bundle):
    x, packed, scales, factors, _ = (tensor.to("meta") for tensor in make_problem(bundle))
    planes = torch.randint(40, 50, (E, N, 4), dtype=torch.uint8)
    fixed, words = bundle.compress_nvfp4_csf_scales(planes)
    resident = bundle.prepare_nvfp4_csf_scales(fixed, words, num_rows=N, num_cols=4).to("meta")
    start = torch.tensor([0, 2, 4, 6], dtype=torch.int32, device="meta")
    ids = torch.zeros(S, dtype=torch.int64, device="meta")
    words = [own.to("meta") for own in words]
    for call in (
        lambda: bundle.matmul_2d(x, packed[0], None, scales[0]),
        lambda: bundle.matmul_2d(x, packed[0], None, scales[0], activation_format="bf16"),
        lambda: bundle.matmul_grouped(x, packed, None, scales, expert_start=start),
        lambda: bundle.matmul_batched(x, packed, None, scales, expert_ids=ids),
        lambda: bundle.nvfp4_act_quant(x),
        lambda: bundle.nvfp4_quantize_two_level(x),
        lambda: bundle.compress_nvfp4_csf_scales(planes.to("meta")),
        lambda: bundle.prepare_nvfp4_csf_scales(fixed.to("meta"), words, num_rows=N, num_cols=4),
        lambda: bundle.prepare_nvfp4_csf_scales(list(fixed.to("meta")), words, num_rows=N, num_cols=4),
        lambda: bundle.decompress_nvfp4_csf_scales(resident),
        lambda: bundle.csf_workspace_size(resident),
        lambda: bundle.compute_grouped_scheduling(ids, E, 2),
        lambda: bundle.weighted_reduce(x, ids.view(3, 2), torch.ones(3, 2, device="meta"), E),
    ):
        with pytest.raises(ValueError, match=r"^[^\n]*on a CPU or GPU, got a tensor on meta$"):
            call()
    experts = make_experts(bundle, "cpu")
    fields = {field.name: getattr(experts, field.name) for field in dataclasses.fields(experts)}
    experts = type(experts)(**{name: value if value is None else value.to("meta") for name, value in fields.items()})
    with pytest.raises(ValueError, match="experts must be on a CPU or GPU, got a tensor on meta"):
        bundle.moe_forward(experts, *(tensor.to("meta") for tensor in make_call("cpu", 3, 2)))


def test_what_is_wrong_is_said(bundle):
    x, packed, scales, _, _ = make_problem(bundle)
    call = (x, packed[0], None, scales[0])
    ids = torch.zeros(S, dtype=torch.int64)
    large = torch.empty(1, dtype=torch.uint8).expand(4112, 4096)
    words = torch.zeros(1, dtype=torch.int32).expand((1 << 30) + 1)
    wire = importlib.import_module(f"{bundle.__name__}.csf.wire").NVFP4CSFWire
    for run, said in (
        (
            lambda: bundle.matmul_2d(x.to_sparse(), *call[1:]),
            "A: expected a tensor on a CPU or GPU, got a tensor of lay",
        ),
        (
            lambda: bundle.matmul_2d(x[:, 1:], *call[1:]),
            f"A: expected K = {K} columns, as B has, got shape ({S}, {K - 1})",
        ),
        (
            lambda: bundle.matmul_2d(*call[:3], scales[0][1:]),
            f"Bs: expected shape (1, {N}, {K // 16}) or swizzled (1, ",
        ),
        (
            lambda: bundle.matmul_batched(x, packed, None, scales, expert_ids=ids[1:]),
            f"expert_ids: expected {S} entries, one for each routed row, got {S - 1}",
        ),
        (
            lambda: bundle.matmul_batched(x, packed, None, scales, expert_ids=ids, gather_idx=ids.view(2, -1)),
            f"gather_idx: expected one dimension, got (2, {S // 2})",
        ),
        (lambda: bundle.compute_grouped_scheduling(ids, 2.5, 2), "num_experts: expected an int, got float"),
        (lambda: bundle.nvfp4_quantize_two_level(x[0]), f"weight: expected at least 2 dimensions, got shape ({K},)"),
        (lambda: bundle.csf_workspace_size(None), "scales must be NVFP4CSFScales of this bundle, got NoneType"),
        (
            lambda: bundle.prepare_nvfp4_csf_scales([], [], num_rows="16", num_cols=2),
            "num_rows must be an int, got '16'",
        ),
        (
            lambda: bundle.prepare_nvfp4_csf_scales(3, [], num_rows=16, num_cols=2),
            "fixed must be a list of one tensor per plane, got int",
        ),
        (
            lambda: bundle.compress_nvfp4_csf_scales(large),
            "a plane holds at most 2^24 bytes, got 4112 x 4096 = 16842752",
        ),
        (
            lambda: wire(torch.zeros(1, 32, dtype=torch.uint8), words, torch.tensor([len(words)]), 16, 2),
            "exceptions: a stack holds at most 1073741824, got 1073741825: split it",
        ),
    ):
        with pytest.raises((TypeError, ValueError)) as caught:
            run()
        assert str(caught.value).startswith(said)


def test_a_call_that_cublas_refuses(bundle, monkeypatch):
    cublas = importlib.import_module(f"{bundle.__name__}.gemm.cublas")
    monkeypatch.setattr(cublas, "library", lambda: SimpleNamespace(cublasLtCreate=lambda *_: 7))
    with pytest.raises(RuntimeError, match=r"^cublasLtCreate failed with status 7$"):
        cublas.made("cublasLtCreate")


@every_device
def test_quantizing_no_rows(bundle, device):
    for lead in ((), (2,), (0,), (2, 0)):
        packed, scales, factors = bundle.nvfp4_quantize_two_level(torch.zeros(*lead, 0, 32, device=device))
        assert packed.shape == (*lead, 0, 16) and packed.dtype == torch.uint8
        assert scales.shape == (*lead, 0, 2) and scales.dtype == torch.float8_e4m3fn
        assert torch.equal(factors, torch.ones(lead, device=device))
    for call in (bundle.nvfp4_quantize_two_level, bundle.nvfp4_act_quant):
        with pytest.raises(ValueError, match="K % 16 == 0 and above 0, got K = 0"):
            call(torch.zeros(3, 0, device=device))


@every_device
@pytest.mark.parametrize("number", [1e39, -1e39, 10**400, np.float64(3.5e38)])
def test_numbers_that_float32_has_not(bundle, device, number):
    x, packed, scales, _, _ = make_problem(bundle, device)
    call = (x, packed[0], None, scales[0])
    for name, run in (
        ("b_global_scale", lambda: bundle.matmul_2d(*call, b_global_scale=number)),
        ("a_global_scale", lambda: bundle.matmul_2d(*call, a_global_scale=number)),
        ("output_global_scale", lambda: bundle.matmul_2d(*call, quantize_output=True, output_global_scale=number)),
        ("swiglu_limit", lambda: bundle.matmul_2d(*call, gate=True, swiglu_limit=number)),
        ("swiglu_alpha", lambda: bundle.matmul_2d(*call, gate=True, swiglu_alpha=number)),
        ("global_scale", lambda: bundle.nvfp4_quantize_two_level(x, global_scale=number)),
        ("a_global_scale", lambda: bundle.nvfp4_act_quant(x, number)),
    ):
        with pytest.raises(ValueError, match=f"^{name}: expected a number that float32 can hold, got -?[1-9]"):
            run()
    with pytest.raises(TypeError, match=r"^b_global_scale: expected a number, got str$"):
        bundle.matmul_2d(*call, b_global_scale="1")


def test_arrays_are_no_tensors(bundle):
    """The dtype of a numpy array looks like torch's."""
    x, packed, scales, _, _ = make_problem(bundle)
    start, ids = np.zeros(E + 1, np.int32), np.zeros(S, np.int64)
    tensor_start = torch.tensor([0, 2, 4, 6], dtype=torch.int32)
    planes = np.zeros((2, 16, 4), np.uint8)
    fixed, words = bundle.compress_nvfp4_csf_scales(torch.from_numpy(planes))
    resident = bundle.prepare_nvfp4_csf_scales(fixed, words, num_rows=16, num_cols=4)
    top_k = torch.zeros(3, 2, dtype=torch.int64)
    for name, call in {
        "A": lambda: bundle.matmul_2d(np.zeros((S, K), np.float32), packed[0], None, scales[0]),
        "B": lambda: bundle.matmul_2d(x, packed[0].numpy(), None, scales[0]),
        "Bs": lambda: bundle.matmul_2d(x, packed[0], None, scales[0].view(torch.uint8).numpy()),
        "As": lambda: bundle.matmul_2d(packed[0], packed[0], scales[0].view(torch.uint8).numpy(), scales[0]),
        "expert_ids": lambda: bundle.matmul_batched(x, packed, None, scales, expert_ids=ids),
        "expert_start": lambda: bundle.matmul_grouped(x, packed, None, scales, expert_start=start),
        "gather_idx": lambda: bundle.matmul_grouped(x, packed, None, scales, expert_start=tensor_start, gather_idx=ids),
        "x": lambda: bundle.nvfp4_act_quant(np.zeros((S, K), np.float32)),
        "weight": lambda: bundle.nvfp4_quantize_two_level(np.zeros((S, K), np.float32)),
        "scales": lambda: bundle.compress_nvfp4_csf_scales(planes),
        "fixed": lambda: bundle.prepare_nvfp4_csf_scales(fixed.numpy(), words, num_rows=16, num_cols=4),
        "workspace": lambda: bundle.decompress_nvfp4_csf_scales(resident, workspace=np.zeros(999, np.uint8)),
        "expert_start ": lambda: bundle.decompress_nvfp4_csf_scales(resident, expert_start=start),
        "rows": lambda: bundle.weighted_reduce(np.zeros((6, 4), np.float32), top_k, torch.ones(3, 2), E),
        "top_k_index": lambda: bundle.weighted_reduce(torch.zeros(6, 4), top_k.numpy(), torch.ones(3, 2), E),
    }.items():
        with pytest.raises((ValueError, TypeError), match=rf"^{name.strip()}[: ][^\n]*, got numpy\.ndarray$"):
            call()
    for name, call in {
        "expert_start": lambda: bundle.matmul_grouped(x, packed, None, scales, expert_start=None),
        "expert_ids": lambda: bundle.matmul_batched(x, packed, None, scales, expert_ids=None),
    }.items():
        with pytest.raises(TypeError, match=f"^{name}: expected a tensor, got None$"):
            call()


def surroundings():
    return {
        "autocast": torch.autocast("cpu", dtype=torch.bfloat16),
        "meta by default": torch.device("meta"),
        "inference": torch.inference_mode(),
        "gradients": torch.enable_grad(),
        "float64 by default": float64_by_default(),
    }


@contextlib.contextmanager
def float64_by_default():
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("name", list(surroundings()))
def test_surroundings_do_not_matter(bundle, name):
    """The bits are the same: autocast would round products, and models are built under `torch.device("meta")`."""
    x, packed, scales, factors, _ = make_problem(bundle)
    start = torch.tensor([0, 2, 4, 6], dtype=torch.int32)
    experts = make_experts(bundle, "cpu")
    call = make_call("cpu", 5, 2)
    weight = torch.randn(N, K)

    def run() -> list[torch.Tensor]:
        options = {"expert_start": start, "b_global_scale": factors}
        return [
            bundle.matmul_grouped(x, packed, None, scales, activation_format="bf16", **options),
            bundle.matmul_grouped(x, packed, None, scales, **options),
            *bundle.matmul_grouped(x, packed, None, scales, quantize_output=True, **options),
            bundle.matmul_2d(x, packed[0], None, scales[0], gate=True, swiglu_limit=7.0, b_global_scale=2.0),
            *bundle.nvfp4_act_quant(x),
            *bundle.nvfp4_quantize_two_level(weight),
            bundle.moe_forward(experts, *call, activation_format="bf16"),
            bundle.moe_forward(experts, *call),
        ]

    expected = run()
    with surroundings()[name]:
        actual = run()
    for i, (one, other) in enumerate(zip(actual, expected, strict=True)):
        assert one.dtype == other.dtype and one.device == other.device, i
        assert torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8)), i
