"""The plan of shared memory, compared with compiled kernels: what they declare, and what Triton allocates."""

from __future__ import annotations

import importlib
import re

import pytest

pytest.importorskip("triton", reason="needs triton, which compiles the kernels")

import compile_kernels
import gemm_cases


@pytest.mark.parametrize(
    "name",
    [
        "mma 64x256x8 fused gated",
        "mma 64x256x8 fused sliced",
        "mma 64x128x8 2560x640, 8 tokens",
        "mma 64x256x8 640x2560, 8 tokens",
        "wgmma 128x128x64 fused 2560x640, 4096 tokens",
        "wgmma 128x128x128 fused 640x2560, 16384 tokens",
        "wgmma 128x128x64 640x2560, 4096 tokens",
    ],
)
def test_a_kernel_takes_what_is_planned(bundle, name):
    """A ring of codes, 16-bit activations and, if there is no strip, scales; strips; and results on their way out, two
    bytes each, and half as many with a gate."""
    (case,) = (case for case in gemm_cases.gemm_cases(bundle) if case.name == name)
    plan = importlib.import_module(f"{bundle.__name__}.gemm.smem_plan")
    tile, gate = case.constants["TILE"], case.constants["SHAPE"].GATE
    kernel = compile_kernels.compile_case(case, compile_kernels.TARGETS["sm_90"])
    declared = re.search(r"csf_strip\[(\d+)\]", kernel.asm["ptx"])
    assert int(declared[1] if declared else 0) == tile.STRIP_BYTES
    scales = 0 if tile.STRIPS else tile.BLOCK_N * tile.GROUPS
    stage = tile.BLOCK_N * 8 * tile.GROUPS + tile.BLOCK_T * 32 * tile.GROUPS + scales
    results = tile.BLOCK_N // (2 if gate else 1) * tile.BLOCK_T * 2 // tile.PARTS
    assert kernel.metadata.shared == tile.STAGES * stage + min(results, plan.RESULT_BYTES)
