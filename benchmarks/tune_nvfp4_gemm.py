"""Choose the tiles of the NVFP4 GEMM on this GPU: check every candidate, time it, and write the table for the bundle.

    python benchmarks/tune_nvfp4_gemm.py --bundle build/torch-cuda --out DIR [--cases qwen_down ..] [--tokens 1 8 ..]
        [--scales dense compressed]

Every candidate is first compared with the torch implementation on a small problem of its own shape. Timing is cold (L2
flushed): weights of a layer are never in L2 when its turn comes. Writes tune.csv (all candidates) and <device>.json,
the bundle's table with these entries in place of its own, or beside them; those of compressed scales say "compressed".
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import importlib
import itertools
import json
import multiprocessing
import sys
import time
import traceback
from pathlib import Path
from types import ModuleType

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from cases import CASES, TOP_K, load_bundle
from scale_planes import PERCENT, make_planes

SCALES = ("dense", "compressed")
SMEM_BYTES = 227 << 10
SMALL = [  # block_n, block_k, num_warps, num_stages
    (64, 128, 4, 4), (64, 256, 4, 3), (64, 256, 4, 4), (64, 512, 4, 3), (32, 256, 2, 4), (32, 512, 2, 4),
    (64, 128, 2, 3), (64, 128, 2, 4), (64, 256, 2, 2), (64, 256, 2, 3), (64, 256, 2, 4), (128, 128, 2, 3),
    (128, 128, 2, 4), (128, 128, 4, 4), (128, 128, 8, 4), (128, 256, 4, 3), (128, 256, 4, 4), (128, 256, 8, 3),
    (128, 512, 8, 3), (256, 128, 8, 4), (256, 256, 8, 3),
]  # fmt: skip
TIGHT = [  # for 8 tokens: block_n, block_k, num_warps, num_stages, and what lets more of them share a multiprocessor
    (64, 256, 2, 2, {"max_registers": 128}), (64, 256, 4, 2, {"max_registers": 128}),
    (64, 256, 4, 3, {"max_registers": 128}), (64, 128, 2, 3, {"max_registers": 128}),
    (64, 128, 2, 4, {"max_registers": 128, "chunks_at_once": 2}),
    (64, 256, 2, 2, {"max_registers": 144, "max_cols": 80}),
]  # fmt: skip
LARGE = [  # block_n, block_t, num_warps, num_stages
    (64, 64, 4, 4), (128, 64, 4, 3), (128, 64, 4, 4), (128, 64, 8, 4), (256, 64, 8, 4),
    (128, 128, 4, 2), (128, 128, 8, 3), (128, 128, 8, 4), (128, 128, 8, 5), (256, 128, 8, 4),
]  # fmt: skip


def part(bundle: ModuleType, name: str) -> ModuleType:
    return importlib.import_module(f"{bundle.__name__}.{name}")


def uniform_routing(bundle: ModuleType, tokens: int, experts: int):
    """(expert_start, gather_idx, scatter_idx, active experts) of tokens that each choose 8 experts."""
    generator = torch.Generator().manual_seed(tokens)
    ids = torch.rand(tokens, experts, generator=generator).topk(TOP_K).indices.int().cuda()
    scheduling = part(bundle, "moe.routing").compute_grouped_scheduling(ids, experts, TOP_K)
    return *scheduling, len(ids.unique())


def make_weights(bundle: ModuleType, case: str, experts: list[int], kind: str):
    """(packed codes, dense scales, the same scales as `kind`). For experts that are not in `experts`, codes are
    whatever memory holds, and scales are 0."""
    num_experts, cols, depth, gate = CASES[case]
    rows = cols * (2 if gate else 1)
    packed = torch.empty(num_experts, rows, depth // 2, dtype=torch.uint8, device="cuda")
    planes = torch.zeros(num_experts, rows, depth // 16, dtype=torch.uint8, device="cuda")
    if len(experts) == num_experts:
        packed.random_(0, 256)
        planes = make_planes(num_experts, rows, depth // 16, PERCENT[case])
    else:
        for expert in experts:
            packed[expert].random_(0, 256)
            planes[expert] = make_planes(1, rows, depth // 16, PERCENT[case], seed=expert)[0]
    dense = planes.view(torch.float8_e4m3fn)
    if kind == "dense":
        return packed, dense, dense
    wire = bundle.compress_nvfp4_csf_scales(planes)
    return packed, dense, bundle.prepare_nvfp4_csf_scales(*wire, num_rows=rows, num_cols=depth // 16)


def make_gemm(bundle: ModuleType, case: str, tokens: int, weights, routing, dtype=torch.bfloat16):
    experts, _, depth, gate = CASES[case]
    start, gather, scatter, _ = routing
    first = case.endswith("gate_up")
    x = torch.randn(tokens if first else tokens * TOP_K, depth, dtype=dtype, device="cuda")
    problem = part(bundle, "gemm.problem")
    return problem.check_gemm(problem.Arguments(
        x, weights[0], Bs=weights[2],
        activation_format="bf16", gate=gate, b_global_scale=torch.full((experts,), 1e-4, device="cuda"),
        expert_start=start, gather_idx=gather if first else None, scatter_idx=None if first else scatter,
    ))  # fmt: skip


def moved_bytes(gemm, active: int) -> int:
    """Bytes of weights and scales of the active experts, activations and outputs, each once."""
    rows, depth = gemm.b.shape[1], gemm.depth
    return active * rows * (depth // 2 + depth // 16) + gemm.a.numel() * 2 + gemm.num_rows * gemm.num_cols * 2


def candidates(bundle: ModuleType, tokens: int, case: str, kind: str):
    """Configurations that are worth compiling for this many tokens; the occupancy is filled in after compiling. Tiles
    for compressed scales leave room for their strip."""
    plan = part(bundle, "gemm.smem_plan")
    experts, _, depth, gate = CASES[case]
    mean = tokens * TOP_K / experts
    tiles = [(8, SMALL)]
    if 2 < mean <= 16:
        tiles = [(8, SMALL), (16, SMALL)]
    elif mean > 16:
        tiles = [(32, [(64, 128, 4, 3), (128, 128, 4, 3)])]
    found = [
        plan.Config(block_n, block_k, block_t, warps, stages, 1)
        for block_t, shapes in tiles
        for block_n, block_k, warps, stages in shapes
    ]
    if mean <= 2:
        found += [plan.Config(n, k, 8, warps, stages, 1, **limits) for n, k, warps, stages, limits in TIGHT]
    if mean > 16:
        found += [plan.Config(n, 128, t, warps, stages, 1, warpgroup=True) for n, t, warps, stages in LARGE]
    if kind == "compressed":
        result_bytes = 1 if gate else 2  # for bfloat16
        found = [plan.with_strip(config, depth, result_bytes) for config in found]
        found = [dataclasses.replace(config, programs_per_sm=1) for config in found]
    return dict.fromkeys(found)


def strip_bytes(bundle: ModuleType, config, gemm, kind: str) -> int:
    """Shared memory that the kernel declares in addition to Triton's, for strips of scales, if there are any."""
    plan, launch = part(bundle, "gemm.smem_plan"), part(bundle, "gemm.dispatch")
    has_strip = kind == "compressed" or launch.brings_whole_scales(gemm, config)
    return plan.strip_bytes(config, gemm.depth) if has_strip else 0


