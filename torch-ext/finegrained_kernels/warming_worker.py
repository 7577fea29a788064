"""A program that compiles kernels before their first launch. `warming.py` starts it and writes to its standard input:
first a line with what the program needs for its imports, then the kernels; it prints a line for each of them.

It imports the bundle's modules with kernels, under the names that they have in the program that started it, and nothing
else of that program. Importing torch would take longer than compiling a kernel, and these modules need it only for the
functions that launch kernels, so they get a stand-in. The program sees no GPU: Triton gets a driver that only names
one, and kernels are compiled into Triton's cache as a launch would do it. Once it knows the kernels, it forks into
several processes.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import importlib.abc
import importlib.util
import inspect
import json
import os
import pickle
import sys
import threading
import warnings
from pathlib import Path
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any

NUMBER_BYTES = 2
KERNELS = (
    *("csf.decode_triton", "gemm.kernels.mma", "gemm.kernels.portable", "gemm.kernels.sm90_split"),
    *("gemm.kernels.sm90_wgmma", "gemm.kernels.unpack_ahead", "moe.reduction_triton", "moe.routing_triton"),
    "nvfp4.quantize_triton",
)
"""Modules with kernels, which are imported before it is known which of them are launched."""


def main() -> None:
    task = json.loads(sys.stdin.buffer.readline())
    sys.path[:] = task["sys_path"]
    sys.meta_path.insert(0, NoTorch())
    digest = take_digest()
    make_packages(task["name"], Path(task["directory"]))
    pretend_gpu(task["device"])
    store_binaries()
    take_keys([f"{task['name']}.{module}" for module in KERNELS])
    jobs = sorted(pickle.load(sys.stdin.buffer), key=cost, reverse=True)
    take_keys([module for module, *_ in jobs])
    digest.join()
    quicken_front_end()
    say({"total": len(jobs)})
    gc.freeze()
    gc.disable()  # it would traverse all modules again and again, and write to memory that the processes share
    queue = numbers_up_to(len(jobs))
    first = os.getpid()
    others = fork(min(task["workers"], len(jobs)) - 1)
    while number := os.read(queue, NUMBER_BYTES):
        say(compile_kernel(*jobs[int.from_bytes(number, "little")]))
    if os.getpid() != first:
        os._exit(0)
    if any(os.waitpid(process, 0)[1] for process in others):
        sys.exit("a process ended before its kernels were compiled")


def say(what: dict) -> None:
    """Send a line to whoever started this, in a single write: processes share the pipe, and print() may use several."""
    os.write(1, f"{json.dumps(what)}\n".encode())


class Nothing(ModuleType):
    """Stands in for torch and its modules: each of its attributes is itself, and as a decorator it changes nothing."""

    __path__ = []  # noqa: RUF012  (a package: parts of it are imported)

    def __getattr__(self, name: str) -> Nothing:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *arguments: Any, **_: Any) -> Any:
        return arguments[0] if arguments and isinstance(arguments[0], FunctionType) else self

    def __getitem__(self, key: Any) -> Nothing:
        return self

    __or__ = __ror__ = __getitem__

    def __mro_entries__(self, bases: tuple) -> tuple:
        return ()


class NoTorch(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports `Nothing` in place of torch."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        return importlib.util.spec_from_loader(name, self) if name.partition(".")[0] == "torch" else None

    def create_module(self, spec: Any) -> ModuleType:
        return Nothing(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


def make_packages(name: str, directory: Path) -> None:
    """Make the bundle's packages, with their names in the program that started this one, but without running their
    `__init__`, which would import everything."""
    for path in directory.rglob("__init__.py"):
        package = ModuleType(".".join((name, *path.parent.relative_to(directory).parts)))
        package.__path__ = [str(path.parent)]
        sys.modules[package.__name__] = package


def take_keys(modules: list[str]) -> None:
    """Import modules and compute the keys of their kernels once, before there are several processes."""
    for name in modules:
        module = importlib.import_module(name)
        importlib.import_module(f"{name.partition('.')[0]}.cache_keys").take_keys(module)


def take_digest() -> threading.Thread:
    """Have Triton compute the digest of its own files, which every name in its cache contains, while modules are
    imported."""
    import triton

    thread = threading.Thread(target=getattr(triton.runtime.cache, "triton_key", None))
    thread.start()
    return thread


def pretend_gpu(device: dict[str, Any]) -> None:
    """Answer what Triton asks about the GPU that kernels are compiled for."""
    import triton
    from triton.backends.compiler import GPUTarget

    major, minor = device["capability"]
    driver = SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", 10 * major + minor, 32),
        get_current_device=lambda: 0,
        get_current_stream=lambda index=None: 0,
    )
    triton.runtime.driver.set_active(driver)


def store_binaries() -> None:
    """Keep no intermediate forms of kernels. They are six times as large as the binaries, and each first call would
    read them."""
    import triton

    triton.knobs.compilation.store_binary_only = True


def quicken_front_end() -> None:
    """Make Triton's front end faster. It is written in Python and does a third of the work, and a third of its time is
    spent on repetition: it parses the same functions for every kernel, asks for the signatures of its own functions
    again, and, in Triton 3.6, suppresses Python's warnings at every node."""
    import triton
    from triton.compiler import code_generator

    function = triton.runtime.JITFunction
    function.parse = functools.lru_cache(maxsize=None)(function.parse)
    signature = functools.lru_cache(maxsize=None)(inspect.signature)
    code_generator.inspect = SimpleNamespace(**{**vars(inspect), "signature": signature})
    silent = {"catch_warnings": contextlib.nullcontext, "simplefilter": lambda *_: None}
    code_generator.warnings = SimpleNamespace(**{**vars(warnings), **silent})


