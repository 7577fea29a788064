"""What does keeping scales compressed cost a whole MoE layer, and a stack of them, by strategy?

    LOCAL_KERNELS=kernels-community/finegrained-kernels=$PWD/build python benchmarks/moe_layer.py [--only layer stack]
    [--merge]: into the existing file, replacing its rows of the same case and variant

Strategies: `dense`; `staged`, decoding in the call; `prefetched`, decoded before it (in a stack: on a side stream, into
one scratch, or two as `prefetched_2`); `fused`; and in a stack `default`, for a caller who prefetches and names none.
Outputs of all are compared bit for bit, three seeds each, before any is timed.

`layer`  one layer, L2 flushed. Bytes: weights and scales of the experts that have rows, once, as the strategy stores
         them; staged adds the decoded bytes, written and read. Activations are not counted. The roof reads as many.
`stack`  attention and MoE layers, warm: projections, SDPA and weights of each layer's own. Prefill of one sequence, or
         decode of one token a sequence against a cache of 4096 tokens. Bytes: what expanding every layer moves; time
         of that alone is `expansion`. What prefetch hides of it in prefill is read off the GPU's timeline, rows
         `timeline_*`: sums over the stack (prefetch_timeline.py).
`paths`  few rows, batched against grouped: where the rule should change.
Rows `memory` hold resident bytes a layer; the scratch is shared by all layers of a model.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import harness
import torch
import torch.nn.functional as F
from moe_cases import (
    DEVICE,
    FORMATS,
    PATHS,
    SHAPES,
    Shape,
    batched_up_to,
    compile_one,
    layer_calls,
    make_call,
    make_layer,
    new_scratch,
)
from prefetch_timeline import Timeline, hidden
from read_sweep import time_beside_roofs
from scale_planes import moved_bytes

from finegrained_kernels import load

SEEDS = 3
SAMPLES = {"decode": 150, "few tokens": 20, "many tokens": 9, "timeline": 20}


def num_samples(tokens: int) -> int:
    return SAMPLES["few tokens" if tokens <= 2048 else "many tokens"]


def check_equal(outputs: dict[str, torch.Tensor], what: str) -> None:
    dense = outputs["dense"]
    if not bool(dense.isfinite().all()) or not dense.any():
        raise SystemExit(f"{what}: the dense output is not finite, or all zero")
    for name, out in outputs.items():
        if not torch.equal(out, dense):
            raise SystemExit(f"{what}: {name} differs from dense in {int((out != dense).sum())} of {out.numel()}")


def check_layer(bundle: ModuleType, shape: Shape, layer, tokens: int, options: dict) -> None:
    for seed in range(SEEDS):
        outputs = {}
        for name, run in layer_calls(bundle, layer, make_call(shape, tokens, seed), options).items():
            layer[1].scratch.fill_(0x7F)
            if name == "prefetched":
                bundle.expand_scales(layer[1])
            outputs[name] = run()
        check_equal(outputs, f"{shape.name} layer, {tokens} tokens, seed {seed}")


def layer_bytes(layer, index: torch.Tensor) -> dict[str, int]:
    """Bytes of weights and scales of the experts in `index`, by strategy."""
    dense, compressed = layer
    share = len(index.unique()) / dense.num_experts
    weights = dense.gate_up.nbytes + dense.down.nbytes
    plain = dense.gate_up_scales.nbytes + dense.down_scales.nbytes
    packed = compressed.gate_up_scales.nbytes + compressed.down_scales.nbytes
    stored = {"dense": plain, "staged": packed + 2 * plain, "prefetched": plain, "fused": packed}
    return {name: round(share * (weights + scales)) for name, scales in stored.items()}


def bench_layer(bundle: ModuleType, shape: Shape, formats: list[str], results: harness.Results) -> None:
    layer = make_layer(bundle, shape, seed=0)
    bench_memory(shape, layer, results)
    for activations, tokens in itertools.product(formats, shape.layer_tokens):
        options = {"activation_format": FORMATS[activations]}
        check_layer(bundle, shape, layer, tokens, options)
        call = make_call(shape, tokens, seed=0)
        bundle.expand_scales(layer[1])
        # Staged writes the same bytes to the scratch again, so prefetched may follow it.
        calls, moved = layer_calls(bundle, layer, call, options), layer_bytes(layer, call[1])
        timings, roofs = time_beside_roofs(calls, moved, layer[0].gate_up, samples=num_samples(tokens), flush=True)
        for name, timing in timings.items():
            results.add(
                f"{shape.name}_layer_{activations}", name, "cold", timing, tokens=tokens, moved=moved[name],
                roof_us=roofs[name],
                baseline="" if name == "dense" else "dense",
                baseline_us="" if name == "dense" else timings["dense"].p50,
            )  # fmt: skip


def bench_memory(shape: Shape, layer, results: harness.Results) -> None:
    dense, compressed = layer
    resident = {
        "weights": dense.gate_up.nbytes + dense.down.nbytes,
        "scales_dense": dense.gate_up_scales.nbytes + dense.down_scales.nbytes,
        "scales_compressed": compressed.gate_up_scales.nbytes + compressed.down_scales.nbytes,
        "scratch": compressed.scratch.nbytes,
    }
    for variant, num_bytes in resident.items():
        add_row(results, f"{shape.name}_memory", variant, bytes=num_bytes)


def add_row(results: harness.Results, case: str, variant: str, timing: harness.Timing | None = None, **columns) -> None:
    """Add a row that has no roof, or no time."""
    results.append(case, variant, timing, **columns)
    row = results.rows[-1]
    spread = "" if timing is None else f"({row['us_p20']} to {row['us_p80']})"
    print(*(f"{row[name]}" for name in ("case", "variant", "tokens", "us_p50")), spread, row["bytes"], flush=True)


def bench_paths(bundle: ModuleType, shape: Shape, formats: list[str], results: harness.Results) -> None:
    layer = make_layer(bundle, shape, seed=0)
    bundle.expand_scales(layer[1])
    for activations, tokens in itertools.product(formats, shape.path_tokens):
        call = make_call(shape, tokens, seed=0)
        calls = layer_calls(bundle, layer, call, {"activation_format": FORMATS[activations]})
        calls = {
            f"{name}_{path}": functools.partial(on_path, bundle, path, run)
            for (name, run), path in itertools.product(calls.items(), PATHS)
        }
        for name, timing in harness.time_in_turns(calls, samples=num_samples(tokens), flush=True).items():
            add_row(
                results, f"{shape.name}_paths_{activations}", name, timing, tokens=tokens, condition="cold",
                bytes=layer_bytes(layer, call[1])[name.rpartition("_")[0]],
            )  # fmt: skip


def on_path(bundle: ModuleType, path: str, run: Callable[[], torch.Tensor]) -> torch.Tensor:
    with batched_up_to(bundle, PATHS[path]):
        return run()


class Stack:
    """Alternating attention and MoE layers, with dense experts, and with compressed ones that have one or two
    scratches."""

    def __init__(self, bundle: ModuleType, shape: Shape, num_layers: int) -> None:
        self.bundle, self.shape = bundle, shape
        layers = [make_layer(bundle, shape, seed=0)]
        layers += [make_layer(bundle, shape, seed, layers[0][1].scratch) for seed in range(1, num_layers)]
        self.dense, self.compressed = ([layer[i] for layer in layers] for i in range(2))
        other = new_scratch(self.dense[0])
        in_turns = [
            dataclasses.replace(layer, scratch=other) if i % 2 else layer for i, layer in enumerate(self.compressed)
        ]
        self.prefetchers = {1: bundle.ScalePrefetcher(self.compressed), 2: bundle.ScalePrefetcher(in_turns)}
        generator = torch.Generator(DEVICE).manual_seed(0)
        width = (shape.heads + 2 * shape.kv_heads) * shape.head_dim

        def projection(rows: int, cols: int) -> torch.Tensor:
            weight = torch.randn(rows, cols, generator=generator, device=DEVICE) / rows**0.5
            return weight.to(torch.bfloat16)

        self.to_qkv = [projection(shape.hidden, width) for _ in layers]
        self.to_out = [projection(shape.heads * shape.head_dim, shape.hidden) for _ in layers]

    @staticmethod
    def norm(x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, x.shape[-1:])

    def attention(self, i: int, x: torch.Tensor, cache: torch.Tensor | None) -> torch.Tensor:
        """Causal attention over one sequence `x [M, H]`, or of M sequences' next token over
        `cache [2, M, heads, context, dim]`."""
        shape = self.shape
        widths = [count * shape.head_dim for count in (shape.heads, shape.kv_heads, shape.kv_heads)]
        q, k, v = (x @ self.to_qkv[i]).split(widths, dim=-1)
        group = shape.heads // shape.kv_heads
        if cache is None:
            q = q.view(1, len(x), shape.heads, shape.head_dim).transpose(1, 2)
            k, v = (t.view(1, len(x), shape.kv_heads, shape.head_dim).transpose(1, 2) for t in (k, v))
            k, v = (t.repeat_interleave(group, dim=1) for t in (k, v))
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        else:  # heads that share keys become rows of one product
            q = q.view(len(x), shape.kv_heads, group, shape.head_dim)
            out = F.scaled_dot_product_attention(q, *cache)
        return out.reshape(len(x), -1) @ self.to_out[i]

    def runner(self, variant: str, tokens: int, cache: torch.Tensor | None, seed: int, options: dict):
        """A call of the whole stack."""
        hidden, *routing = make_call(self.shape, tokens, seed)
        scratches = {"prefetched": 1, "prefetched_2": 2, "default": 1}.get(variant)
        strategy = {"staged": "staged", "prefetched": "staged", "prefetched_2": "staged", "fused": "fused"}.get(variant)
        prefetcher = self.prefetchers.get(scratches)
        layers = self.dense if variant == "dense" else self.compressed
        ahead = scratches == 2

        def prefetch(i: int) -> None:
            if prefetcher and i < len(layers):
                prefetcher.prefetch(i, tokens, strategy)

        def run() -> torch.Tensor:
            x = hidden
            if ahead:
                prefetch(0)
            for i, layer in enumerate(layers):
                prefetch(i + 1 if ahead else i)
                x = x + self.attention(i, self.norm(x), cache)
                call = (self.norm(x), *routing)
                if prefetcher:
                    x = x + prefetcher.forward(i, *call, **options, strategy=strategy)
                else:
                    x = x + self.bundle.moe_forward(layer, *call, **options, strategy=strategy)
            return x

        return run

    def expand(self) -> None:
        for layer in self.compressed:
            self.bundle.expand_scales(layer)


STACK_VARIANTS = ("dense", "staged", "prefetched", "prefetched_2", "fused", "default")


def bench_stack(
    bundle: ModuleType, shape: Shape, formats: list[str], results: harness.Results, num_layers: int
) -> None:
    stack = Stack(bundle, shape, num_layers)
    scales = [s for layer in stack.compressed for s in (layer.gate_up_scales, layer.down_scales)]
    moved = sum(moved_bytes(*s.shape, s.exceptions.numel()) for s in scales)
    expansion = harness.time_in_turns({"expansion": stack.expand}, samples=SAMPLES["many tokens"], flush=False)[
        "expansion"
    ]
    add_row(results, f"{shape.name}_stack_{num_layers}", "expansion", expansion, condition="warm", bytes=moved)
    phases = [("prefill", tokens) for tokens in shape.prefill] + [("decode", tokens) for tokens in shape.decode]
    for activations, (phase, tokens) in itertools.product(formats, phases):
        options = {"activation_format": FORMATS[activations]}
        cache = None
        if phase == "decode":
            cache_shape = (2, tokens, shape.kv_heads, shape.context, shape.head_dim)
            cache = torch.randn(cache_shape, device=DEVICE, dtype=torch.bfloat16)
        case = f"{shape.name}_{phase}_{num_layers}_{activations}"
        for seed in range(SEEDS):
            outputs = {name: stack.runner(name, tokens, cache, seed, options)() for name in STACK_VARIANTS}
            check_equal(outputs, f"{case}, {tokens} tokens, seed {seed}")
        runs = {name: stack.runner(name, tokens, cache, 0, options) for name in STACK_VARIANTS}
        samples = SAMPLES["decode"] if phase == "decode" else num_samples(tokens)
        timings = harness.time_in_turns(runs, samples=samples, flush=False)
        for name, timing in timings.items():
            add_row(
                results, case, name, timing, tokens=tokens, condition="warm",
                bytes=0 if name in ("dense", "fused") else moved,
                baseline="" if name == "dense" else "dense",
                baseline_us="" if name == "dense" else f"{timings['dense'].p50:.2f}",
            )  # fmt: skip
        if phase == "prefill":
            bench_timeline(stack, case, make_call(shape, tokens, seed=0), options, results, moved)
            continue
        for other in ("fused", "dense"):
            ratio = timings["default"].p50 / timings[other].p50
            print(f"{case} {tokens}: a prefetcher and no strategy named take {ratio:.4f} of {other}", flush=True)


def bench_timeline(stack: Stack, case: str, call, options: dict, results: harness.Results, moved: int) -> None:
    """Measure what prefetching hides, by marks on the GPU's streams in eager steps."""
    timeline, tokens = Timeline(stack, call, options), len(call[0])
    dense = stack.runner("dense", tokens, None, 0, options)()
    outputs = {f"a timeline's step {first}": timeline.step(first)[0] for first in range(2)}
    check_equal({"dense": dense, **outputs}, f"{case}, {tokens} tokens")
    del dense, outputs
    timings = timeline.measure(SAMPLES["timeline"])
    baselines = {
        "exposed": "expansion", "attention_loss": "expansion", "expansion_beside": "expansion",
        "attention_with_prefetch": "attention_alone",
    }  # fmt: skip
    for name, timing in timings.items():
        baseline = baselines.get(name)
        add_row(
            results, case, f"timeline_{name}", timing, tokens=tokens, condition="warm",
            bytes=moved if name.startswith("expansion") else 0,
            baseline=f"timeline_{baseline}" if baseline else "",
            baseline_us=f"{timings[baseline].p50:.2f}" if baseline else "",
        )  # fmt: skip
    by_exposed, by_both = hidden(timings)
    print(f"{case} {tokens}: prefetch hides {by_exposed:.1%}; with what attention loses, {by_both:.1%}", flush=True)


