"""Replayed calls have the same results and errors as calls without plans, whatever runs before or beside them."""

from __future__ import annotations

import contextlib
import importlib
import itertools
import random
import threading

import pytest
import torch

pytest.importorskip("triton", reason="needs triton")

from fake_gpu import FakeGPU
from random_calls import TOP_K, Arguments, Call, E, H, I, bytes_of, outcome


@pytest.fixture
def gpu(bundle, monkeypatch):
    return FakeGPU(bundle, monkeypatch)


def compare_with_unplanned(calls: list[Call], plans, patch: pytest.MonkeyPatch, device: str, most: int | None) -> None:
    """Each of eight threads, on its own stream, makes half of all calls twice, in its own order."""
    with patch.context() as without:
        without.setattr(plans, "_is_planned", lambda tensor: False)
        expected = [outcome(call, most) for call in calls]
    right = sum(not isinstance(one[0], type) for one in expected)
    assert len(calls) / 5 < right < len(calls) * 9 / 10
    found: dict[tuple[int, int], object] = {}

    def work(thread: int) -> None:
        order = list(range(len(calls)))
        random.Random(thread).shuffle(order)
        with torch.cuda.stream(torch.cuda.Stream()) if device == "cuda" else contextlib.nullcontext():
            for i in [i for i in order if i % 4 == thread % 4] * 2:
                found[thread, i] = outcome(calls[i], most)

    threads = [threading.Thread(target=work, args=(thread,)) for thread in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    wrong = {i: (one, expected[i]) for (_, i), one in found.items() if one != expected[i]}
    assert not wrong, [(calls[i], *pair) for i, pair in wrong.items()][:1]
    assert len(found) == 2 * len(calls)


def test_randomized_calls_of_eight_threads(bundle, gpu, monkeypatch):
    """1,000 calls, most kinds of which occur several times. A stand-in writes four bytes."""
    arguments = Arguments(bundle, seed=20)
    compare_with_unplanned([arguments.call() for _ in range(1000)], gpu.plans, monkeypatch, "cpu", 4)
    assert gpu.num_plans() > 60


@pytest.mark.gpu
def test_randomized_calls_of_eight_threads_on_a_gpu(bundle, monkeypatch):
    """The same 1,000 calls, compared to the last bit. If Triton's cache is empty, 150 kernels are compiled."""
    arguments = Arguments(bundle, seed=20, device="cuda")
    calls = [arguments.call() for _ in range(1000)]
    torch.cuda.synchronize()
    compare_with_unplanned(calls, importlib.import_module(f"{bundle.__name__}.plans"), monkeypatch, "cuda", None)


def test_memory_that_is_read_is_refused_at_any_call(bundle, gpu):
    """Whether the workspace overlaps other memory depends on addresses, by which plans are not chosen."""
    scales = Arguments(bundle, seed=0).compressed[2 * I]
    size = bundle.csf_workspace_size(scales)
    memory = torch.zeros(size + 64, dtype=torch.uint8)
    apart, inside = torch.arange(E + 1, dtype=torch.int32), memory[64 : 64 + 4 * (E + 1)].view(torch.int32)
    for _ in range(4):
        bundle.decompress_nvfp4_csf_scales(scales, workspace=memory[:size], expert_start=apart)
    assert gpu.num_plans() == 1
    for _ in range(2):
        with pytest.raises(ValueError, match="workspace must be memory of its own, got bytes of expert_start"):
            bundle.decompress_nvfp4_csf_scales(scales, workspace=memory[:size], expert_start=inside)


@pytest.mark.parametrize("first", ["none", "some"])
def test_scales_share_a_plan_whatever_their_exceptions(bundle, gpu, monkeypatch, first):
    """A plan that was recorded without exceptions has a null pointer for them, and is not used for other calls."""
    arguments = Arguments(bundle, seed=0)
    planes = arguments.planes[H] * 0 + 45
    several = {"none": [arguments.compress(planes)] * 3, "some": []}
    for count in (3, 30, 300):
        planes.flatten(0, 1)[:count, 0] = 1
        several["some"].append(arguments.compress(planes))
    order = [*several[first], *several["none"], *several["some"]]
    assert [len(scales.exceptions) for scales in several["some"]] == [3, 30, 300]

    def decode(scales):
        workspace = torch.zeros(bundle.csf_workspace_size(scales) + 64, dtype=torch.uint8)
        return bytes_of(bundle.decompress_nvfp4_csf_scales(scales, workspace=workspace), 4)

    with monkeypatch.context() as patch:
        patch.setattr(gpu.plans, "_is_planned", lambda tensor: False)
        expected = [decode(scales) for scales in order]
    assert [decode(scales) for scales in order] == expected
    assert gpu.num_plans() == {"none": 2, "some": 1}[first]


def test_who_watches_sees_every_launch(bundle, gpu, monkeypatch):
    import triton

    scales = Arguments(bundle, seed=0).compressed[2 * I]
    workspace = torch.zeros(bundle.csf_workspace_size(scales), dtype=torch.uint8)
    for _ in range(3):
        bundle.decompress_nvfp4_csf_scales(scales, workspace=workspace)
    ordinary = len(gpu.ordinary)
    monkeypatch.setattr(triton.knobs.runtime.launch_enter_hook, "calls", [print])
    bundle.decompress_nvfp4_csf_scales(scales, workspace=workspace)
    assert len(gpu.ordinary) == ordinary + 1


def test_recording_a_call_does_not_import_torchs_compiler(bundle_dir, run_python):
    """That takes seconds, in the middle of a generation."""
    script = f"""
import importlib, sys
from pathlib import Path
import torch
from kernels import get_local_kernel
bundle = get_local_kernel(Path({str(bundle_dir)!r}))
plans = importlib.import_module(bundle.__name__ + ".plans")
with plans._Watch() as watch:
    torch.empty(3).view(3, 1)
assert len(watch.allocated) == 1 and watch.is_simple
assert "torch._dynamo" not in sys.modules
"""
    run_python(script)


def test_three_launches_up_to_four_tokens(bundle, gpu):
    arguments = Arguments(bundle, seed=0)
    weights = arguments.weights[2 * I][0], arguments.weights[H][0]
    for scales in (arguments.scales, arguments.compressed):
        experts = bundle.NVFP4Experts(*weights, scales[2 * I], scales[H], torch.rand(E), torch.rand(E))
        for tokens in (1, 2, 3, 4):
            index = torch.randint(0, E, (tokens, TOP_K))
            call = (experts, torch.randn(tokens, H).bfloat16(), index, torch.rand(tokens, TOP_K))
            for _ in range(3):
                gpu.direct.clear(), gpu.ordinary.clear()
                bundle.moe_forward(*call, activation_format="bf16")
            assert gpu.direct == ["nvfp4_gemm_kernel", "nvfp4_gemm_kernel", "weighted_reduce_kernel"]
            assert not gpu.ordinary


def test_calls_of_many_tokens_are_replayed_too(bundle, gpu):
    arguments = Arguments(bundle, seed=0)
    weights = arguments.weights[2 * I][0], arguments.weights[H][0]
    experts = bundle.NVFP4Experts(*weights, arguments.scales[2 * I], arguments.scales[H], torch.rand(E), torch.rand(E))
    index = torch.randint(0, E, (2100, TOP_K))
    for _ in range(3):
        gpu.direct.clear(), gpu.ordinary.clear()
        bundle.moe_forward(experts, torch.zeros(2100, H).bfloat16(), index, torch.rand(2100, TOP_K))
    assert gpu.direct[:3] == ["count_kernel", "sum_kernel", "place_kernel"] and not gpu.ordinary


@pytest.mark.parametrize("num_tokens", [1, 2, 5])
def test_each_choice_of_a_token_reads_its_row(bundle, num_tokens):
    """Through a contiguous index, because kernels do not know its strides."""
    layer = importlib.import_module(f"{bundle.__name__}.moe.layer")
    index = layer._token_of_choice(num_tokens, TOP_K, device=torch.device("cpu"))
    assert index.tolist() == [token for token in range(num_tokens) for _ in range(TOP_K)]
    assert index.dtype == torch.int32 and index.is_contiguous() and index.untyped_storage().nbytes() == index.nbytes


@pytest.mark.gpu
@pytest.mark.parametrize("compressed", [False, True])
def test_replayed_calls_have_the_same_bits_on_a_gpu(bundle, monkeypatch, compressed):
    arguments = Arguments(bundle, seed=0)
    scales = arguments.compressed if compressed else arguments.scales
    weights = (arguments.weights[2 * I][0].cuda(), arguments.weights[H][0].cuda())
    planes = (scales[2 * I].to("cuda"), scales[H].to("cuda"))
    experts = bundle.NVFP4Experts(*weights, *planes, torch.rand(E).cuda(), torch.rand(E).cuda())
    plans = importlib.import_module(f"{bundle.__name__}.plans")
    for tokens, activation_format in itertools.product((1, 4, 40, 300), ("bf16", None)):
        index = torch.randint(-1, E, (tokens, TOP_K), device="cuda")
        call = (experts, torch.randn(tokens, H).bfloat16().cuda(), index, torch.rand(tokens, TOP_K).cuda())
        with monkeypatch.context() as patch:
            patch.setattr(plans, "_is_planned", lambda tensor: False)
            expected = bundle.moe_forward(*call, activation_format=activation_format)
        for _ in range(4):
            assert torch.equal(bundle.moe_forward(*call, activation_format=activation_format), expected)
