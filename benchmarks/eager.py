"""CPU time of eager calls, measured over a loop that the GPU keeps up with, compared with torch's smallest operator;
and what `warm_up` saves them, measured in separate programs.

    LOCAL_KERNELS=kernels-community/finegrained-kernels=$PWD/build python benchmarks/eager.py

A call's row is the median of five loops of 300 calls, which take turns with those of other variants and of torch, the
baseline. Marlin is included if `peers/prepare.py` has gathered it. If transformers is installed, `qwen_module` is the
module that replaces a model's experts, compared with its layer, and `decode_8_layers` is a step of one token in a model
with 8 such layers, whose experts do nothing in the row `no_experts`.

`warm_up` of a layer's dense and compressed forms, W4A16 and W4A4, is measured with an empty cache of Triton (`warm_up`)
and with a full one (`warm_up_again`). After that, a new program makes calls with 40 random numbers of tokens, and
counts compilations (`first_calls` is the slowest call). In these three rows, the column `bytes` has numbers of kernels.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import harness
import torch
from cases import get_bundle
from scale_planes import make_planes, plain_scales

EXPERTS, HIDDEN, INNER, TOP_K = 512, 2560, 640, 8
LOOPS, ROUNDS, STEPS_A_LOOP = 5, 300, 15
TOKENS = (1, 8, 64)
LAYERS = 8
PEERS = Path(__file__).parent / "peers"
Calls = dict[str, Callable[[], object]]


def make_layers(bundle, device: str = "cuda") -> tuple:
    """The layer on dense scales, and on compressed ones."""
    bytes_ = functools.partial(torch.empty, dtype=torch.uint8, device=device)
    sizes = {"gate_up_scales": (EXPERTS, 2 * INNER, HIDDEN // 16), "down_scales": (EXPERTS, HIDDEN, INNER // 16)}
    dense = bundle.NVFP4Experts(
        gate_up=bytes_(EXPERTS, 2 * INNER, HIDDEN // 2), down=bytes_(EXPERTS, HIDDEN, INNER // 2),
        gate_up_global=torch.ones(EXPERTS, device=device), down_global=torch.ones(EXPERTS, device=device),
        **{name: bytes_(*size).fill_(0x38).view(torch.float8_e4m3fn) for name, size in sizes.items()},
    )  # fmt: skip
    return dense, dataclasses.replace(
        dense, **{name: plain_scales(bundle, *size, device) for name, size in sizes.items()}
    )


def routing(tokens: int, device: str = "cuda") -> tuple[torch.Tensor, ...]:
    generator = torch.Generator(device).manual_seed(tokens)
    index = torch.rand(tokens, EXPERTS, generator=generator, device=device).topk(TOP_K).indices
    hidden = torch.randn(tokens, HIDDEN, dtype=torch.bfloat16, generator=generator, device=device)
    return hidden, index, torch.rand(tokens, TOP_K, generator=generator, device=device)


def load_marlin():
    """The module in peers/ that calls it; None if it was not gathered."""
    if not (PEERS.parent / "local/peers/vllm_marlin.py").exists():
        print("Marlin is not there: peers/prepare.py gathers it", flush=True)
        return None
    sys.path.append(str(PEERS))
    marlin = importlib.import_module("marlin")
    marlin.load()
    return marlin


def calls(bundle, marlin) -> dict[tuple[str, int], Calls]:
    dense, fused = make_layers(bundle)
    x = torch.randn(1, 4096, dtype=torch.bfloat16, device="cuda")
    weight = torch.zeros(4096, 2048, dtype=torch.uint8, device="cuda")
    planes, factor = make_planes(1, 4096, 256, 0.3), torch.ones(1, device="cuda")
    scales = planes[0].view(torch.float8_e4m3fn)
    compressed = bundle.prepare_nvfp4_csf_scales(*bundle.compress_nvfp4_csf_scales(planes), num_rows=4096, num_cols=256)
    linear = functools.partial(bundle.matmul_2d, x, weight, activation_format="bf16", b_global_scale=factor)
    size = bundle.csf_workspace_size(fused.down_scales)
    decompress = functools.partial(
        bundle.decompress_nvfp4_csf_scales, fused.down_scales, max_active=TOP_K,
        workspace=torch.empty(size, dtype=torch.uint8, device="cuda"),
        expert_start=torch.zeros(EXPERTS + 1, dtype=torch.int32, device="cuda"),
    )  # fmt: skip
    work: dict[tuple[str, int], Calls] = {
        ("dense_4096", 1): {
            "ours_dense": functools.partial(linear, Bs=scales),
            "ours_fused": functools.partial(linear, Bs=compressed),
        },
        ("decompress_qwen_down", 1): {"ours": decompress},
    }
    if marlin is not None:
        work["dense_4096", 1]["marlin"] = functools.partial(marlin.Linear(weight, scales, factor[0]), x)
        peer = marlin.Layer(SimpleNamespace(experts=EXPERTS, hidden=HIDDEN, inner=INNER), dense, TOP_K)
    for tokens in TOKENS:
        hidden, index, weights = routing(tokens)
        forward = functools.partial(bundle.moe_forward, activation_format="bf16")
        work["qwen", tokens] = {
            "ours_dense": functools.partial(forward, dense, hidden, index, weights),
            "ours_fused": functools.partial(forward, fused, hidden, index, weights),
        }
        if marlin is not None:
            call = functools.partial(peer.layer, hidden, index.int(), weights, peer.caches(tokens))
            work["qwen", tokens]["marlin"] = call
    return work


def model_calls() -> dict[tuple[str, int], Calls]:
    """Calls of a model: a layer, the module around it, and a step with and without experts."""
    model_benchmark = importlib.import_module("model")
    model = model_benchmark.make_model(LAYERS, model_benchmark.SHAPE, "cuda")
    blocks = [layer.mlp for layer in model.model.layers]
    experts = [block.experts for block in blocks]
    experts[0].schedule.switch("fused", prefetch=False)
    generator = torch.Generator("cuda").manual_seed(0)
    hidden = torch.randn(1, experts[0].hidden_dim, dtype=torch.bfloat16, generator=generator, device="cuda")
    index = torch.rand(1, experts[0].num_experts, generator=generator, device="cuda").topk(TOP_K).indices
    given = hidden, index, torch.rand(1, TOP_K, generator=generator, device="cuda").bfloat16()
    forward = experts[0].schedule.bundle.moe_forward
    step = importlib.import_module("model_parts").decode(model, 1)

    class NoExperts(torch.nn.Module):
        def forward(self, hidden_states, top_k_index, top_k_weights):
            return hidden_states

    def step_on(modules: list[torch.nn.Module]) -> None:
        for block, module in zip(blocks, modules, strict=True):
            block._modules["experts"] = module
        step()

    return {
        ("qwen_module", 1): {
            "layer": functools.partial(forward, experts[0].experts, *given, activation_format="bf16", strategy="fused"),
            "module": functools.partial(experts[0], *given),
        },
        (f"decode_{LAYERS}_layers", 1): {
            "experts": functools.partial(step_on, experts),
            "no_experts": functools.partial(step_on, [NoExperts()] * LAYERS),
        },
    }


def cpu_times(calls: Calls, rounds: int) -> dict[str, harness.Timing]:
    """CPU time in us of each call, and of torch's smallest operator."""
    small = torch.zeros(16, 16, device="cuda")
    loops = {name: (call, rounds) for name, call in calls.items()} | {"torch": (lambda: small + small, ROUNDS)}
    taken: dict[str, list[float]] = {name: [] for name in loops}
    with torch.no_grad():
        for call, _ in loops.values():
            for _ in range(20):
                call()
        for _ in range(LOOPS):
            for name, (call, count) in loops.items():
                torch.cuda.synchronize()
                begin = time.perf_counter()
                for _ in range(count):
                    call()
                taken[name].append((time.perf_counter() - begin) / count * 1e6)
    torch.cuda.synchronize()
    return {name: harness.quantiles(times) for name, times in taken.items()}


