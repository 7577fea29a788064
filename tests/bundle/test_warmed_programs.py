"""After `warm_up`, a program compiles nothing, because its launches find everything in Triton's cache.

A kernel's name there is a digest of its source, arguments, constants and options. Triton makes a folder of that name
before it compiles, and here stops at that point, so the test compares names: those of a program that warms up for an
H200 with those of programs that call. Their launches go through Triton, with stand-ins for its driver and for compiled
kernels.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton", reason="needs triton")

from told_gpu import beside_an_h200

SUPPORT = Path(__file__).resolve().parent.parent / "support"
LAYERS = {"qwen": (512, 2560, 640, 8, 16384), "small": (8, 512, 256, 2, 16384), "long rows": (16, 12288, 128, 2, 16)}
"""Experts, hidden size, intermediate size, experts per token, most tokens. The first layer has tiles from a table; the
rows of the last one are too long to be read compressed."""
WEIGHTS = {"measured": (4096, 4096), "other": (384, 640)}

STOP = """
class Stop(Exception):
    pass

def stop(*arguments, **options):
    raise Stop

def stop_before_compiling():
    from triton.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource

    ASTSource.make_ir = GluonASTSource.make_ir = stop
"""

WORKER = f"""
import importlib.util, sys
{STOP}
spec = importlib.util.spec_from_file_location("worker", sys.argv[1])
worker = importlib.util.module_from_spec(spec)
spec.loader.exec_module(worker)
compile_kernel = worker.compile_kernel

def name_kernel(*job):
    stop_before_compiling()
    try:
        compile_kernel(*job)
    except Stop:
        return {{"cache": job[1]}}

worker.compile_kernel = name_kernel
worker.main()
"""

PROGRAM = f"""
import importlib, json, os, random, sys, types
from collections import namedtuple
sys.path.insert(0, {str(SUPPORT)!r})
import pytest, torch, triton
from fake_gpu import FakeGPU
from finegrained_kernels import load
{STOP}
bundle, patch, run = load(), pytest.MonkeyPatch(), triton.runtime.JITFunction.run
FakeGPU(bundle, patch)
triton.runtime.JITFunction.run = run
split = importlib.import_module(f"{{bundle.__name__}}.gemm.split")
split.has_clusters = lambda device: True
for module in (split, importlib.import_module(f"{{bundle.__name__}}.csf.decode_triton")):
    module.num_sms = lambda device: 132

class Compiled:
    metadata = namedtuple("Metadata", "target shared")(types.SimpleNamespace(backend="cuda"), 0)
    packed_metadata, function = (4, 1, 0), None
    launch_metadata = run = lambda self, *arguments: None

def name_kernel(source, *arguments, **options):
    before = set(os.listdir(os.environ["TRITON_CACHE_DIR"]))
    try:
        compile(source, *arguments, **options)
    except Stop:
        for name in set(os.listdir(os.environ["TRITON_CACHE_DIR"])) - before:
            print(json.dumps([name, source.name, str(source.signature), str(source.constants), str(source.attrs)]))
        return Compiled()

compile = triton.compiler.compile
stop_before_compiling()
triton.compiler.compile, triton.compiler.CompiledKernel = name_kernel, Compiled
target = triton.backends.compiler.GPUTarget("cuda", 90, 32)
triton.runtime.driver.set_active(types.SimpleNamespace(
    get_current_target=lambda: target, get_current_device=lambda: 0, get_current_stream=lambda index=None: 0
))

def empty(*shape, dtype=torch.uint8):
    return torch.empty(shape, dtype=dtype)  # memory that nobody touches is none

