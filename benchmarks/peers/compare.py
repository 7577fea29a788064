"""Compares our W4A16 kernels with what a user would run instead, in one process, in turns, each checked against
float64.

`python benchmarks/peers/compare.py [--out FILE] [--only CASE ...] [--bundle build/torch-cuda]`, on a Hopper GPU, after
`prepare.py` has gathered the peers (it says how, and for machines without a network). `--tiny` runs ours and torch on
small shapes, on a CPU too, to see that it runs.

weights  one weight: ours_dense, ours_fused (compressed scales), marlin, humming, torch_bf16 (cuBLAS on dequantized).
layers   whole layers of experts, each with its own scheduling of given routing and its own weighted sum: ours_dense,
         ours_fused, marlin (fused_marlin_moe's kernels) and humming. Top 8, uniform routing.

Bytes are those of the weights and scales that a call reads once; `rel_error` is a ratio of norms over sampled rows. If
one is not below ALLOWED, the run ends with exit status 1, after everything is written.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import harness  # noqa: E402
from cases import E2M1, command_line, get_bundle, parse, pick_device  # noqa: E402
from scale_planes import make_planes, plain_scales  # noqa: E402

TOP_K, GROUP, CHECKED, ALLOWED, TINY_TOKENS = 8, 16, 6, 0.01, (1, 16)
COLUMNS = [*harness.COLUMNS, "rel_error"]
EXCEPTIONS = 0.3
"""Percentage of exceptions in the scales of single weights."""


class Layer(NamedTuple):
    experts: int
    hidden: int
    inner: int
    gate_percent: float
    down_percent: float
    tokens: tuple[int, ...]


LAYERS = {
    "qwen": Layer(512, 2560, 640, 1.02, 0.22, (1, 8, 64, 1024, 4096, 16384)),
    "glm": Layer(288, 4096, 2048, 0.30, 0.30, (1, 8, 64, 512, 4096)),
}
WEIGHTS = {
    "dense_4096": (4096, 4096),
    "dense_8192": (8192, 8192),
    "qwen3_8b_kv": (1024, 4096),
    "qwen3_8b_up": (12288, 4096),
    "qwen3_8b_down": (4096, 12288),
    "llama_70b_up": (28672, 8192),
}
"""(rows, K) of single weights: square layers, and those of two dense models."""
WEIGHT_TOKENS = (1, 8, 16, 32, 64, 128, 512, 1024, 4096)
TINY_LAYERS = {"qwen": Layer(16, 256, 128, 1.0, 0.3, TINY_TOKENS)}
TINY_WEIGHTS = {"dense_4096": (256, 128)}


@dataclasses.dataclass
class Run:
    """What all measurements share; `marlin` and `humming` are modules, or None if they cannot run."""

    bundle: ModuleType
    results: harness.Results
    marlin: ModuleType | None
    humming: ModuleType | None
    ends: float
    faults: list[str] = dataclasses.field(default_factory=list)

    def is_late(self, what: str) -> bool:
        late = time.monotonic() > self.ends
        if late:
            print(f"no time left for {what}", flush=True)
        return late


def dequantized(packed: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """code * scale [rows, K] of one plane in float64, without the global scale."""
    values = torch.tensor(E2M1, dtype=torch.float64, device=packed.device)
    codes = values[torch.stack([packed & 15, packed >> 4], -1).flatten(-2).int()]
    return (codes.unflatten(-1, (-1, GROUP)) * scales.double().unsqueeze(-1)).flatten(-2)


def random_codes(*size: int) -> torch.Tensor:
    device = pick_device()
    generator = torch.Generator(device).manual_seed(0)
    return torch.empty(size, dtype=torch.uint8, device=device).random_(0, 256, generator=generator)


def compressed(bundle: ModuleType, planes: torch.Tensor) -> Any:
    wire = bundle.compress_nvfp4_csf_scales(planes)
    return bundle.prepare_nvfp4_csf_scales(*wire, num_rows=planes.shape[1], num_cols=planes.shape[2])


def make_layer(bundle: ModuleType, layer: Layer, *, fill: bool = True) -> tuple[Any, Any]:
    """Our experts, with dense and with compressed scales."""
    experts, hidden, inner, device = layer.experts, layer.hidden, layer.inner, pick_device()
    sizes = {"gate_up_scales": (experts, 2 * inner, hidden // GROUP), "down_scales": (experts, hidden, inner // GROUP)}
    spread = 1 + torch.rand(experts, 2, generator=torch.Generator(device).manual_seed(0), device=device)
    packed = {"gate_up": (experts, 2 * inner, hidden // 2), "down": (experts, hidden, inner // 2)}
    weights = {name: random_codes(*size) if fill else torch.empty(size, dtype=torch.uint8, device=device)
               for name, size in packed.items()}  # fmt: skip
    weights["gate_up_global"] = (spread[:, 0] * 0.01 / hidden**0.5).contiguous()
    weights["down_global"] = (spread[:, 1] * 0.01 / inner**0.5).contiguous()
    if fill:
        percent = {"gate_up_scales": layer.gate_percent, "down_scales": layer.down_percent}
        planes = {n: make_planes(*size, percent[n], seed, device) for seed, (n, size) in enumerate(sizes.items())}
        small = {name: compressed(bundle, plane) for name, plane in planes.items()}
    else:
        planes = {name: torch.zeros(size, dtype=torch.uint8, device=device) for name, size in sizes.items()}
        small = {name: plain_scales(bundle, *size, device) for name, size in sizes.items()}
    dense = bundle.NVFP4Experts(**weights, **{n: p.view(torch.float8_e4m3fn) for n, p in planes.items()})
    return dense, dataclasses.replace(dense, **small)


def make_call(layer: Layer, tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(hidden states, uniform routing as int32, its weights as float32)."""
    device = pick_device()
    draw: dict[str, Any] = {"generator": torch.Generator(device).manual_seed(tokens), "device": device}
    hidden = torch.randn(tokens, layer.hidden, dtype=torch.bfloat16, **draw)
    ids = torch.rand(tokens, layer.experts, **draw).topk(TOP_K).indices.int()
    return hidden, ids, torch.rand(tokens, TOP_K, **draw).softmax(-1)