def compile_jobs(shape: Shape, formats: list[str], benches: list[str]) -> list[tuple]:
    """Jobs in an order in which different kernels are compiled at the same time, so that fewer processes wait for each
    other."""
    counts = {"layer": shape.layer_tokens, "paths": (), "stack": (*shape.prefill, *shape.decode)}
    whole = sorted({(count, None) for bench in benches for count in counts[bench]})
    calls = whole + (list(itertools.product(shape.path_tokens, PATHS)) if "paths" in benches else [])
    return [
        (shape.name, activations, *call, strategy)
        for activations, call, strategy in itertools.product(formats, calls, ("dense", "fused", "staged"))
    ]


BENCHES = {"layer": bench_layer, "paths": bench_paths, "stack": bench_stack}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results/moe_layer.csv")
    parser.add_argument("--commit", help="for the commit column, where there is no git checkout")
    parser.add_argument("--only", nargs="+", choices=BENCHES, default=list(BENCHES))
    parser.add_argument("--shape", choices=SHAPES, default="qwen")
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=["w4a16"])
    parser.add_argument("--layers", type=int, default=4, help="MoE layers of the stack (default: %(default)s)")
    parser.add_argument("--jobs", type=int, help="processes that compile ahead; 0: none (default: by the cores)")
    parser.add_argument("--samples", type=int, help=f"timed calls of each variant (default: {SAMPLES})")
    parser.add_argument("--merge", action="store_true", help="keep rows of --out that are not measured anew")
    arguments = parser.parse_args()
    if arguments.samples:
        SAMPLES.update(dict.fromkeys(SAMPLES, arguments.samples))
    shape = SHAPES[arguments.shape]
    results, bundle = harness.Results(arguments.out, arguments.commit, merge=arguments.merge), load()
    if DEVICE == "cuda":
        jobs = compile_jobs(shape, arguments.formats, arguments.only)
        harness.compile_ahead(compile_one, jobs, arguments.jobs)
    for name in arguments.only:
        more = {"num_layers": arguments.layers} if name == "stack" else {}
        BENCHES[name](bundle, shape, arguments.formats, results, **more)


if __name__ == "__main__":
    main()
