"""What model.py and dense_model.py share: random weights, calls of a model and their timing, and the command line.

prefill  one sequence, eager, launched ahead, logits of the last token.
decode   one token for each of some sequences after CONTEXT tokens, with a static cache.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import harness
import torch
from transformers import StaticCache

from finegrained_kernels.integrations.transformers import NVFP4Linear
from finegrained_kernels.integrations.transformers.schedule import Schedule

COLUMNS = [*harness.COLUMNS, "tokens_per_s", "scale_bytes", "allocated_bytes"]
CONTEXT = 256
SLEEP_CYCLES = {"eager": 60_000_000, "graph": 2_000_000, "compiled": 4_000_000}
"""How long the GPU sleeps before a sample, about 30, 1 and 2 ms, so that the sample is launched ahead."""
CALLS = {"eager": 1, "graph": 1, "compiled": 8}
"""Consecutive calls in a sample: compiled steps also take CPU time, and a generation waits for the longer of the
two."""
OUT = Path(__file__).parent / "results" / "model.csv"


def parse_arguments(doc: str | None, full: dict, few: dict, more: Iterable[str] = ()) -> argparse.Namespace:
    """The arguments of both benchmarks, and ``more`` lists of sizes; ``full`` has the defaults, ``few`` those of
    --tiny."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--samples", type=int, help="of prefill; decode takes four times as many")
    for name in ("prefill", "decode", *more):
        parser.add_argument(f"--{name}", type=int, nargs="*")
    parser.add_argument("--out", type=Path, help="other rows that it has are kept")
    parser.add_argument("--commit", help="for the CSV, where git does not know it")
    parser.add_argument("--tiny", action="store_true", help="needs --out: its rows are no results")
    parser.set_defaults(out=OUT, **full)
    if parser.parse_args().tiny:
        parser.set_defaults(**{**few, "out": None})
    args = parser.parse_args()
    if args.out is None:
        parser.error("--tiny needs --out")
    return args


def make_planes(shape: tuple[int, int, int], rate: float, device: str) -> torch.Tensor:
    """uint8 `[E, N, C]`: windows around 1.0, and a share `rate` of exceptions below them."""
    base = torch.randint(0x2C, 0x34, (*shape[:2], 1), device=device, dtype=torch.uint8)
    planes = base + torch.randint(0, 16, shape, device=device, dtype=torch.uint8)
    chosen = torch.rand(shape, device=device) < rate
    return torch.where(chosen, torch.randint(0, 0x28, shape, device=device, dtype=torch.uint8), planes)


def quantize_linears(model: torch.nn.Module, schedule: Schedule, rate: float, device: str, *, compressed: bool) -> None:
    """Replace the projections of a model on the meta device by random NVFP4 ones, W4A16, with dense or compressed
    scales.

    ``rate`` of the scales are exceptions.
    """
    for name, module in list(model.named_modules()):
        if type(module) is not torch.nn.Linear or not name.endswith("_proj"):
            continue
        rows, cols = module.out_features, module.in_features // 16
        packed = torch.empty(rows, cols * 8, dtype=torch.uint8, device=device)
        packed.view(torch.int64).random_()
        planes = make_planes((1, rows, cols), rate, device)
        if compressed:
            wire = schedule.bundle.compress_nvfp4_csf_scales(planes)
            planes = schedule.bundle.prepare_nvfp4_csf_scales(*wire, num_rows=rows, num_cols=cols)
        model.set_submodule(name, nvfp4_linear(module, schedule, packed, planes))


def nvfp4_linear(replaced: Any, schedule: Schedule, weight: torch.Tensor, scales: Any) -> NVFP4Linear:
    """A W4A16 layer with the shape of ``replaced``, and with scales as `NVFP4Linear.set_scales` takes them."""
    linear = NVFP4Linear(replaced, schedule)
    linear.activation_format = "bf16"
    linear.weight = torch.nn.Parameter(weight, requires_grad=False)
    linear.set_scales(scales)
    linear.weight_global = torch.tensor([0.005], device=weight.device)
    linear.prepare()
    return linear


