"""What a call comes down to, found again: a call that did nothing but allocate, view and launch is replayed.

`planned(function, arguments)` is `function(*arguments)`. The second call of a kind is recorded: what torch allocates,
which binaries are launched, and of which tensor or allocation each pointer among their arguments is. Later calls of
this kind allocate, fill in the pointers and launch.

Calls are of one kind if all is equal that checks, tile rules and launchers may look at: of every argument its type, of
what is no tensor its value, of every tensor dtype, shape, device, strides and the address modulo 16. A call that raises
leaves no plan, so one that is wrong is checked every time. Keys hold no tensor, and nobody's identity.

Not replayed is a call that runs any other operator of torch, launches past `launching.py`, gives a binary a pointer
that may be of two tensors, or has an argument of another type; nor any while somebody looks on, through torch's
dispatch modes or Triton's hooks. These calls run as they always did.
"""

from __future__ import annotations

import functools
import operator
from typing import Any, Callable

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from .csf.scales import NVFP4CSFScales
from .recording import current_recorder, picker, recording

_MAX_PLANS = 4096
_TENSOR_TYPES = (torch.Tensor, torch.nn.Parameter)
_PLAIN_TYPES = (type(None), bool, int, float, str, torch.dtype)
_ALLOCATIONS = (
    torch.ops.aten.empty.memory_format,
    torch.ops.aten.empty_strided.default,
    torch.ops.aten.empty_like.default,
    torch.ops.aten.new_empty.default,
    torch.ops.aten.new_empty_strided.default,
)
_tensors_of = operator.attrgetter("bases", "codes", "exceptions", "exception_offsets")
_facts_of = operator.attrgetter("dtype", "shape")
_address_of, _strides_of, _device_of = torch.Tensor.data_ptr, torch.Tensor.stride, torch.Tensor.get_device
_is_contiguous = torch.Tensor.is_contiguous
_is_compiling, _num_modes = torch.compiler.is_compiling, torch._C._len_torch_dispatch_stack
_is_planned = operator.attrgetter("is_cuda")

_SEEN, _NEVER = "seen once", "not to be replayed"
_plans: dict[tuple, Any] = {}


def planned(function: Callable, arguments: tuple, described: tuple | None = None) -> Any:
    """`function(*arguments)`, a function of a module that depends on its arguments alone.

    `described`: tensors, compressed scales and plain values that `arguments` consist of; None: they are such.
    """
    if _is_compiling() or current_recorder() is not None:
        return function(*arguments)
    if described is None:
        described = arguments
    kinds = tuple(map(type, described))
    split = _splitters.get(kinds) or _splitter(kinds)
    tensors, others = split(described)
    if not tensors or not _is_planned(tensors[0]) or _num_modes():
        return function(*arguments)
    addresses = list(map(_address_of, tensors))
    is_aligned = not functools.reduce(operator.or_, addresses) & 15
    key = (
        function, kinds, others, is_aligned or tuple([address & 15 for address in addresses]),
        all(map(_is_contiguous, tensors)) or tuple(map(_strides_of, tensors)),
        *map(_facts_of, tensors), *map(_device_of, tensors),
    )  # fmt: skip
    plan = _plans.get(key)
    if callable(plan):
        if plan.is_observed() or not plan.is_apart(addresses):
            return function(*arguments)
        return plan(tensors, addresses)
    if plan is not _SEEN:
        result = function(*arguments)
        if plan is None:
            if len(_plans) >= _MAX_PLANS:
                _plans.clear()
            # 0.0 and -0.0 are one key, but not always one result.
            _plans[key] = _NEVER if any(type(value) is float and value == 0 for value in others) else _SEEN
        return result
    result, recorded = _record(function, arguments, tensors)
    _plans[key] = recorded or _NEVER
    return result


_splitters: dict[tuple[type, ...], Callable[[tuple], tuple[tuple, tuple]]] = {}


def _splitter(kinds: tuple[type, ...]) -> Callable[[tuple], tuple[tuple, tuple]]:
    """What takes arguments of these types apart, into (tensors, plain values); no tensors if there are others."""
    tensors = [i for i, kind in enumerate(kinds) if kind in _TENSOR_TYPES]
    scales = [i for i, kind in enumerate(kinds) if kind is NVFP4CSFScales]
    others = [i for i, kind in enumerate(kinds) if kind in _PLAIN_TYPES]
    if len(tensors) + len(scales) + len(others) < len(kinds) or len(scales) > 2:
        return lambda arguments: ((), ())
    pick_tensors, pick_others = picker(tensors), picker(others)

    def split(arguments: tuple) -> tuple[tuple, tuple]:
        return pick_tensors(arguments), pick_others(arguments)

    def split_one(arguments: tuple) -> tuple[tuple, tuple]:
        return pick_tensors(arguments) + _tensors_of(arguments[scales[0]]), pick_others(arguments)

    def split_two(arguments: tuple) -> tuple[tuple, tuple]:
        both = _tensors_of(arguments[scales[0]]) + _tensors_of(arguments[scales[1]])
        return pick_tensors(arguments) + both, pick_others(arguments)

    _splitters[kinds] = (split, split_one, split_two)[len(scales)]
    return _splitters[kinds]


class _Watch(TorchDispatchMode):
    """Keeps what torch allocates, and sees whether it does more than that and views."""

    def __init__(self) -> None:
        super().__init__()
        self.allocated: list[torch.Tensor] = []
        self.is_simple = True

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in _ALLOCATIONS:
            self.allocated.append(result)
        elif not func.is_view:
            self.is_simple = False
        return result


def _record(function: Callable, arguments: tuple, tensors: tuple) -> tuple[Any, Callable | None]:
    """The call's result, and its plan if it can be replayed."""
    with recording() as recorder, _Watch() as watch:
        result = function(*arguments)
    if not (watch.is_simple and recorder.is_complete):
        return result, None
    from .replay import NotTraced, Plan  # Triton may be absent where only the CPU is used

    try:
        return result, Plan(tensors, watch.allocated, recorder, result)
    except NotTraced:
        return result, None
