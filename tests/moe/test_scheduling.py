"""Routing in one launch: interpreted against numpy, and on a GPU against the sort that it replaces."""

from __future__ import annotations

import importlib

import pytest
import torch

from conftest import ROOT
from scheduling_cases import CASES, check, make_ids

SUPPORT = ROOT / "tests" / "support"
INTERPRETED = """
import importlib, sys
from pathlib import Path
import torch
from kernels import get_local_kernel
sys.path.insert(0, {support!r})
import scheduling_cases
bundle = get_local_kernel(Path({variant!r}))
part = importlib.import_module(f"{{bundle.__name__}}.moe.routing_triton")
for case in scheduling_cases.CASES:
    ids, num_experts, top_k = scheduling_cases.make_ids(*case)
    assert part.fits(ids.numel(), num_experts)
    scheduling_cases.check(part.schedule_on_gpu(ids.view(-1), num_experts, top_k), ids, num_experts, top_k)
strided = torch.arange(40).remainder(5)[::2]
scheduling_cases.check(part.schedule_on_gpu(strided, 4, 1), strided, 4, 1)
"""


def test_kernel_is_the_stable_sort(bundle_dir, run_python):
    pytest.importorskip("triton", reason="needs triton, whose interpreter runs the kernel")
    script = INTERPRETED.format(support=str(SUPPORT), variant=str(bundle_dir))
    run_python(script, TRITON_INTERPRET="1", PYTHONPATH=str(SUPPORT))


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
