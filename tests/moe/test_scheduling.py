"""Routing in one launch: interpreted against numpy, and on a GPU against the sort that it replaces."""

from __future__ import annotations

import importlib

import numpy as np
import pytest
import torch

INTERPRETED = """
import importlib, sys
from pathlib import Path
import torch
from kernels import get_local_kernel
sys.path.insert(0, {tests!r})
import test_scheduling
bundle = get_local_kernel(Path({variant!r}))
part = importlib.import_module(f"{{bundle.__name__}}.moe.routing_triton")
for case in test_scheduling.CASES:
    ids, num_experts, top_k = test_scheduling.make_ids(*case)
    assert part.fits(ids.numel(), num_experts)
    test_scheduling.check(part.schedule_on_gpu(ids.view(-1), num_experts, top_k), ids, num_experts, top_k)
strided = torch.arange(40).remainder(5)[::2]
test_scheduling.check(part.schedule_on_gpu(strided, 4, 1), strided, 4, 1)
"""
CASES = [  # tokens, top_k, experts, dtype, the kind of ids
    (1, 1, 1, torch.int64, "any"),
    (1, 10, 512, torch.int32, "any"),
    (3, 2, 16, torch.int64, "sentinels"),
    (16, 1, 15, torch.int32, "one"),
    (17, 3, 7, torch.int64, "huge"),
    (64, 8, 300, torch.int32, "sentinels"),
    (65, 8, 33, torch.int32, "none"),
    (150, 4, 5, torch.int64, "descending"),
]


def make_ids(tokens: int, top_k: int, num_experts: int, dtype: torch.dtype, kind: str):
    generator = torch.Generator().manual_seed(tokens)
    low, high = {"sentinels": (-2, num_experts + 3), "one": (num_experts - 1, num_experts)}.get(kind, (0, num_experts))
    ids = torch.randint(low, high, (tokens, top_k), generator=generator).to(dtype)
    if kind == "huge":  # ids that are valid in their low 32 bits alone
        ids += torch.randint(-1, 2, ids.shape, generator=generator) << 32
        ids[0, 0], ids[-1, -1] = torch.iinfo(dtype).max, torch.iinfo(dtype).min
    elif kind == "none":
        ids.fill_(-1)
    elif kind == "descending":
        ids = ids.flatten().sort(descending=True).values.view(tokens, top_k)
    return ids, num_experts, top_k


def check(scheduling, ids: torch.Tensor, num_experts: int, top_k: int) -> None:
    """`scheduling` is the stable sort of `ids`, by numpy."""
    keys = ids.cpu().numpy().astype(np.int64).ravel()
    keys[(keys < 0) | (keys >= num_experts)] = num_experts
    scatter = np.argsort(keys, kind="stable")
    start = np.array([np.count_nonzero(keys < expert) for expert in range(num_experts + 1)])
    for name, got, want in zip(
        ("expert_start", "gather_idx", "scatter_idx"), scheduling, (start, scatter // top_k, scatter), strict=True
    ):
        assert got.dtype == torch.int32 and got.shape == want.shape, (name, got.dtype, got.shape)
        np.testing.assert_array_equal(got.cpu().numpy(), want, err_msg=name)


def test_kernel_is_the_stable_sort(bundle_dir, run_python):
    pytest.importorskip("triton", reason="needs triton, whose interpreter runs the kernel")
    tests = __file__.rpartition("/")[0]
    script = INTERPRETED.format(tests=tests, variant=str(bundle_dir))
    run_python(script, TRITON_INTERPRET="1", PYTHONPATH=tests)


def test_what_one_launch_takes(bundle):
    pytest.importorskip("triton", reason="needs triton, which the kernel is written in")
    scheduling = importlib.import_module(f"{bundle.__name__}.moe.routing_triton")
    assert scheduling.fits(scheduling.MAX_ROWS, 512) and not scheduling.fits(scheduling.MAX_ROWS + 1, 512)
    assert not scheduling.fits(0, 512)
    assert not scheduling.fits(4096, 1 << 19), "keys beyond int32"


def test_the_registered_op(bundle):
    """What compiled code calls: its schema and shapes, on as many rows as torch sorts."""
    pytest.importorskip("triton", reason="needs triton, which the kernel is written in")
    scheduling = importlib.import_module(f"{bundle.__name__}.moe.routing_triton")
    ids, num_experts, top_k = make_ids(scheduling.MAX_ROWS + 1, 1, 9, torch.int64, "sentinels")
    op = importlib.import_module(f"{bundle.__name__}._ops").ops.grouped_scheduling
    torch.library.opcheck(op.default, (ids.view(-1), num_experts, top_k))
    check(op(ids.view(-1), num_experts, top_k), ids, num_experts, top_k)


@pytest.mark.gpu
@pytest.mark.parametrize("case", [*CASES, (512, 8, 512, torch.int64, "sentinels"), (513, 8, 512, torch.int64, "any")])
def test_on_a_gpu(bundle, case):
    ids, num_experts, top_k = make_ids(*case)
    for given in (ids.cuda(), ids.cuda().T.contiguous().T):
        check(bundle.compute_grouped_scheduling(given, num_experts, top_k), ids, num_experts, top_k)


@pytest.mark.parametrize("arch", ["sm_80", "sm_89", "sm_90", "sm_100", "sm_120", "gfx942"])
@pytest.mark.parametrize("ids", ["*i32", "*i64"])
def test_compiles_everywhere_without_spills(bundle, arch, ids):
    pytest.importorskip("triton", reason="needs triton, which the kernel is written in")
    import compile_kernels

    part = importlib.import_module(f"{bundle.__name__}.moe.routing_triton")
    pointers = dict.fromkeys(("expert_start_ptr", "gather_ptr", "scatter_ptr"), "*i32") | {"ids_ptr": ids}
    constants = {"BLOCK_I": part.BLOCK_I, "BLOCK_J": part.BLOCK_J}
    case = compile_kernels.codec_case("schedule", part.schedule_kernel, constants, pointers, 4)
    kernel = compile_kernels.compile_case(case, compile_kernels.TARGETS[arch])
    registers, _, spilled = compile_kernels.resources(kernel, arch)
    assert spilled == 0 and registers <= 128
