"""Puts deliberate faults into the GEMM kernels that only a GPU runs, and expects the tests there to fail.

    python scripts/mutation_check_gpu.py [--only TEXT] [--csv FILE] [--commit REV]

Like mutation_check.py, whose faults need no GPU. Every fault has a separate process, and several run at a time. Tests
that do not end count as failed. `--csv` writes which test found which fault, with device, versions and commit.
"""

from __future__ import annotations

import argparse
import csv
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
import triton

from mutation_check import ROOT, TESTS_FAILED, TESTS_PASSED, Fault, faulty_tree, run_tests

KERNELS = "torch-ext/finegrained_kernels/gemm/kernels"
COLUMNS = ("device", "torch", "triton", "commit", "fault", "file", "found_by")
WORKERS = 16
"""Processes at a time; each compiles on one core and has its own CUDA context."""
SECONDS = 120
"""How long the tests for one fault may take."""


def every_byte(tile: str, *depths: int) -> tuple[str, ...]:
    return tuple(f"tests/gemm/test_fused.py::test_every_byte_arrives_on_gpu[{tile}-{depth}]" for depth in depths)


def dense(*scenarios: str) -> tuple[str, ...]:
    return tuple(f"tests/gemm/test_nvfp4_gemm.py::test_scenario_on_gpu[{scenario}]" for scenario in scenarios)


MMA = every_byte("64x256x8x4x3x3x0", 2560, 4096)
BURSTS = every_byte("64x128x8x2x4x8x0x128x176x2", 2560)
TWO_STRIPS = every_byte("128x128x64x8x4x1x1", 2560)
IN_PARTS = every_byte("128x128x128x4x2x2x1", 640)
GATED = dense("grouped-w4a16_bf16-silu-True-uniform-dense-5-5-2-128-2880")
SWIZZLED = dense("2d-w4a16_bf16-none-False-uniform-swizzled-5-140-2-272-544")
MANY_ROWS = dense("grouped-w4a16_bf16-none-False-uniform-dense-3-150-2-80-320")
GATED_STRIP = (
    "tests/gemm/test_fused.py::test_scenario_on_gpu"
    "[grouped-w4a16_fp16-silu-True-padded-7x3-48x4096-5-any-own-64x256x8x4x3x3x0]",
)
PTX = ("tests/gemm/test_ptx.py",)

FAULTS = [
    Fault(
        "no barrier between windows and exceptions",
        f"{KERNELS}/scale_strip.py",
        "    if SHAPE.COMPRESSED:\n        barrier()\n        patch_strip(strip",
        "    if SHAPE.COMPRESSED:\n        patch_strip(strip",
        MMA,
    ),
    Fault(
        "a stale stage of the ring",
        f"{KERNELS}/weights.py",
        "    codes = ring.codes.index(chunk % TILE.STAGES)\n",
        "    codes = ring.codes.index((chunk + 1) % TILE.STAGES)\n",
        MMA,
    ),
    Fault(
        "copies not waited for",
        f"{KERNELS}/mma.py",
        "async_copy.wait_group(AHEAD // BURST - 1)",
        "async_copy.wait_group(AHEAD // BURST)",
        BURSTS,
    ),
    Fault(
        "copies not waited for (warpgroups)",
        f"{KERNELS}/sm90_wgmma.py",
        "async_copy.wait_group(STAGES - 2)",
        "async_copy.wait_group(STAGES - 1)",
        TWO_STRIPS,
    ),
    Fault(
        "another lane's scales",
        f"{KERNELS}/scale_strip.py",
        "(lane * (GROUPS // 4))[None, :]",
        "((3 - lane) * (GROUPS // 4))[None, :]",
        MMA,
    ),
    Fault(
        "the strip's row after the exception's",
        f"{KERNELS}/scale_strip.py",
        "    row = position // C\n",
        "    row = position // C + 1\n",
        MMA,
    ),
    Fault(
        "a row of the strip too far for up's exceptions",
        f"{KERNELS}/scale_strip.py",
        "start + (8 - 2 * N) * STRIDE",
        "start + (9 - 2 * N) * STRIDE",
        GATED_STRIP,
    ),
    Fault(
        "a tile's last exception dropped",
        f"{KERNELS}/scale_strip.py",
        "    exists = place < part.exceptions.count\n",
        "    exists = place + 1 < part.exceptions.count\n",
        MMA,
    ),
    Fault(
        "exceptions beyond the held ones dropped",
        f"{KERNELS}/scale_strip.py",
        "range(BLOCK_X, part.exceptions.count, BLOCK_X)",
        "range(2 * BLOCK_X, part.exceptions.count, BLOCK_X)",
        MMA,
    ),
    Fault(
        "exceptions of a tile's last offset tile dropped",
        f"{KERNELS}/scale_strip.py",
        "(plane + offset_tiles(end))",
        "(plane + end // OFFSET_TILE)",
        MMA,
    ),
    Fault(
        "the slice's columns counted from the row's start",
        f"{KERNELS}/scale_strip.py",
        "address = position - row * C - part.first_col.to(gl.uint32)\n",
        "address = position - row * C\n",
        every_byte("64x256x8x2x2x7x0x144x80", 2560),
    ),
    Fault(
        "the first part's scales for every part",
        f"{KERNELS}/sm90_wgmma.py",
        "strip_pairs(strip + part * (ROWS * TILE.STRIDE), chunk",
        "strip_pairs(strip, chunk",
        IN_PARTS,
    ),
    Fault(
        "the first part's columns for every part",
        f"{KERNELS}/sm90_wgmma.py",
        "tile.n_tile * PARTS + i)",
        "tile.n_tile * PARTS)",
        IN_PARTS,
    ),
    Fault(
        "gate and up rows swapped",
        f"{KERNELS}/weights.py",
        "return rows // 16 * 8 + rows % 8, rows // 8 % 2\n",
        "return rows // 16 * 8 + rows % 8, 1 - rows // 8 % 2\n",
        GATED,
    ),
    Fault(
        "gate's global for up",
        f"{KERNELS}/epilogue.py",
        "gl.load(w_global_ptr + epilogue.w_half_stride)",
        "gl.load(w_global_ptr)",
        GATED,
    ),
    Fault(
        "requantized nibbles in the wrong order",
        f"{KERNELS}/epilogue.py",
        "store_bytes(low | (high << 4)",
        "store_bytes(high | (low << 4)",
        GATED,
    ),
    Fault(
        "a share of the results over the first one",
        f"{KERNELS}/epilogue.py",
        "tile.first + (zero + i * SHARE)",
        "tile.first + zero",
        every_byte("128x128x128x8x4x1x1", 640),
    ),
    Fault(
        "an odd group scaled as the even one before it",
        f"{KERNELS}/ptx.py",
        'f"mov.b32 s, {{h{odd_group}, h{odd_group}}};"',
        '"mov.b32 s, {h0, h0};"',
        PTX,
    ),
    Fault(
        "a group unscaled",
        f"{KERNELS}/ptx.py",
        '                "fma.rn.bf16x2 u, u, s, z;",\n',
        "",
        PTX,
    ),
    Fault(
        "decoded bytes in the wrong order",
        f"{KERNELS}/ptx.py",
        "enumerate((0x5140, 0x7362))",
        "enumerate((0x7362, 0x5140))",
        PTX,
    ),
    Fault(
        "products' values swapped",
        f"{KERNELS}/unpack.py",
        "return x0, x1, x2, x3, x4, x5, x6, x7",
        "return x1, x0, x2, x3, x4, x5, x6, x7",
        GATED,
    ),
    Fault(
        "permuted activations in another order",
        f"{KERNELS}/sm90_wgmma.py",
        "values.permute(0, 3, 5, 2, 1, 4)",
        "values.permute(0, 3, 5, 1, 2, 4)",
        MANY_ROWS,
    ),
    Fault(
        "a tile of many rows multiplied as one of few",
        f"{KERNELS}/sm90_wgmma.py",
        "is_small = tile.end - tile.first <= BLOCK_T // 4\n",
        "is_small = tile.end - tile.first <= BLOCK_T\n",
        MANY_ROWS,
    ),
    Fault(
        "swizzled rows of the wrong quarter",
        "torch-ext/finegrained_kernels/swizzle_triton.py",
        "row // 32 % 4 * COLS",
        "row // 32 % 2 * COLS",
        SWIZZLED,
    ),
]


