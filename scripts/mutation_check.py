"""Puts deliberate faults into copies of the tree, one at a time, and expects tests to fail.

    python scripts/mutation_check.py [--only TEXT]

A fault is an exact replacement of text. If the text of one is gone, the check stops, so it cannot pass by doing
nothing. The same tests first have to pass on a copy without a fault. No GPU is needed: kernels are interpreted, or
their compiled code is read.
"""

from __future__ import annotations

import argparse
import dataclasses
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
COPIED = ("finegrained_kernels", "torch-ext", "scripts", "tests", "docs", "build.toml", "pyproject.toml")
IGNORED = shutil.ignore_patterns("__pycache__", "_bundle")
TESTS_PASSED, TESTS_FAILED = 0, 1
"""pytest's exit status; any other means neither."""


@dataclasses.dataclass(frozen=True)
class Fault:
    """Replacing `before`, which occurs once in `path`, by `after` has to make one of `tests` (pytest's arguments)
    fail."""

    name: str
    path: str
    before: str
    after: str
    tests: tuple[str, ...]


CSF = "torch-ext/finegrained_kernels/csf"
KERNELS = "torch-ext/finegrained_kernels/gemm/kernels"
CODEC = ("tests/codec/test_csf_codec.py",)
INTERPRETED = ("tests/codec/test_csf_interpreted.py",)

IN_TRITON = ("tests/gemm/test_nvfp4_compile.py::test_interpreted_kernels_match[compressed]",)
BLOCK_SCALED = ("tests/gemm/test_nvfp4_compile.py::test_interpreted_kernels_match[block-scaled, compressed]",)
CAPABILITY = ("tests/gemm/test_capability.py",)

PLANS = "torch-ext/finegrained_kernels/plans.py"
PLANNED = ("tests/bundle/test_plans.py",)

