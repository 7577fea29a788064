"""What do scales that stay compressed cost a GEMM?

`python benchmarks/fused.py [--out FILE] [--only CASE ..] [--tokens 1 64 ..] [--bundle
build/torch-cuda]`, on a GPU; `--tiny` runs the same code on small shapes, on a CPU too, to see that it runs. W4A16,
uniform top-8 routing of random tokens, and scale planes with the models' own share of exceptions. Each variant runs
with its configuration from the shipped tables; all of them, and their roofs, are timed in turns. If staged and fused
results do not have the bits of dense ones, the run fails at its end.

dense    scales decoded once, at load. Bytes: `active * rows * (K / 2 + K / 16)`. Checked against float64.
staged   compressed scales of the active experts are decoded into one workspace, then dense: both in one graph. Bytes:
         the compressed scales once, the dense ones written and read, the weights.
fused    the GEMM reads compressed scales: `active * rows * (K / 2 + 1 + K / 32)`, offsets and the experts' exceptions.

With `_batched`, `matmul_batched`; its staged variant finds the active experts ready. Baseline: dense, of the same op.

portable_dense, portable_fused    the same grouped GEMM on the kernel in plain Triton, which other GPUs run, though this
         one may have better. Baseline: portable_dense.

`--kernels chosen` or `--kernels portable` measures one of these halves, and keeps the rows that FILE has of the other.
"""

from __future__ import annotations

import functools
import importlib
import itertools
from collections.abc import Callable
from pathlib import Path

import harness
import torch
from cases import CASES, RESULTS, Problem, Weights, command_line, get_bundle, parse, pick_device
from read_sweep import time_beside_roofs
from scale_planes import PERCENT, make_planes, plain_scales

TOKENS = {"w4a16": (1, 8, 64, 512, 4096), "w4a16_batched": (1, 8, 64)}
TINY_TOKENS = {"w4a16": (1, 16), "w4a16_batched": (1,)}
TINY_SHAPES = {name: (16, 32, 64, gate) for name, (_, _, _, gate) in CASES.items()}
VARIANTS = ("dense", "staged", "fused")
PORTABLE_VARIANTS = ("portable_dense", "portable_fused")
PORTABLE_TOKENS = {"w4a16": (1, 8, 64, 512)}
KERNELS = ("chosen", "portable")
ROOF_LAUNCHES = ((4, 4), (8, 8))
"""Two of the four sweeps, because each variant has its own roof."""


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
        else:
            self.compressed = plain_scales(bundle, self.experts, self.rows, cols, device)
        self.workspace = torch.full((planes.numel(),), 0x7F, dtype=torch.uint8, device=device)

    def compressed_bytes(self, experts: torch.Tensor) -> int:
        """The bytes of these experts' compressed scales."""
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
        self.moved |= {"portable_dense": dense, "portable_fused": fused}

    def call(self, variant: str) -> Callable[[], torch.Tensor]:
        scales, weights, problem = self.weights.compressed, self.weights, self.problem
        if variant in PORTABLE_VARIANTS:
            return self.on_portable_kernel(problem.call(self.op, scales if variant == "portable_fused" else None).run)
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

    def on_portable_kernel(self, call: functools.partial) -> Callable[[], torch.Tensor]:
        """`call` of a public GEMM, without the choice of a kernel. On a CPU, which has no kernels, `call` itself."""
        if not self.problem.x.is_cuda:
            return call
        names = ("problem", "config", "dispatch")
        problem, config, dispatch = (importlib.import_module(f"{self.bundle.__name__}.gemm.{name}") for name in names)
        gemm = problem.check_gemm(problem.Arguments(*call.args, **call.keywords))
        return lambda: dispatch.run_on_gpu(gemm, config.PORTABLE)[0]

    def faults(self, variants: tuple[str, ...]) -> list[str]:
        """Which variants do not have the bits of the first one, which is compared with float64."""
        self.problem.checked_call(self.op)
        dense = self.call(variants[0])()
        self.weights.workspace.fill_(0x7F)
        found = []
        if variants == PORTABLE_VARIANTS:  # its sums differ from those of the GEMM that was checked
            want = self.call("dense")().double()
            error = float((dense.double() - want).norm() / want.norm())
            if not error < 1e-3:
                found.append(f"{variants[0]}: relative error {error:.3g}")
        for variant in variants[1:]:
            wrong = int((self.call(variant)().view(torch.int16) != dense.view(torch.int16)).sum())
            if wrong:
                found.append(f"{variant}: {wrong} of {dense.numel()} results are not those of dense scales")
        return found


