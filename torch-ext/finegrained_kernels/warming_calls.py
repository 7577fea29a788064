"""Finds out which kernels the calls of a layer launch, so that `warming.py` can have them compiled.

The calls are made on tensors without memory, in the user's program, which has torch and knows its GPU. Their kernels
are not launched but recorded, with what Triton needs to know about their arguments.
"""

from __future__ import annotations

import contextlib
from typing import Any, Callable, Dict, NamedTuple

import torch
from triton.runtime.jit import MockTensor

from .csf.decode_triton import decode_launch
from .csf.scales import NVFP4CSFScales
from .gemm import ahead, capability, config, split
from .gemm.api import matmul_2d
from .launching import BoundKernel
from .moe.experts import NVFP4Experts
from .moe.layer import FUSED_MAX_TOKENS, is_batched, moe_forward, strategy_of
from .moe.reduction import weighted_reduce
from .moe.routing_triton import fits, takes_one_launch
from .placeholders import Placeholders
from .recording import launches_noted


class Job(NamedTuple):
    """A kernel to compile. Its module has the same name in both programs."""

    module: str
    name: str
    constants: Dict[str, Any]
    arguments: tuple
    """The kernel's arguments, or stand-ins for them."""


class _OtherLibrary(Exception):
    """The rest of the call runs in a library, and needs no compiler."""


def find_kernels(task: dict[str, Any], device: torch.device) -> dict[tuple, Job]:
    """Every kernel that calls of the task's layers launch, by everything that distinguishes kernels for Triton."""
    found: dict[tuple, Job] = {}

    def note(bound: BoundKernel, arguments: tuple) -> None:
        function = bound.kernel
        stand_ins = tuple(map(_stand_in, arguments))
        names = [parameter for parameter in function.params if not parameter.is_constexpr]
        classes = [_class_of(value, not parameter.do_not_specialize) for parameter, value in zip(names, stand_ins)]
        constants = tuple(sorted((name, repr(value)) for name, value in bound.constants.items()))
        name = function.fn.__name__
        found.setdefault((name, constants, *classes), Job(function.__module__, name, bound.constants, stand_ins))
        if name == "unpack_kernel":
            raise _OtherLibrary

    with Placeholders(device), launches_noted(note):
        for layer in task["layers"]:
            (_call_experts if layer["kind"] == "experts" else _call_linear)(layer, task, device)
    return found


def _stand_in(argument: Any) -> Any:
    """`argument`, or what Triton accepts in place of a tensor: an aligned object with the name of the dtype."""
    if isinstance(argument, torch.Tensor):
        return MockTensor(str(argument.dtype))
    if isinstance(argument, tuple):
        items = tuple(map(_stand_in, argument))
        return type(argument)(*items) if hasattr(argument, "_fields") else items
    return argument


def _class_of(value: Any, specialized: bool) -> Any:
    """The class of an argument. It distinguishes at least those arguments that Triton distinguishes."""
    if isinstance(value, tuple):
        return tuple(_class_of(item, specialized) for item in value)
    if type(value) is int:
        return (1 if value == 1 else 2 if value % 16 == 0 else 0) if specialized else int
    return value.dtype if isinstance(value, MockTensor) else type(value)


def _tensor(described: Any, device: torch.device) -> Any:
    """A tensor, scales, or None, from the description that `warming.py` made."""
    if described is None:
        return None
    if "bases" in described:
        return NVFP4CSFScales(**{name: _tensor(part, device) for name, part in described.items()})
    return torch.empty(described["shape"], dtype=getattr(torch, described["dtype"]), device=device)


