"""What do compressed scales cost and save in a whole model?

`python benchmarks/model.py [--layers 24] [--out FILE]` on a GPU, with `LOCAL_KERNELS` naming a built bundle;
`--tiny --out FILE` runs the same code on small shapes, on a CPU too, to see that it runs. Needs the extra
[transformers].

The model is a Qwen3-Next with real expert shapes, 512 experts of 640 x 2560, top 10, and a shared expert. It is made on
the GPU, with random packed weights, and random scale planes with the exception rates of real ones, 1.02 % (gate, up)
and 0.22 % (down). All layers have full attention: without its optional kernels, transformers runs linear attention in
plain torch, so slowly that nothing else would show.

prefill  one sequence, eager, launched ahead, logits of the last token.
decode   one token for each of 1, 8 and 64 sequences after a context of CONTEXT tokens, static cache, CUDA graph.

First, memory is measured: the same model as dense, staged, prefetched and fused, with nothing else on the GPU; `bytes`
is the peak of the longest prefill. Then time: one model with both forms of scales and one copy of all weights runs the
four in turns, so that a drift of the clocks changes no ratio. The logits of all four are compared, bit for bit, before
they are timed. Rows have three more columns: tokens per second, bytes of scales, and all bytes allocated between calls.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable
from types import SimpleNamespace

import harness
import model_parts as parts
import torch
from moe_cases import QWEN_NEXT, compile_one
from transformers import AutoConfig, AutoModelForCausalLM

from finegrained_kernels.integrations.transformers import (
    NVFP4ExpertsModule,
    nvfp4_experts,
    nvfp4_linears,
    set_scale_strategy,
)
from finegrained_kernels.integrations.transformers.schedule import Schedule

RATES = {"gate_up": 0.0102, "down": 0.0022}
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
FEW = {"layers": 2, "samples": 2, "prefill": [64, 256], "decode": [1, 8]}
TINY = {"hidden_size": 128, "moe_intermediate_size": 64, "num_experts": 8, "num_experts_per_tok": 2, "vocab_size": 256}


def make_model(num_layers: int, shape: dict[str, int], device: str) -> torch.nn.Module:
    """Make the model on the meta device, and then its experts and everything else on ``device``."""
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
    parts.quantize_linears(model.model, schedule, RATES["gate_up"], device, compressed=True)
    parts.make_the_rest(model, device, norm=0)
    schedule.prepare()
    return model


def fill_experts(experts: NVFP4ExpertsModule, bundle, device: str) -> None:
    for parameter in (experts.gate_up_proj, experts.down_proj):
        parameter.view(torch.int64).random_()
    for name, parameter in (("gate_up", experts.gate_up_proj), ("down", experts.down_proj)):
        num_experts, rows, packed = parameter.shape
        planes = parts.make_planes((num_experts, rows, packed // 8), RATES[name], device)
        wire = bundle.compress_nvfp4_csf_scales(planes)
        scales = bundle.prepare_nvfp4_csf_scales(*wire, num_rows=rows, num_cols=packed // 8)
        experts.set_scales(name, scales)
        columns = (num_experts, 2) if name == "gate_up" else (num_experts,)
        experts.register_buffer(f"{name}_global", torch.full(columns, 0.005, device=device), persistent=False)


def make_dense(model: torch.nn.Module) -> list:
    """Decode all scales permanently, one layer at a time. Returns each layer's compressed scales, on the CPU."""
    experts, kept = nvfp4_experts(model), []
    schedule = experts[0].schedule
    for layer in experts:
        kept.append({name: layer.scales(name).to("cpu") for name in ("gate_up", "down")})
        for name in ("gate_up", "down"):
            dense = schedule.bundle.decompress_nvfp4_csf_scales(layer.scales(name)).view(torch.uint8)
            layer.experts = None
            for field in ("bases", "codes", "exceptions", "exception_offsets"):
                del layer._buffers[f"{name}_{field}"]
            layer.set_scales(name, dense)
    for linear in nvfp4_linears(model):
        kept.append(linear.read_scales().to("cpu"))
        dense = schedule.bundle.decompress_nvfp4_csf_scales(linear.read_scales()).view(torch.uint8)
        parts.replace_linears(model, [linear], [parts.nvfp4_linear(linear, schedule, linear.weight, dense)])
    schedule.switch("dense", prefetch=False)
    return kept


