"""What does a dense language model gain by NVFP4 weights, and what do compressed scales cost it?

`python benchmarks/dense_model.py [--layers 36] [--out FILE]` on a GPU, with `LOCAL_KERNELS` naming a built bundle;
`--tiny --out FILE` runs the same code on small shapes, on a CPU too, to see that it runs. Needs the extra
[transformers].

A Qwen3 of 8B shapes with random weights: "bf16", and with all linear layers but the head in NVFP4 (W4A16), scales as
they are ("dense") or compressed ("fused"). One model after another, each alone on the GPU.

prefill  one sequence, eager, logits of the last token.
decode   one token for each of 1, 8 and 64 sequences after a context, static cache: by CUDA graph of the eager model
         ("graph"), and by `torch.compile` with mode "reduce-overhead" ("compiled").

Rows have three columns more: tokens a second, bytes that scales take, and all bytes allocated between calls.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable
from pathlib import Path

import harness
import torch
from model import COLUMNS, decode, make_planes, prefill, time_call
from transformers import AutoConfig, AutoModelForCausalLM

from finegrained_kernels.integrations.transformers import NVFP4Linear, nvfp4_linears
from finegrained_kernels.integrations.transformers.schedule import Schedule

RATE = 0.006
"""Share of exceptions, as in the scales of SmolLM2."""
VARIANTS = ("bf16", "dense", "fused")
SHAPE = {"hidden_size": 4096, "intermediate_size": 12288, "num_attention_heads": 32, "num_key_value_heads": 8}
SHAPE |= {"head_dim": 128, "vocab_size": 151936}
TINY = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}
TINY |= {"head_dim": 32, "vocab_size": 256}
FULL = {"layers": 36, "samples": 12, "prefill": [2048, 8192], "decode": [1, 8, 64], "compiled": [1, 8, 64]}
FULL["out"] = Path(__file__).parent / "results" / "dense_model.csv"
FEW = {"layers": 2, "samples": 1, "prefill": [16], "decode": [1], "compiled": [], "out": None}


def make_model(num_layers: int, shape: dict[str, int], variant: str, device: str) -> torch.nn.Module:
    """The model on the meta device, then all of it made on ``device``."""
    config = AutoConfig.for_model(
        "qwen3", **shape, num_hidden_layers=num_layers, max_position_embeddings=16384, dtype=torch.bfloat16
    )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    if variant != "bf16":
        quantize_linears(model.model, Schedule("auto", prefetch=False), device, compressed=variant == "fused")
    for name, module in model.named_modules():
        for own, parameter in module._parameters.items():
            if parameter is not None and parameter.is_meta:
                value = torch.empty_like(parameter, device=device).normal_(0, 0.02)
                value = value.fill_(1) if "norm" in name else value
                module._parameters[own] = torch.nn.Parameter(value, requires_grad=False)
    model.model.rotary_emb = type(model.model.rotary_emb)(config=config).to(device)
    return model.eval()


def quantize_linears(model: torch.nn.Module, schedule: Schedule, device: str, *, compressed: bool) -> None:
    """Replace the linear layers of a model on the meta device by random NVFP4 ones."""
    for name, module in list(model.named_modules()):
        if type(module) is not torch.nn.Linear:
            continue
        linear = NVFP4Linear(module, schedule)
        linear.activation_format = "bf16"
        packed = torch.empty(linear.weight.shape, dtype=torch.uint8, device=device)
        packed.view(torch.int64).random_()
        linear.weight = torch.nn.Parameter(packed, requires_grad=False)
        rows, cols = packed.shape[0], packed.shape[1] // 8
        planes = make_planes((1, rows, cols), RATE, device)
        if compressed:
            wire = schedule.bundle.compress_nvfp4_csf_scales(planes)
            planes = schedule.bundle.prepare_nvfp4_csf_scales(*wire, num_rows=rows, num_cols=cols)
        linear.set_scales(planes)
        linear.weight_global = torch.tensor([0.005], device=device)
        linear.prepare()
        model.set_submodule(name, linear)


def graph_of(step: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
    """`step` as a CUDA graph; as it is on a CPU."""
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

    def replay() -> torch.Tensor:
        graph.replay()
        return logits

    return replay


def memory_of(model: torch.nn.Module) -> dict[str, int]:
    """Bytes of scales, and of all between calls."""
    gc.collect()
    scales = sum(layer.scale_bytes for layer in nvfp4_linears(model))
    if model.device.type == "cpu":
        allocated = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    else:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        allocated = torch.cuda.memory_allocated()
    return {"scale_bytes": scales, "allocated_bytes": allocated}


def calls_of(model: torch.nn.Module, args: argparse.Namespace):
    """Case, tokens, condition and call of all that is measured; each is made when the one before it is done with."""
    for size in args.prefill:
        yield f"prefill_{size}", size, "eager", prefill(model, size)
    for size in args.decode:
        yield f"decode_{size}", size, "graph", graph_of(decode(model, size))
    for size in args.compiled:
        torch.compiler.reset()
        yield f"decode_{size}", size, "compiled", decode(model, size, torch.compile(model, mode="reduce-overhead"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--samples", type=int, help="of prefill; decode takes four times as many")
    parser.add_argument("--prefill", type=int, nargs="*")
    parser.add_argument("--decode", type=int, nargs="*")
    parser.add_argument("--compiled", type=int, nargs="*", help="batches whose decoding is compiled")
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
    results = harness.Results(args.out, args.commit, columns=COLUMNS)
    baseline: dict[tuple[str, str], float] = {}
    for variant in VARIANTS:
        torch.manual_seed(0)
        model = make_model(args.layers, TINY if args.tiny else SHAPE, variant, device)
        memory = memory_of(model)
        for case, tokens, condition, call in calls_of(model, args):
            samples = args.samples * (1 if condition == "eager" else 4)
            for _ in range(3):  # reduce-overhead records at the second call, and replays from the third on
                logits = call()
            if not bool(logits.isfinite().all()):
                raise SystemExit(f"{case}, {condition}, {variant}: logits are not finite")
            clock = "graph" if condition == "compiled" else condition
            timing = harness.quantiles([time_call(call, clock) for _ in range(samples)])
            base = baseline.setdefault((case, condition), timing.p50)
            results.append(
                case, variant, timing, tokens=tokens, condition=condition, **memory, baseline="bf16",
                baseline_us=f"{base:.2f}", tokens_per_s=f"{tokens / timing.p50 * 1e6:.2f}",
            )  # fmt: skip
            print(
                f"{case:14}{condition:10}{variant:8}{timing.p50 / 1000:10.3f} ms, {base / timing.p50:.3f} x the speed "
                f"of bf16, {memory['allocated_bytes'] / 1e9:.2f} GB",
                flush=True,
            )
        del model, call
        gc.collect()


if __name__ == "__main__":
    main()