FAULTS = [
    Fault(
        "a plan for other strides",
        PLANS,
        "strides = [list(tensor.stride()) for tensor in tensors]",
        "strides = [[None] * tensor.ndim for tensor in tensors]",
        PLANNED,
    ),
    Fault(
        "a plan for other alignments",
        PLANS,
        "alignment = is_aligned or tuple([address & 15 for address in addresses])",
        "alignment = None",
        PLANNED,
    ),
    Fault(
        "a plan for arguments of other types",
        PLANS,
        "_signatures.get((function, types)) or _signatures.setdefault((function, types), _Signature(types))",
        "_signatures.get(function) or _signatures.setdefault(function, _Signature(types))",
        PLANNED,
    ),
    Fault("a plan that writes to what it reads", PLANS, " or not plan.is_apart(tensors, addresses)", "", PLANNED),
    Fault(
        "wrong nibble order (CPU)",
        f"{CSF}/decode.py",
        "    pairs |= pairs << 4\n    pairs &= 0x0F0F\n",
        "    pairs = (pairs >> 4) | (pairs & 0x0F) << 8\n",
        CODEC,
    ),
    Fault(
        "wrong nibble order (kernel)",
        f"{CSF}/decode_tiles.py",
        "    return (x | (x << 4)) & 0x0F0F0F0F0F0F0F0F\n",
        "    return ((x << 8) | (x >> 4)) & 0x0F0F0F0F0F0F0F0F\n",
        INTERPRETED,
    ),
    Fault(
        "wrong nibble order (weights)",
        "torch-ext/finegrained_kernels/nvfp4/reference.py",
        "torch.stack([byte & 15, byte >> 4], dim=-1)",
        "torch.stack([byte >> 4, byte & 15], dim=-1)",
        ("tests/moe/test_moe.py", "-k", "test_weight_only_forward and cpu"),
    ),
    Fault(
        "off-by-one base (encoder)",
        f"{CSF}/encode.py",
        "num_windows - 1 - ranked % num_windows",
        "(num_windows - ranked % num_windows).clamp(max=num_windows - 1)",
        CODEC,
    ),
    Fault(
        "off-by-one base (kernel)",
        f"{CSF}/decode_tiles.py",
        "        x += base * 0x0101010101010101\n",
        "        x += (base + 1) * 0x0101010101010101\n",
        INTERPRETED,
    ),
    Fault(
        "dropped last exception (CPU)",
        f"{CSF}/decode.py",
        "    planes.view(-1)[positions] = (words >> NVFP4_CSF.position_bits).to(torch.uint8)\n",
        "    planes.view(-1)[positions[:-1]] = (words >> NVFP4_CSF.position_bits).to(torch.uint8)[:-1]\n",
        CODEC,
    ),
    Fault(
        "dropped last exception (kernel)",
        f"{CSF}/decode_tiles.py",
        "offs_x < span.end, span, PLANE=PLANE, SWIZZLED=SWIZZLED)\n    for i_x",
        "offs_x < span.end - 1, span, PLANE=PLANE, SWIZZLED=SWIZZLED)\n    for i_x",
        INTERPRETED,
    ),
    Fault(
        "missed barrier",
        f"{CSF}/decode_tiles.py",
        "    tl.debug_barrier()\n",
        "",
        ("tests/codec/test_csf_barrier.py",),
    ),
    Fault(
        "padding taken for bytes (encoding kernel)",
        f"{CSF}/encode_triton.py",
        "tl.where(first == 0, PADDING, 0)",
        "0",
        INTERPRETED,
    ),
    Fault(
        "lower bases not tried (encoding kernel)",
        f"{CSF}/encode_triton.py",
        "    down = (reach_down >= covered) & (lowest > 0)\n    up",
        "    down = (reach_down > covered) & (lowest > 0)\n    up",
        INTERPRETED,
    ),
    Fault(
        "word before a column tile of the same (unaligned)",
        f"{CSF}/decode_tiles.py",
        "col_tile_before = tl.where(is_first, col_tile - 1, col_tile)",
        "col_tile_before = col_tile",
        INTERPRETED,
    ),
    Fault(
        "ignored expert_start (CPU)",
        f"{CSF}/decode.py",
        "for plane in active_experts(expert_start, num_planes)]",
        "for plane in range(num_planes)]",
        ("tests/codec/test_csf_workspace.py",),
    ),
    Fault(
        "ignored expert_start (kernel)",
        f"{CSF}/decode_triton.py",
        "            active = (end > begin).to(tl.int32)\n",
        "            active = (mask & (end >= begin)).to(tl.int32)\n",
        INTERPRETED,
    ),
    Fault(
        "swapped gate and up (CPU)",
        "torch-ext/finegrained_kernels/gemm/cpu.py",
        "gated(halves[:, 0], halves[:, 1], gemm.alpha",
        "gated(halves[:, 1], halves[:, 0], gemm.alpha",
        ("tests/gemm/test_nvfp4_gemm.py",),
    ),
    Fault(
        "swapped gate and up (kernel)",
        "torch-ext/finegrained_kernels/gemm/kernels/portable.py",
        "    finish_tile(acc, acc_up, tile",
        "    finish_tile(acc_up, acc, tile",
        ("tests/gemm/test_nvfp4_compile.py", "-k", "test_interpreted_kernels_match"),
    ),
    Fault(
        "another expert's compressed scales (CPU)",
        "torch-ext/finegrained_kernels/gemm/cpu.py",
        "decode_planes(gemm.b_scales, expert, expert + 1)",
        "decode_planes(gemm.b_scales, 0, 1)",
        ("tests/gemm/test_fused.py", "-k", "test_every_byte_arrives_on_cpu"),
    ),
    Fault(
        "shared memory of results not counted",
        "torch-ext/finegrained_kernels/gemm/smem_plan.py",
        "rest = config.block_n * config.block_t * result_bytes + strips\n",
        "rest = strips\n",
        ("tests/gemm/test_configs.py",),
    ),
    Fault(
        "swapped gate and up (slices of a checkpoint)",
        "finegrained_kernels/checkpoint/slices.py",
        '"gate_up": (GATE, UP)',
        '"gate_up": (UP, GATE)',
        ("tests/checkpoint/test_checkpoint_slices.py",),
    ),
    Fault(
        "divisor taken for multiplier",
        "finegrained_kernels/checkpoint/slices.py",
        "torch.where(divisors, 1 / stored, stored)",
        "torch.where(divisors, stored, stored)",
        ("tests/checkpoint/test_checkpoint_slices.py",),
    ),
    Fault(
        "unsorted exceptions accepted",
        f"{CSF}/wire.py",
        "(keys[1:] <= keys[:-1]).any()",
        "(keys[1:] == keys[:-1]).any()",
        CODEC,
    ),
    Fault(
        "int32 overflow (rows)",
        f"{CSF}/decode_tiles.py",
        "    plane = plane.to(tl.int64)\n    out_ptr += plane * PLANE_BYTES\n",
        "    out_ptr += plane * PLANE_BYTES\n",
        INTERPRETED,
    ),
    Fault(
        "int32 overflow (swizzled)",
        f"{CSF}/decode_tiles.py",
        "    plane = plane.to(tl.int64)\n    out_ptr += plane * swizzled_bytes",
        "    out_ptr += plane * swizzled_bytes",
        INTERPRETED,
    ),
    Fault(
        "stale workspace",
        "torch-ext/finegrained_kernels/moe/layer.py",
        "        if expand:\n",
        "        if expand and memory is None:\n",
        ("tests/moe/test_moe.py", "-k", "test_only_routed_experts_are_decoded and cpu"),
    ),
    Fault(
        "threads in one scratch at once",
        "torch-ext/finegrained_kernels/moe/scratch.py",
        "        scratch.lock.acquire()\n        self.scratch = scratch\n",
        "",
        ("tests/moe/test_threads.py", "-k", "single_threaded and cpu"),
    ),
    Fault(
        "a stream that does not wait for another's use of the scratch",
        "torch-ext/finegrained_kernels/moe/scratch.py",
        "            stream_of(stream, self._device).wait_event(end)\n",
        "            pass\n",
        ("tests/moe/test_prefetcher.py", "-k", "free_of_races"),
    ),
    *(
        Fault(f"{what} (kernels in Triton)", f"{KERNELS}/{path}", before, after, tests)
        for what, path, before, after, tests in [
            (
                "codes of a byte swapped",
                "tile_scales.py",
                "(codes | (codes << 4)) & 0x0F0F",
                "((codes >> 4) | (codes << 8)) & 0x0F0F",
                IN_TRITON,
            ),
            (
                "bases of gate for up",
                "tile_scales.py",
                "scales.bases + expert * (HALVES * N) + plane_row",
                "scales.bases + expert * (HALVES * N) + plane_row % N",
                IN_TRITON,
            ),
            (
                "another expert's codes",
                "tile_scales.py",
                "(expert * (HALVES * N * (C // 2)) + first_col // 2)",
                "first_col // 2",
                IN_TRITON,
            ),
            (
                "another expert's exceptions",
                "tile_scales.py",
                "scales.exception_offsets + expert * offset_tiles(PLANE)",
                "scales.exception_offsets",
                IN_TRITON,
            ),
            ("exceptions past the first block dropped", "tile_scales.py", "        place += STEP\n", "", IN_TRITON),
            (
                "exceptions of the rows above taken in",
                "tile_scales.py",
                "exists & (row >= 0) & (row < HALF)",
                "exists & (row < HALF)",
                BLOCK_SCALED,
            ),
            ("another part's columns", "tile_scales.py", "return out_ptr - first_col", "return out_ptr", BLOCK_SCALED),
            (
                "columns past the first group not decoded",
                "tile_scales.py",
                "for group in tl.static_range(0, COLS // 2, GROUP_PAIRS)",
                "for group in tl.static_range(0, GROUP_PAIRS, GROUP_PAIRS)",
                IN_TRITON,
            ),
            (
                "codes read past a plane's end",
                "tile_scales.py",
                "mask = ok[:, None] & (first_col // 2 + i + pair < C // 2)[None, :]",
                "mask = ok[:, None]",
                IN_TRITON,
            ),
            (
                "one piece of scratch for all programs",
                "tile_scales.py",
                "weight.scratch + tl.program_id(0).to(tl.int64) * (HALVES * HALF * COLS)",
                "weight.scratch",
                IN_TRITON,
            ),
            (
                "scales of gate for up",
                "portable.py",
                "UP: tl.constexpr = BLOCK_N if SHAPE.COMPRESSED else N",
                "UP: tl.constexpr = 0 if SHAPE.COMPRESSED else N",
                IN_TRITON,
            ),
            (
                "decoded rows not alternating",
                "sm100_scaled.py",
                "plane_rows(row, 0, N=HALF, HALF=HALF, GATE=SHAPE.GATE)",
                "plane_rows(row, 0, N=HALF, HALF=HALF, GATE=False)",
                BLOCK_SCALED,
            ),
            (
                "a negative scale flips the even codes alone",
                "sm100_scaled.py",
                "flips = (scales >> 7) * 0x88",
                "flips = (scales >> 7) * 0x08",
                BLOCK_SCALED,
            ),
            (
                "no barrier before exceptions",
                "tile_scales.py",
                "SHAPE=SHAPE)\n    tl.debug_barrier()\n    for",
                "SHAPE=SHAPE)\n    for",
                ("tests/gemm/test_nvfp4_barriers.py", "-k", "portable or scaled"),
            ),
        ]
    ),
    Fault(
        "W4A16 of sm_120 on the block-scaled kernel",
        "torch-ext/finegrained_kernels/gemm/capability.py",
        "if not weight_only and capability[0] in (10, 12):",
        "if capability[0] in (10, 12):",
        CAPABILITY,
    ),
    *(
        Fault(
            f"no barrier {what}",
            f"{KERNELS}/{path}",
            before,
            after,
            ("tests/gemm/test_nvfp4_barriers.py",),
        )
        for what, path, before, after in [
            (
                "between a strip's windows and its exceptions",
                "scale_strip.py",
                "    if SHAPE.COMPRESSED:\n        barrier()\n        patch_strip(strip",
                "    if SHAPE.COMPRESSED:\n        patch_strip(strip",
            ),
            (
                "before a strip is filled again",
                "mma.py",
                "            barrier()  # until every warp is done with the strip\n",
                "",
            ),
            (
                "before a warpgroup's stage is overwritten",
                "sm90_wgmma.py",
                "barrier()  # every warp has waited for the last chunk's products, so its stage is free\n",
                "pass\n",
            ),
        ]
    ),
]


