"""Launches Triton and Gluon kernels without Triton's own launch path, which takes tens of microseconds of CPU time.

`BoundKernel(kernel, **constants)` is launched by `bound(grid, *arguments)`. The first launch of a specialization goes
through `kernel[grid](...)`, which compiles or finds the binary and returns it; later ones call the binary's launcher.

Triton compiles a binary for each class of arguments: their types, whether a pointer is 16-byte aligned, whether an
integer is 1 or a multiple of 16. `specialize` distinguishes at least as many classes. One class too many only costs an
ordinary launch; one too few would run a binary that was compiled for other arguments.

Everything else is left to Triton: versions and backends other than those below, the interpreter, a profiler's hooks,
and arguments of other types.
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
from .recording import Launch, current_recorder, forgo_plan, is_noted

_FIRST_VERSION, _LAST_VERSION = (3, 6), (3, 9)
"""The first and the last version of Triton whose `CompiledKernel.run` takes what `BoundKernel` passes."""

_UNASKED_BYTES = 48 << 10
"""Bytes of shared memory that a program may have without asking for it."""


class BoundKernel:
    """A kernel with fixed constants, and fixed options such as `num_warps`. Its constant parameters come last.

    Call it with a grid of one to three dimensions and the other arguments by position. The first argument is a tensor,
    and the kernel is launched on its device. All other tensors are on that device too, or in page-locked memory, which
    has the same address for the GPU as for the host.

    With `cluster`, so many neighbouring programs form a cluster, and the grid counts clusters.
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
            if not is_noted(self, arguments):
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
    """Have a compiled kernel launched in clusters. Triton does that for kernels which it compiles for clusters itself,
    but not for a kernel with cluster instructions of its own.

    Such kernels also declare shared memory that Triton does not know of. More than 48 KB for a program has to be
    requested when the binary is loaded, even if Triton's own part of it is smaller.
    """
    if isinstance(compiled, triton.compiler.CompiledKernel):
        num_warps, _, shared = compiled.packed_metadata
        compiled.packed_metadata = (num_warps, size, shared)
        if compiled.metadata.shared <= _UNASKED_BYTES:
            compiled.metadata = compiled.metadata._replace(shared=_UNASKED_BYTES + 1)


def bind(kernel: Any, cluster: int | None = None, **constants: Any) -> BoundKernel:
    """The `BoundKernel` of this kernel and these constants; there is only one."""
    take_key(kernel)  # the key is also the kernel's hash, and would otherwise be computed for this kernel alone
    return _bind(kernel, cluster, **constants)


@functools.lru_cache(maxsize=None, typed=True)
def _bind(kernel: Any, cluster: int | None, **constants: Any) -> BoundKernel:
    return BoundKernel(kernel, cluster, **constants)


def specialize(arguments: tuple) -> tuple[list, list] | None:
    """The class of `arguments` as a list of hashable items, and the values to pass for them: for a tensor its address.

    None if an argument is of a type that is not handled here.
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
        elif isinstance(argument, tuple):  # named tuples too
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
    """Whether this is a jitted kernel, not an interpreted one, with a known version of Triton and torch built for
    NVIDIA GPUs."""
    known = torch.version.cuda is not None and _FIRST_VERSION <= _version() <= _LAST_VERSION
    return known and isinstance(kernel, triton.runtime.JITFunction)


def _trailing_constants(kernel: Any, constants: dict[str, Any]) -> tuple | None:
    """The values of the kernel's last parameters, from its first constant on; None unless all of them are constants."""
    first = next((i for i, parameter in enumerate(kernel.params) if parameter.is_constexpr), len(kernel.params))
    trailing = kernel.params[first:]
    values = [constants.get(parameter.name, parameter.default) for parameter in trailing]
    bound = all(parameter.name in constants or parameter.has_default for parameter in trailing)
    leading = {parameter.name for parameter in kernel.params[:first]}
    if not bound or leading & constants.keys() or not all(parameter.is_constexpr for parameter in trailing):
        return None
    return tuple(values)


def shortest_way(launch: Launch) -> tuple[Callable, tuple, bool]:
    """(callee, its arguments between the stream and the kernel's arguments, whether it takes the latter as one tuple).

    `run` is a Python function that looks for scratch memory and calls a compiled function. If the kernel needs no
    scratch, and the arguments in this version of Triton are known, the compiled function can be called directly.
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
    """For this kernel Triton does all that it does once for any kernel (first_launch.py)."""


def is_observed(hooks: Sequence[list] = ()) -> bool:
    """Whether somebody observes launches, or wants kernels to be compiled differently than before. `hooks`: the
    kernels' own hooks."""
    runtime = triton.knobs.runtime
    try:
        return any(hooks) or any(_looks_on(runtime))
    except AttributeError:  # a user may have replaced Triton's chain of hooks with a function or None
        alone = (runtime.launch_enter_hook, runtime.launch_exit_hook)
        return bool(runtime.debug or any(getattr(hook, "calls", hook) for hook in alone))


_looks_on = operator.attrgetter(
    *("debug", "launch_enter_hook.calls", "launch_exit_hook.calls", "add_stages_inspection_hook")
)
