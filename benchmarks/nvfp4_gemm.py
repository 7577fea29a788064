"""How close to the speed of memory are the NVFP4 GEMMs in decoding, and how do they compare with torch's bf16 in
prefill?

`python benchmarks/nvfp4_gemm.py [--out FILE] [--only decode prefill dense] [--bundle build/torch-cuda]`, on a GPU;
`--tiny` runs the same code on small shapes, on a CPU too, to see that it runs. Uniform top-8 routing of random tokens,
made before anything is timed; all data comes from a seed. Each call is checked, on rows spread over its output, against
float64 products of the dequantized weights, which are computed here.

decode   W4A16: `matmul_grouped` (w4a16), and for few tokens `matmul_batched` too. Bytes: weights and scales of the
         active experts, `active * rows * (K / 2 + K / 16)`; the roof is the fastest read-only sweep of as many bytes.
prefill  W4A16, and W4A4 with its pass over the activations, beside torch's grouped GEMM of bf16 weights. That one is
         given its rows gathered and does not gate. Bytes and roof as in decode, though products are the limit here.
dense    `matmul_2d` on one weight beside torch's bf16 matmul.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from pathlib import Path

import harness
import torch
from cases import CASES, DENSE, RESULTS, Problem, Weights, command_line, get_bundle, parse, pick_device
from read_sweep import time_beside_roofs

SHAPES = {**CASES, DENSE: (1, 4096, 4096, False)}
TOKENS = {"decode": (1, 8, 64), "prefill": (4096, 16384), "dense": (1, 16, 128, 4096)}
TINY_SHAPES = {name: (16, 32, 64, gate) for name, (_, _, _, gate) in CASES.items()} | {DENSE: (1, 64, 64, False)}
TINY_TOKENS = {"decode": (1, 8), "prefill": (16,), "dense": (1, 16)}
PREFILL_CASES = ("qwen_gate_up", "qwen_down")
BATCHED_TOKENS = 8


def grouped_mm(*args, **kwargs) -> torch.Tensor:
    """torch's grouped GEMM, by its public name if this torch has it."""
    public = getattr(torch.nn.functional, "grouped_mm", None)
    return (public or torch._grouped_mm)(*args, **kwargs)


def torch_grouped_call(problem: Problem, dense: torch.Tensor) -> Callable[[], torch.Tensor]:
    """A call that multiplies the routed rows, already gathered, by bf16 weights [E, rows, K]; its result is checked."""
    call, ends = problem.call("w4a16"), problem.start[1:].contiguous()
    rows = problem.x[call.sources]
    run = functools.partial(grouped_mm, rows, dense.transpose(-2, -1), offs=ends)
    out = run()
    for row in problem.sample():
        expert = int(call.experts[row])
        expected = problem.float64_sums(rows[row].unsqueeze(0), expert) / float(problem.weights.b_global[expert])
        problem.check(out[row], expected, f"torch_grouped_mm, routed row {row}")
    return run


def add_timings(results: harness.Results, case: str, problem: Problem, calls: dict[str, Callable],
                baselines: dict[str, str]) -> None:  # fmt: skip
    """Time `calls`, by variant, in turns with the sweeps that are their roof. `baselines` names another variant, or
    read_sweep."""
    moved = dict.fromkeys(calls, problem.moved)
    for condition, options in harness.conditions(problem.moved).items():
        timings, roofs = time_beside_roofs(calls, moved, problem.weights.memory, **options)
        for variant, timing in timings.items():
            baseline = baselines[variant]
            results.add(
                case, variant, condition, timing, moved=problem.moved, roof_us=roofs[variant], tokens=problem.tokens,
                baseline=baseline,
                baseline_us=roofs[variant] if baseline == "read_sweep" else timings[baseline].p50,
            )  # fmt: skip


def bench_decode(bundle, results: harness.Results, shapes: dict, tokens: tuple[int, ...]) -> None:
    baselines = {"w4a16": "read_sweep", "w4a16_batched": "w4a16"}
    for case in CASES:
        weights = Weights(shapes[case], pick_device())
        for count in tokens:
            problem = Problem(bundle, case, weights, count)
            variants = [name for name in baselines if name == "w4a16" or count <= BATCHED_TOKENS]
            calls = {name: problem.checked_call(name) for name in variants}
            add_timings(results, case, problem, calls, baselines)


def bench_prefill(bundle, results: harness.Results, shapes: dict, tokens: tuple[int, ...]) -> None:
    baselines = {"torch_grouped_mm": "read_sweep", "w4a16": "torch_grouped_mm", "w4a4": "w4a16"}
    for case in PREFILL_CASES:
        weights = Weights(shapes[case], pick_device())
        dense = torch.empty(weights.experts, weights.rows, weights.depth, dtype=torch.bfloat16, device=pick_device())
        for i in range(0, weights.experts, 16):
            dense[i : i + 16] = weights.dequantized(slice(i, i + 16), torch.bfloat16)
        for count in tokens:
            problem = Problem(bundle, case, weights, count)
            calls = {"torch_grouped_mm": torch_grouped_call(problem, dense)}
            calls |= {name: problem.checked_call(name) for name in ("w4a16", "w4a4")}
            add_timings(results, case, problem, calls, baselines)


def bench_dense(bundle, results: harness.Results, shapes: dict, tokens: tuple[int, ...]) -> None:
    baselines = {"torch_bf16": "read_sweep", "w4a16": "torch_bf16"}
    weights = Weights(shapes[DENSE], pick_device())
    dense = weights.dequantized(0, torch.bfloat16)
    for count in tokens:
        problem = Problem(bundle, DENSE, weights, count)
        calls = {"torch_bf16": functools.partial(torch.matmul, problem.x, dense.T)}
        calls["w4a16"] = problem.checked_call("w4a16")
        add_timings(results, DENSE, problem, calls, baselines)


BENCHES = {"decode": bench_decode, "prefill": bench_prefill, "dense": bench_dense}


def compile_jobs(directory: Path | None, only: list[str]) -> list[tuple]:
    """Arguments of `launch_once`, ordered so that different kernels are compiled at the same time."""
    jobs = []
    for part in only:
        cases = {"decode": CASES, "prefill": PREFILL_CASES, "dense": (DENSE,)}[part]
        variants = {"decode": ("w4a16", "w4a16_batched"), "prefill": ("w4a16", "w4a4"), "dense": ("w4a16",)}[part]
        for count, case, variant in itertools.product(TOKENS[part], cases, variants):
            if variant != "w4a16_batched" or count <= BATCHED_TOKENS:
                jobs.append((directory, case, count, variant))
    return jobs


def launch_once(directory: Path | None, case: str, tokens: int, variant: str) -> None:
    torch.set_num_threads(1)
    Problem(get_bundle(directory), case, Weights(SHAPES[case], "cuda", fill=False), tokens).call(variant).run()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


def main() -> None:
    parser = command_line(__doc__, RESULTS / "nvfp4_gemm.csv")
    parser.add_argument("--only", nargs="+", choices=BENCHES, default=list(BENCHES))
    arguments = parse(parser)
    shapes, tokens = (TINY_SHAPES, TINY_TOKENS) if arguments.tiny else (SHAPES, TOKENS)
    results = harness.Results(arguments.out, arguments.commit)
    if not arguments.tiny:
        harness.compile_ahead(launch_once, compile_jobs(arguments.bundle, arguments.only))
    bundle = get_bundle(arguments.bundle)
    for part in arguments.only:
        BENCHES[part](bundle, results, shapes, tokens[part])


if __name__ == "__main__":
    main()