def check(fault: Fault | None, tests: tuple[str, ...]) -> tuple[bool, str, float]:
    """(whether the tests have the expected outcome, which test decided it or what was printed, seconds)."""
    begin = time.perf_counter()
    try:
        status, said = run_tests(fault, tests, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        status, said = TESTS_FAILED, f"{tests[0]} (does not end)"
    expected = TESTS_PASSED if fault is None else TESTS_FAILED
    return status == expected, said, time.perf_counter() - begin


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", default="", help="faults whose name contains this")
    parser.add_argument("--csv", type=Path, help="also write what found them here")
    parser.add_argument("--commit", help="of this tree; asked of git if it is not given")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("needs a CUDA device (an NVIDIA GPU and its driver); torch finds none")
        return 1
    commit = arguments.commit or subprocess.run(
        ["git", "describe", "--always", "--dirty", "--abbrev=12"], cwd=ROOT, capture_output=True, text=True
    ).stdout.strip()  # fmt: skip
    faults = [fault for fault in FAULTS if arguments.only in fault.name]
    for fault in faults:
        with tempfile.TemporaryDirectory() as directory:
            faulty_tree(fault, Path(directory))  # checks that all texts are there before anything takes time
    tests = tuple(dict.fromkeys(test for fault in faults for test in fault.tests))
    jobs = [(None, tests), *((fault, fault.tests) for fault in faults)]
    rows, missed, broken = [], 0, False
    with ThreadPoolExecutor(WORKERS) as pool:
        for (fault, _), (right, said, seconds) in zip(jobs, pool.map(lambda job: check(*job), jobs), strict=True):
            if fault is None:
                broken = not right
                print(f"{'without a fault':66} {seconds:5.1f} s  {'' if right else 'FAILED: '}{said}", flush=True)
                continue
            missed += not right
            print(f"{fault.name:66} {seconds:5.1f} s  {'' if right else 'NOT '}found: {said}", flush=True)
            found_by = said if right else ""
            rows.append((fault.name, fault.path.removeprefix("torch-ext/finegrained_kernels/"), found_by))
    if arguments.csv:
        environment = (torch.cuda.get_device_name(), torch.__version__, triton.__version__, commit)
        with arguments.csv.open("w", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(COLUMNS)
            writer.writerows((*environment, *row) for row in rows)
    print(f"{len(faults)} faults, {missed} not found; without one, the tests {'fail' if broken else 'pass'}")
    return 1 if missed or broken else 0


if __name__ == "__main__":
    sys.exit(main())