def scales(*shape, compressed):
    if not compressed:
        return empty(*shape, dtype=torch.float8_e4m3fn)
    *planes, rows, cols = (1, *shape)[-3:]
    tiles = -(-rows * cols // 1024)
    return bundle.NVFP4CSFScales(empty(*planes, rows), empty(*planes, rows, cols // 2), empty(64, dtype=torch.int32),
                                 torch.zeros(planes[0] * tiles + 1, dtype=torch.int32))

random = random.Random(int(sys.argv[1]))

def counts(number):
    return [random.randrange(1, 16385) >> random.randrange(14) or 1 for _ in range(number)]
"""

LAYER_CALLS = """
for E, H, I, top_k, most in LAYERS:
    for compressed in (False, True):
        experts = bundle.NVFP4Experts(
            empty(E, 2 * I, H // 2), empty(E, H, I // 2),
            scales(E, 2 * I, H // 16, compressed=compressed), scales(E, H, I // 16, compressed=compressed),
            *[torch.ones(E) for _ in range(2)],
        )
        for tokens in [1, 2, 3, 5, *(count % most + 1 for count in counts(9))]:
            for activation_format in (None, "bf16"):
                x, weights = empty(tokens, H, dtype=torch.bfloat16), empty(tokens, top_k, dtype=random.choice(DTYPES))
                call(experts, x, empty(tokens, top_k, dtype=torch.int64), weights, activation_format)
"""

CALLS = {
    "moe_forward": """
DTYPES = (torch.bfloat16, torch.float32)
def call(*arguments):
    bundle.moe_forward(*arguments[:4], activation_format=arguments[4])
""" + LAYER_CALLS,
    "transformers": """
from finegrained_kernels.integrations.transformers.schedule import Schedule
schedules = [Schedule(strategy, prefetch=False) for strategy in ("auto", "fused")]
DTYPES = (torch.bfloat16, torch.float32)
def call(experts, x, index, weights, activation_format):
    schedule = random.choice(schedules[: 2 if x.shape[1] < 8192 else 1])
    module = types.SimpleNamespace(experts=experts, activation_format=activation_format)
    schedule.run(module, schedule.strategy, x, index, weights)
""" + LAYER_CALLS,
    "matmul_2d": """
for N, K in WEIGHTS:
    for compressed in (False, True):
        for tokens in [1, 2, 9, *counts(17)]:
            given = [{"activation_format": "bf16"}, {}, {"a_global_scale": torch.ones(1)}]
            for options in given:
                x, own = empty(tokens, K, dtype=torch.bfloat16), scales(N, K // 16, compressed=compressed)
                bundle.matmul_2d(x, empty(N, K // 2), None, own, b_global_scale=torch.ones(1), **options)
""",
}  # fmt: skip


def names(cache: Path) -> set[str]:
    return {path.name for path in cache.iterdir() if path.is_dir()}


def on_meta(bundle, rows: tuple[int, ...], cols: int, is_compressed: bool):
    """Weight `[.., N, K / 2]` and its scales."""

    def empty(*shape: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    weight = empty(*rows, cols // 2)
    if not is_compressed:
        return weight, empty(*rows, cols // 16, dtype=torch.float8_e4m3fn)
    planes = rows[0] if len(rows) > 1 else 1
    tiles = -(-rows[-1] * cols // 16 // 1024)
    parts = empty(planes, rows[-1]), empty(planes, rows[-1], cols // 32), empty(64, dtype=torch.int32)
    return weight, bundle.NVFP4CSFScales(*parts, empty(planes * tiles + 1, dtype=torch.int32))


@pytest.fixture
def warmed(bundle, monkeypatch, tmp_path) -> tuple[set[str], int]:
    """The names of what `warm_up` compiles for all layers and weights, and how many kernels it returns."""
    module = beside_an_h200(bundle, monkeypatch)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "warmed"))

    class Popen(subprocess.Popen):
        def __init__(self, command: list[str], **options) -> None:
            super().__init__([command[0], "-c", WORKER, command[1]], **options)

    monkeypatch.setattr(module, "subprocess", SimpleNamespace(Popen=Popen, PIPE=subprocess.PIPE))
    linear = [on_meta(bundle, (rows,), cols, form) for rows, cols in WEIGHTS.values() for form in (False, True)]
    told = bundle.warm_up(linear, max_workers=1)
    for num_experts, hidden, inner, top_k, most in LAYERS.values():
        layers = []
        for form in (False, True):
            up, up_scales = on_meta(bundle, (num_experts, 2 * inner), hidden, form)
            down, down_scales = on_meta(bundle, (num_experts, hidden), inner, form)
            factors = [torch.empty(num_experts, device="meta") for _ in range(2)]
            layers.append(bundle.NVFP4Experts(up, down, up_scales, down_scales, *factors))
        told += bundle.warm_up(layers, tokens=range(1, most + 1), top_k=top_k, max_workers=1)
    return names(tmp_path / "warmed"), told


@pytest.mark.slow
def test_a_new_program_finds_all_that_it_launches(warmed, bundle_dir, tmp_path):
    known, told = warmed
    assert 100 < len(known) <= told
    for seed, (name, calls) in enumerate(CALLS.items()):
        (tmp_path / name).mkdir()
        environment = os.environ | {
            "TRITON_CACHE_DIR": str(tmp_path / name),
            "LOCAL_KERNELS": f"kernels-community/finegrained-kernels={bundle_dir}",
        }
        code = f"{PROGRAM}\nLAYERS, WEIGHTS = {[*LAYERS.values()]}, {[*WEIGHTS.values()]}\n{calls}"
        command = [sys.executable, "-c", code, str(seed)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        launched = {name: rest for name, *rest in map(json.loads, done.stdout.splitlines())}
        assert len(launched) > 20
        missing = [rest for name, rest in launched.items() if name not in known]
        assert not missing, (
            f"{name}: {len(missing)} of {len(launched)} kernels would be compiled, the first {missing[0]}"
        )
