"""Decodes a stack of scale planes on one CPU thread, compared with the plain torch expression of the same formula; and
on torch's usual number of threads, in turns with one thread, beside a process that keeps a core busy.

    LOCAL_KERNELS=kernels-community/finegrained-kernels=$PWD/build python benchmarks/csf_cpu.py

Bytes moved by decoding: one per row (its base), half a byte in and one byte out per scale, and 4 per exception. The
roof is a copy that reads and writes as many in total. Compressing reads every scale once and writes the wire form.
Outputs are compared before anything is timed.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from harness import COLUMNS, cpu_environment

import finegrained_kernels

STACK = (512, 640, 160)
EXCEPTION_RATE = 0.0102
RESULTS = Path(__file__).parent / "results" / "csf_cpu.csv"


def synthetic_planes(num_planes: int, num_rows: int, num_cols: int, rate: float, seed: int = 0) -> torch.Tensor:
    """Scale bytes uint8 `[E, N, C]`. Those of a row are spread over one window, except for a share `rate` outside
    it."""
    generator = torch.Generator().manual_seed(seed)
    draw = {"generator": generator, "dtype": torch.uint8}
    planes = torch.randint(0, 16, (num_planes, num_rows, num_cols), **draw)
    planes[:, :, 0], planes[:, :, 1] = 0, 15
    outside = torch.rand(num_rows, num_cols - 2, generator=generator)
    threshold = outside.flatten().kthvalue(round(rate * num_rows * num_cols)).values
    bases = torch.randint(60, 110, (num_planes, num_rows, 1), **draw)
    planes += bases
    # The same positions in every plane: a stack is quick to make, and its rate is exact.
    planes[:, :, 2:].masked_fill_(outside <= threshold, 0x7E)
    return planes


def torch_expression(scales, words: torch.Tensor, plane_starts: torch.Tensor) -> torch.Tensor:
    """The formula of docs/format.md, written in the obvious way. `plane_starts` says where the plane of each exception
    starts."""
    nibbles = torch.stack([scales.codes & 0xF, scales.codes >> 4], dim=-1).to(torch.int16).flatten(-2)
    planes = (nibbles + scales.bases[:, :, None]).to(torch.uint8)
    planes.view(-1).index_put_((plane_starts + (words & 0xFFFFFF),), (words >> 24).to(torch.uint8))
    return planes


def quantiles_us(call: Callable[[], object], samples: int) -> tuple[float, float, float]:
    """20th, 50th and 80th percentile of the time of a call, after one that is not counted."""
    call()
    times = []
    for _ in range(samples):
        begin = time.perf_counter()
        call()
        times.append((time.perf_counter() - begin) * 1e6)
    return tuple(torch.tensor(times, dtype=torch.float64).quantile(torch.tensor([0.2, 0.5, 0.8]).double()).tolist())


@contextlib.contextmanager
def busy_core() -> Iterator[None]:
    """Run beside a process that keeps one core busy."""
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as process:
        time.sleep(0.2)
        try:
            yield
        finally:
            process.kill()


def beside_busy_core(call: Callable[[], object], threads: int, samples: int) -> tuple[tuple, float]:
    """`quantiles_us` on `threads` threads, and the median on one, in turns."""
    times: dict[int, list[float]] = {1: [], threads: []}
    with busy_core():
        for sample in range(samples + 1):
            for count in times:
                torch.set_num_threads(count)
                begin = time.perf_counter()
                call()
                if sample:
                    times[count].append((time.perf_counter() - begin) * 1e6)
    torch.set_num_threads(1)
    levels = torch.tensor([0.2, 0.5, 0.8]).double()
    several, one = (torch.tensor(times[count], dtype=torch.float64).quantile(levels).tolist() for count in (threads, 1))
    return tuple(several), one[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=RESULTS, help="the CSV file to write")
    out = parser.parse_args().out
    torch.set_num_threads(1)
    bundle = finegrained_kernels.load()
    num_planes, num_rows, num_cols = STACK
    planes = synthetic_planes(*STACK, EXCEPTION_RATE)
    fixed, exceptions = bundle.compress_nvfp4_csf_scales(planes)
    scales = bundle.prepare_nvfp4_csf_scales(fixed, exceptions, num_rows=num_rows, num_cols=num_cols)
    workspace = torch.empty(bundle.csf_workspace_size(scales), dtype=torch.uint8)

    counts = torch.tensor([len(words) for words in exceptions])
    words = torch.cat(list(exceptions)).view(torch.int32)
    plane_starts = torch.arange(num_planes).repeat_interleave(counts) * (num_rows * num_cols)

    def decode() -> torch.Tensor:
        return bundle.decompress_nvfp4_csf_scales(scales, workspace=workspace)

    def express() -> torch.Tensor:
        return torch_expression(scales, words, plane_starts)

    def compress() -> object:
        return bundle.compress_nvfp4_csf_scales(planes)

    for name, output in (("decompress", decode()), ("torch expression", express())):
        if not torch.equal(output.view(torch.uint8), planes):
            raise SystemExit(f"{name}: the decoded bytes differ")
    print(f"stack {num_planes} x {num_rows} x {num_cols}, {len(words) / planes.numel():.2%} exceptions, outputs equal")

    wire_bytes = fixed.nbytes + words.nbytes
    rows = []
    for variant, call, moved, samples, baseline in (
        ("full", decode, wire_bytes + planes.nbytes, 20, express),
        ("compress", compress, planes.nbytes + wire_bytes, 3, None),
    ):
        source, target = torch.zeros(moved // 2, dtype=torch.uint8), torch.empty(moved // 2, dtype=torch.uint8)
        roof_us = quantiles_us(lambda source=source, target=target: target.copy_(source), 10)[1]
        p20, p50, p80 = quantiles_us(call, samples)
        baseline_us = quantiles_us(baseline, 5)[1] if baseline else None
        print(
            f"{variant:8} {p50 / 1e3:8.1f} ms ({p20 / 1e3:.1f} to {p80 / 1e3:.1f}), {moved / p50 / 1e3:.2f} GB/s",
            end="",
        )
        print(f", {roof_us / p50:.0%} of a copy", end="")
        print(f"; torch expression {baseline_us / 1e3:.1f} ms, {baseline_us / p50:.1f}x" if baseline else "")
        rows.append(
            cpu_environment()
            | {"case": "qwen_gate", "variant": variant, "tokens": "", "condition": "warm"}
            | {"us_p20": f"{p20:.1f}", "us_p50": f"{p50:.1f}", "us_p80": f"{p80:.1f}"}
            | {"bytes": moved, "roof_us": f"{roof_us:.1f}"}
            | {
                "baseline": "torch_expression" if baseline else "",
                "baseline_us": f"{baseline_us:.1f}" if baseline else "",
            }
        )

    def prepare() -> object:
        return bundle.prepare_nvfp4_csf_scales(fixed, exceptions, num_rows=num_rows, num_cols=num_cols)

    threads = os.cpu_count() or 2
    for variant, call, samples in (("full", decode, 20), ("compress", compress, 3), ("prepare", prepare, 20)):
        (p20, p50, p80), one_us = beside_busy_core(call, threads, samples)
        print(f"{variant:8} {p50 / 1e3:8.1f} ms on {threads} threads beside a busy core, {one_us / 1e3:.1f} ms on one")
        row = {"case": "qwen_gate", "variant": variant, "tokens": "", "condition": "busy_core", "roof_us": ""}
        row |= {"us_p20": f"{p20:.1f}", "us_p50": f"{p50:.1f}", "us_p80": f"{p80:.1f}"}
        row |= {"bytes": wire_bytes + planes.nbytes, "baseline": "one_thread", "baseline_us": f"{one_us:.1f}"}
        described = cpu_environment()
        described["device"] = described["device"].replace("1 thread", f"{threads} threads")
        rows.append(described | row)
    out.parent.mkdir(exist_ok=True)
    with out.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    main()
