"""Do 48 layers run with scales that stay compressed, without any buffer of dense scales?

`python benchmarks/resident_scales.py [--out FILE] [--layers 48] [--tokens 1 64 4096] [--bundle build/torch-cuda]`, on
a GPU; `--tiny` runs small layers, on a CPU too, without the memory's figures. Scales of every layer are resident,
compressed, with the models' own share of exceptions; packed weights are one layer's, which all layers share. Per number
of tokens, every layer's experts run: gate_up, down, weighted sum, the same tokens for each layer.

Rows `fused` hold the time of all layers, in a CUDA graph, and as bytes what they read of scales; `peak` and `calls` the
peak of memory and how much of it is not resident; the others what is resident, and what dense scales would be.

It fails, at its end, if a call requests memory for anything but a result, indices or activations in another order, if
the peak is higher than these and what is resident, or if the first or last layer's result does not have the bits of
dense scales.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import time
from collections.abc import Iterator
from pathlib import Path

import harness
import torch
from cases import RESULTS, TOP_K, command_line, get_bundle, parse, pick_device
from scale_planes import PERCENT, make_planes, plain_scales

MIB = 1 << 20
ROUTING_BYTES = 4 * MIB
"""An upper bound for indices and what sorting takes."""

QWEN = {"experts": 512, "hidden": 2560, "intermediate": 640}
TINY = {"experts": 16, "hidden": 128, "intermediate": 64}


@dataclasses.dataclass
class Stack:
    """Packed weights of one layer, and every layer's compressed scales."""

    bundle: object
    gate_up: torch.Tensor
    down: torch.Tensor
    b_global: torch.Tensor
    scales: list[tuple]

    @property
    def compressed_bytes(self) -> int:
        return sum(scales.nbytes for layer in self.scales for scales in layer)

    @property
    def dense_bytes(self) -> list[int]:
        """Bytes of a layer's stacks of scales, if they were dense."""
        return [weights.numel() // 8 for weights in (self.gate_up, self.down)]

    @property
    def weight_bytes(self) -> int:
        return self.gate_up.nbytes + self.down.nbytes + self.b_global.nbytes

    def run(self, layer: tuple, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        bundle, experts = self.bundle, len(self.gate_up)
        start, gather, scatter = bundle.compute_grouped_scheduling(ids, experts, TOP_K)
        options = {"expert_start": start, "activation_format": "bf16", "b_global_scale": self.b_global}
        inner = bundle.matmul_grouped(x, self.gate_up, None, layer[0], gather_idx=gather, gate=True, **options)
        rows = bundle.matmul_grouped(inner, self.down, None, layer[1], scatter_idx=scatter, **options)
        return bundle.weighted_reduce(rows, ids, weights, experts)


def build_stack(bundle, layers: int, shape: dict[str, int], device: str, *, fill: bool = True) -> Stack:
    """Make a stack. With `fill=False`, it has no exceptions, and is only for compiling."""
    experts, hidden, intermediate = shape.values()
    torch.manual_seed(0)
    gate_up, down = (
        torch.randint(0, 256, (experts, rows, depth // 2), dtype=torch.uint8, device=device)
        for rows, depth in ((2 * intermediate, hidden), (hidden, intermediate))
    )
    scales = []
    for layer in range(layers):
        pair = []
        for weights, case in ((gate_up, "qwen_gate_up"), (down, "qwen_down")):
            rows, cols = weights.shape[1], weights.shape[2] // 8
            if not fill:
                pair.append(plain_scales(bundle, experts, rows, cols, device))
                continue
            wire = bundle.compress_nvfp4_csf_scales(
                make_planes(experts, rows, cols, PERCENT[case], seed=2 * layer + len(pair), device=device)
            )
            pair.append(bundle.prepare_nvfp4_csf_scales(*wire, num_rows=rows, num_cols=cols))
        scales.append(tuple(pair))
    return Stack(bundle, gate_up, down, torch.full((experts,), 1e-4, device=device), scales)


def result_faults(stack: Stack, layer: tuple, inputs: tuple, out: torch.Tensor) -> list[str]:
    """Compare `out` with the result of dense scales. It decodes scales, so call it only after memory was measured."""
    dense = stack.run(tuple(map(stack.bundle.decompress_nvfp4_csf_scales, layer)), *inputs)
    if not bool(dense.isfinite().all()) or not bool(dense.any()):
        return [f"{len(out)} tokens: the result of dense scales is not finite, or all zero"]
    wrong = int((dense != out).sum())
    return [f"{len(out)} tokens: {wrong} of {out.numel()} are not the result of dense scales"] if wrong else []


@contextlib.contextmanager
def noted_allocations() -> Iterator[list[int]]:
    """The sizes that were requested from the allocator meanwhile, filled in at the end."""
    sizes: list[int] = []
    torch.cuda.memory._record_memory_history("all", context=None, stacks="python", max_entries=1_000_000)
    try:
        yield sizes
        events = torch.cuda.memory._snapshot()["device_traces"][torch.cuda.current_device()]
        sizes += [event["size"] for event in events if event["action"] == "alloc"]
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)


def memory_faults(stack: Stack, tokens: int, sizes: list[int], peak: int) -> list[str]:
    """Compare sizes, and the peak above what is resident, with what a layer's calls need."""
    rows, hidden, intermediate = tokens * TOP_K, stack.down.shape[1], stack.down.shape[2] * 2
    inner, out, hidden_states = (2 * count for count in (rows * intermediate, rows * hidden, tokens * hidden))
    permuted = [inner // intermediate * -(-intermediate // 256) * 256, inner, hidden_states]  # rows in whole chunks
    known = [inner, out, hidden_states, *permuted]
    strangers = [size for size in sizes if size > ROUTING_BYTES and not any(0 <= size - own < 512 for own in known)]
    allowed = inner + out + permuted[0] + 2 * hidden_states + 2 * ROUTING_BYTES  # the results of two layers are kept
    faults = []
    if not sizes:
        faults.append("no allocation was noted, not even a result's")
    if strangers:
        faults.append(f"asked for {sorted(set(strangers))} bytes, which no result has")
    if set(stack.dense_bytes) & set(sizes):
        faults.append("as much as dense scales take was asked for")
    if peak > allowed:
        faults.append(f"{peak} bytes above what is resident, expected at most {allowed}")
    return [f"{tokens} tokens: {fault}" for fault in faults]


def make_inputs(tokens: int, shape: dict[str, int], device: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, shape["hidden"], generator=generator).bfloat16().to(device)
    ids = torch.rand(tokens, shape["experts"], generator=generator).topk(TOP_K).indices.int().to(device)
    return x, ids, torch.rand(tokens, TOP_K, generator=generator).to(device)


def run_all(stack: Stack, inputs: tuple) -> list[torch.Tensor]:
    """Run every layer on the same tokens. Returns the first and the last result."""
    first = last = None
    for layer in stack.scales:
        del last
        last = stack.run(layer, *inputs)
        first = last if first is None else first
    return [first, last]


def run_tokens(stack: Stack, tokens: int, shape: dict[str, int], case: str, results: harness.Results) -> list[str]:
    """Run and measure all layers for this many tokens. Returns what went wrong."""
    inputs, faults = make_inputs(tokens, shape, stack.gate_up.device.type), []
    if not torch.cuda.is_available():
        outputs = run_all(stack, inputs)
    else:
        stack.run(stack.scales[0], *inputs)  # compiles
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        resident = torch.cuda.memory_stats()["requested_bytes.all.current"]
        with noted_allocations() as sizes:
            outputs = run_all(stack, inputs)
            torch.cuda.synchronize()
        peak = torch.cuda.memory_stats()["requested_bytes.all.peak"]
        print(
            f"{tokens:5} tokens: a peak of {peak / MIB:.2f} MiB = "
            f"{stack.compressed_bytes / MIB:.2f} of compressed scales + {stack.weight_bytes / MIB:.2f} of weights + "
            f"{(resident - stack.compressed_bytes - stack.weight_bytes) / MIB:.2f} of inputs + "
            f"{(peak - resident) / MIB:.2f} for calls, the largest of their {len(sizes)} allocations "
            f"{max(sizes, default=0) / MIB:.2f}; max_memory_allocated {torch.cuda.max_memory_allocated() / MIB:.2f}",
            flush=True,
        )
        results.append(case, "peak", tokens=tokens, bytes=peak)
        results.append(case, "calls", tokens=tokens, bytes=peak - resident)
        faults += memory_faults(stack, tokens, sizes, peak - resident)
    for layer, out in zip((stack.scales[0], stack.scales[-1]), outputs, strict=True):
        faults += result_faults(stack, layer, inputs, out)
    del outputs
    call = functools.partial(run_all, stack, inputs)
    timing = harness.time_in_turns({"fused": call}, samples=harness.SAMPLES // 3, flush=False)["fused"]
    active = len(inputs[1].unique()) / len(stack.gate_up)
    read = round(active * stack.compressed_bytes)
    results.append(case, "fused", timing, tokens=tokens, condition="warm", bytes=read)
    print(f"{tokens:5} tokens: all layers in {timing.p50 / 1000:.3f} ms, fused", flush=True)
    return faults


def launch_once(directory: Path | None, tokens: int, is_dense: bool) -> None:
    """Launch one layer in a separate process, to fill the compiler's cache."""
    torch.set_num_threads(1)
    stack = build_stack(get_bundle(directory), 1, QWEN, "cuda", fill=False)
    (layer,) = stack.scales
    if is_dense:
        layer = tuple(map(stack.bundle.decompress_nvfp4_csf_scales, layer))
    stack.run(layer, *make_inputs(tokens, QWEN, "cuda"))
    torch.cuda.synchronize()
    del stack, layer
    torch.cuda.empty_cache()


def main() -> None:
    parser = command_line(__doc__, RESULTS / "resident_scales.csv")
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 64, 4096])
    arguments = parse(parser)
    device, shape = pick_device(), TINY if arguments.tiny else QWEN
    case = f"{'tiny' if arguments.tiny else 'qwen'}_stack_{arguments.layers}"
    began = time.monotonic()
    results = harness.Results(arguments.out, arguments.commit)
    if not arguments.tiny:
        jobs = itertools.product((arguments.bundle,), arguments.tokens, (False, True))
        harness.compile_ahead(launch_once, jobs)
    stack = build_stack(get_bundle(arguments.bundle), arguments.layers, shape, device)
    dense = arguments.layers * sum(stack.dense_bytes)
    print(
        f"{arguments.layers} layers: {stack.compressed_bytes / 1e9:.3f} GB of compressed scales resident, "
        f"{dense / 1e9:.3f} GB dense, built in {time.monotonic() - began:.0f} s",
        flush=True,
    )
    sizes = {"scales_compressed": stack.compressed_bytes, "scales_dense": dense, "weights": stack.weight_bytes}
    for variant, num_bytes in sizes.items():
        results.append(case, variant, bytes=num_bytes)
    if device == "cuda":
        torch.cuda.empty_cache()
    faults = [fault for tokens in arguments.tokens for fault in run_tokens(stack, tokens, shape, case, results)]
    if faults:
        raise SystemExit("\n".join(faults))
    print(f"every layer ran, outputs right, {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