def bench_case(
    bundle, results: harness.Results, case: str, shape: tuple, tokens: dict[str, dict[str, tuple[int, ...]]]
) -> list[str]:
    """`tokens`: by kernels and op."""
    weights, faults = BothScales(bundle, case, shape, pick_device()), []
    runs = [(kernels, op, count) for kernels, ops in tokens.items() for op, counts in ops.items() for count in counts]
    for kernels, op, count in runs:
        variants = VARIANTS if kernels == "chosen" else PORTABLE_VARIANTS
        comparison = Comparison(bundle, case, weights, count, op)
        faults += [f"{case}, {op}, {count} tokens, {fault}" for fault in comparison.faults(variants)]
        suffix = op.removeprefix("w4a16")
        calls = {variant: comparison.call(variant) for variant in variants}
        for condition, options in harness.conditions(comparison.moved["dense"]).items():
            timings, roofs = time_beside_roofs(
                calls, comparison.moved, weights.memory, launches=ROOF_LAUNCHES, **options
            )
            for variant, timing in timings.items():
                results.add(
                    case, variant + suffix, condition, timing, moved=comparison.moved[variant], roof_us=roofs[variant],
                    tokens=count, baseline=variants[0] + suffix, baseline_us=timings[variants[0]].p50,
                )  # fmt: skip
    return faults


def summarize(rows: list[dict]) -> None:
    """Print us, the ratio of fused to dense, and how much less time than staged it takes; then the same for a layer's
    two GEMMs."""
    found = {}
    for row in rows:
        if row["variant"] in PORTABLE_VARIANTS:
            continue
        variant, _, batched = row["variant"].partition("_")
        found.setdefault((row["case"], batched or "grouped", row["tokens"], row["condition"]), {})[variant] = row
    layers = {}
    for key, variants in found.items():
        if len(variants) < len(VARIANTS):
            continue
        times = [float(variants[variant]["us_p50"]) for variant in VARIANTS]
        layers.setdefault((key[0].split("_")[0], *key[1:]), []).append(times)
        share = int(variants["fused"]["bytes"]) / int(variants["dense"]["bytes"])
        print(describe(key, times), f"(bytes {share:5.3f})")
    for key, times in layers.items():
        if len(times) == 2:
            print(describe((f"{key[0]} layer", *key[1:]), [sum(pair) for pair in zip(*times, strict=True)]))
    for row in rows:
        if row["variant"] == "portable_fused":
            key = row["case"], "portable", row["tokens"], row["condition"]
            print(
                f"{' '.join(map(str, key)):36} fused {float(row['us_p50']) / float(row['baseline_us']):5.3f} of dense"
            )


def describe(key: tuple, times: list[float]) -> str:
    dense, staged, fused = times
    return (
        f"{key[0]:12} {key[1]:7} {key[2]:5} {key[3]:4}  dense {dense:9.2f} us  staged {staged / dense:5.3f}  "
        f"fused {fused / dense:5.3f}, {staged - fused:8.2f} us less than staged"
    )


def compile_jobs(
    directory: Path | None, cases: list[str], tokens: dict[str, dict[str, tuple[int, ...]]]
) -> list[tuple]:
    """Arguments of `launch_once`, ordered so that different kernels are compiled at the same time."""
    jobs = []
    if "portable" in tokens:  # one kernel for all numbers of tokens
        jobs += [(directory, case, 1, "w4a16", variant) for case in cases for variant in PORTABLE_VARIANTS]
    by_op = tokens.get("chosen", {})
    counts = sorted({count for counts in by_op.values() for count in counts})
    return jobs + [
        (directory, case, count, op, variant)
        for count, variant, case, op in itertools.product(counts, ("fused", "dense", "staged"), cases, by_op)
        if count in by_op[op] and (variant, op) != ("staged", "w4a16_batched")
    ]


def launch_once(directory: Path | None, case: str, tokens: int, op: str, variant: str) -> None:
    torch.set_num_threads(1)
    bundle = get_bundle(directory)
    weights = BothScales(bundle, case, CASES[case], "cuda", fill=False)
    comparison = Comparison(bundle, case, weights, tokens, op)
    comparison.call(variant)()
    torch.cuda.synchronize()
    del weights, comparison
    torch.cuda.empty_cache()


def main() -> None:
    parser = command_line(__doc__, RESULTS / "fused.csv")
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--tokens", nargs="+", type=int, help="of these numbers of tokens only")
    parser.add_argument("--kernels", nargs="+", choices=KERNELS, default=list(KERNELS), help="measure these alone")
    arguments = parse(parser)
    shapes = TINY_SHAPES if arguments.tiny else CASES
    tokens = {"chosen": TINY_TOKENS if arguments.tiny else TOKENS}
    tokens["portable"] = {"w4a16": TINY_TOKENS["w4a16"]} if arguments.tiny else PORTABLE_TOKENS
    tokens = {
        kernels: {
            op: tuple(count for count in counts if arguments.tokens is None or count in arguments.tokens)
            for op, counts in tokens[kernels].items()
        }
        for kernels in arguments.kernels
    }
    results = harness.Results(arguments.out, arguments.commit, merge=len(arguments.kernels) < len(KERNELS))
    if not arguments.tiny:
        harness.compile_ahead(launch_once, compile_jobs(arguments.bundle, arguments.only, tokens))
    bundle, faults = get_bundle(arguments.bundle), []
    for case in arguments.only:
        faults += bench_case(bundle, results, case, shapes[case], tokens)
    summarize(results.rows)
    if faults:
        raise SystemExit("\n".join(faults))


if __name__ == "__main__":
    main()
