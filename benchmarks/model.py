"""What do compressed scales cost and save in a whole model?

`python benchmarks/model.py [--layers 24] [--out FILE]` on a GPU, with `LOCAL_KERNELS` naming a built bundle;
`--tiny --out FILE` runs the same code on small shapes, on a CPU too, to see that it runs. Needs the extra
[transformers].

A Qwen3-Next with real expert shapes, 512 experts of 640 x 2560, top 10, and a shared expert, made on the GPU: random
packed weights, and random scale planes with the exception rates of real ones, 1.02 % (gate, up) and 0.22 % (down). All
layers have full attention: transformers runs linear attention without its optional kernels in plain torch, so slowly
that nothing else would show.

prefill  one sequence, eager, launched ahead, logits of the last token.
decode   one token for each of 1, 8 and 64 sequences after a context of CONTEXT tokens, static cache, CUDA graph.

First memory: the same model as dense, staged, prefetched and fused, with nothing else on the GPU; `bytes` is the peak
of the longest prefill. Then time: one model with both forms of scales and one copy of all weights, the four in turns,
so that a drift of the clocks changes no ratio. Logits of all four are compared, bit for bit, before they are timed.
Rows have three columns more: tokens a second, bytes that scales take, and all bytes allocated between calls.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import itertools
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import harness
import torch
from moe_cases import QWEN_NEXT, compile_one
from transformers import AutoConfig, AutoModelForCausalLM, StaticCache

from finegrained_kernels.integrations.transformers import NVFP4ExpertsModule, nvfp4_experts, set_scale_strategy
from finegrained_kernels.integrations.transformers.schedule import Schedule

COLUMNS = [*harness.COLUMNS, "tokens_per_s", "scale_bytes", "allocated_bytes"]
RATES = {"gate_up": 0.0102, "down": 0.0022}
CONTEXT = 256
SLEEP_CYCLES = {"eager": 60_000_000, "graph": 2_000_000}
"""About 30 and 1 ms that the GPU waits before a call, so that it is launched ahead."""
VARIANTS = {
    "dense": ("dense", False),
    "staged": ("staged", False),
    "prefetched": ("staged", True),
    "fused": ("fused", False),
}
SHAPE = {
    "hidden_size": QWEN_NEXT.hidden,
    "moe_intermediate_size": QWEN_NEXT.intermediate,
    "num_experts": QWEN_NEXT.num_experts,
    "num_experts_per_tok": QWEN_NEXT.top_k,
}
FULL = {"layers": 24, "samples": 12, "prefill": [2048, 8192], "decode": [1, 8, 64]}
FULL["out"] = Path(__file__).parent / "results" / "model.csv"
FEW = {"layers": 2, "samples": 2, "prefill": [64, 256], "decode": [1, 8], "out": None}
TINY = {"hidden_size": 128, "moe_intermediate_size": 64, "num_experts": 8, "num_experts_per_tok": 2, "vocab_size": 256}


def make_planes(shape: tuple[int, int, int], rate: float, device: str) -> torch.Tensor:
    """uint8 `[E, N, C]`: windows around 1.0, and a share of exceptions below them."""
    base = torch.randint(0x2C, 0x34, (*shape[:2], 1), device=device, dtype=torch.uint8)
    planes = base + torch.randint(0, 16, shape, device=device, dtype=torch.uint8)
    chosen = torch.rand(shape, device=device) < rate
    return torch.where(chosen, torch.randint(0, 0x28, shape, device=device, dtype=torch.uint8), planes)


def make_model(num_layers: int, shape: dict[str, int], device: str) -> torch.nn.Module:
    """The model on the meta device, then its experts and all else made on ``device``."""
    config = AutoConfig.for_model(
        "qwen3_next",
        **shape,
        num_hidden_layers=num_layers,
        layer_types=["full_attention"] * num_layers,
        shared_expert_intermediate_size=shape["moe_intermediate_size"],
        num_attention_heads=16,
        num_key_value_heads=2,
        head_dim=shape["hidden_size"] // 16 if shape is TINY else 256,
        max_position_embeddings=16384,
        dtype=torch.bfloat16,
    )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    schedule = Schedule("staged", prefetch=False)
    plan = SimpleNamespace(
        num_experts=config.num_experts,
        hidden_size=config.hidden_size,
        intermediate_size=config.moe_intermediate_size,
    )
    for layer in model.model.layers:
        with torch.device(device):
            experts = NVFP4ExpertsModule(config, plan, schedule, layer.mlp.experts.act_fn)
        experts.activation_format = "bf16"
        fill_experts(experts, schedule.bundle, device)
        layer.mlp.experts = experts
        schedule.layers.append(experts)
    for name, module in model.named_modules():
        for own, parameter in module._parameters.items():
            if parameter is not None and parameter.is_meta:
                value = torch.empty_like(parameter, device=device).normal_(0, 0.02)
                value = value.zero_() if "norm" in name else value
                module._parameters[own] = torch.nn.Parameter(value, requires_grad=False)
    model.model.rotary_emb = type(model.model.rotary_emb)(config=config).to(device)
    schedule.prepare()
    return model.eval()


def fill_experts(experts: NVFP4ExpertsModule, bundle, device: str) -> None:
    for parameter in (experts.gate_up_proj, experts.down_proj):
        parameter.view(torch.int64).random_()
    for name, parameter in (("gate_up", experts.gate_up_proj), ("down", experts.down_proj)):
        num_experts, rows, packed = parameter.shape
        planes = make_planes((num_experts, rows, packed // 8), RATES[name], device)
        wire = bundle.compress_nvfp4_csf_scales(planes)
        scales = bundle.prepare_nvfp4_csf_scales(*wire, num_rows=rows, num_cols=packed // 8)
        experts.set_scales(name, scales)
        columns = (num_experts, 2) if name == "gate_up" else (num_experts,)
        experts.register_buffer(f"{name}_global", torch.full(columns, 0.005, device=device), persistent=False)


def make_dense(model: torch.nn.Module) -> list[dict]:
    """Decode all scales for good, one layer at a time. Returns each layer's compressed ones, on the CPU."""
    layers, kept = nvfp4_experts(model), []
    schedule = layers[0].schedule
    for layer in layers:
        kept.append({name: layer.scales(name).to("cpu") for name in ("gate_up", "down")})
        for name in ("gate_up", "down"):
            dense = schedule.bundle.decompress_nvfp4_csf_scales(layer.scales(name)).view(torch.uint8)
            layer.experts = None
            for field in ("bases", "codes", "exceptions", "exception_offsets"):
                del layer._buffers[f"{name}_{field}"]
            layer.set_scales(name, dense)
    schedule.switch("dense", prefetch=False)
    return kept