def layer_rows(dense: Any, call: tuple, picked: list[int]) -> torch.Tensor:
    """float64 outputs of the picked tokens, without intermediate roundings."""
    hidden, ids, weights = call
    out = torch.zeros(len(picked), hidden.shape[1], dtype=torch.float64, device=hidden.device)
    for row, token in enumerate(picked):
        for slot, expert in enumerate(ids[token].tolist()):
            sums = dequantized(dense.gate_up[expert], dense.gate_up_scales[expert]) @ hidden[token].double()
            gate, up = (sums * dense.gate_up_global[expert].double()).chunk(2)
            inner = gate * torch.sigmoid(gate) * up
            sums = dequantized(dense.down[expert], dense.down_scales[expert]) @ inner
            out[row] += weights[token, slot].double() * sums * dense.down_global[expert].double()
    return out


def spread_out(count: int) -> list[int]:
    return sorted(set(torch.linspace(0, count - 1, min(count, CHECKED)).round().int().tolist()))


def conditions(tokens: int, moved: int) -> dict[str, dict]:
    large = tokens > 2048
    samples = 3 if pick_device() == "cpu" else 8 if large else 20
    repeat = 1 if large else max(2, min(harness.CALLS, harness.WARM_BYTES // max(1, moved)))
    return {
        "warm": {"samples": samples, "flush": False, "repeat": repeat},
        "cold": {"samples": samples, "flush": True},
    }


def measure(run: Run, case: str, tokens: int, calls: dict[str, Callable], moved: dict[str, int],
            expected: torch.Tensor) -> None:  # fmt: skip
    """Check rows spread over each call's output, then time the calls in turns."""
    picked, errors = spread_out(tokens), {}
    for name, call in calls.items():
        errors[name] = float((call()[picked].double() - expected).norm() / expected.norm())
        if not errors[name] < ALLOWED:
            run.faults.append(f"{case}, {tokens} tokens: {name} is off by {errors[name]:.3g}")
    for condition, options in conditions(tokens, max(moved.values())).items():
        timings = harness.time_in_turns(calls, **options)
        for name, timing in timings.items():
            run.results.append(
                case, name, timing, tokens=tokens, condition=condition, bytes=moved[name],
                baseline="" if name == "ours_dense" else "ours_dense",
                baseline_us="" if name == "ours_dense" else f"{timings['ours_dense'].p50:.2f}",
                rel_error=f"{errors[name]:.3e}",
            )  # fmt: skip
        words = (f"{name} {timing.p50:.1f}" for name, timing in timings.items())
        print(f"{case} {tokens} {condition}, us: {'  '.join(words)}", flush=True)


def bench_weight(run: Run, case: str, size: tuple[int, int], counts: tuple[int, ...]) -> None:
    rows, depth = size
    packed, device = random_codes(rows, depth // 2), pick_device()
    planes = make_planes(1, rows, depth // GROUP, EXCEPTIONS, 0, device)
    scales, small = planes[0].view(torch.float8_e4m3fn), compressed(run.bundle, planes)
    factor = torch.tensor(0.01 / depth**0.5, device=device)
    exact = dequantized(packed, scales)
    full = (exact * factor.double()).to(torch.bfloat16)
    read = packed.nbytes + scales.nbytes
    moved = {"ours_dense": read, "ours_fused": packed.nbytes + small.nbytes, "torch_bf16": full.nbytes}
    peers = {"marlin": run.marlin, "humming": run.humming}
    linears = {name: peer.Linear(packed, scales, factor) for name, peer in peers.items() if peer is not None}
    for tokens in counts:
        if run.is_late(f"{case}, {tokens} tokens"):
            continue
        generator = torch.Generator(device).manual_seed(tokens)
        x = torch.randn(tokens, depth, dtype=torch.bfloat16, device=device, generator=generator)
        options = {"activation_format": "bf16", "b_global_scale": factor}
        calls: dict[str, Callable] = {
            "ours_dense": functools.partial(run.bundle.matmul_2d, x, packed, None, scales, **options),
            "ours_fused": functools.partial(run.bundle.matmul_2d, x, packed, None, small, **options),
        }
        calls |= {name: functools.partial(linear, x) for name, linear in linears.items()}
        calls["torch_bf16"] = functools.partial(torch.matmul, x, full.T)
        expected = x[spread_out(tokens)].double() @ exact.T * factor.double()
        measure(run, case, tokens, calls, moved | dict.fromkeys(linears, read), expected)


def bench_layer(run: Run, case: str, layer: Layer) -> None:
    dense, packed = make_layer(run.bundle, layer)
    marlin = None if run.marlin is None else run.marlin.Layer(layer, dense, TOP_K)
    humming = None
    if run.humming is not None and run.marlin is not None:
        humming = run.humming.Layer(layer, dense, TOP_K, run.marlin.vllm.moe_align_block_size)
    weights = dense.gate_up.nbytes + dense.down.nbytes
    plain, small = (e.gate_up_scales.nbytes + e.down_scales.nbytes for e in (dense, packed))
    for tokens in layer.tokens:
        if run.is_late(f"{case}, {tokens} tokens"):
            continue
        call = make_call(layer, tokens)
        forward = functools.partial(run.bundle.moe_forward, activation_format="bf16")
        calls: dict[str, Callable] = {
            "ours_dense": functools.partial(forward, dense, *call),
            "ours_fused": functools.partial(forward, packed, *call, strategy="fused"),
        }
        if marlin is not None:
            calls["marlin"] = functools.partial(marlin.layer, *call, marlin.caches(tokens))
        if humming is not None:
            calls["humming"] = functools.partial(humming.layer_call, *call, humming.caches(tokens))
        share = len(call[1].unique()) / layer.experts
        moved = {name: round(share * (weights + (small if name == "ours_fused" else plain))) for name in calls}
        measure(run, case, tokens, calls, moved, layer_rows(dense, call, spread_out(tokens)))


def launch_once(directory: Path | None, case: str, tokens: int, variant: str) -> None:
    """Compile what a call needs, in a separate process."""
    torch.set_num_threads(1)
    layer = LAYERS.get(case)
    if variant == "humming":
        sizes = [(2 * layer.inner, layer.hidden), (layer.hidden, layer.inner)] if layer else [WEIGHTS[case]]
        rows = tokens * (TOP_K if layer else 1)
        importlib.import_module("humming_peer").compile_layer(sizes, rows, layer.experts if layer else 0)
        return
    bundle, fused = get_bundle(directory), variant == "ours_fused"
    if layer:
        experts = make_layer(bundle, layer, fill=False)[int(fused)]
        strategy = {"strategy": "fused"} if fused else {}
        bundle.moe_forward(experts, *make_call(layer, tokens), activation_format="bf16", **strategy)
    else:
        rows, depth = WEIGHTS[case]
        packed, planes = (torch.zeros(rows, depth // n, dtype=torch.uint8, device="cuda") for n in (2, GROUP))
        scales = plain_scales(bundle, 1, rows, depth // GROUP, "cuda") if fused else planes.view(torch.float8_e4m3fn)
        x = torch.zeros(tokens, depth, dtype=torch.bfloat16, device="cuda")
        bundle.matmul_2d(x, packed, None, scales, activation_format="bf16", b_global_scale=1.0)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


def main() -> None:
    parser = command_line(__doc__, HERE.parent / "results/peers.csv")
    parser.add_argument("--only", nargs="+", choices=[*WEIGHTS, *LAYERS], default=[*WEIGHTS, *LAYERS])
    parser.add_argument("--seconds", type=float, default=400, help="after which no further row is begun")
    parser.add_argument("--merge", action="store_true", help="keep the file's rows of other cases")
    parser.add_argument("--compiled", action="store_true", help="what is timed was compiled before, on this machine")
    arguments = parse(parser)
    ends = time.monotonic() + arguments.seconds
    torch.set_grad_enabled(False)
    weights, layers = (TINY_WEIGHTS, TINY_LAYERS) if arguments.tiny else (WEIGHTS, LAYERS)
    weights = {name: size for name, size in weights.items() if name in arguments.only}
    layers = {name: layer for name, layer in layers.items() if name in arguments.only}
    marlin = humming = None
    if not arguments.tiny:
        marlin, humming = importlib.import_module("marlin"), importlib.import_module("humming_peer")
        calls = [(name, tokens) for name in weights for tokens in WEIGHT_TOKENS]
        calls += [(name, tokens) for name, layer in layers.items() for tokens in layer.tokens]
        steps = (("ours_dense", "ours_fused"), ("humming",))
        for variants in () if arguments.compiled else steps:
            jobs = [(arguments.bundle, *call, variant) for call in calls for variant in variants]
            harness.compile_ahead(launch_once, jobs)
        marlin.load()
    results = harness.Results(arguments.out, arguments.commit, merge=arguments.merge, columns=COLUMNS)
    run = Run(get_bundle(arguments.bundle), results, marlin, humming, ends)
    for case, size in weights.items():
        bench_weight(run, case, size, TINY_TOKENS if arguments.tiny else WEIGHT_TOKENS)
    for case, layer in layers.items():
        bench_layer(run, case, layer)
    if run.faults:
        raise SystemExit("\n".join(run.faults))


if __name__ == "__main__":
    main()
