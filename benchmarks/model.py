"""What do compressed scales cost and save in a whole model?

`python benchmarks/model.py [--layers 24] [--out FILE]` on a GPU, with `LOCAL_KERNELS` naming a built bundle;
`--tiny` runs the same code on small shapes, on a CPU too, to see that it runs. Needs the extra [transformers].

A Qwen3-Next with real expert shapes, 512 experts of 640 x 2560, top 10, and a shared expert, made on the GPU: random
packed weights, and random scale planes with the exception rates of real ones, 1.02 % (gate, up) and 0.22 % (down). All
layers have full attention: transformers runs linear attention without its optional kernels in plain torch, so slowly
that nothing else would show.

prefill  one sequence, eager, logits of the last token.
decode   one token for each of 1, 8 and 64 sequences after a context of CONTEXT tokens, static cache, CUDA graph.

dense, staged, prefetched and fused run the same model, one after the other, and their logits are compared: bit for bit.
Rows have three columns more: tokens a second, bytes that scales take, and all bytes allocated.
"""

from __future__ import annotations

import argparse
import csv
import gc
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import harness
import torch
from transformers import AutoConfig, AutoModelForCausalLM, StaticCache

from finegrained_kernels.integrations.transformers import NVFP4ExpertsModule, nvfp4_experts, set_scale_strategy
from finegrained_kernels.integrations.transformers.schedule import Schedule

COLUMNS = [*harness.COLUMNS, "tokens_per_s", "scale_bytes", "allocated_bytes"]
RATES = {"gate_up": 0.0102, "down": 0.0022}
CONTEXT = 256
VARIANTS = {"staged": ("staged", False), "prefetched": ("staged", True), "fused": ("fused", False)}
SHAPE = {"hidden_size": 2560, "moe_intermediate_size": 640, "num_experts": 512, "num_experts_per_tok": 10}
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


def make_dense(model: torch.nn.Module) -> None:
    """Decode all scales for good, one layer at a time."""
    layers = nvfp4_experts(model)
    schedule = layers[0].schedule
    for layer in layers:
        for name in ("gate_up", "down"):
            dense = schedule.bundle.decompress_nvfp4_csf_scales(layer.scales(name)).view(torch.uint8)
            layer.experts = None
            for field in ("bases", "codes", "exceptions", "exception_offsets"):
                del layer._buffers[f"{name}_{field}"]
            layer.set_scales(name, dense)
    schedule.switch("dense", prefetch=False)


class Clock:
    """Times calls on the GPU by events, on the CPU by the clock."""

    def __init__(self, device: str, samples: int) -> None:
        self.device, self.samples = device, samples

    def __call__(self, call: Callable[[], object]) -> harness.Timing:
        times = []
        for _ in range(self.samples + 1):
            if self.device == "cpu":
                begin = time.perf_counter()
                call()
                times.append((time.perf_counter() - begin) * 1e6)
                continue
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            call()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) * 1000)
        return harness.quantiles(times[1:])


def prefill(model: torch.nn.Module, length: int) -> tuple[Callable[[], torch.Tensor], str]:
    ids = torch.arange(length, device=model.device).view(1, -1) * 7 % model.config.vocab_size

    def call() -> torch.Tensor:
        with torch.no_grad():
            return model(ids, use_cache=False, logits_to_keep=1).logits

    return call, "eager"


def decode(model: torch.nn.Module, batch: int) -> tuple[Callable[[], torch.Tensor], str]:
    """A step, as a CUDA graph where that can be."""
    cache = StaticCache(config=model.config, max_cache_len=CONTEXT + 8)
    ids = torch.arange(batch * CONTEXT, device=model.device).view(batch, CONTEXT) * 7 % model.config.vocab_size
    with torch.no_grad():
        model(ids, past_key_values=cache, logits_to_keep=1)
    token, position = ids[:, :1].clone(), torch.full((batch, 1), CONTEXT, device=model.device)
    # The cache counts its own tokens: every step is made the same one again.
    counts = [tensor for layer in cache.layers for tensor in vars(layer).values() if is_count(tensor)]
    kept = [count.clone() for count in counts]

    def step() -> torch.Tensor:
        with torch.no_grad():
            for count, value in zip(counts, kept, strict=True):
                count.copy_(value)
            return model(token, position_ids=position, past_key_values=cache).logits

    if model.device.type == "cpu":
        return step, "eager"
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            logits = step()
    except RuntimeError as error:  # a transformers that waits for the GPU in a step: said in the row
        print(f"no CUDA graph: {error}".splitlines()[0], flush=True)
        return step, "eager"

    def replay() -> torch.Tensor:
        graph.replay()
        return logits

    return replay, "graph"


def is_count(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.numel() == 1 and not value.is_floating_point()


def measure(
    model: torch.nn.Module, variant: str, args: argparse.Namespace, expected: dict[str, torch.Tensor]
) -> list[dict]:
    layers = nvfp4_experts(model)
    device = model.device.type
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
    scales = sum(layer.scale_bytes for layer in layers)
    allocated = torch.cuda.memory_allocated() if device == "cuda" else sum(p.nbytes for p in model.parameters())
    clock = Clock(device, args.samples)
    rows = []
    cases = [(f"prefill_{n}", n, prefill, n) for n in args.prefill] + [
        (f"decode_{n}", n, decode, n) for n in args.decode
    ]
    for case, tokens, make, size in cases:
        call, condition = make(model, size)
        logits = call().clone()
        if case in expected and not torch.equal(logits, expected[case]):
            raise SystemExit(f"{case}: {variant} differs from {next(iter(VARIANTS))}")
        expected.setdefault(case, logits)
        timing = clock(call)
        row = {"case": case, "variant": variant, "tokens": tokens, "condition": condition}
        row |= {"us_p20": timing.p20, "us_p50": timing.p50, "us_p80": timing.p80}
        row |= {"tokens_per_s": tokens / timing.p50 * 1e6, "scale_bytes": scales, "allocated_bytes": allocated}
        rows.append(row)
        print(f"{case:14}{variant:12}{timing.p50 / 1000:10.2f} ms {row['tokens_per_s']:10.0f} tokens/s", flush=True)
        del call, logits
    print(f"{variant:12} scales {scales / 1e9:.3f} GB, all {allocated / 1e9:.2f} GB", flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--prefill", type=int, nargs="*", default=[2048, 8192])
    parser.add_argument("--decode", type=int, nargs="*", default=[1, 8, 64])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "model.csv")
    parser.add_argument("--commit", help="for the CSV, where git does not know it")
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    begin = time.perf_counter()
    model = make_model(args.layers, TINY if args.tiny else SHAPE, device)
    print(f"model of {args.layers} layers made in {time.perf_counter() - begin:.1f} s", flush=True)
    rows, expected = [], {}
    for variant, (strategy, prefetch) in VARIANTS.items():
        set_scale_strategy(model, strategy, prefetch=prefetch)
        rows += measure(model, variant, args, expected)
    make_dense(model)
    rows += measure(model, "dense", args, expected)
    baseline = {row["case"]: row["us_p50"] for row in rows if row["variant"] == "dense"}
    environment = harness.environment(args.commit)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    with args.out.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n", restval="")
        writer.writeheader()
        for row in rows:
            row |= {"baseline": "dense", "baseline_us": baseline[row["case"]]}
            writer.writerow(environment | {k: f"{v:.2f}" if isinstance(v, float) else v for k, v in row.items()})
    print(f"{time.perf_counter() - begin:.0f} s in all, {args.out}")


if __name__ == "__main__":
    main()
