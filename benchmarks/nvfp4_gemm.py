"""How close to memory's speed are the NVFP4 GEMMs in decode, and how do they compare with torch's bf16 in prefill?

`python benchmarks/nvfp4_gemm.py [--out FILE] [--only decode prefill dense] [--bundle build/torch-cuda]`, on a GPU;
`--tiny` runs the same code on small shapes, on a CPU too, to see that it runs. Uniform top-8 routing of random tokens,
made before anything is timed; all data comes from SEED. Each call is checked, on rows spread over its output, against
float64 products of the dequantized weights, which are computed here.

decode   W4A16: `matmul_grouped` (w4a16), and for few tokens `matmul_batched` too. Bytes: weights and scales of the
         active experts, `active * rows * (K / 2 + K / 16)`; the roof is the fastest read-only sweep of as many bytes.
prefill  W4A16, and W4A4 with its pass over the activations, beside torch's grouped GEMM of bf16 weights. That one is
         given its rows gathered and does not gate. Bytes and roof as in decode, though products are the limit here.
dense    `matmul_2d` on one weight beside torch's bf16 matmul.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import harness
import torch
from read_sweep import time_beside_roofs
from tune_nvfp4_gemm import CASES, TOP_K, load_bundle

SEED = 0
DENSE = "dense_4096"
SHAPES = {**CASES, DENSE: (1, 4096, 4096, False)}
TOKENS = {"decode": (1, 8, 64), "prefill": (4096, 16384), "dense": (1, 16, 128, 4096)}
TINY_SHAPES = {name: (16, 32, 64, gate) for name, (_, _, _, gate) in CASES.items()} | {DENSE: (1, 64, 64, False)}
TINY_TOKENS = {"decode": (1, 8), "prefill": (16,), "dense": (1, 16)}
PREFILL_CASES = ("qwen_gate_up", "qwen_down")
BATCHED_TOKENS = 8
CHECKED_ROWS = 12
WEIGHT_GLOBAL = 1e-4
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


def pick_device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


class Weights:
    """Packed weights [E, rows, K/2] and their scales [E, rows, K/16], side by side in one block of memory."""

    def __init__(self, shape: tuple[int, int, int, bool], device: str, *, fill: bool = True) -> None:
        self.experts, self.cols, self.depth, self.gate = shape
        self.rows = self.cols * (2 if self.gate else 1)
        self.expert_bytes = self.rows * (self.depth // 2 + self.depth // 16)
        self.memory = torch.empty(self.experts * self.expert_bytes, dtype=torch.uint8, device=device)
        packed, scales = self.memory.split([self.experts * self.rows * self.depth // n for n in (2, 16)])
        self.packed = packed.view(self.experts, self.rows, -1)
        self.scales = scales.view(self.experts, self.rows, -1).view(torch.float8_e4m3fn)
        self.b_global = torch.full((self.experts,), WEIGHT_GLOBAL, device=device)
        if fill:
            generator = torch.Generator(device).manual_seed(SEED)
            packed.random_(0, 256, generator=generator)
            scales.random_(
                0x58, 0x78, generator=generator
            )  # 16 to 240: exponents as close as trained weights have them

    def dequantized(self, expert: int | slice, dtype: torch.dtype) -> torch.Tensor:
        """code * scale [.., rows, K], exact in bf16 too."""
        values = torch.tensor(E2M1, dtype=dtype, device=self.memory.device)
        pairs = torch.stack([values.repeat(16), values.repeat_interleave(16)], -1)  # by byte: low nibble, high nibble
        codes = pairs[self.packed[expert].int()].flatten(-2)
        return (codes.unflatten(-1, (-1, 16)) * self.scales[expert].to(dtype).unsqueeze(-1)).flatten(-2)


@dataclasses.dataclass
class Call:
    """One way to run a GEMM, and what its routed rows are: the row of x, the expert, and the row of the output."""

    run: Callable[[], torch.Tensor]
    sources: torch.Tensor
    experts: torch.Tensor
    targets: torch.Tensor


class Problem:
    """Activations of `tokens` tokens, routed, for one weight stack."""

    def __init__(self, bundle, case: str, weights: Weights, tokens: int) -> None:
        self.bundle, self.weights, self.tokens = bundle, weights, tokens
        device = weights.memory.device
        generator = torch.Generator().manual_seed(SEED + tokens)
        self.from_tokens = case.endswith("gate_up") or case == DENSE
        self.top_k = 1 if case == DENSE else TOP_K
        choices = torch.rand(tokens, weights.experts, generator=generator).topk(self.top_k).indices.int().to(device)
        self.ids = choices.flatten()
        self.active = len(self.ids.unique())
        rows = tokens if self.from_tokens else tokens * self.top_k
        generator = torch.Generator(device).manual_seed(SEED + tokens)
        self.x = torch.randn(rows, weights.depth, generator=generator, dtype=torch.bfloat16, device=device)
        self.start, self.gather, self.scatter = bundle.compute_grouped_scheduling(choices, weights.experts, self.top_k)
        self.slots = torch.arange(len(self.ids), device=device)

    @property
    def moved(self) -> int:
        return self.active * self.weights.expert_bytes

    def call(self, variant: str, scales: Any = None) -> Call:
        """`scales`: other ones than the weights' own, for all experts."""
        weights = self.weights
        arguments = [self.x, weights.packed, None, weights.scales if scales is None else scales]
        options = {"b_global_scale": weights.b_global, "gate": weights.gate}
        if variant != "w4a4":
            options["activation_format"] = "bf16"
        slots, token_of = self.slots, self.slots // self.top_k
        if self.top_k == 1:
            arguments[1], arguments[3] = weights.packed[0], weights.scales[0]
            options["b_global_scale"] = weights.b_global[0]
            run = functools.partial(self.bundle.matmul_2d, *arguments, **options)
            return Call(run, slots, self.ids, slots)
        if variant == "w4a16_batched":
            options |= {"expert_ids": self.ids, "gather_idx": token_of.int() if self.from_tokens else None}
            run = functools.partial(self.bundle.matmul_batched, *arguments, **options)
            return Call(run, token_of if self.from_tokens else slots, self.ids, slots)
        options["expert_start"] = self.start
        options |= {"gather_idx": self.gather} if self.from_tokens else {"scatter_idx": self.scatter}
        run = functools.partial(self.bundle.matmul_grouped, *arguments, **options)
        sources, targets = (self.gather, slots) if self.from_tokens else (slots, self.scatter)
        return Call(run, sources, self.ids[self.scatter], targets)

    def checked_call(self, variant: str) -> Callable[[], torch.Tensor]:
        call = self.call(variant)
        out = call.run()
        for row in self.sample():
            x = self.x[call.sources[row]].unsqueeze(0)
            sums = self.float64_sums(x, int(call.experts[row]), quantized=variant == "w4a4")
            self.check(out[call.targets[row]], self.activated(sums), f"{variant}, routed row {row}")
        return call.run

    def sample(self) -> list[int]:
        return torch.linspace(0, len(self.slots) - 1, min(len(self.slots), CHECKED_ROWS)).round().int().tolist()

    def float64_sums(self, x: torch.Tensor, expert: int, *, quantized: bool = False) -> torch.Tensor:
        """x [1, K] times an expert's weights, [rows]."""
        values = x.double()
        if quantized:
            packed, scales, x_global = self.bundle.nvfp4_act_quant(x)
            low_high = torch.stack([packed & 15, packed >> 4], -1).flatten(-2).int()
            codes = torch.tensor(E2M1, dtype=torch.float64, device=x.device)[low_high]
            values = codes * scales.double().repeat_interleave(16, -1) * x_global.double()
        return (self.weights.dequantized(expert, torch.float64) @ values[0]) * float(self.weights.b_global[expert])

    def activated(self, sums: torch.Tensor) -> torch.Tensor:
        if not self.weights.gate:
            return sums
        gate, up = sums.chunk(2)
        return gate * torch.sigmoid(gate) * up

    @staticmethod
    def check(actual: torch.Tensor, expected: torch.Tensor, name: str) -> None:
        """To bf16's rounding, and 1e-3 of a row's size for what the float32 sums may be off by where terms cancel."""
        allowed = 2.0**-8 * expected.abs() + 1e-3 * expected.square().mean().sqrt()
        error = (actual.double() - expected).abs()
        assert bool((error <= allowed).all()), f"{name}: {(error / allowed).max():.3g} x the allowed error"