class Switch:
    """`switch(variant)`: the model runs so from now on. Both forms of scales are resident, and nothing is made."""

    def __init__(self, model: torch.nn.Module, compressed: list[dict]) -> None:
        self.layers = nvfp4_experts(model)
        self.schedule = self.layers[0].schedule
        self.dense = [layer.experts for layer in self.layers]
        scratch = None
        self.compressed = []
        for experts, scales in zip(self.dense, compressed, strict=True):
            scales = {f"{name}_scales": part.to(experts.gate_up.device) for name, part in scales.items()}
            found = dataclasses.replace(experts, **scales)
            scratch = found.gate_up.new_empty(found.scratch_size) if scratch is None else scratch
            self.compressed.append(dataclasses.replace(found, scratch=scratch))

    def __call__(self, variant: str) -> None:
        self.schedule.strategy, self.schedule.prefetch = VARIANTS[variant]
        for layer, experts in zip(self.layers, self.dense if variant == "dense" else self.compressed, strict=True):
            layer.experts = experts


def time_call(call: Callable[[], object], condition: str) -> float:
    """us of one call, "eager" or "graph": on the GPU by events, on the CPU by the clock."""
    if not torch.cuda.is_available():
        begin = time.perf_counter()
        call()
        return (time.perf_counter() - begin) * 1e6
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(SLEEP_CYCLES[condition])
    start.record()
    call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1000


