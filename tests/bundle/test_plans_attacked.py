"""After a call was replayed, the next one differs in one thing, and does what it would have done without plans."""

from __future__ import annotations

import contextlib
import gc
import weakref

import pytest
import torch

pytest.importorskip("triton", reason="needs triton")

from fake_gpu import FakeGPU
from random_calls import FP8, Arguments, E, H, outcome

ROWS, COLS = 64, 128


@pytest.fixture
def gpu(bundle, monkeypatch):
    return FakeGPU(bundle, monkeypatch)


class Subclass(torch.Tensor):
    pass


def changed_in_place(tensor: torch.Tensor, change: str) -> torch.Tensor:
    """A copy of `tensor`, to be changed after calls with it."""
    {
        "transposed": lambda: tensor.t_(),
        "shortened": lambda: tensor.resize_(tensor.shape[0] - 16, *tensor.shape[1:]),
        "other data": lambda: setattr(tensor, "data", tensor.data[:, : tensor.shape[1] // 2].contiguous()),
        "same data, narrower": lambda: setattr(tensor, "data", tensor.data[:, : tensor.shape[1] // 2]),
        "moved by a byte": lambda: tensor.set_(tensor.untyped_storage(), 1, (64, 63), (63, 1)),
    }[change]()
    return tensor


def linear(bundle, a: object, b: object, scales: object):
    return bundle.matmul_2d(a, b, None, scales, activation_format="bf16", b_global_scale=1.0)


def operands() -> tuple[torch.Tensor, ...]:
    """A weight of 64 x 128, which has as many rows as bytes in a row."""
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(4, COLS, generator=generator).bfloat16()
    b = torch.randint(0, 256, (ROWS, COLS // 2), dtype=torch.uint8, generator=generator)
    return a, b, torch.full((ROWS, COLS // 16), 45, dtype=torch.uint8).view(FP8)


def compare(gpu: FakeGPU, monkeypatch: pytest.MonkeyPatch, call) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(gpu.plans, "_is_planned", lambda tensor: False)
        expected = outcome(call, 4)
    assert [outcome(call, 4) for _ in range(3)] == [expected] * 3


@pytest.mark.parametrize("change", ["transposed", "shortened", "other data", "same data, narrower", "moved by a byte"])
def test_a_weight_that_was_changed_in_place(bundle, gpu, monkeypatch, change):
    a, b, scales = operands()
    for _ in range(3):
        linear(bundle, a, b, scales)
    assert gpu.num_plans() == 1
    changed_in_place(b, change)
    compare(gpu, monkeypatch, lambda: linear(bundle, a, b, scales))


@pytest.mark.parametrize(
    "replace",
    [
        lambda x: x.as_subclass(Subclass),
        lambda x: torch.nn.Parameter(x, requires_grad=False),
        lambda x: x.clone().requires_grad_() if x.is_floating_point() and x.dtype != FP8 else x,
        lambda x: torch._neg_view(x) if x.dtype == torch.bfloat16 else x,
        lambda x: x.to_sparse() if x.dtype != FP8 else x,
        lambda x: x.view(torch.int8) if x.element_size() == 1 else x.half(),
        lambda x: x.expand(1, *x.shape),
        lambda x: x.numpy() if x.dtype == torch.uint8 else x,
        lambda x: x.to("meta"),
    ],
)
@pytest.mark.parametrize("position", range(3))
def test_an_operand_of_another_kind(bundle, gpu, monkeypatch, position, replace):
    given = list(operands())
    for _ in range(3):
        linear(bundle, *given)
    given[position] = replace(given[position])
    compare(gpu, monkeypatch, lambda: linear(bundle, *given))


@pytest.mark.parametrize("begin", ["inside", "outside"])
def test_inference_mode_comes_and_goes(bundle, gpu, monkeypatch, begin):
    """Tensors that were made in it cannot be changed in place outside of it, except by kernels."""
    scales = Arguments(bundle, seed=0).compressed[H]
    inside, outside = torch.inference_mode(), contextlib.nullcontext()
    with inside if begin == "inside" else outside:
        workspace = torch.zeros(bundle.csf_workspace_size(scales), dtype=torch.uint8)
        a, b, dense = operands()
    for context in (inside, outside, inside, outside):
        with context:
            compare(gpu, monkeypatch, lambda: bundle.decompress_nvfp4_csf_scales(scales, workspace=workspace))
            compare(gpu, monkeypatch, lambda: linear(bundle, a, b, dense))


def test_what_is_ambient_changes_nothing(bundle, gpu, monkeypatch):
    given = operands()
    for _ in range(3):
        linear(bundle, *given)
    with torch.autocast("cpu", dtype=torch.float16):
        compare(gpu, monkeypatch, lambda: linear(bundle, *given))
    with torch.device("meta"):
        compare(gpu, monkeypatch, lambda: linear(bundle, *given))
    with torch.enable_grad(), torch.profiler.profile():
        compare(gpu, monkeypatch, lambda: linear(bundle, *given))
    torch.use_deterministic_algorithms(True)
    try:
        compare(gpu, monkeypatch, lambda: linear(bundle, *given))
    finally:
        torch.use_deterministic_algorithms(False)


def test_under_a_transform_of_torch(bundle, gpu, monkeypatch):
    a, b, scales = operands()
    for _ in range(3):
        linear(bundle, a, b, scales)
    rows = torch.stack([a, a])
    compare(gpu, monkeypatch, lambda: torch.func.vmap(lambda row: linear(bundle, row, b, scales))(rows))


def test_plans_keep_no_tensor_of_a_call(bundle, gpu):
    scales = Arguments(bundle, seed=0).compressed[H]
    workspace, start = torch.zeros(bundle.csf_workspace_size(scales), dtype=torch.uint8), torch.arange(E + 1).int()
    a, b, dense = operands()
    for _ in range(4):
        linear(bundle, a, b, dense)
        bundle.decompress_nvfp4_csf_scales(scales, workspace=workspace, expert_start=start)
    assert gpu.num_plans() == 2
    gone = [weakref.ref(tensor) for tensor in (scales, workspace, start, a, b, dense)]
    del scales, workspace, start, a, b, dense
    gc.collect()
    assert not [reference for reference in gone if reference() is not None]


def test_without_torchs_guards_nothing_is_replayed(bundle, gpu, monkeypatch):
    """Torch does not promise that their arguments stay the same."""

    def refuse(*tensors: torch.Tensor, **options: object) -> None:
        raise TypeError("other arguments")

    for absent in (refuse, None):
        monkeypatch.setattr(gpu.plans, "_Guards", absent)
        monkeypatch.setattr(gpu.plans, "_signatures", {})
        for _ in range(4):
            linear(bundle, *operands())
        assert not gpu.num_plans()
