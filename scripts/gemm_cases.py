"""The GEMM kernels as their launchers launch them; compile_kernels.py compiles them, and those of the codec.

The launchers run on CPU tensors with recorders in place of kernels, so that the table follows the launchers. Memory for
stacks of experts is allocated but never touched.
"""

from __future__ import annotations

import contextlib
import importlib
import unittest.mock
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, NamedTuple

import torch
from triton.runtime.jit import JITFunction

E, TOP_K = 512, 8
POINTERS = {
    torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32", torch.uint8: "*u8",
    torch.int16: "*i16", torch.int32: "*i32", torch.int64: "*i64",
}  # fmt: skip
OPTIONS = ("num_warps", "num_stages", "maxnreg", "launch_pdl")
BLACKWELL = ("sm_100", "sm_103", "sm_120", "sm_121")
TENSOR_CORES = ("sm_89", "sm_90", "sm_100", "sm_120")
EVERYWHERE = ("sm_80", *TENSOR_CORES, "gfx942", "gfx950")
IN_TRITON = {
    "portable": ("sm_80", "sm_86", "sm_89", "sm_90", *BLACKWELL, "gfx942", "gfx950"),
    "scaled": BLACKWELL,
}
"""The architectures for which each kernel is compiled: one GPU of every kind, or all of a kind on which it was never
run."""
KERNELS = {"portable": "portable", "scaled": "sm100_scaled"}


class Case(NamedTuple):
    """A launch: the `types` of arguments that are not compile-time constants, and the architectures for which it is
    compiled."""

    name: str
    kernel: JITFunction
    constants: dict[str, Any]
    types: dict[str, Any]
    options: dict[str, int]
    archs: tuple[str, ...]


class Recorder:
    """Stands in for a kernel: `kernel[grid](...)` records the launch."""

    def __init__(self, kernel: JITFunction, launches: list) -> None:
        self.kernel, self.launches = kernel, launches

    def __getitem__(self, grid) -> Callable[..., None]:
        return lambda *args, **kwargs: self.launches.append((self.kernel, args, kwargs))

    def warmup(self, *args, **kwargs) -> None:
        """A launch in clusters calls this first."""


@contextlib.contextmanager
def recorded(*modules: ModuleType) -> Iterator[list]:
    """Record the launches of the modules' kernels instead of making them."""
    launches: list = []
    kernels = [(m, n, k) for m in modules for n, k in vars(m).items() if isinstance(k, JITFunction)]
    for module, name, kernel in kernels:
        setattr(module, name, Recorder(kernel, launches))
    try:
        yield launches
    finally:
        for module, name, kernel in kernels:
            setattr(module, name, kernel)


