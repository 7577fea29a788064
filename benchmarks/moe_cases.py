"""A MoE layer by strategy, for several benchmarks: shapes, layers of random weights, and their calls."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
from collections.abc import Callable, Iterator
from types import ModuleType

import torch
from scale_planes import make_planes, plain_scales

from finegrained_kernels import load

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FORMATS = {"w4a16": "bf16", "w4a4": None}
PATHS = {"batched": 1 << 30, "grouped": 0}
"""The limit of rows of a batched call that makes every call batched or grouped."""


@dataclasses.dataclass(frozen=True)
class Shape:
    """A model's layer; `gate_percent`, `down_percent` are the rates of exceptions of the real stacks."""

    name: str
    num_experts: int
    hidden: int
    intermediate: int
    top_k: int
    heads: int
    kv_heads: int
    head_dim: int
    gate_percent: float = 1.02
    down_percent: float = 0.22
    context: int = 4096
    layer_tokens: tuple[int, ...] = (1, 4, 16, 64, 256, 1024, 4096, 8192, 32768)
    path_tokens: tuple[int, ...] = (1, 2, 4, 8, 16)
    prefill: tuple[int, ...] = (2048, 8192, 32768)
    decode: tuple[int, ...] = (1, 4, 16, 64)


QWEN = Shape("qwen", 512, 2560, 640, 8, heads=32, kv_heads=4, head_dim=128)
QWEN_NEXT = dataclasses.replace(QWEN, name="qwen_next", top_k=10, heads=16, kv_heads=2, head_dim=256)
"""The layer of model.py's model."""

TINY = Shape("tiny", 6, 64, 32, 2, heads=4, kv_heads=2, head_dim=16, context=32, layer_tokens=(1, 24),
             path_tokens=(2,), prefill=(24,), decode=(2,))  # fmt: skip
SHAPES = {shape.name: shape for shape in (QWEN, QWEN_NEXT, TINY)}


def make_layer(bundle: ModuleType, shape: Shape, seed: int, scratch: torch.Tensor | None = None):
    """(dense experts, the same compressed), with random codes, one window of scales per row, and different globals of
    gate and up."""
    experts, hidden, inner = shape.num_experts, shape.hidden, shape.intermediate
    generator = torch.Generator(DEVICE).manual_seed(seed)

    def codes(*size: int) -> torch.Tensor:
        return torch.randint(0, 256, size, generator=generator, dtype=torch.uint8, device=DEVICE)

    gate_up_planes = make_planes(experts, 2 * inner, hidden // 16, shape.gate_percent, 2 * seed, DEVICE)
    down_planes = make_planes(experts, hidden, inner // 16, shape.down_percent, 2 * seed + 1, DEVICE)
    spread = 1 + torch.rand(experts, 3, generator=generator, device=DEVICE)
    dense = bundle.NVFP4Experts(
        gate_up=codes(experts, 2 * inner, hidden // 2),
        down=codes(experts, hidden, inner // 2),
        gate_up_scales=gate_up_planes.view(torch.float8_e4m3fn),
        down_scales=down_planes.view(torch.float8_e4m3fn),
        gate_up_global=(spread[:, :2] * 0.01 / hidden**0.5).contiguous(),
        down_global=(spread[:, 2] * 0.01 / inner**0.5).contiguous(),
    )
    prepared = {}
    for name, planes in (("gate_up_scales", gate_up_planes), ("down_scales", down_planes)):
        wire = bundle.compress_nvfp4_csf_scales(planes)
        prepared[name] = bundle.prepare_nvfp4_csf_scales(*wire, num_rows=planes.shape[1], num_cols=planes.shape[2])
    if scratch is None:
        scratch = new_scratch(dense)
    return dense, dataclasses.replace(dense, **prepared, scratch=scratch)


def blank_layer(bundle: ModuleType, shape: Shape):
    """Like `make_layer`, but with whatever is in memory, only for compiling."""
    experts, hidden, inner = shape.num_experts, shape.hidden, shape.intermediate
    sizes = {"gate_up_scales": (experts, 2 * inner, hidden // 16), "down_scales": (experts, hidden, inner // 16)}
    dense = bundle.NVFP4Experts(
        gate_up=torch.empty(experts, 2 * inner, hidden // 2, dtype=torch.uint8, device=DEVICE),
        down=torch.empty(experts, hidden, inner // 2, dtype=torch.uint8, device=DEVICE),
        **{
            name: torch.zeros(size, dtype=torch.uint8, device=DEVICE).view(torch.float8_e4m3fn)
            for name, size in sizes.items()
        },
        gate_up_global=torch.ones(experts, 2, device=DEVICE),
        down_global=torch.ones(experts, device=DEVICE),
    )
    compressed = {name: plain_scales(bundle, *size, DEVICE) for name, size in sizes.items()}
    return dense, dataclasses.replace(dense, **compressed, scratch=new_scratch(dense))


def new_scratch(dense) -> torch.Tensor:
    return torch.empty(dense.gate_up_scales.nbytes + dense.down_scales.nbytes, dtype=torch.uint8, device=DEVICE)


def make_call(shape: Shape, tokens: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Hidden states, and uniform routing to `top_k` experts each."""
    generator = torch.Generator(DEVICE).manual_seed(seed)
    draw = {"generator": generator, "device": DEVICE}
    hidden = torch.randn(tokens, shape.hidden, dtype=torch.bfloat16, **draw)
    index = torch.rand(tokens, shape.num_experts, **draw).topk(shape.top_k).indices
    return hidden, index, torch.rand(tokens, shape.top_k, **draw)


def layer_calls(bundle: ModuleType, layer, call, options: dict) -> dict[str, Callable[[], torch.Tensor]]:
    dense, compressed = layer
    forward = bundle.moe_forward
    return {
        "dense": lambda: forward(dense, *call, **options),
        "staged": lambda: forward(compressed, *call, **options, strategy="staged"),
        "prefetched": lambda: forward(compressed, *call, **options, strategy="staged", scales_expanded=True),
        "fused": lambda: forward(compressed, *call, **options, strategy="fused"),
    }


@contextlib.contextmanager
def batched_up_to(bundle: ModuleType, rows: int | None) -> Iterator[None]:
    """Use another limit of batched calls meanwhile; None is the bundle's own. A graph keeps the limit of its
    capture."""
    moe = importlib.import_module(f"{bundle.__name__}.moe.layer")
    rule = moe.BATCHED_MAX_ROWS
    moe.BATCHED_MAX_ROWS = rule if rows is None else rows
    try:
        yield
    finally:
        moe.BATCHED_MAX_ROWS = rule


@functools.lru_cache(maxsize=1)
def blank_layer_of(name: str):
    """(bundle, layer) of this process."""
    bundle = load()
    return bundle, blank_layer(bundle, SHAPES[name])


def compile_one(name: str, activations: str, tokens: int, path: str | None, strategy: str) -> None:
    """Launch what a layer's call launches, to fill the compiler's cache; `path` is one of PATHS, or None for the
    bundle's choice."""
    torch.set_num_threads(1)
    bundle, layer = blank_layer_of(name)
    calls = layer_calls(bundle, layer, make_call(SHAPES[name], tokens, 0), {"activation_format": FORMATS[activations]})
    with batched_up_to(bundle, None if path is None else PATHS[path]):
        calls[strategy]()
    if strategy == "staged":
        bundle.expand_scales(layer[1])
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