class Switch:
    """`switch(variant)` makes the model run that variant from now on. Both forms of scales are resident, so nothing is
    made."""

    def __init__(self, model: torch.nn.Module, compressed: list) -> None:
        self.model, self.layers = model, nvfp4_experts(model)
        self.schedule = self.layers[0].schedule
        self.dense = [layer.experts for layer in self.layers]
        scratch = None
        self.compressed = []
        for experts, scales in zip(self.dense, compressed, strict=False):
            scales = {f"{name}_scales": part.to(experts.gate_up.device) for name, part in scales.items()}
            found = dataclasses.replace(experts, **scales)
            scratch = found.gate_up.new_empty(found.scratch_size) if scratch is None else scratch
            self.compressed.append(dataclasses.replace(found, scratch=scratch))
        linears, scales = nvfp4_linears(model), compressed[len(self.layers) :]
        twins = [
            parts.nvfp4_linear(linear, self.schedule, linear.weight, own.to(linear.device))
            for linear, own in zip(linears, scales, strict=True)
        ]
        self.linears = {"dense": linears, "compressed": twins}
        self.form = "dense"

    def __call__(self, variant: str) -> None:
        self.schedule.strategy, self.schedule.prefetch = VARIANTS[variant]
        form = "dense" if variant == "dense" else "compressed"
        for layer, experts in zip(self.layers, self.dense if form == "dense" else self.compressed, strict=True):
            layer.experts = experts
        if form != self.form:
            parts.replace_linears(self.model, self.linears[self.form], self.linears[form])
            self.form = form


def measured_memory(model: torch.nn.Module, variant: str, length: int) -> dict[str, int]:
    memory = parts.memory_of(model, [*nvfp4_experts(model), *nvfp4_linears(model)], length)
    print(f"{variant:12}" + ", ".join(f"{name} {count / 1e9:.3f} GB" for name, count in memory.items()), flush=True)
    return memory


class Case:
    """One call of the model, whose variants are timed in turns."""

    def __init__(self, model: torch.nn.Module, switch: Switch, phase: str, size: int) -> None:
        self.switch, self.name, self.tokens = switch, f"qwen3_next_{phase}_{size}", size
        switch("dense")
        call = (parts.prefill if phase == "prefill" else parts.decode)(model, size)
        self.calls = self.eager = dict.fromkeys(VARIANTS, call)
        self.condition = "eager"
        if phase == "decode" and torch.cuda.is_available():
            self.calls = {variant: self.with_variant(variant, parts.captured, call) for variant in VARIANTS}
            self.condition = "graph"

    def with_variant(self, variant: str, function: Callable, *arguments):
        self.switch(variant)
        return function(*arguments)

    def check(self) -> list[str]:
        """What differs from dense, or from run to run; also tells whether graphs differ, or what was captured."""
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
                taken[name].append(self.with_variant(name, parts.time_calls, self.calls[name], self.condition))
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
            f"{case.name:26}{variant:12}{timing.p50 / 1000:10.3f} ms ({timing.p20 / 1000:.3f} to "
            f"{timing.p80 / 1000:.3f}) {speed:10.0f} tokens/s, {timing.p50 / timings['dense'].p50:.4f} of dense",
            flush=True,
        )


def warm_up_linears(model: torch.nn.Module, counts: list[int]) -> None:
    """Compile the kernels of the linear layers; for experts, compile_ahead does it."""
    pairs = [linear.as_pair() for linear in nvfp4_linears(model)]
    pairs += [
        (weight, torch.empty(tuple(scales.shape)[1:], dtype=torch.uint8, device="meta")) for weight, scales in pairs
    ]
    nvfp4_linears(model)[0].schedule.bundle.warm_up(pairs, tokens=counts, formats=["bf16"])


def main() -> None:
    args = parts.parse_arguments(__doc__, FULL, FEW)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    begin = time.perf_counter()
    # cuDNN's results differ from call to call, and logits are compared bit for bit.
    torch.backends.cuda.enable_cudnn_sdp(False)
    if device == "cuda" and not args.tiny:
        counts = sorted({*args.prefill, *args.decode, *(parts.CONTEXT * batch for batch in args.decode)})
        jobs = itertools.product(("qwen_next",), ("w4a16",), counts, (None,), ("dense", "fused", "staged"))
        harness.compile_ahead(compile_one, jobs)
    torch.manual_seed(0)
    model = make_model(args.layers, TINY if args.tiny else SHAPE, device)
    print(f"model of {args.layers} layers made, {time.perf_counter() - begin:.1f} s", flush=True)
    if device == "cuda" and not args.tiny:
        warm_up_linears(model, counts)
    longest, memory = max([1, *args.prefill]), {}
    for variant, (strategy, prefetch) in VARIANTS.items():
        if strategy != "dense":
            set_scale_strategy(model, strategy, prefetch=prefetch)
            memory[variant] = measured_memory(model, variant, longest)
    compressed = make_dense(model)
    memory["dense"] = measured_memory(model, "dense", longest)
    switch = Switch(model, compressed)
    results = harness.Results(args.out, args.commit, merge=True, columns=parts.COLUMNS)
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