def occupancy(kernel, declared: int) -> int:
    """How many programs fit in an SM, by registers and shared memory; Triton does not know of `declared` bytes of the
    latter."""
    threads = kernel.metadata.num_warps * 32
    registers = -(-kernel.n_regs // 8) * 8 * threads
    shared = kernel.metadata.shared + declared + 1024
    return max(1, min(65536 // registers, SMEM_BYTES // shared, 2048 // threads))


def check_candidate(job) -> tuple:
    """Compile one candidate and compare it with the torch implementation. This also fills the compiler's cache on
    disk."""
    directory, case, kind, tokens, config_values = job
    torch.set_num_threads(1)
    try:
        bundle = load_bundle(directory)
        config = part(bundle, "gemm.smem_plan").Config(**config_values)
        experts = CASES[case][0]
        torch.manual_seed(1)
        tokens = max(1, min(tokens, 2 * config.block_t))
        routing = uniform_routing(bundle, tokens, experts)
        start, used = torch.zeros_like(routing[0]), [0, experts - 1]
        for expert, count in zip(used, (3, config.block_t + 1), strict=True):  # the other rows have no expert
            start[expert + 1 :] += count
        start.clamp_(max=tokens * TOP_K)
        weights = make_weights(bundle, case, used, kind)
        gemm = make_gemm(bundle, case, tokens, weights, (start, *routing[1:]))
        launch = part(bundle, "gemm.dispatch")
        out = launch.run_on_gpu(gemm, config)[0]
        b_start = torch.stack([start[0], start[1], start[experts]]).int()
        small = dataclasses.replace(
            gemm, a=gemm.a.cpu(), b=gemm.b[used].cpu(), b_scales=weights[1][used].cpu(),
            b_global=gemm.b_global[used].cpu(), expert_start=b_start.cpu(),
            gather_idx=None if gemm.gather_idx is None else gemm.gather_idx.cpu(),
            scatter_idx=None if gemm.scatter_idx is None else gemm.scatter_idx.cpu(),
        )  # fmt: skip
        want = part(bundle, "gemm.cpu").run_on_cpu(small)[0].double()
        error = ((out.cpu().double() - want).norm() / want.norm()).item()
        if not error < 4e-3:
            return case, kind, config_values, f"wrong: relative error {error:.3g}"
        return case, kind, config_values, ""
    except Exception:  # a candidate that does not compile or launch is a result, not a failure of the run
        return case, kind, config_values, traceback.format_exc().strip().splitlines()[-1][:300]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--bundle", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--cases", nargs="+", default=list(CASES))
    parser.add_argument("--tokens", nargs="+", type=int, default=[1, 8, 16, 64, 512, 4096, 16384])
    parser.add_argument("--scales", nargs="+", choices=SCALES, default=["dense"])
    parser.add_argument("--seconds", type=float, default=200)
    arguments = parser.parse_args()
    began = time.monotonic()
    bundle = load_bundle(arguments.bundle)

    plan = {}
    for case, kind, tokens in itertools.product(arguments.cases, arguments.scales, arguments.tokens):
        for config in candidates(bundle, tokens, case, kind):
            plan.setdefault((case, kind, config), []).append(tokens)
    jobs = [
        (arguments.bundle, case, kind, max(tokens), dataclasses.asdict(config))
        for (case, kind, config), tokens in plan.items()
    ]
    failed = set()
    with multiprocessing.get_context("spawn").Pool(14) as pool:
        for case, kind, values, problem in pool.imap_unordered(check_candidate, jobs):
            if problem:
                failed.add((case, kind, tuple(values.values())))
                print(f"{case} {kind} {list(values.values())}: {problem}", flush=True)
    print(f"{len(jobs)} candidates checked, {len(failed)} failed, {time.monotonic() - began:.0f} s", flush=True)
    time_candidates(bundle, arguments, plan, failed, began)


def time_candidates(bundle: ModuleType, arguments, plan: dict, failed: set, began: float) -> None:
    rows, entries = [], []
    for case, kind in itertools.product(arguments.cases, arguments.scales):
        experts = CASES[case][0]
        weights = make_weights(bundle, case, list(range(experts)), kind)
        for tokens in arguments.tokens:
            routing = uniform_routing(bundle, tokens, experts)
            gemm = make_gemm(bundle, case, tokens, weights, routing)
            roof = read_roof(weights, moved_bytes(gemm, routing[3]))
            results = []
            for (plan_case, plan_kind, config), token_counts in plan.items():
                unwanted = (plan_case, plan_kind) != (case, kind) or tokens not in token_counts
                if unwanted or (case, kind, dataclasses.astuple(config)) in failed:
                    continue
                if time.monotonic() - began > arguments.seconds:
                    print("out of time", flush=True)
                    break
                results += time_config(bundle, gemm, config, strip_bytes(bundle, config, gemm, kind))
            results.sort(key=lambda result: result[1])
            for config, micros in results[:3]:
                print(
                    f"{case} {kind} {tokens:5} tokens: {micros:8.2f} us, {micros / roof:.2f} x the dense roof "
                    f"{dataclasses.astuple(config)}"
                )
            sys.stdout.flush()
            rows += [(case, kind, tokens, roof, micros, config) for config, micros in results]
            if results:
                entry = {"n": gemm.b.shape[1], "k": gemm.depth, "rows_per_expert": tokens * TOP_K / experts}
                entry |= {"compressed": True} if kind == "compressed" else {}
                entries.append(entry | {"config": without_defaults(results[0][0])})
        del weights
    write(arguments.out, rows, merged(arguments.bundle, entries))


def time_config(bundle: ModuleType, gemm, config, declared: int) -> list:
    """[(config with its programs per SM, cold us)], for full and for lower occupancy."""
    from harness import time_cold

    launch = part(bundle, "gemm.dispatch")
    activations, outputs = launch.prepare_activations(gemm), launch.new_outputs(gemm)
    resident = occupancy(launch.launch_mma(gemm, config, activations, outputs), declared)
    results = []
    for programs in sorted({resident, max(1, resident - 1), max(1, resident // 2)}, reverse=True):
        chosen = dataclasses.replace(config, programs_per_sm=programs)
        results.append((chosen, time_cold(lambda c=chosen: launch.run_on_gpu(gemm, c), samples=7).p50))
    return results


def without_defaults(config) -> dict:
    return {f.name: value for f in dataclasses.fields(config) if (value := getattr(config, f.name)) != f.default}


def merged(directory: Path, entries: list[dict]) -> list[dict]:
    """The bundle's entries for this device, with `entries` added or replaced."""

    def place(entry: dict) -> tuple:
        return entry["n"], entry["k"], entry.get("compressed", False), entry["rows_per_expert"]

    path = directory / "gemm/tables" / table_name()
    table = {place(entry): entry for entry in json.loads(path.read_text())["entries"]} if path.exists() else {}
    table |= {place(entry): entry for entry in entries}
    return list(table.values())


def table_name() -> str:
    return torch.cuda.get_device_name().lower().replace(" ", "_") + ".json"


def read_roof(weights, num_bytes: int) -> float:
    """Cold us of the fastest read-only sweep of `num_bytes` bytes of these weights."""
    from harness import time_cold
    from read_sweep import read_sweep

    words = weights[0].view(torch.int64).flatten()[: num_bytes // 8]
    return min(
        time_cold(lambda o=options: read_sweep(words, *o), samples=7).p50
        for options in ((4, 4), (8, 4), (8, 8), (16, 4))
    )


def write(out: Path, rows: list, entries: list) -> None:
    out.mkdir(parents=True, exist_ok=True)
    with (out / "tune.csv").open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        config = [field.name for field in dataclasses.fields(rows[0][5])] if rows else []
        writer.writerow(["case", "scales", "tokens", "roof_us", "us_p50", *config])
        writer.writerows((*row[:5], *dataclasses.astuple(row[5])) for row in rows)
    lines = ",\n".join(map(json.dumps, entries))
    (out / table_name()).write_text(f'{{"entries": [\n{lines}\n]}}\n')


if __name__ == "__main__":
    main()
