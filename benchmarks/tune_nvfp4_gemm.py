"""Choose the tiles of the NVFP4 GEMM on this GPU: check every candidate, time it, write the table the bundle ships.

    python benchmarks/tune_nvfp4_gemm.py --bundle build/torch-cuda --out DIR [--cases qwen_down ..] [--tokens 1 8 ..]

Every candidate is first compared with the torch implementation on a small problem of its own shape. Timing is cold (L2
flushed): weights of a layer are never in L2 when its turn comes. Writes tune.csv (all candidates) and <device>.json.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import importlib
import importlib.util
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

TOP_K = 8
CASES = {  # experts, N output columns, K, gated
    "qwen_gate_up": (512, 640, 2560, True),
    "qwen_down": (512, 2560, 640, False),
    "glm_gate_up": (288, 2048, 4096, True),
    "glm_down": (288, 4096, 2048, False),
}
SMEM_BYTES = 227 << 10
LARGE = [  # block_n, block_t, num_warps, num_stages
    (64, 64, 4, 4), (128, 64, 4, 4), (128, 64, 8, 4), (256, 64, 8, 4),
    (128, 128, 8, 3), (128, 128, 8, 4), (128, 128, 8, 5), (256, 128, 8, 4),
]  # fmt: skip


def load_bundle(directory: Path) -> ModuleType:
    """A built variant, imported from its directory; several processes may do so at once."""
    name = json.loads((directory / "metadata.json").read_text())["id"]
    spec = importlib.util.spec_from_file_location(
        name, directory / "__init__.py", submodule_search_locations=[str(directory)]
    )
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def part(bundle: ModuleType, name: str) -> ModuleType:
    return importlib.import_module(f"{bundle.__name__}.{name}")


def uniform_routing(bundle: ModuleType, tokens: int, experts: int):
    """(expert_start, gather_idx, scatter_idx, active experts) of tokens that each choose 8 experts."""
    generator = torch.Generator().manual_seed(tokens)
    ids = torch.rand(tokens, experts, generator=generator).topk(TOP_K).indices.int().cuda()
    scheduling = part(bundle, "routing").compute_grouped_scheduling(ids, experts, TOP_K)
    return *scheduling, len(ids.unique())


def make_weights(experts: int, rows: int, depth: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Random codes and ordinary scale bytes: exponents within 8 of each other, as trained weights have."""
    packed = torch.randint(0, 256, (experts, rows, depth // 2), dtype=torch.uint8, device="cuda")
    scales = torch.randint(0x58, 0x78, (experts, rows, depth // 16), dtype=torch.uint8, device="cuda")
    return packed, scales.view(torch.float8_e4m3fn)


def make_gemm(bundle: ModuleType, case: str, tokens: int, weights, routing, dtype=torch.bfloat16):
    experts, _, depth, gate = CASES[case]
    start, gather, scatter, _ = routing
    first = case.endswith("gate_up")
    x = torch.randn(tokens if first else tokens * TOP_K, depth, dtype=dtype, device="cuda")
    return part(bundle, "nvfp4.arguments").check_gemm(
        x, weights[0], None, weights[1],
        activation_format="bf16", gate=gate, b_global_scale=torch.full((experts,), 1e-4, device="cuda"),
        expert_start=start, gather_idx=gather if first else None, scatter_idx=None if first else scatter,
    )  # fmt: skip


def moved_bytes(gemm, active: int) -> int:
    """Weights and scales of the active experts once, activations once, outputs once."""
    rows, depth = gemm.b.shape[1], gemm.depth
    return active * rows * (depth // 2 + depth // 16) + gemm.a.numel() * 2 + gemm.num_rows * gemm.num_cols * 2


def candidates(bundle: ModuleType, tokens: int, experts: int):
    """Configurations worth compiling for this many tokens; the occupancy is filled in after compiling."""
    config_type = part(bundle, "nvfp4.configs").Config
    mean = tokens * TOP_K / experts
    small = [
        (64, 128, 4, 4), (64, 256, 4, 3), (64, 256, 4, 4), (64, 512, 4, 3), (64, 256, 2, 4), (32, 256, 2, 4),
        (32, 512, 2, 4), (128, 128, 4, 4), (128, 128, 8, 4), (128, 256, 4, 3), (128, 256, 4, 4), (128, 256, 8, 3),
        (128, 512, 8, 3), (256, 128, 8, 4), (256, 256, 8, 3),
    ]  # fmt: skip
    if mean <= 2:
        tiles = [(8, small)]
    elif mean <= 16:
        tiles = [(8, small), (16, small)]
    else:
        tiles = [(32, [(64, 128, 4, 3), (128, 128, 4, 3)])]
        for block_n, block_t, warps, stages in LARGE:
            yield config_type(block_n, 128, block_t, warps, stages, 1, warpgroup=True)
    for block_t, shapes in tiles:
        for block_n, block_k, warps, stages in shapes:
            yield config_type(block_n, block_k, block_t, warps, stages, 1)


def occupancy(kernel) -> int:
    """Programs an SM holds, by registers and shared memory."""
    threads = kernel.metadata.num_warps * 32
    registers = -(-kernel.n_regs // 8) * 8 * threads
    return max(1, min(65536 // registers, SMEM_BYTES // (kernel.metadata.shared + 1024), 2048 // threads))


def check_candidate(job) -> tuple:
    """Compile one candidate and compare it with the torch implementation; also warms the compiler's disk cache."""
    directory, case, tokens, config_values = job
    torch.set_num_threads(1)
    try:
        bundle = load_bundle(directory)
        config = part(bundle, "nvfp4.configs").Config(**config_values)
        experts, _, depth, gate = CASES[case]
        torch.manual_seed(1)
        tokens = max(1, min(tokens, 2 * config.block_t))
        routing = uniform_routing(bundle, tokens, experts)
        rows = CASES[case][1] * (2 if gate else 1)
        packed = torch.empty(experts, rows, depth // 2, dtype=torch.uint8, device="cuda")
        scales = torch.empty(experts, rows, depth // 16, dtype=torch.float8_e4m3fn, device="cuda")
        start = torch.zeros_like(routing[0])
        for expert, count in ((0, 3), (5, 0), (experts - 1, config.block_t + 1)):  # the rest of the rows have no expert
            start[expert + 1 :] += count
            packed[expert], scales[expert] = (t[0] for t in make_weights(1, rows, depth))
        start.clamp_(max=tokens * TOP_K)
        gemm = make_gemm(bundle, case, tokens, (packed, scales), (start, *routing[1:]))
        launch = part(bundle, "nvfp4.launch")
        out = launch.run_on_gpu(gemm, config)[0]
        used = [0, experts - 1]
        b_start = torch.stack([start[0], start[1], start[experts]]).int()
        small = dataclasses.replace(
            gemm, a=gemm.a.cpu(), b=gemm.b[used].cpu(), b_scales=gemm.b_scales[used].cpu(),
            b_global=gemm.b_global[used].cpu(), expert_start=b_start.cpu(),
            gather_idx=None if gemm.gather_idx is None else gemm.gather_idx.cpu(),
            scatter_idx=None if gemm.scatter_idx is None else gemm.scatter_idx.cpu(),
        )  # fmt: skip
        want = part(bundle, "nvfp4.cpu").run_on_cpu(small)[0].double()
        error = ((out.cpu().double() - want).norm() / want.norm()).item()
        if not error < 4e-3:
            return case, config_values, f"wrong: relative error {error:.3g}"
        return case, config_values, ""
    except Exception:  # a candidate that does not compile or launch is a result, not a failure of the run
        return case, config_values, traceback.format_exc().strip().splitlines()[-1][:300]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--bundle", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--cases", nargs="+", default=list(CASES))
    parser.add_argument("--tokens", nargs="+", type=int, default=[1, 8, 64, 512, 4096])
    parser.add_argument("--seconds", type=float, default=200)
    arguments = parser.parse_args()
    began = time.monotonic()
    bundle = load_bundle(arguments.bundle)

    plan = {}
    for case, tokens in itertools.product(arguments.cases, arguments.tokens):
        for config in candidates(bundle, tokens, CASES[case][0]):
            plan.setdefault((case, config), []).append(tokens)
    jobs = [
        (arguments.bundle, case, max(tokens), dataclasses.asdict(config)) for (case, config), tokens in plan.items()
    ]
    failed = set()
    with multiprocessing.get_context("spawn").Pool(14) as pool:
        for case, values, problem in pool.imap_unordered(check_candidate, jobs):
            if problem:
                failed.add((case, tuple(values.values())))
                print(f"{case} {list(values.values())}: {problem}", flush=True)
    print(f"{len(jobs)} candidates checked, {len(failed)} failed, {time.monotonic() - began:.0f} s", flush=True)
    time_candidates(bundle, arguments, plan, failed, began)


def time_candidates(bundle: ModuleType, arguments, plan: dict, failed: set, began: float) -> None:
    from harness import time_cold

    rows, entries = [], []
    for case in arguments.cases:
        experts, cols, depth, gate = CASES[case]
        weights = make_weights(experts, cols * (2 if gate else 1), depth)
        for tokens in arguments.tokens:
            routing = uniform_routing(bundle, tokens, experts)
            gemm = make_gemm(bundle, case, tokens, weights, routing)
            roof = read_roof(weights, moved_bytes(gemm, routing[3]))
            results = []
            for (plan_case, config), token_counts in plan.items():
                if plan_case != case or tokens not in token_counts or (case, dataclasses.astuple(config)) in failed:
                    continue
                if time.monotonic() - began > arguments.seconds:
                    print("out of time", flush=True)
                    break
                results += time_config(bundle, gemm, config, time_cold)
            results.sort(key=lambda result: result[1])
            for config, micros in results[:3]:
                ratio = micros / roof
                print(f"{case} {tokens:5} tokens: {micros:8.2f} us, {ratio:.2f} x roof {dataclasses.astuple(config)}")
            sys.stdout.flush()
            rows += [(case, tokens, roof, micros, config) for config, micros in results]
            if results:
                entries.append(
                    {
                        "n": cols * (2 if gate else 1),
                        "k": depth,
                        "rows_per_expert": tokens * TOP_K / experts,
                        "config": dataclasses.asdict(results[0][0]),
                    }
                )
        del weights
    write(arguments.out, rows, entries)


def time_config(bundle: ModuleType, gemm, config, timer) -> list:
    """[(config with its programs an SM, cold us)], for full occupancy and for less."""
    launch = part(bundle, "nvfp4.launch")
    operands, x_global, gather_idx = launch.prepare_activations(gemm)
    arguments, constants = launch.kernel_arguments(gemm, operands, x_global, gather_idx, launch.new_outputs(gemm))
    resident = occupancy(launch.launch_mma(gemm, config, arguments, constants))
    results = []
    for programs in sorted({resident, max(1, resident - 1), max(1, resident // 2)}, reverse=True):
        chosen = dataclasses.replace(config, programs_per_sm=programs)
        results.append((chosen, timer(lambda c=chosen: launch.run_on_gpu(gemm, c), samples=7).p50))
    return results


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
        config = [field.name for field in dataclasses.fields(rows[0][4])] if rows else []
        writer.writerow(["case", "tokens", "roof_us", "us_p50", *config])
        writer.writerows((*row[:4], *dataclasses.astuple(row[4])) for row in rows)
    name = torch.cuda.get_device_name().lower().replace(" ", "_")
    lines = ",\n".join(map(json.dumps, entries))
    (out / f"{name}.json").write_text(f'{{"entries": [\n{lines}\n]}}\n')


if __name__ == "__main__":
    main()
