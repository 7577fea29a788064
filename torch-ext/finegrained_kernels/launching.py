"""Repeated launches of a Triton or Gluon kernel past Triton's own launch path, which costs the CPU tens of us.

`BoundKernel(kernel, **constants)` is launched by `bound(grid, *arguments)`. The first launch of a specialization goes
through `kernel[grid](...)`, which compiles or finds the binary and returns it; later ones call the binary's launcher.

Triton compiles a binary for each class of arguments: their types, whether a pointer is 16-byte aligned, whether an
integer is 1 or a multiple of 16. `specialize` tells at least as many classes apart. One too many costs an ordinary
launch; one too few would run a binary made for other arguments.

Whatever is not the known case is left to Triton: its versions and backends other than those below, its interpreter, a
profiler's hooks, arguments of other types.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton

from .device import on_device

_FIRST_VERSION, _LAST_VERSION = (3, 6), (3, 9)
"""Versions of Triton whose `CompiledKernel.run` takes what `BoundKernel` passes."""


class BoundKernel:
    """A kernel with its constants, and options such as `num_warps`, chosen. Its constant parameters come last.

    Called with a grid of one to three and the other arguments by position. The first is a tensor, on the device that
    the kernel is launched on, and all others lie there too, or in page-locked memory, which a GPU knows by the same
    address as the host does.
    """

    def __init__(self, kernel: Any, **constants: Any) -> None:
        self.kernel = kernel
        self.constants = constants
        self._trailing = _trailing_constants(kernel, constants) if _is_known_case(kernel) else None
        self._compiled: dict[tuple, tuple] = {}

    def __call__(self, grid: tuple[int, ...], *arguments: Any) -> None:
        device = arguments[0].device
        trailing = self._trailing
        specialized = None if trailing is None or _is_observed(self.kernel) else specialize(arguments)
        if trailing is None or specialized is None:
            with on_device(device):
                self.kernel[grid](*arguments, **self.constants)
            return
        index = device.index
        if index != torch.cuda.current_device():
            with torch.cuda.device(index):
                return self(grid, *arguments)
        kinds, values = specialized
        key = (index, *kinds)
        compiled = self._compiled.get(key)
        if compiled is None:
            kernel = self.kernel[grid](*arguments, **self.constants)
            if isinstance(kernel, triton.compiler.CompiledKernel) and kernel.metadata.target.backend == "cuda":
                self._compiled[key] = (kernel.run, kernel.function, kernel.packed_metadata)
            return
        run, function, metadata = compiled
        x, y, z = (*grid, 1, 1)[:3]
        stream = torch._C._cuda_getCurrentRawStream(index)
        run(x, y, z, stream, function, metadata, None, None, None, *values, *trailing)


@functools.lru_cache(maxsize=None, typed=True)
def bind(kernel: Any, **constants: Any) -> BoundKernel:
    """The one `BoundKernel` of these constants."""
    return BoundKernel(kernel, **constants)


def specialize(arguments: tuple) -> tuple[list, list] | None:
    """The class of `arguments`, hashable item by item, and what to pass for them: for a tensor its address.

    None for arguments whose class is not known here.
    """
    key, values = [], []
    for argument in arguments:
        kind = type(argument)
        if kind is torch.Tensor or kind is torch.nn.Parameter:
            address = argument.data_ptr()
            key.append(argument.dtype if address % 16 == 0 else (argument.dtype, "unaligned"))
            values.append(address)
            continue
        if kind is int:
            key.append(_int_class(argument))
        elif argument is None or kind is float or kind is bool:
            key.append(kind)
        elif kind is tuple:
            nested = specialize(argument)
            if nested is None:
                return None
            key.append(tuple(nested[0]))
            argument = tuple(nested[1])
        else:
            return None
        values.append(argument)
    return key, values


def _int_class(value: int) -> int:
    width = 0 if -(1 << 31) <= value < 1 << 31 else 1 if value < 1 << 63 else 2
    return 3 * width + (1 if value == 1 else 2 if value % 16 == 0 else 0)


def _is_known_case(kernel: Any) -> bool:
    """A jitted kernel, not an interpreted one, of a known Triton, on torch for NVIDIA GPUs."""
    version = tuple(int(part) for part in triton.__version__.split(".")[:2])
    known = torch.version.cuda is not None and _FIRST_VERSION <= version <= _LAST_VERSION
    return known and isinstance(kernel, triton.runtime.JITFunction)


def _trailing_constants(kernel: Any, constants: dict[str, Any]) -> tuple | None:
    """The values of the kernel's last parameters from its first constant on, None unless all of those are constants."""
    first = next((i for i, parameter in enumerate(kernel.params) if parameter.is_constexpr), len(kernel.params))
    trailing = kernel.params[first:]
    values = [constants.get(parameter.name, parameter.default) for parameter in trailing]
    bound = all(parameter.name in constants or parameter.has_default for parameter in trailing)
    leading = {parameter.name for parameter in kernel.params[:first]}
    if not bound or leading & constants.keys() or not all(parameter.is_constexpr for parameter in trailing):
        return None
    return tuple(values)


def _is_observed(kernel: Any) -> bool:
    """Whether somebody wants to see launches, or to have kernels compiled differently than before."""
    runtime = triton.knobs.runtime
    return bool(
        kernel.pre_run_hooks
        or runtime.debug
        or getattr(runtime.launch_enter_hook, "calls", runtime.launch_enter_hook)
        or getattr(runtime.launch_exit_hook, "calls", runtime.launch_exit_hook)
        or getattr(runtime, "add_stages_inspection_hook", None)
    )