def replace_linears(model: torch.nn.Module, old: list[NVFP4Linear], new: list[NVFP4Linear]) -> None:
    """Replace each layer of ``old`` by that of ``new``."""
    places = {id(module): name for name, module in model.named_modules()}
    for before, after in zip(old, new, strict=True):
        model.set_submodule(places[id(before)], after)


def make_the_rest(model: torch.nn.Module, device: str, norm: float) -> torch.nn.Module:
    """Make everything that is still on the meta device on ``device``: with random values, and ``norm`` in norms."""
    for name, module in model.named_modules():
        for own, parameter in module._parameters.items():
            if parameter is not None and parameter.is_meta:
                value = torch.empty_like(parameter, device=device).normal_(0, 0.02)
                value = value.fill_(norm) if "norm" in name else value
                module._parameters[own] = torch.nn.Parameter(value, requires_grad=False)
    model.model.rotary_emb = type(model.model.rotary_emb)(config=model.config).to(device)
    return model.eval()


def prefill(model: torch.nn.Module, length: int) -> Callable[[], torch.Tensor]:
    """A prefill with a cache, as at the beginning of a generation; without one, transformers would wait for the GPU."""
    ids = torch.arange(length, device=model.device).view(1, -1) * 7 % model.config.vocab_size

    def call() -> torch.Tensor:
        with torch.no_grad():
            return model(ids, use_cache=True, logits_to_keep=1).logits

    return call


def decode(model: torch.nn.Module, batch: int, forward: Callable | None = None) -> Callable[[], torch.Tensor]:
    """A decoding step, always the same one. All variants may share it, because it does not change the cache.

    ``forward`` is called instead of the model, for example the compiled model.
    """
    cache = StaticCache(config=model.config, max_cache_len=CONTEXT + 8)
    ids = torch.arange(batch * CONTEXT, device=model.device).view(batch, CONTEXT) * 7 % model.config.vocab_size
    with torch.no_grad():
        model(ids, past_key_values=cache, logits_to_keep=1)
    token, position = ids[:, :1].clone(), torch.full((batch, 1), CONTEXT, device=model.device)
    # The cache counts its tokens.
    counts = [tensor for layer in cache.layers for tensor in vars(layer).values() if is_count(tensor)]
    kept = [count.clone() for count in counts]

    def step() -> torch.Tensor:
        with torch.no_grad():
            if counts:
                torch._foreach_copy_(counts, kept)
            return (model if forward is None else forward)(token, position_ids=position, past_key_values=cache).logits

    return step


def is_count(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.numel() == 1 and not value.is_floating_point()


def captured(step: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
    """`step` as a CUDA graph, which keeps a reference to `step`, whose tensors it reads. On a CPU, `step` itself.

    Raises:
        RuntimeError: the step waits for the GPU.
    """
    if not torch.cuda.is_available():
        return step
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        logits = step()

    def replay(kept: object = step) -> torch.Tensor:
        graph.replay()
        return logits

    return replay


def time_calls(call: Callable[[], object], condition: str) -> float:
    """us of one call, as the mean of CALLS: on the GPU by events, on the CPU by the clock."""
    count = CALLS[condition]
    if not torch.cuda.is_available():
        begin = time.perf_counter()
        for _ in range(count):
            call()
        return (time.perf_counter() - begin) * 1e6 / count
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(SLEEP_CYCLES[condition])
    start.record()
    for _ in range(count):
        call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1000 / count


def memory_of(model: torch.nn.Module, layers: list, length: int) -> dict[str, int]:
    """Bytes of the scales of ``layers``, of everything between calls, and at the peak of a prefill of `length`
    tokens."""
    scales = sum(layer.scale_bytes for layer in layers)
    call = prefill(model, length)
    call()
    gc.collect()
    if model.device.type == "cpu":
        allocated = peak = sum(parameter.nbytes for parameter in model.parameters()) + scales
    else:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        allocated = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        call()
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated()
        torch.cuda.empty_cache()
    return {"scale_bytes": scales, "allocated_bytes": allocated, "bytes": peak}