def grouped_mm(*args, **kwargs) -> torch.Tensor:
    """torch's grouped GEMM, by its public name where this torch has it."""
    public = getattr(torch.nn.functional, "grouped_mm", None)
    return (public or torch._grouped_mm)(*args, **kwargs)


def torch_grouped_call(problem: Problem, dense: torch.Tensor) -> Callable[[], torch.Tensor]:
    """The routed rows, already gathered, times bf16 weights [E, rows, K]; checked."""
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
    """Time `calls`, by variant, in turns with the sweeps that are their roof; `baselines`: another, or read_sweep."""
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


def get_bundle(directory: Path | None):
    if directory is not None:
        return load_bundle(directory)
    from finegrained_kernels import load

    return load()


def compile_jobs(directory: Path | None, only: list[str]) -> list[tuple]:
    """Arguments of `launch_once`, different kernels side by side."""
    jobs = []
    for part in only:
        cases = {"decode": CASES, "prefill": PREFILL_CASES, "dense": (DENSE,)}[part]
        variants = {"decode": ("w4a16", "w4a16_batched"), "prefill": ("w4a16", "w4a4"), "dense": ("w4a16",)}[part]
        for count, case, variant in itertools.product(TOKENS[part], cases, variants):
            if variant != "w4a16_batched" or count <= BATCHED_TOKENS:
                jobs.append((directory, case, count, variant))
    return jobs


own_bundle = functools.lru_cache(maxsize=1)(get_bundle)


def launch_once(directory: Path | None, case: str, tokens: int, variant: str) -> None:
    torch.set_num_threads(1)
    Problem(own_bundle(directory), case, Weights(SHAPES[case], "cuda", fill=False), tokens).call(variant).run()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results/nvfp4_gemm.csv")
    parser.add_argument("--commit", help="for the commit column, where there is no git checkout")
    parser.add_argument("--only", nargs="+", choices=BENCHES, default=list(BENCHES))
    parser.add_argument("--bundle", type=Path, help="a built variant, where `kernels` is not installed")
    parser.add_argument("--tiny", action="store_true", help="small shapes: does it run?")
    arguments = parser.parse_args()
    if not (arguments.tiny or torch.cuda.is_available()):
        parser.error("real shapes need a CUDA device; --tiny runs without one")
    shapes, tokens = (TINY_SHAPES, TINY_TOKENS) if arguments.tiny else (SHAPES, TOKENS)
    results = harness.Results(arguments.out, arguments.commit)
    if not arguments.tiny:
        harness.compile_ahead(launch_once, compile_jobs(arguments.bundle, arguments.only))
    bundle = get_bundle(arguments.bundle)
    for part in arguments.only:
        BENCHES[part](bundle, results, shapes, tokens[part])


if __name__ == "__main__":
    main()
