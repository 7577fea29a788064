"""Replays repeated calls: a call that does nothing but allocate, view and launch is recorded once, and then repeated
from the record.

`planned(function, arguments)` is `function(*arguments)`. The second call of a kind is recorded: what torch allocates,
which binaries are launched, and which tensor or allocation each pointer argument points into. Later calls of this kind
allocate, fill in the pointers and launch.

Two calls are of one kind if everything is equal that checks, tile rules and launchers may look at: the type of every
argument, the value of everything that is not a tensor, and the dtype, shape, device, strides and address modulo 16 of
every tensor. (The number of exceptions in compressed scales does not matter to them, so layers share plans.) A call
that raises leaves no plan, so a faulty call is checked every time. Kinds hold no tensors and compare no identities.

A call is not replayed if it runs any other torch operator, launches without `launching.py`, passes a pointer that may
belong to either of two tensors, or has an argument of another type. No call is replayed while somebody observes it
through torch's dispatch modes or Triton's hooks. These calls run as usual.
"""

from __future__ import annotations

import functools
import operator
from typing import Any, Callable

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from .csf.scales import NVFP4CSFScales
from .recording import current_recorder, picker, recording

_MAX_KEYS, _MAX_KINDS = 4096, 16
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
_address_of = torch.Tensor.data_ptr
_is_compiling, _num_modes = torch.compiler.is_compiling, torch._C._len_torch_dispatch_stack
_is_planned = operator.attrgetter("is_cuda")

_Guards: Any = getattr(torch._C._dynamo.guards, "TensorGuards", None)
"""Compares types, dtypes, devices, shapes and strides of all tensors in one call."""


class _Kind:
    """Calls of one kind: those whose tensors `matches` accepts. `plan` is None until the second call, and False if the
    call cannot be replayed."""

    __slots__ = ("matches", "plan")

    def __init__(self, matches: Callable[..., bool], plan: Any) -> None:
        self.matches, self.plan = matches, plan


class _Signature:
    """Calls of one function with arguments of the same types. `split` separates them into (tensors, plain values); it
    returns no tensors if an argument is of another type. `of_any_size` lists the tensors that are exceptions of
    compressed scales. `kinds` groups calls by their plain values and the shapes of their first tensors."""

    __slots__ = ("kinds", "of_any_size", "second", "split")

    def __init__(self, types: tuple[type, ...]) -> None:
        self.split = _splitter(types)
        num_tensors, num_compressed = sum(map(types.count, _TENSOR_TYPES)), types.count(NVFP4CSFScales)
        self.of_any_size = [num_tensors + 4 * i + 2 for i in range(num_compressed)]
        self.second = min(1, num_tensors + 4 * num_compressed - 1)
        self.kinds: dict[tuple, list[_Kind]] = {}


_signatures: dict[tuple, _Signature] = {}


def planned(function: Callable, arguments: tuple, described: tuple | None = None) -> Any:
    """`function(*arguments)`. The function is a module-level one that depends on its arguments alone.

    `described`: the tensors, compressed scales and plain values that `arguments` consist of; None if `arguments` are
    such values themselves.
    """
    if _is_compiling() or current_recorder() is not None:
        return function(*arguments)
    if described is None:
        described = arguments
    types = tuple(map(type, described))
    signature = _signatures.get((function, types)) or _signatures.setdefault((function, types), _Signature(types))
    tensors, others = signature.split(described)
    if not tensors or not _is_planned(tensors[0]) or _num_modes():
        return function(*arguments)
    try:
        addresses = list(map(_address_of, tensors))
    except RuntimeError:  # sparse tensors and tensors inside torch.func have no address
        return function(*arguments)
    is_aligned = not functools.reduce(operator.or_, addresses) & 15
    alignment = is_aligned or tuple([address & 15 for address in addresses])
    key = others, alignment, tensors[0].shape, tensors[signature.second].shape
    for kind in signature.kinds.get(key, ()):
        if kind.matches(*tensors):
            plan = kind.plan
            break
    else:
        result = function(*arguments)
        _add_kind(signature, key, tensors)
        return result
    if plan:
        if plan.is_observed() or not plan.is_apart(tensors, addresses):
            return function(*arguments)
        return plan(tensors, addresses)
    if plan is None:
        result, recorded = _record(function, arguments, tensors, signature.of_any_size)
        kind.plan = recorded or False
        return result
    return function(*arguments)


def _add_kind(signature: _Signature, key: tuple, tensors: tuple) -> None:
    sizes: list[list[int | None]] = [list(tensor.shape) for tensor in tensors]
    for i in signature.of_any_size:
        if sizes[i] != [0]:  # an empty tensor's pointer is null, which a plan takes for a constant
            sizes[i] = [None] * len(sizes[i])
    strides = [list(tensor.stride()) for tensor in tensors]
    try:
        matches = _Guards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check
    except (
        TypeError,
        RuntimeError,
    ):  # torch does not promise these: if they take other arguments, no call is replayed
        return
    if len(signature.kinds) >= _MAX_KEYS:
        signature.kinds.clear()
    kinds = signature.kinds.setdefault(key, [])
    if len(kinds) >= _MAX_KINDS:
        kinds.clear()
    # 0.0 and -0.0 are the same key, but do not always give the same result.
    is_never = any(type(value) is float and value == 0 for value in key[0])
    kinds.append(_Kind(matches, False if is_never else None))


def _splitter(types: tuple[type, ...]) -> Callable[[tuple], tuple[tuple, tuple]]:
    tensors = [i for i, kind in enumerate(types) if kind in _TENSOR_TYPES]
    scales = [i for i, kind in enumerate(types) if kind is NVFP4CSFScales]
    others = [i for i, kind in enumerate(types) if kind in _PLAIN_TYPES]
    if _Guards is None or len(tensors) + len(scales) + len(others) < len(types) or len(scales) > 2:
        return lambda arguments: ((), ())
    pick_tensors, pick_others = picker(tensors), picker(others)

    def split(arguments: tuple) -> tuple[tuple, tuple]:
        return pick_tensors(arguments), pick_others(arguments)

    def split_one(arguments: tuple) -> tuple[tuple, tuple]:
        return pick_tensors(arguments) + _tensors_of(arguments[scales[0]]), pick_others(arguments)

    def split_two(arguments: tuple) -> tuple[tuple, tuple]:
        both = _tensors_of(arguments[scales[0]]) + _tensors_of(arguments[scales[1]])
        return pick_tensors(arguments) + both, pick_others(arguments)

    return (split, split_one, split_two)[len(scales)]


class _Watch(TorchDispatchMode):
    """Keeps what torch allocates, and notices whether it does anything besides allocating and viewing."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Without this, torch 2.11 and later would import its compiler, which takes seconds, only to exempt it from the
        mode."""
        return False

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


def _record(
    function: Callable, arguments: tuple, tensors: tuple, of_any_size: list[int]
) -> tuple[Any, Callable | None]:
    """The call's result, and its plan if it can be replayed."""
    with recording() as recorder, _Watch() as watch:
        result = function(*arguments)
    if not (watch.is_simple and recorder.is_complete):
        return result, None
    from .replay import NotTraced, Plan  # Triton may be absent where only the CPU is used

    try:
        return result, Plan(tensors, of_any_size, watch.allocated, recorder, result)
    except NotTraced:
        return result, None