def numbers_up_to(count: int) -> int:
    """A pipe from which processes read the numbers below `count`, each number once, and then its end."""
    readable, writable = os.pipe()
    for number in range(count):
        os.write(writable, number.to_bytes(NUMBER_BYTES, "little"))
    os.close(writable)
    return readable


def fork(count: int) -> list[int]:
    """Fork `count` processes, if the system can. Returns their ids, and in each of them an empty list."""
    others: list[int] = []
    for _ in range(count if hasattr(os, "fork") else 0):
        process = os.fork()
        if not process:
            return []
        others.append(process)
    return others


def cost(job: tuple) -> tuple:
    """A sort key for how long a kernel takes to compile, roughly, because the largest are compiled first."""
    _, name, constants, _ = job
    tile, shape = constants.get("TILE"), constants.get("SHAPE")
    size = getattr(tile, "BLOCK_N", 0) * getattr(tile, "BLOCK_T", 0) * (4 if "wgmma" in name else 1)
    return size, getattr(shape, "COMPRESSED", False), getattr(shape, "GLOBAL_PER_ROW", False)


def compile_kernel(module: str, name: str, constants: dict[str, Any], arguments: tuple) -> dict[str, Any]:
    """Where in Triton's cache the kernel is now, and whether it was there before."""
    import triton
    from triton.runtime.cache import get_cache_manager

    hits: list[bool] = []

    def listen(*_: Any, cache_hit: bool = False, **__: Any) -> None:
        hits.append(cache_hit)

    triton.knobs.compilation.listener = listen
    kernel = getattr(sys.modules[module], name)
    compiled = kernel.run(*arguments, grid=(1,), warmup=True, **constants)
    if triton.__version__.startswith("3.6."):  # whose launchers are C that is compiled for each signature
        from triton.backends.nvidia.driver import CudaLauncher

        with contextlib.suppress(Exception):  # if there is no driver to link them to, the first launch says so
            CudaLauncher(compiled.src, compiled.metadata)
    return {"cache": get_cache_manager(compiled.hash).cache_dir, "compiled": not all(hits)}


if __name__ == "__main__":
    main()