def _call_experts(layer: dict[str, Any], task: dict[str, Any], device: torch.device) -> None:
    experts = NVFP4Experts(**{name: _tensor(part, device) for name, part in layer["tensors"].items()})
    top_k, num_experts = layer["top_k"], experts.num_experts
    dtype, index_dtype = getattr(torch, layer["dtype"]), getattr(torch, task["index_dtype"])
    kinds: dict[tuple, int] = {}
    choose = [
        config_chooser(weight, scales, result_bytes)
        for weight, scales, result_bytes in (
            (experts.gate_up, experts.gate_up_scales, dtype.itemsize // 2),
            (experts.down, experts.down_scales, dtype.itemsize),
        )
    ]
    is_staged = {  # asked once, not for every number of tokens
        few: any(strategy_of(experts, number, None, name) == "staged" for name in task["formats"])
        for few, number in ((True, 1), (False, FUSED_MAX_TOKENS + 1))
    }
    for num_tokens in task["tokens"]:
        rows = num_tokens * top_k
        batched = is_batched(rows)
        tiled = min(rows, num_experts) if batched else rows
        configs = [config_of(tiled) for config_of in choose]
        if is_staged[num_tokens <= FUSED_MAX_TOKENS]:
            configs += _decoders(experts, min(num_experts, rows))
        kinds.setdefault((batched, takes_one_launch(rows, num_experts), fits(rows, num_experts), *configs), num_tokens)
    for num_tokens in kinds.values():
        x = torch.empty(num_tokens, experts.hidden_size, dtype=dtype, device=device)
        index = torch.empty(num_tokens, top_k, dtype=index_dtype, device=device)
        rows_of = x.new_empty(num_tokens * top_k, experts.hidden_size)
        for weights_dtype in (torch.float32, dtype):  # routers give either
            weights = torch.empty(num_tokens, top_k, dtype=weights_dtype, device=device)
            weighted_reduce(rows_of, index, weights, num_experts)
        for activation_format in task["formats"]:
            moe_forward(experts, x, index, weights, activation_format=activation_format)


def _decoders(experts: NVFP4Experts, max_active: int) -> list[BoundKernel]:
    """The kernels that decode compressed scales, of at most `max_active` experts."""
    compressed = [
        scales for scales in (experts.gate_up_scales, experts.down_scales) if isinstance(scales, NVFP4CSFScales)
    ]
    return [decode_launch(scales.device, *scales.shape, True, False, True, max_active)[1] for scales in compressed]


def _call_linear(layer: dict[str, Any], task: dict[str, Any], device: torch.device) -> None:
    weight, scales = (_tensor(layer["tensors"][name], device) for name in ("weight", "scales"))
    dtype = getattr(torch, layer["dtype"])
    kinds: dict[Any, int] = {}
    shape = device, weight.shape[0], weight.shape[1] * 2
    config_of = config_chooser(weight.unsqueeze(0), scales, dtype.itemsize)
    for num_tokens in task["tokens"]:
        kind = ahead.unpacks_ahead(*shape, num_tokens), split.choose_split(*shape, num_tokens), config_of(num_tokens)
        kinds.setdefault(kind, num_tokens)
    for num_tokens in kinds.values():
        x = torch.empty(num_tokens, weight.shape[1] * 2, dtype=dtype, device=device)
        factor = torch.empty(1, dtype=torch.float32, device=device)
        for activation_format in task["formats"]:
            with contextlib.suppress(_OtherLibrary):
                matmul_2d(x, weight, None, scales, activation_format=activation_format, b_global_scale=factor)
            if activation_format is None:
                matmul_2d(x, weight, None, scales, a_global_scale=factor, b_global_scale=factor)


def config_chooser(weight: torch.Tensor, scales: Any, result_bytes: int) -> Callable[[int], Any]:
    """The tiles of calls on a stack of weights, by their number of rows."""
    device, (num_experts, rows, half) = weight.device, weight.shape
    depth = 2 * half
    # Scales of rows that are too long, or not whole words, are decoded first; other kernels have tiles of one kind.
    has_tiles = capability.kernel_of(device, depth, True) == capability.TENSOR_CORE
    is_read = has_tiles and capability.reads_compressed_on(device, depth, True)
    is_compressed = is_read and isinstance(scales, NVFP4CSFScales)
    return lambda num_rows: config.choose_config(
        device, rows, depth, num_rows, num_experts, result_bytes, is_compressed
    )
