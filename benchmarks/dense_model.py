"""How much does a dense language model gain by NVFP4 weights, and what do compressed scales cost?

`python benchmarks/dense_model.py [--layers 36] [--out FILE]` on a GPU, with `LOCAL_KERNELS` naming a built bundle;
`--tiny --out FILE` runs the same code on small shapes, on a CPU too, to see that it runs. Needs the extra
[transformers].

A Qwen3 of 8B shapes with random weights: "bf16", and with all linear layers except the head in NVFP4 (W4A16), with
dense ("dense") or compressed scales ("fused"). Calls are those of model_parts.py: prefill, and decoding for 1, 8 and 64
sequences, by CUDA graph of the eager model ("graph") and by `torch.compile` with mode "reduce-overhead" ("compiled").

Each variant has separate processes, one for each size that is compiled, and one for everything else. The three of one
kind prepare their calls in parallel, because compiling takes a minute on one core, and so do those of the next kind.
Then they are timed in turns, one sample of one process at a time. At most 80 GB are on the GPU at a time.
`bytes` is the peak of the longest prefill. Rows have three more columns: tokens per second, bytes of scales, and all
bytes that the process has allocated between calls.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from collections.abc import Callable, Iterator
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

import harness
import model_parts as parts
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from finegrained_kernels import load
from finegrained_kernels.integrations.transformers import nvfp4_linears
from finegrained_kernels.integrations.transformers.schedule import Schedule

RATE = 0.006
"""The share of exceptions, as in the scales of SmolLM2."""
VARIANTS = ("bf16", "dense", "fused")
SHAPE = {"hidden_size": 4096, "intermediate_size": 12288, "num_attention_heads": 32, "num_key_value_heads": 8}
SHAPE |= {"head_dim": 128, "vocab_size": 151936}
TINY = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}
TINY |= {"head_dim": 32, "vocab_size": 256}
FULL = {"layers": 36, "samples": 12, "prefill": [2048, 8192], "decode": [1, 8, 64], "compiled": [1, 8, 64]}
FEW = {"layers": 2, "samples": 1, "prefill": [16], "decode": [1], "compiled": []}
Call = Callable[[], torch.Tensor]
CONTEXT = get_context("spawn")


def make_model(num_layers: int, shape: dict[str, int], variant: str, device: str) -> torch.nn.Module:
    """Make the model on the meta device, and then all of it on ``device``."""
    config = AutoConfig.for_model(
        "qwen3", **shape, num_hidden_layers=num_layers, max_position_embeddings=16384, dtype=torch.bfloat16
    )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    if variant != "bf16":
        schedule = Schedule("auto", prefetch=False)
        parts.quantize_linears(model.model, schedule, RATE, device, compressed=variant == "fused")
    return parts.make_the_rest(model, device, norm=1)


def calls_of(model: torch.nn.Module, args: argparse.Namespace, compiled: int | None) -> Iterator[tuple[tuple, Call]]:
    """((case, tokens, condition), call) of everything that a process measures."""
    if compiled:
        forward = torch.compile(model, mode="reduce-overhead", dynamic=False)
        yield (f"qwen3_8b_decode_{compiled}", compiled, "compiled"), parts.decode(model, compiled, forward)
        return
    for size in args.prefill:
        yield (f"qwen3_8b_prefill_{size}", size, "eager"), parts.prefill(model, size)
    condition = "graph" if torch.cuda.is_available() else "eager"
    for size in args.decode:
        yield (f"qwen3_8b_decode_{size}", size, condition), parts.captured(parts.decode(model, size))


def serve(
    connection: Connection, are_kernels_ready: Any, variant: str, compiled: int | None, args: argparse.Namespace
) -> None:
    """The program of a process: make the model and its calls, send their list, and then take samples of requested
    calls."""
    began = time.monotonic()
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = make_model(args.layers, TINY if args.tiny else SHAPE, variant, device)
    are_kernels_ready.wait()
    memory = parts.memory_of(model, nvfp4_linears(model), max([1, *args.prefill]))
    calls: dict[tuple, Call] = {}
    for what, call in calls_of(model, args, compiled):
        for _ in range(3):  # reduce-overhead records the second call, and replays from the third on
            logits = call()
        if not bool(logits.isfinite().all()):
            raise SystemExit(f"{what}, {variant}: logits are not finite")
        calls[what] = call
    print(
        f"{variant}, {f'compiled for {compiled}' if compiled else 'eager'}: ready in {time.monotonic() - began:.0f} s",
        flush=True,
    )
    connection.send((memory, list(calls)))
    while (what := connection.recv()) is not None:
        connection.send(parts.time_calls(calls[what], what[2]))


@dataclasses.dataclass
class Server:
    """A process of one variant, ready to time its calls."""

    variant: str
    connection: Connection
    memory: dict[str, int] = dataclasses.field(default_factory=dict)
    calls: list[tuple] = dataclasses.field(default_factory=list)

    def time(self, what: tuple) -> float:
        self.connection.send(what)
        return self.connection.recv()


def measure(servers: list[Server], samples: int, results: harness.Results) -> None:
    """Measure each call in turns, over processes that have the same calls."""
    for what in servers[0].calls:
        case, tokens, condition = what
        taken: dict[str, list[float]] = {server.variant: [] for server in servers}
        for i in range(samples * (1 if condition == "eager" else 4) + 1):
            for server in servers[i % len(servers) :] + servers[: i % len(servers)]:
                taken[server.variant].append(server.time(what))
        timings = {variant: harness.quantiles(times[1:]) for variant, times in taken.items()}
        base = timings["bf16"].p50
        for server in servers:
            timing = timings[server.variant]
            results.append(
                case, server.variant, timing, tokens=tokens, condition=condition, **server.memory, baseline="bf16",
                baseline_us=f"{base:.2f}", tokens_per_s=f"{tokens / timing.p50 * 1e6:.2f}",
            )  # fmt: skip
            print(
                f"{case:24}{condition:10}{server.variant:8}{timing.p50 / 1000:10.3f} ms ({timing.p20 / 1000:.3f} to "
                f"{timing.p80 / 1000:.3f}), {base / timing.p50:.3f} x the speed of bf16, "
                f"{server.memory['allocated_bytes'] / 1e9:.2f} GB",
                flush=True,
            )


def warm_up(args: argparse.Namespace) -> None:
    """Compile the kernels of one layer for all processes; all layers are alike."""
    pairs = []
    for variant in VARIANTS[1:]:
        pairs += [linear.as_pair() for linear in nvfp4_linears(make_model(1, SHAPE, variant, "cuda"))]
    batches = {*args.decode, *args.compiled}
    load().warm_up(pairs, tokens={*args.prefill, *batches, *(parts.CONTEXT * n for n in batches)}, formats=["bf16"])
    del pairs
    torch.cuda.empty_cache()


def start(args: argparse.Namespace, compiled: int | None, are_kernels_ready: Any) -> list[Server]:
    """Start a process for each variant."""
    servers = []
    for variant in VARIANTS:
        ours, theirs = CONTEXT.Pipe()
        given = theirs, are_kernels_ready, variant, compiled, args
        CONTEXT.Process(target=serve, args=given, daemon=True).start()
        theirs.close()  # otherwise, this process would wait for one that has failed
        servers.append(Server(variant, ours))
    return servers


def main() -> None:
    args = parts.parse_arguments(__doc__, FULL, FEW, ["compiled"])
    results = harness.Results(args.out, args.commit, merge=True, columns=parts.COLUMNS)
    are_kernels_ready = CONTEXT.Event()
    kinds = ([None] if args.prefill or args.decode else []) + args.compiled
    groups = [start(args, kind, are_kernels_ready) for kind in kinds[:2]]
    if torch.cuda.is_available() and not args.tiny:
        warm_up(args)
    are_kernels_ready.set()
    for i in range(len(kinds)):
        for server in groups[i]:
            server.memory, server.calls = server.connection.recv()
        measure(groups[i], args.samples, results)
        for server in groups[i]:
            server.connection.send(None)
        if i + 2 < len(kinds):
            groups.append(start(args, kinds[i + 2], are_kernels_ready))


if __name__ == "__main__":
    main()