def prefill(model: torch.nn.Module, length: int) -> Callable[[], torch.Tensor]:
    """With a cache, as a generation begins; without one, transformers would wait for the GPU."""
    ids = torch.arange(length, device=model.device).view(1, -1) * 7 % model.config.vocab_size

    def call() -> torch.Tensor:
        with torch.no_grad():
            return model(ids, use_cache=True, logits_to_keep=1).logits

    return call


def decode(model: torch.nn.Module, batch: int, forward: Callable | None = None) -> Callable[[], torch.Tensor]:
    """A step, the same one every time: all variants may share it, as it leaves the cache as it was.

    ``forward`` takes the model's place in it, such as the model compiled.
    """
    cache = StaticCache(config=model.config, max_cache_len=CONTEXT + 8)
    ids = torch.arange(batch * CONTEXT, device=model.device).view(batch, CONTEXT) * 7 % model.config.vocab_size
    with torch.no_grad():
        model(ids, past_key_values=cache, logits_to_keep=1)
    token, position = ids[:, :1].clone(), torch.full((batch, 1), CONTEXT, device=model.device)
    # The cache counts its own tokens.
    counts = [tensor for layer in cache.layers for tensor in vars(layer).values() if is_count(tensor)]
    kept = [count.clone() for count in counts]

    def step() -> torch.Tensor:
        with torch.no_grad():
            for count, value in zip(counts, kept, strict=True):
                count.copy_(value)
            return (forward or model)(token, position_ids=position, past_key_values=cache).logits

    return step


