"""What does a GEMM pay for scales that stay compressed?

`python benchmarks/fused.py [--out FILE] [--only CASE ..] [--tokens 1 64 ..] [--bundle build/torch-cuda]`, on a GPU;
`--tiny` runs the same code on small shapes, on a CPU too, to see that it runs. W4A16, uniform top-8 routing of random
tokens; scale planes with the models' own share of exceptions. Each variant at its own table configuration.

dense    scales decoded once, at load. Bytes: `active * rows * (K / 2 + K / 16)`. Checked against float64.
staged   compressed scales of the active experts are decoded into one workspace, then dense: both in one graph. Bytes:
         the compressed scales once, the dense ones written and read, the weights.
fused    the GEMM reads compressed scales: `active * rows * (K / 2 + 1 + K / 32)`, offsets and the experts' exceptions.

With `_batched`, `matmul_batched`; its staged variant finds the active experts ready. Staged results are dense ones to
the bit, and fused results are those of dense scales under the fused configuration. Baseline: dense, of the same op.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import harness
import torch
from nvfp4_gemm import Problem, Weights, get_bundle, pick_device, read_roof, time_on_cpu
from scale_planes import PERCENT, make_planes
from tune_nvfp4_gemm import CASES, TOP_K, part

TOKENS = {"w4a16": (1, 8, 64, 512, 4096), "w4a16_batched": (1, 8, 64, 512)}
TINY_TOKENS = {"w4a16": (1, 16), "w4a16_batched": (1,)}
TINY_SHAPES = {name: (16, 32, 64, gate) for name, (_, _, _, gate) in CASES.items()}
VARIANTS = ("dense", "staged", "fused")


class BothScales(Weights):
    """Weights with scales in both forms, and a workspace to decode into."""

    def __init__(self, bundle, case: str, shape: tuple[int, int, int, bool], device: str, *, fill: bool = True) -> None:
        super().__init__(shape, device, fill=fill)
        planes = self.scales.view(torch.uint8)
        cols = self.depth // 16
        if fill:
            planes.copy_(make_planes(self.experts, self.rows, cols, PERCENT[case], device=device))
            wire = bundle.compress_nvfp4_csf_scales(planes)
            self.compressed = bundle.prepare_nvfp4_csf_scales(*wire, num_rows=self.rows, num_cols=cols)
        else:  # to compile with: no exceptions
            bases, codes = planes[:, :, 0].contiguous(), planes[:, :, : cols // 2].contiguous()
            offsets = torch.zeros(self.experts * -(-self.rows * cols // 1024) + 1, dtype=torch.int32, device=device)
            scales_type = part(bundle, "csf.scales").NVFP4CSFScales
            self.compressed = scales_type(bases, codes, offsets[:0].clone(), offsets)
        self.workspace = torch.full((planes.numel(),), 0x7F, dtype=torch.uint8, device=device)

    def compressed_bytes(self, experts: torch.Tensor) -> int:
        """Of these experts' scales."""
        offsets = self.compressed.exception_offsets
        tiles = (len(offsets) - 1) // self.experts
        exceptions = int(offsets[::tiles].diff()[experts].sum())
        return len(experts) * self.rows * (1 + self.depth // 32) + 4 * (len(experts) * tiles + exceptions)


class Comparison:
    """One GEMM, dense, staged and fused: calls by variant, and the bytes that each moves."""

    def __init__(self, bundle, case: str, weights: BothScales, tokens: int, op: str) -> None:
        self.bundle, self.weights, self.op = bundle, weights, op
        self.problem = Problem(bundle, case, weights, tokens)
        experts = self.problem.ids.unique().long()
        dense, compressed = self.problem.moved, weights.compressed_bytes(experts)
        dense_scales = len(experts) * weights.rows * weights.depth // 16
        fused = dense - dense_scales + compressed
        self.moved = {"dense": dense, "staged": fused + 2 * dense_scales, "fused": fused}

    def call(self, variant: str) -> Callable[[], torch.Tensor]:
        scales, weights, problem = self.weights.compressed, self.weights, self.problem
        if variant == "fused":
            return problem.call(self.op, scales).run
        if variant == "dense":
            return problem.call(self.op).run
        decoded = weights.workspace.view(torch.float8_e4m3fn).view(weights.scales.shape)
        multiply = problem.call(self.op, decoded).run
        active = {"expert_start": problem.start, "max_active": min(weights.experts, len(problem.ids))}

        def staged() -> torch.Tensor:
            self.bundle.decompress_nvfp4_csf_scales(scales, workspace=weights.workspace, **active)
            return multiply()

        return staged

    def check(self) -> None:
        dense = self.problem.checked_call(self.op)()
        self.weights.workspace.fill_(0x7F)
        assert_same(self.call("staged")(), dense, "staged")
        fused = self.call("fused")()
        with configured_as_fused(self.bundle):
            dense = self.problem.checked_call(self.op)()
        assert_same(fused, dense, "fused")


def assert_same(actual: torch.Tensor, expected: torch.Tensor, name: str) -> None:
    wrong = (actual.view(torch.int16) != expected.view(torch.int16)).sum()
    assert not wrong, f"{name}: {wrong} of {expected.numel()} results are not those of dense scales"


@contextlib.contextmanager
def configured_as_fused(bundle) -> Iterator[None]:
    """Dense scales get the configuration of compressed ones."""
    launch = part(bundle, "nvfp4.launch")
    choose = launch.choose_config
    launch.choose_config = lambda *args: choose(*args[:-1], True)
    try:
        yield
    finally:
        launch.choose_config = choose


def timers(op: str, tokens: int) -> dict[str, Callable]:
    if not torch.cuda.is_available():
        return dict.fromkeys(harness.TIMERS, time_on_cpu)
    long = tokens >= (512 if op == "w4a16_batched" else 4096)  # milliseconds a call
    return {name: functools.partial(timer, samples=5 if long else 20) for name, timer in harness.TIMERS.items()}


def bench_case(bundle, results: harness.Results, case: str, shape: tuple, tokens: dict[str, tuple[int, ...]]) -> None:
    weights = BothScales(bundle, case, shape, pick_device())
    swept = weights.memory.new_zeros(weights.memory.numel() + 3 * weights.workspace.numel())
    roofs = {}
    for op, count in ((op, count) for op, counts in tokens.items() for count in counts):
        comparison = Comparison(bundle, case, weights, count, op)
        comparison.check()
        suffix = op.removeprefix("w4a16")
        dense = None
        for variant in VARIANTS:
            call, moved = comparison.call(variant), comparison.moved[variant]
            if moved not in roofs:
                roofs[moved] = read_roof(swept, moved, samples=7)
            timings = {condition: timer(call) for condition, timer in timers(op, count).items()}
            dense = dense or timings
            for condition, timing in timings.items():
                results.add(
                    case, variant + suffix, condition, timing, moved=moved, roof_us=roofs[moved][condition].p50,
                    tokens=count, baseline="dense" + suffix, baseline_us=dense[condition].p50,
                )  # fmt: skip


def summarize(rows: list[dict]) -> None:
    """us, the ratio of fused to dense, and what fused saves of staged."""
    found = {}
    for row in rows:
        variant, _, batched = row["variant"].partition("_")
        found.setdefault((row["case"], batched or "grouped", row["tokens"], row["condition"]), {})[variant] = row
    for key, variants in found.items():
        if len(variants) == len(VARIANTS):
            dense, staged, fused = (float(variants[variant]["us_p50"]) for variant in VARIANTS)
            shares = int(variants["fused"]["bytes"]) / int(variants["dense"]["bytes"])
            print(
                f"{key[0]:12} {key[1]:7} {key[2]:5} {key[3]:4}  dense {dense:9.2f} us  staged {staged / dense:5.3f}  "
                f"fused {fused / dense:5.3f} (bytes {shares:5.3f})  fused saves {staged - fused:8.2f} us of staged"
            )


def compile_ahead(directory: Path | None, cases: list[str], tokens: dict[str, tuple[int, ...]]) -> None:
    """Launch everything once, in processes of their own: what is timed then finds its kernels in the disk's cache."""
    jobs = [
        (directory, case, count, op, variant)
        for variant, case, (op, counts) in itertools.product(("dense", "fused", "as_fused"), cases, tokens.items())
        for count in counts
        if op == "w4a16" or count * TOP_K < 2 * CASES[case][0]  # more rows get the same tiles
    ]
    began = time.monotonic()
    with multiprocessing.get_context("spawn").Pool(max(1, min(14, len(os.sched_getaffinity(0)) - 2))) as pool:
        pool.starmap(launch_once, jobs, chunksize=1)
    print(f"{len(jobs)} launches compiled in {time.monotonic() - began:.0f} s", flush=True)


own_bundle = functools.lru_cache(maxsize=1)(get_bundle)


def launch_once(directory: Path | None, case: str, tokens: int, op: str, variant: str) -> None:
    torch.set_num_threads(1)
    bundle = own_bundle(directory)
    weights = BothScales(bundle, case, CASES[case], "cuda", fill=False)
    comparison = Comparison(bundle, case, weights, tokens, op)
    with configured_as_fused(bundle) if variant == "as_fused" else contextlib.nullcontext():
        comparison.call("fused" if variant == "fused" else "dense")()
    torch.cuda.synchronize()
    del weights, comparison
    torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results/fused.csv")
    parser.add_argument("--commit", help="for the commit column, where there is no git checkout")
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--tokens", nargs="+", type=int, help="of these numbers of tokens only")
    parser.add_argument("--bundle", type=Path, help="a built variant, where `kernels` is not installed")
    parser.add_argument("--tiny", action="store_true", help="small shapes: does it run?")
    arguments = parser.parse_args()
    if not (arguments.tiny or torch.cuda.is_available()):
        parser.error("real shapes need a CUDA device; --tiny runs without one")
    shapes, tokens = (TINY_SHAPES, TINY_TOKENS) if arguments.tiny else (CASES, TOKENS)
    if arguments.tokens:
        tokens = {op: tuple(count for count in counts if count in arguments.tokens) for op, counts in tokens.items()}
    results = harness.Results(arguments.out, arguments.commit)
    if not arguments.tiny:
        compile_ahead(arguments.bundle, arguments.only, tokens)
    bundle = get_bundle(arguments.bundle)
    try:
        for case in arguments.only:
            bench_case(bundle, results, case, shapes[case], tokens)
    finally:
        results.write()  # what was checked and timed before a fault, too
    summarize(results.rows)


if __name__ == "__main__":
    main()