def type_of(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return POINTERS[value.dtype]
    if isinstance(value, tuple):
        return type(value)(*map(type_of, value)) if hasattr(value, "_fields") else tuple(map(type_of, value))
    if value is None:
        return "constexpr"
    return "fp32" if isinstance(value, float) else "i32"


def make_case(name: str, archs: tuple[str, ...], kernel: JITFunction, args: tuple, kwargs: dict) -> Case:
    given = dict(zip(kernel.arg_names, args, strict=False)) | kwargs
    options = {key: given.pop(key) for key in OPTIONS if key in given}
    types = {parameter.name: type_of(given[parameter.name]) for parameter in kernel.params
             if not parameter.is_constexpr and given[parameter.name] is not None}  # fmt: skip
    constants = {key: value for key, value in given.items() if key not in types}
    return Case(name, kernel, constants, types, options, archs)


@contextlib.contextmanager
def unpacked_ahead(dispatch: ModuleType, ahead: ModuleType) -> Iterator[None]:
    """Have GEMMs unpack weights ahead for cuBLAS, which is not called."""
    product = unittest.mock.Mock(workspace_bytes=16)
    with (
        unittest.mock.patch.object(dispatch, "unpacks_ahead", lambda *_: True),
        unittest.mock.patch.object(ahead.cublas, "plan", lambda *_: product),
        unittest.mock.patch.object(torch.cuda, "current_stream", unittest.mock.Mock()),
    ):
        yield


def split_cases(split: ModuleType, gemm: Callable[..., Any]) -> Iterator[tuple[str, Any, Any]]:
    """(name, GEMM, tile) for every tile in the table for one weight, at the first shape that uses it, with both forms
    of scales; and one with everything at once."""
    w4a16 = {"activation_format": "bf16"}
    first: dict[Any, tuple[int, int, int]] = {}
    for (weight_rows, depth), entries in split.load_split_table("NVIDIA H200").items():
        for tokens, config in entries:
            first.setdefault(config, (weight_rows, depth, tokens))
    for config, (weight_rows, depth, tokens) in first.items():
        tile = f"split {config.block_n}x{config.block_k}x{config.block_t} by {config.programs}"
        for compressed in (False, True):
            g = gemm(weight_rows, depth, tokens, "dense", compressed=compressed, **w4a16)
            name = f"{'fused ' if compressed else ''}{tile} {weight_rows}x{depth}, {tokens} tokens"
            yield name, g, config
    requantized = {"quantize_output": True, "output_global_scale": torch.ones(1)}
    for compressed in (False, True):
        g = gemm(2048, 4096, 64, "dense", gate=True, compressed=compressed, **requantized)
        config = split.default_split(4096, 4096, 64, 132)
        yield f"split{' fused' if compressed else ''} gated w4a4 requantized", g, config


def gemm_cases(bundle: ModuleType) -> list[Case]:
    """Every GEMM kernel, at tiles of decode and of prefill, with each kind of routing, scales and output."""
    names = (
        "dispatch",
        "split",
        "ahead",
        "kernels.sm90_split",
        "kernels.unpack_ahead",
        "kernels.sm100_scaled",
        "kernels.mma",
        "kernels.sm90_wgmma",
        "config",
        "problem",
        "smem_plan",
    )
    modules = {name: importlib.import_module(f"{bundle.__name__}.gemm.{name}") for name in names}
    dispatch, configs, plan = modules["dispatch"], modules["config"], modules["smem_plan"]
    problem = modules["problem"]
    quant = importlib.import_module(f"{bundle.__name__}.nvfp4.quantize_triton")
    reduce = importlib.import_module(f"{bundle.__name__}.moe.reduction_triton")
    cases: list[Case] = []

    def add(name: str, archs: tuple[str, ...], run: Callable[[], Any]) -> None:
        with recorded(*modules.values(), quant, reduce) as launches:
            run()
        case = make_case(name, archs, *launches[-1])  # what prepares the operands is launched before
        if case[1:] not in [other[1:] for other in cases]:
            cases.append(case)

    def add_gemm(name: str, archs: tuple[str, ...], g, *, kernel: str = "portable", config=None) -> None:
        choices = {"choose_kernel": lambda _: kernel, "choose_config": lambda *_: config}
        with unittest.mock.patch.multiple(dispatch, **choices):
            add(name, archs, lambda: dispatch.run_on_gpu(g))

    def compressed_scales(experts: int, rows: int, cols: int):
        sizes = (experts, rows), (experts, rows, cols // 2), (experts,), (experts * (-(-rows * cols // 1024)) + 1,)
        types = torch.uint8, torch.uint8, torch.int32, torch.int32
        return bundle.NVFP4CSFScales(
            *(torch.empty(size, dtype=dtype) for size, dtype in zip(sizes, types, strict=True))
        )

    def gemm(
        cols: int, depth: int, tokens: int, routing: str, dtype=torch.bfloat16, swizzled=False, compressed=False,
        **options,
    ):  # fmt: skip
        rows = cols * 2 if options.get("gate") else cols
        plane = (-(-rows // 128), -(-depth // 64), 32, 16) if swizzled else (rows, depth // 16)
        experts = 1 if routing == "dense" else E
        scales = torch.empty(experts, *plane, dtype=torch.float8_e4m3fn)
        index, start = (torch.zeros(n, dtype=torch.int32) for n in (tokens * TOP_K, E + 1))
        indices = {
            "grouped": {"expert_start": start, "gather_idx": index, "scatter_idx": index},
            "batched": {"expert_ids": index, "gather_idx": index},
            "dense": {},
        }
        x, weight = torch.empty(tokens, depth, dtype=dtype), torch.empty(experts, rows, depth // 2, dtype=torch.uint8)
        b_scales = compressed_scales(experts, *plane) if compressed else scales
        return problem.check_gemm(problem.Arguments(x, weight, Bs=b_scales, **indices[routing], **options))

    def add_mma(name: str, archs: tuple[str, ...], g, config=None) -> None:
        rows = g.num_rows if g.expert_ids is None else min(g.num_rows, E)
        config = config or configs.default_config(g.b.shape[1], g.depth, rows, g.num_experts, 132, False)
        if not isinstance(g.b_scales, torch.Tensor):
            name, config = f"fused {name}", plan.with_strip(config, g.depth, dispatch.result_bytes(g))
        tile = f"{'wgmma' if config.warpgroup else 'mma'} {config.block_n}x{config.block_k}x{config.block_t}"
        add_gemm(f"{tile} {name}", archs, g, kernel="mma", config=config)

    def add_in_triton(kind: str, name: str, *shape, **options) -> None:
        """Add cases with both forms of scales, side by side."""
        for compressed in (False, True):
            g = gemm(*shape, compressed=compressed, **options)
            add_gemm(f"{kind} {'fused ' if compressed else ''}{name}", IN_TRITON[kind], g, kernel=KERNELS[kind])

    w4a16 = {"activation_format": "bf16"}
    requantized = {"quantize_output": True, "output_global_scale": torch.ones(E)}
    add_in_triton("portable", "gated", 640, 2560, 64, "grouped", gate=True, swiglu_limit=7.0, **w4a16)
    add_in_triton("portable", "down", 2560, 640, 64, "grouped", torch.float16, **w4a16)
    add_in_triton("portable", "batched", 2560, 160, 8, "batched", **requantized)
    add_in_triton("portable", "gated long rows requantized", 2048, 7168, 64, "grouped", gate=True, **requantized)
    add_in_triton("scaled", "gated requantized", 640, 2560, 8, "grouped", gate=True, **requantized)
    add_in_triton("scaled", "batched", 2560, 160, 8, "batched", a_global_scale=torch.ones(E))
    add_in_triton("scaled", "prefill gated", 640, 2560, 4096, "grouped", gate=True)
    add_in_triton("scaled", "prefill down", 2560, 640, 4096, "grouped")
    add_mma("gated", ("sm_89", "sm_90", *BLACKWELL), gemm(640, 2560, 8, "grouped", gate=True, **w4a16))
    add_mma("swizzled", TENSOR_CORES, gemm(2560, 640, 8, "batched", torch.float16, swizzled=True, **w4a16))
    add_mma("dense", ("sm_89", "sm_90"), gemm(4096, 4096, 16, "dense", **w4a16))
    add_mma("prefill requantized", ("sm_89", *BLACKWELL), gemm(640, 2560, 4096, "grouped", gate=True, **requantized))
    table = configs.load_table("NVIDIA H200")
    for (weight_rows, depth, compressed), entries in table.items():
        gate = depth >= weight_rows
        for ratio, config in entries:
            tokens = max(1, round(ratio * E / TOP_K))
            cols = weight_rows // 2 if gate else weight_rows
            g = gemm(cols, depth, tokens, "grouped", gate=gate, compressed=compressed, **w4a16)
            add_mma(f"{cols}x{depth}, {tokens} tokens", ("sm_90",), g, config)
    fused = {"compressed": True, **w4a16}
    add_mma("gated", ("sm_89", "sm_90", *BLACKWELL), gemm(640, 2560, 8, "grouped", gate=True, **fused))
    add_mma("down", TENSOR_CORES, gemm(2560, 640, 8, "batched", torch.float16, **fused))
    add_mma("sliced", TENSOR_CORES, gemm(2048, 4096, 64, "grouped", gate=True, **fused))
    prefill = gemm(640, 2560, 4096, "grouped", gate=True, **fused, **requantized)
    add_mma("prefill requantized", ("sm_89", "sm_90", "sm_120"), prefill)
    large = plan.Config(128, 128, 128, 8, 4, 1, warpgroup=True)
    add_mma("prefill down", ("sm_90",), gemm(2560, 640, 4096, "grouped", **fused), large)
    add_mma("prefill long rows", ("sm_90",), gemm(2048, 4096, 4096, "grouped", gate=True, **fused), large)
    g = gemm(640, 2560, 8, "grouped", gate=True, swizzled=True, **requantized)
    add_gemm("scaled swizzled gated requantized", BLACKWELL, g, kernel="sm100_scaled")
    for name, g, config in split_cases(modules["split"], gemm):
        with unittest.mock.patch.object(dispatch, "choose_split", lambda *_, config=config: config):
            add(name, ("sm_90",), lambda g=g: dispatch.run_on_gpu(g))
    for compressed in (False, True):
        g = gemm(4096, 4096, 4096, "dense", compressed=compressed, **w4a16)
        with unpacked_ahead(dispatch, modules["ahead"]):
            add(f"unpack {'fused' if compressed else 'dense'}", ("sm_90",), lambda g=g: dispatch.run_on_gpu(g))
    rows, codes = torch.empty(8, 2560, dtype=torch.bfloat16), torch.empty(8, 1280, dtype=torch.uint8)
    index, scales = torch.zeros(1, 8, dtype=torch.int64), torch.empty(8, 160, dtype=torch.uint8)
    add("permute_tokens", ("sm_90",), lambda: modules["kernels.sm90_wgmma"].permute_tokens(rows, 8))
    add("quantize_rows", (*EVERYWHERE, "sm_103", "sm_121"), lambda: quant.quantize_rows(rows, None))
    add("quantized_operands", (*EVERYWHERE, "sm_86"), lambda: quant.quantized_operands(rows, None, None))
    add("expanded_operands", (*EVERYWHERE, "sm_86"), lambda: quant.expanded_operands(codes, scales))
    add("weighted_reduce", EVERYWHERE, lambda: reduce.weighted_reduce_on_gpu(rows, index, torch.ones(1, 8), E))
    return cases
