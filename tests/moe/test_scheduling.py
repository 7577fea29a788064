"""Routing in one or three launches: interpreted and compared with numpy, and on a GPU."""

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


def test_what_the_kernels_take(bundle):
    pytest.importorskip("triton", reason="needs triton, which the kernels are written in")
    scheduling = importlib.import_module(f"{bundle.__name__}.moe.routing_triton")
    assert scheduling.takes_one_launch(4096, 512) and not scheduling.takes_one_launch(4097, 512)
    assert not scheduling.takes_one_launch(4096, 1 << 19), "keys beyond int32"
    most = scheduling.BLOCK * scheduling.MAX_BLOCKS
    assert scheduling.fits(4097, 2046) and not scheduling.fits(4097, 2047)
    assert scheduling.fits(most, 512) and not scheduling.fits(most + 1, 512)
    assert not scheduling.fits(0, 512)


def test_the_registered_op(bundle):
    """The op for compiled code: its schema and shapes, with as many rows as torch sorts."""
    pytest.importorskip("triton", reason="needs triton, which the kernel is written in")
    scheduling = importlib.import_module(f"{bundle.__name__}.moe.routing_triton")
    ids, num_experts, top_k = make_ids(scheduling.BLOCK * scheduling.MAX_BLOCKS + 1, 1, 9, torch.int64, "sentinels")
    op = importlib.import_module(f"{bundle.__name__}._ops").ops.grouped_scheduling
    torch.library.opcheck(op.default, (ids.view(-1), num_experts, top_k))
    check(op(ids.view(-1), num_experts, top_k), ids, num_experts, top_k)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "case", [*CASES, (16384, 8, 512, torch.int64, "sentinels"), (32769, 8, 512, torch.int64, "any")]
)
def test_on_a_gpu(bundle, case):
    ids, num_experts, top_k = make_ids(*case)
    for given in (ids.cuda(), ids.cuda().T.contiguous().T):
        check(bundle.compute_grouped_scheduling(given, num_experts, top_k), ids, num_experts, top_k)


@pytest.mark.parametrize("arch", ["sm_80", "sm_89", "sm_90", "sm_100", "sm_120", "gfx942", "gfx950"])
@pytest.mark.parametrize("kernel", ["schedule", "count", "sum", "place"])
@pytest.mark.parametrize("ids", ["*i32", "*i64"])
def test_compiles_everywhere_without_spills(bundle, arch, kernel, ids):
    pytest.importorskip("triton", reason="needs triton, which the kernels are written in")
    import compile_kernels

    part = importlib.import_module(f"{bundle.__name__}.moe.routing_triton")
    constants = {
        "schedule": {"BLOCK_I": part.BLOCK_I, "BLOCK_J": part.BLOCK_J},
        "count": {"BINS": 1024, "BLOCK": part.BLOCK},
        "sum": {"BINS": 1024, "ROWS": part.SUMMED // 1024},
        "place": {"BINS": 1024, "BLOCK": part.BLOCK, "BLOCK_J": 16},
    }[kernel]
    function = getattr(part, f"{kernel}_kernel")
    names = [p.name for p in function.params if p.name.endswith("_ptr")]
    if "ids_ptr" not in names and ids == "*i64":
        pytest.skip("reads no ids")
    pointers = dict.fromkeys(names, "*i32") | ({"ids_ptr": ids} if "ids_ptr" in names else {})
    num_warps = 8 if kernel in ("sum", "place") else 4
    case = compile_kernels.codec_case(kernel, function, constants, pointers, num_warps)
    registers, _, spilled = compile_kernels.resources(
        compile_kernels.compile_case(case, compile_kernels.TARGETS[arch]), arch
    )
    assert spilled == 0 and registers <= 160
