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
import operator
from collections.abc import Sequence
from typing import Any, Callable

import torch
import triton

from .cache_keys import take_key
from .device import on_device
from .recording import Launch, current_recorder, forgo_plan

_FIRST_VERSION, _LAST_VERSION = (3, 6), (3, 9)
"""Versions of Triton whose `CompiledKernel.run` takes what `BoundKernel` passes."""

_UNASKED_BYTES = 48 << 10
"""Shared memory that every program may have."""


class BoundKernel:
    """A kernel with its constants, and options such as `num_warps`, chosen. Its constant parameters come last.

    Called with a grid of one to three and the other arguments by position. The first is a tensor, on the device that
    the kernel is launched on, and all others lie there too, or in page-locked memory, which a GPU knows by the same
    address as the host does.

    With a `cluster`, as many neighbours of the grid run as one, and the grid counts clusters.
    """

    def __init__(self, kernel: Any, cluster: int | None = None, **constants: Any) -> None:
        self.kernel = kernel
        self.cluster = cluster
        self.constants = constants
        self._trailing = _trailing_constants(kernel, constants) if _is_known_case(kernel) else None
        self._compiled: dict[tuple, tuple[Any, Any, Any]] = {}

    def __call__(self, grid: tuple[int, ...], *arguments: Any) -> None:
        device = arguments[0].device
        trailing = self._trailing
        is_known = trailing is not None and not self.kernel.pre_run_hooks and not is_observed()
        specialized = specialize(arguments) if is_known else None
        if trailing is None or specialized is None:
            forgo_plan()
            with on_device(device):
                self._launch_by_triton(grid, arguments)
            return
        index = device.index
        if index != torch.cuda.current_device():
            with torch.cuda.device(index):
                return self(grid, *arguments)
        kinds, values = specialized
        key = (index, *kinds)
        compiled = self._compiled.get(key)
        x, y, z = (*grid, 1, 1)[:3]
        if compiled is None:
            kernel = self._launch_by_triton(grid, arguments)
            if isinstance(kernel, triton.compiler.CompiledKernel) and kernel.metadata.target.backend == "cuda":
                compiled = self._compiled[key] = (kernel.run, kernel.function, kernel.packed_metadata)
                self._record(compiled, (x, y, z), arguments)
            else:
                forgo_plan()
            return
        self._record(compiled, (x, y, z), arguments)
        run, function, metadata = compiled
        stream = torch._C._cuda_getCurrentRawStream(index)
        run(x, y, z, stream, function, metadata, None, None, None, *values, *trailing)

    def _record(self, compiled: tuple[Any, Any, Any], grid: tuple[int, int, int], arguments: tuple) -> None:
        recorder = current_recorder()
        if recorder is not None:
            run, function, metadata = compiled
            given = (*arguments, *(self._trailing or ()))
            recorder.launches.append(Launch(run, function, metadata, grid, given, self.kernel.pre_run_hooks))

    def _launch_by_triton(self, grid: tuple[int, ...], arguments: tuple) -> Any:
        take_key(self.kernel)
        if self.cluster is not None:
            ask_for_cluster(self.kernel.warmup(*arguments, grid=grid, **self.constants), self.cluster)
        return self.kernel[grid](*arguments, **self.constants)


def ask_for_cluster(compiled: Any, size: int) -> None:
    """Have a compiled kernel launched in clusters, which Triton does for kernels that it compiles for several programs
    at once, and not for one that brings its own instructions for them.

    Such kernels also declare shared memory that Triton does not know of; what a program may have beyond 48 KB has to be
    asked for when the binary is loaded, even where Triton's own share is less.
    """
    if isinstance(compiled, triton.compiler.CompiledKernel):
        num_warps, _, shared = compiled.packed_metadata
        compiled.packed_metadata = (num_warps, size, shared)
        if compiled.metadata.shared <= _UNASKED_BYTES:
            compiled.metadata = compiled.metadata._replace(shared=_UNASKED_BYTES + 1)


@functools.lru_cache(maxsize=None, typed=True)
def bind(kernel: Any, cluster: int | None = None, **constants: Any) -> BoundKernel:
    """The one `BoundKernel` of these constants."""
    return BoundKernel(kernel, cluster, **constants)


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
        elif isinstance(argument, tuple):  # a named one, too
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


def _version() -> tuple[int, ...]:
    return tuple(int(part) for part in triton.__version__.split(".")[:2])


def _is_known_case(kernel: Any) -> bool:
    """A jitted kernel, not an interpreted one, of a known Triton, on torch for NVIDIA GPUs."""
    known = torch.version.cuda is not None and _FIRST_VERSION <= _version() <= _LAST_VERSION
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


def shortest_way(launch: Launch) -> tuple[Callable, tuple, bool]:
    """(callee, what it takes between stream and kernel arguments, whether it takes these as one tuple).

    `run` is Python: it looks for scratch memory, and calls what is compiled. Where the kernel has no scratch, and
    Triton is of a version whose arguments are known, that can be called at once.
    """
    run, function, metadata = launch.run, launch.function, launch.metadata
    if type(run).__name__ == "CudaLauncher" and run.global_scratch_size == run.profile_scratch_size == 0:
        between = (function, run.launch_cooperative_grid, run.launch_pdl)
        if _version() == (3, 6):
            return run.launch, (*between, None, None, metadata, None, None, None), False
        if _version() == (3, 9) and not run.gsan_enabled:
            rest = (metadata, None, None, None, None, None, run.arg_annotations, run.kernel_signature)
            return run.launch, (*between, *rest), True
    return run, (function, metadata, None, None, None), False


@triton.jit
def empty_kernel():
    """What Triton does for any kernel, it does for this one (first_launch.py)."""


def is_observed(hooks: Sequence[list] = ()) -> bool:
    """Whether somebody wants to see launches, or to have kernels compiled differently than before. `hooks`: kernels'
    own."""
    runtime = triton.knobs.runtime
    try:
        return any(hooks) or any(_looks_on(runtime))
    except AttributeError:  # Triton takes a function, or None, in place of its chains of hooks
        alone = (runtime.launch_enter_hook, runtime.launch_exit_hook)
        return bool(runtime.debug or any(getattr(hook, "calls", hook) for hook in alone))


_looks_on = operator.attrgetter(
    *("debug", "launch_enter_hook.calls", "launch_exit_hook.calls", "add_stages_inspection_hook")
)