def faulty_tree(fault: Fault | None, directory: Path) -> Path:
    """A copy of what tests need, with the fault in it."""
    tree = directory / "tree"
    for name in COPIED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, tree / name, ignore=IGNORED)
        else:
            tree.mkdir(exist_ok=True)
            shutil.copy(ROOT / name, tree / name)
    if fault is not None:
        text = (tree / fault.path).read_text()
        if text.count(fault.before) != 1:
            raise SystemExit(
                f"{fault.name}: {fault.path} has {text.count(fault.before)} x this, expected one:\n{fault.before}"
            )
        (tree / fault.path).write_text(text.replace(fault.before, fault.after))
    return tree


def run_tests(fault: Fault | None, tests: tuple[str, ...], timeout: float | None = None) -> tuple[int, str]:
    """pytest's exit status, and the first test that failed, or the last output. After `timeout` seconds, raises
    subprocess.TimeoutExpired."""
    with tempfile.TemporaryDirectory() as directory:
        tree = faulty_tree(fault, Path(directory))
        command = [sys.executable, "-m", "pytest", "-q", "-x", "--no-header", "-p", "no:cacheprovider", *tests]
        result = subprocess.run(command, cwd=tree, capture_output=True, text=True, timeout=timeout)
    lines = result.stdout.strip().splitlines() or result.stderr.strip().splitlines() or [""]
    failed = [line.partition(" ")[2].partition(" - ")[0] for line in lines if line.startswith(("FAILED ", "ERROR "))]
    return result.returncode, (failed or lines[-1:])[0]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", default="", help="faults whose name contains this")
    only = parser.parse_args().only
    faults = [fault for fault in FAULTS if only in fault.name]
    for fault in faults:
        with tempfile.TemporaryDirectory() as directory:
            faulty_tree(fault, Path(directory))  # checks that all texts are there before anything takes time
    for tests in dict.fromkeys(fault.tests for fault in faults):
        status, last = run_tests(None, tests)
        if status != TESTS_PASSED:
            print(f"without a fault, {' '.join(tests)} should pass: {last}")
            return 1
    missed = 0
    for fault in faults:
        begin = time.perf_counter()
        status, found_by = run_tests(fault, fault.tests)
        found = status == TESTS_FAILED
        missed += not found
        verdict = f"found by {found_by}" if found else f"NOT FOUND (pytest's status {status}): {found_by}"
        print(f"{fault.name:44} {time.perf_counter() - begin:5.1f} s  {verdict}", flush=True)
    print(f"{len(faults)} faults, {missed} not found")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