def is_count(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.numel() == 1 and not value.is_floating_point()


def captured(model: torch.nn.Module, step: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor] | None:
    """`step` as a CUDA graph; None where that cannot be."""
    if not torch.cuda.is_available():
        return None
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            logits = step()
    except RuntimeError as error:  # a transformers that waits for the GPU in a step: said in the row
        print(f"no CUDA graph: {error}".splitlines()[0], flush=True)
        nvfp4_experts(model)[0].schedule.changed()
        return None

    def replay() -> torch.Tensor:
        graph.replay()
        return logits

    return replay


def memory_of(model: torch.nn.Module, variant: str, length: int) -> dict[str, int]:
    """Bytes of scales, of all between calls, and at the peak of a prefill of `length` tokens."""
    scales = sum(layer.scale_bytes for layer in nvfp4_experts(model))
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
    gb = [f"{name} {count / 1e9:.3f} GB" for name, count in (("scales", scales), ("all", allocated), ("peak", peak))]
    print(f"{variant:12}{', '.join(gb)}", flush=True)
    return {"scale_bytes": scales, "allocated_bytes": allocated, "bytes": peak}


class Case:
    """One call of the model, by variant, timed in turns."""

    def __init__(self, model: torch.nn.Module, switch: Switch, phase: str, size: int) -> None:
        self.switch, self.name, self.tokens = switch, f"{phase}_{size}", size
        switch("dense")
        call = (prefill if phase == "prefill" else decode)(model, size)
        self.calls = self.eager = dict.fromkeys(VARIANTS, call)  # kept: the graphs use the cache that it holds
        self.condition = "eager"
        if phase == "decode":
            graphs = {variant: self.with_variant(variant, captured, model, call) for variant in VARIANTS}
            if all(graphs.values()):
                self.calls, self.condition = graphs, "graph"

    def with_variant(self, variant: str, function: Callable, *arguments):
        self.switch(variant)
        return function(*arguments)

    def check(self) -> list[str]:
        """What differs from dense, or from itself: also whether it is the graphs or what was captured."""
        kinds = {self.condition: self.calls, "eager": self.eager}
        found = {
            (kind, name): [self.with_variant(name, call).clone() for _ in range(2)]
            for kind, calls in kinds.items()
            for name, call in calls.items()
        }
        expected = found["eager", "dense"][0]
        if not bool(expected.isfinite().all()):
            return [f"{self.name}: logits are not finite"]
        faults = []
        for (kind, name), (first, second) in found.items():
            if not torch.equal(first, second):
                faults.append(f"{self.name}: {kind} {name} differs from call to call")
            if not torch.equal(first, expected):
                off = (first.float() - expected.float()).abs().max()
                faults.append(f"{self.name}: {kind} {name} differs from eager dense, by {off:.3g} at most")
        return faults

    def measure(self, samples: int) -> dict[str, harness.Timing]:
        names, taken = list(VARIANTS), {name: [] for name in VARIANTS}
        for i in range(samples + 1):
            first = i % len(names)
            for name in names[first:] + names[:first]:
                taken[name].append(self.with_variant(name, time_call, self.calls[name], self.condition))
        return {name: harness.quantiles(times[1:]) for name, times in taken.items()}


def bench_case(case: Case, samples: int, memory: dict[str, dict], results: harness.Results) -> None:
    timings = case.measure(samples)
    for variant, timing in timings.items():
        speed = case.tokens / timing.p50 * 1e6
        results.append(
            case.name, variant, timing, tokens=case.tokens, condition=case.condition, **memory[variant],
            baseline="dense", baseline_us=f"{timings['dense'].p50:.2f}", tokens_per_s=f"{speed:.2f}",
        )  # fmt: skip
        print(
            f"{case.name:14}{variant:12}{timing.p50 / 1000:10.3f} ms ({timing.p20 / 1000:.3f} to "
            f"{timing.p80 / 1000:.3f}) {speed:10.0f} tokens/s, {timing.p50 / timings['dense'].p50:.4f} of dense",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--samples", type=int, help="of prefill; decode takes four times as many")
    parser.add_argument("--prefill", type=int, nargs="*")
    parser.add_argument("--decode", type=int, nargs="*")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--commit", help="for the CSV, where git does not know it")
    parser.add_argument("--tiny", action="store_true", help="needs --out: its rows are no results")
    parser.set_defaults(**FULL)
    if parser.parse_args().tiny:
        parser.set_defaults(**FEW)
    args = parser.parse_args()
    if args.out is None:
        parser.error("--tiny needs --out")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    begin = time.perf_counter()
    torch.backends.cuda.enable_cudnn_sdp(False)  # it differs from call to call, and logits are compared bit for bit
    if device == "cuda" and not args.tiny:
        counts = sorted({*args.prefill, *args.decode, *(CONTEXT * batch for batch in args.decode)})
        jobs = itertools.product(("qwen_next",), ("w4a16",), counts, (None,), ("dense", "fused", "staged"))
        harness.compile_ahead(compile_one, jobs)
    torch.manual_seed(0)
    model = make_model(args.layers, TINY if args.tiny else SHAPE, device)
    print(f"model of {args.layers} layers made, {time.perf_counter() - begin:.1f} s", flush=True)
    longest, memory = max([1, *args.prefill]), {}
    for variant, (strategy, prefetch) in VARIANTS.items():
        if strategy != "dense":
            set_scale_strategy(model, strategy, prefetch=prefetch)
            memory[variant] = memory_of(model, variant, longest)
    compressed = make_dense(model)
    memory["dense"] = memory_of(model, "dense", longest)
    switch, results = Switch(model, compressed), harness.Results(args.out, args.commit, columns=COLUMNS)
    faults = []
    for phase, size in [("prefill", n) for n in args.prefill] + [("decode", n) for n in args.decode]:
        case = Case(model, switch, phase, size)
        faults += case.check()
        bench_case(case, args.samples * (4 if phase == "decode" else 1), memory, results)
    print(f"{time.perf_counter() - begin:.0f} s in all, {args.out}")
    if faults:
        raise SystemExit("\n".join(faults))


if __name__ == "__main__":
    main()
