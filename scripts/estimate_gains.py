"""What compressed scales would gain on GPUs on which nothing was run: computed from compiled kernels, not measured.

`python scripts/estimate_gains.py` compiles some of compile_kernels.py's kernels, counts the instructions of a tile in
their machine code and the bytes that it reads, and prints the table of docs/kernels.md. A tile takes the longer of two
times: its bytes at its share of the memory's speed, and its instructions at the multiprocessor's rate of issue. It is
assumed that all multiprocessors are busy and nothing else takes time, so a ratio is no better than that.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from triton.backends.nvidia.compiler import get_ptxas

from compile_kernels import TARGETS, compile_case
from finegrained_kernels import load
from gemm_cases import BLACKWELL, Case, gemm_cases

EXCEPTIONS = 0.01


class GPU(NamedTuple):
    """Numbers published by the vendor. `issued`: instructions of a warp (on AMD, of a wave's vectors) per cycle."""

    name: str
    arch: str
    multiprocessors: int
    ghz: float
    terabytes: float
    issued: int


GPUS = [
    GPU("A100", "sm_80", 108, 1.41, 2.04, 4),
    GPU("RTX 3090", "sm_86", 82, 1.70, 0.94, 4),
    GPU("H200", "sm_90", 132, 1.98, 4.8, 4),
    GPU("B200", "sm_100", 148, 1.85, 8.0, 4),
    GPU("RTX PRO 6000", "sm_120", 188, 2.60, 1.79, 4),
    GPU("GB10", "sm_121", 48, 2.42, 0.27, 4),
    GPU("MI300X", "gfx942", 304, 2.10, 5.3, 1),
    GPU("MI355X", "gfx950", 256, 2.40, 8.0, 1),
]
KERNELS = [
    ("portable", "gated"), ("portable", "down"), ("scaled", "gated requantized"), ("scaled", "prefill down"),
    ("mma 64x256x8", "gated"),
]  # fmt: skip
PRODUCT = re.compile(r"[HOQ]MMA|UTC\w*MMA|v_mfma")


def machine_code(kernel: Any, arch: str) -> list[str]:
    """Instructions and labels, one per line."""
    if "ptx" not in kernel.asm:
        lines = kernel.asm["amdgcn"].partition(".type")[2].splitlines()
        return [line.strip() for line in lines if re.match(r"\t[a-z]\w+_|\.LBB\w+:", line)]
    ptxas = Path(get_ptxas(TARGETS[arch].arch).path)
    target = re.search(r"\.target (\w+)", kernel.asm["ptx"])
    assert target
    with tempfile.TemporaryDirectory() as directory:
        ptx, cubin = Path(directory) / "kernel.ptx", Path(directory) / "kernel.cubin"
        ptx.write_text(kernel.asm["ptx"])
        subprocess.run([ptxas, f"-arch={target[1]}", ptx, "-o", cubin], check=True)
        command = [ptxas.with_name("nvdisasm"), "-c", cubin]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return [line.strip() for line in text.splitlines() if re.match(r"\s*(?:/\*[0-9a-f]{4,}\*/|\.L_x_\w+:)", line)]


def instructions_of_a_tile(lines: list[str], steps: int) -> int:
    """Count the loop over tiles once, in it the loop that multiplies `steps` times, and other loops once."""
    labels, code = {}, []
    for line in lines:
        if label := re.match(r"(\.L\w+):", line):
            labels[label[1]] = len(code)
        else:
            code.append(line)
    loops = []
    for end, line in enumerate(code):
        jump = re.search(r"(?:BRA|s_c?branch\w*)\b.*?(\.L\w+)", line)
        if jump and jump[1] in labels and labels[jump[1]] < end:
            loops.append((labels[jump[1]], end))
    products = [i for i, line in enumerate(code) if PRODUCT.search(line)]
    multiplying = [loop for loop in loops if any(loop[0] <= i <= loop[1] for i in products)]
    inner, outer = (pick(multiplying, key=lambda loop: loop[1] - loop[0]) for pick in (min, max))
    assert inner != outer, "a kernel without a loop over tiles"
    length = inner[1] - inner[0] + 1
    return outer[1] - outer[0] + 1 + (steps - 1) * length


def tile_bytes(case: Case) -> tuple[int, int, int]:
    """(bytes of weights and dense scales that a tile reads, the same with compressed ones, all bytes that staging
    moves)."""
    shape, tile = case.constants["SHAPE"], case.constants["TILE"]
    rows = tile.HALF * (2 if shape.GATE else 1)
    codes, dense = rows * shape.K // 2, rows * shape.C
    compressed = rows + rows * shape.C // 2 + round(4 * EXCEPTIONS * dense) + dense // 256
    return codes + dense, codes + compressed, codes + compressed + 2 * dense


def estimate(gpu: GPU, dense: Case, fused: Case) -> str:
    """A row of the table."""
    tile = dense.constants["TILE"]
    steps = -(-dense.constants["SHAPE"].C // (getattr(tile, "BLOCK_K", 0) // 16 or tile.GROUPS))
    moved = tile_bytes(dense)
    instructions = [
        instructions_of_a_tile(machine_code(compile_case(case, TARGETS[gpu.arch]), gpu.arch), steps)
        for case in (dense, fused)
    ]
    memory = [bytes_ * gpu.multiprocessors / gpu.terabytes / 1e6 for bytes_ in moved]  # us
    issue = [count * dense.options["num_warps"] / gpu.issued / gpu.ghz / 1e3 for count in instructions]
    us_dense, us_fused = (max(pair) for pair in zip(memory[:2], issue, strict=True))
    us_staged = us_dense + memory[2] - memory[0]
    cells = (
        f"{gpu.name} ({gpu.arch})", fused.name.replace("fused ", ""), f"{moved[0]:,} / {moved[1]:,}",
        f"{instructions[0]:,} / {instructions[1]:,}", f"{memory[0]:.1f} / {memory[1]:.1f}",
        f"{issue[0]:.1f} / {issue[1]:.1f}", f"{us_fused / us_dense:.2f}", f"{us_staged / us_dense:.2f}",
    )  # fmt: skip
    return f"| {' | '.join(cells)} |"


def table(bundle: ModuleType) -> Iterator[str]:
    """The lines of the table."""
    cases = {case.name: case for case in gemm_cases(bundle)}
    columns = ("GPU", "kernel", "bytes", "instructions", "us by memory", "us by issue", "fused", "staged")
    yield f"| {' | '.join(columns)} |"
    yield f"|{'---|' * len(columns)}"
    for gpu in GPUS:
        for kind, name in KERNELS:
            if gpu.arch == "sm_90" and kind != "portable":
                continue  # measured
            if gpu.arch in BLACKWELL and kind == "portable":
                continue  # there for few K alone
            dense, fused = cases[f"{kind} {name}"], cases[f"{kind} fused {name}"]
            if gpu.arch in fused.archs:
                yield estimate(gpu, dense, fused)


if __name__ == "__main__":
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
    print(*table(load()), sep="\n")