def measure(results: harness.Results, work: dict[tuple[str, int], Calls]) -> None:
    for (case, tokens), calls in work.items():
        timings = cpu_times(calls, STEPS_A_LOOP if case.startswith("decode_") else ROUNDS)
        reference = timings["torch"].p50
        for variant, timing in timings.items():
            results.append(
                case, variant, timing, tokens=tokens, condition="eager_cpu", baseline="torch_add",
                baseline_us=f"{reference:.2f}",
            )  # fmt: skip
            adds = timing.p50 / reference
            print(f"{case:22}{tokens:4} {variant:12}{timing.p50:9.2f} us, {adds:6.2f} adds", flush=True)


def warm(bundle) -> dict[str, float]:
    """Seconds that `warm_up` takes in this program, for both forms of the layer and both formats."""
    layers = make_layers(bundle, "meta")
    begin = time.perf_counter()
    kernels = bundle.warm_up(layers)
    return {"us": (time.perf_counter() - begin) * 1e6, "count": kernels}


def first_calls(bundle) -> dict[str, float]:
    """The slowest of 40 calls of random numbers of tokens, and how many kernels they compiled."""
    import triton

    compiled: list[bool] = []

    def listen(*_: object, cache_hit: bool, **__: object) -> None:
        compiled.append(not cache_hit)

    triton.knobs.compilation.listener = listen
    layers = make_layers(bundle)
    generator, slowest = torch.Generator().manual_seed(0), 0.0
    torch.cuda.synchronize()
    for number in range(40):
        tokens = int(torch.randint(1, 16385, (1,), generator=generator)) >> int(
            torch.randint(0, 14, (1,), generator=generator)
        )
        given = routing(max(tokens, 1))
        torch.cuda.synchronize()
        begin = time.perf_counter()
        bundle.moe_forward(layers[number % 2], *given, activation_format=(None, "bf16")[number // 2 % 2])
        slowest = max(slowest, time.perf_counter() - begin)
        torch.cuda.synchronize()
    return {"us": slowest * 1e6, "count": sum(compiled)}


STEPS = {"warm_up": warm, "warm_up_again": warm, "first_calls": first_calls}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results/eager.csv")
    parser.add_argument("--commit", help="for the commit column, where there is no git checkout")
    parser.add_argument("--bundle", type=Path, help="a built variant, where `kernels` is not installed")
    parser.add_argument("--step", choices=STEPS, help="one step of warming up, printed")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.step:
        print(json.dumps(STEPS[arguments.step](get_bundle(arguments.bundle))))
        return
    marlin = load_marlin()  # it tells CUDA where to cache what it compiles
    results = harness.Results(arguments.out, arguments.commit, merge=True)
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TRITON_CACHE_DIR"] = cache
        for step in STEPS:
            command = [sys.executable, __file__, "--step", step]
            command += ["--bundle", str(arguments.bundle)] if arguments.bundle else []
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                raise SystemExit(done.stderr)
            measured = json.loads(done.stdout.splitlines()[-1])
            timing = harness.Timing(*[measured["us"]] * 3)
            results.append("qwen", step, timing, condition="eager_cpu", bytes=measured["count"])
            print(f"{step:22} {measured['us'] / 1e6:8.3f} s, {measured['count']}", flush=True)
        measure(results, calls(get_bundle(arguments.bundle), marlin))
        torch.cuda.empty_cache()
        if importlib.util.find_spec("transformers") is None:
            print("transformers is not there: no module and no model", flush=True)
        else:
            measure(results, model_calls())


if __name__ == "__main__":
    main()
