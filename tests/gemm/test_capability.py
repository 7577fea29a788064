"""For every target, which kernel a GEMM uses, and whether that reads compressed scales; and what a layer does."""

from __future__ import annotations

import importlib

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from experts import Shape, compressed, make_call, make_experts
from fake_gpu import FakeGPU

NVIDIA = {f"sm_{major}{minor}": (major, minor) for major, minor in
          ((7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (10, 3), (11, 0), (12, 0), (12, 1))}  # fmt: skip
TARGETS = (*NVIDIA, "gfx942", "gfx950", "xpu")
PORTABLE_ONLY = {"sm_75", "sm_80", "sm_86", "gfx942", "gfx950", "xpu"}
BLOCK_SCALED = {"sm_100", "sm_103", "sm_120", "sm_121"}
NUM_EXPERTS = 384
DEPTHS = {"whole": 2560, "half a word": 2880, "odd": 96, "long": 16128, "longer": 28672, "has no halves": 29568}


@pytest.fixture(params=TARGETS)
def target(request, bundle, monkeypatch):
    """The target's name. CPU tensors are taken for tensors on it."""
    FakeGPU(bundle, monkeypatch)
    name = request.param
    capability = importlib.import_module(f"{bundle.__name__}.gemm.capability")
    monkeypatch.setattr(capability, "is_nvidia", lambda device: name in NVIDIA)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: NVIDIA[name])
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    return name


def expected(target: str, kind: str, weight_only: bool) -> tuple[str, bool]:
    """(kernel, whether it reads compressed scales), according to docs/kernels.md."""
    if target in PORTABLE_ONLY:
        return "portable", True
    if target in BLOCK_SCALED and not weight_only:
        return "sm100_scaled", True
    if kind == "odd":
        return "portable", True
    return "mma", kind == "whole" or (kind in ("long", "longer") and target != "sm_90")


@pytest.mark.parametrize("weight_only", [True, False], ids=["w4a16", "w4a4"])
@pytest.mark.parametrize("kind", DEPTHS)
def test_the_rule(bundle, target, kind, weight_only):
    capability = importlib.import_module(f"{bundle.__name__}.gemm.capability")
    arguments = torch.device("cpu"), DEPTHS[kind], weight_only
    got = capability.kernel_of(*arguments), capability.reads_compressed_on(*arguments)
    assert got == expected(target, kind, weight_only)


class Allocations(TorchDispatchMode):
    """The largest tensor that an operator returned."""

    largest = 0

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        result = operator(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, torch.Tensor) and not operator.is_view:
                self.largest = max(self.largest, tensor.nbytes)
        return result


@pytest.fixture(scope="module")
def experts(bundle):
    return compressed(bundle, make_experts(bundle, "cpu", shape=Shape(NUM_EXPERTS, 256, 128)))


@pytest.mark.parametrize("num_tokens", [1, 40])
@pytest.mark.parametrize("activation_format", ["bf16", None], ids=["w4a16", "w4a4"])
def test_a_layer_allocates_no_dense_scales(bundle, experts, target, activation_format, num_tokens):
    """It does not decode into its scratch either, if no strategy is given and rows of codes are whole words."""
    call = make_call("cpu", num_tokens, 2, high=NUM_EXPERTS)
    assert not bundle.uses_expanded_scales(experts, num_tokens, activation_format=activation_format)
    with Allocations() as allocations:
        bundle.moe_forward(experts, *call, activation_format=activation_format)
    dense = min(scales.num_planes * scales.plane_bytes for scales in (experts.gate_up_scales, experts.down_scales))
    assert 0 < allocations.largest < dense
    assert bool((experts.scratch == 0x7F).all())
