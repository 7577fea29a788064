"""A program that compiles kernels before their first launch. `warming.py` starts it and writes the task to its standard
input; it prints a line for each kernel.

It imports the bundle, under the name that it has in the program that started it, and nothing else of that program. It
sees no GPU: Triton gets a driver that only names one, and calls are made on placeholder tensors. Their kernels are not
launched, but compiled into Triton's cache as their launch would do it. Once it knows the kernels it forks into several
processes, so that what takes seconds to import is imported only once.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import importlib.util
import json
import os
import sys
import threading
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, Callable

NUMBER_BYTES = 2


def main() -> None:
    task = json.loads(sys.stdin.read())
    os.putenv("CUDA_VISIBLE_DEVICES", "")  # torch, imported below, reads it
    os.putenv("OMP_NUM_THREADS", "1")
    sys.path[:] = task["sys_path"]
    digest = take_digest()
    bundle = load_bundle(task["name"], Path(task["directory"]))
    pretend_gpu(task["device"])
    jobs = sorted(find_kernels(bundle, task).values(), key=cost, reverse=True)
    cache_keys = importlib.import_module(f"{bundle.__name__}.cache_keys")
    for kernel, *_ in jobs:  # once, before there are several processes
        cache_keys.take_key(kernel)
    digest.join()
    say({"total": len(jobs)})
    steps: list[Callable[[], dict]] = [build_driver, *(functools.partial(compile_kernel, *job) for job in jobs)]
    gc.freeze()
    gc.disable()  # it would walk through all of torch again and again, and write to memory that the processes share
    queue = numbers_up_to(len(steps))
    first = os.getpid()
    others = fork(min(task["workers"], len(jobs)) - 1)
    while number := os.read(queue, NUMBER_BYTES):
        say(steps[int.from_bytes(number, "little")]())
    if os.getpid() != first:
        os._exit(0)  # torch's own clean-up takes half a second
    if any(os.waitpid(process, 0)[1] for process in others):
        sys.exit("a process ended before its kernels were compiled")


def say(what: dict) -> None:
    """Send a line to whoever started this, in a single write: processes share the pipe, and print() may use several."""
    os.write(1, f"{json.dumps(what)}\n".encode())


def build_driver() -> dict:
    """Have Triton compile the C code that loads its binaries. If there is no driver to link it to, the first launch
    says so."""
    from triton.backends.nvidia.driver import CudaUtils

    with contextlib.suppress(Exception):
        CudaUtils()
    return {}


def take_digest() -> threading.Thread:
    """Have Triton compute the digest of its own files, which every name in its cache contains, while torch is
    imported."""
    import triton

    thread = threading.Thread(target=getattr(triton.runtime.cache, "triton_key", None))
    thread.start()
    return thread


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


def load_bundle(name: str, directory: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        name, directory / "__init__.py", submodule_search_locations=[str(directory)]
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def pretend_gpu(device: dict[str, Any]) -> None:
    """Answer what launchers and Triton ask about the GPU that kernels are compiled for."""
    import torch
    import triton
    from triton.backends.compiler import GPUTarget

    major, minor = device["capability"]
    patches: dict[str, Callable] = {
        "get_device_capability": lambda index=None: (major, minor),
        "get_device_name": lambda index=None: device["name"],
        "get_device_properties": lambda index=None: SimpleNamespace(multi_processor_count=device["num_sms"]),
        "current_device": lambda: 0,
        "current_stream": lambda index=None: SimpleNamespace(cuda_stream=0),
        "is_current_stream_capturing": lambda: True,  # during a capture no constants are kept
    }
    for name, function in patches.items():
        setattr(torch.cuda, name, function)
    driver = SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", 10 * major + minor, 32),
        get_current_device=lambda: 0,
        get_current_stream=lambda index=None: 0,
    )
    triton.runtime.driver.set_active(driver)


class OtherLibrary(Exception):
    """The rest of a call is done by a library, so there is nothing to compile."""


def find_kernels(bundle: ModuleType, task: dict[str, Any]) -> dict[tuple, tuple]:
    """Every kernel that these layers' calls launch, with its constants and stand-ins for its arguments."""
    launching, placeholders = (
        importlib.import_module(f"{bundle.__name__}.{name}") for name in ("launching", "placeholders")
    )
    found: dict[tuple, tuple] = {}

    def note(bound: Any, grid: tuple, *arguments: Any) -> None:
        stand_ins = tuple(map(stand_in, arguments))
        names = [parameter for parameter in bound.kernel.params if not parameter.is_constexpr]
        classes = [class_of(value, not parameter.do_not_specialize) for parameter, value in zip(names, stand_ins)]
        constants = tuple(sorted((name, repr(value)) for name, value in bound.constants.items()))
        found.setdefault((bound.kernel, constants, *classes), (bound.kernel, bound.constants, stand_ins))
        if bound.kernel.fn.__name__ == "unpack_kernel":
            raise OtherLibrary

    launching.BoundKernel.__call__ = note
    routing: Any = importlib.import_module(f"{bundle.__name__}.moe.routing")
    routing._schedule_by_sort = routing._schedule_fake  # it launches only torch's own kernels
    with placeholders.Placeholders():
        for layer in task["layers"]:
            call_experts(bundle, layer, task) if layer["kind"] == "experts" else call_linear(bundle, layer, task)
    return found


def stand_in(argument: Any) -> Any:
    """What Triton accepts in place of an argument; for a tensor, an aligned one of the same dtype."""
    import torch
    from triton.runtime.jit import MockTensor

    if isinstance(argument, torch.Tensor):
        return MockTensor(argument.dtype)
    if isinstance(argument, tuple):
        items = tuple(map(stand_in, argument))
        return type(argument)(*items) if hasattr(argument, "_fields") else items
    return argument


def class_of(value: Any, specialized: bool) -> Any:
    """A key that distinguishes arguments at least as finely as Triton does."""
    if isinstance(value, tuple):
        return tuple(class_of(item, specialized) for item in value)
    if type(value) is int:
        return (1 if value == 1 else 2 if value % 16 == 0 else 0) if specialized else int
    return value.dtype if hasattr(value, "dtype") else type(value)


def fake(described: Any, bundle: ModuleType) -> Any:
    """The tensor, scales or None that `warming.py` described."""
    import torch

    if described is None:
        return None
    if "bases" in described:
        return bundle.NVFP4CSFScales(**{name: fake(part, bundle) for name, part in described.items()})
    dtype = getattr(torch, described["dtype"])
    return torch.empty(described["shape"], dtype=dtype, device="cuda:0")


def call_experts(bundle: ModuleType, layer: dict[str, Any], task: dict[str, Any]) -> None:
    import torch

    forward = importlib.import_module(f"{bundle.__name__}.moe.layer")
    scheduling = importlib.import_module(f"{bundle.__name__}.moe.routing_triton")
    experts = bundle.NVFP4Experts(**{name: fake(part, bundle) for name, part in layer["tensors"].items()})
    top_k, num_experts = layer["top_k"], experts.num_experts
    dtype = getattr(torch, layer["dtype"])
    kinds: dict[tuple, int] = {}
    choose = [
        config_chooser(bundle, weight, scales, result_bytes)
        for weight, scales, result_bytes in (
            (experts.gate_up, experts.gate_up_scales, dtype.itemsize // 2),
            (experts.down, experts.down_scales, dtype.itemsize),
        )
    ]
    for num_tokens in task["tokens"]:
        rows = num_tokens * top_k
        is_batched = forward.is_batched(rows)
        tiled = min(rows, num_experts) if is_batched else rows
        configs = [config_of(tiled) for config_of in choose]
        is_one = num_tokens == 1  # then one global for each row is just one global
        way = scheduling.takes_one_launch(rows, num_experts), scheduling.fits(rows, num_experts)
        kinds.setdefault((is_batched, is_one, *way, *configs), num_tokens)
    for num_tokens in kinds.values():
        x = torch.empty(num_tokens, experts.hidden_size, dtype=dtype, device="cuda:0")
        for index_dtype, weights_dtype in ((torch.int64, torch.float32), (torch.int32, dtype)):
            index = torch.empty(num_tokens, top_k, dtype=index_dtype, device="cuda:0")
            weights = torch.empty(num_tokens, top_k, dtype=weights_dtype, device="cuda:0")
            for activation_format in task["formats"]:
                bundle.moe_forward(experts, x, index, weights, activation_format=activation_format)
            bundle.weighted_reduce(x.new_empty(num_tokens * top_k, x.shape[1]), index, weights.to(dtype), num_experts)
            bundle.weighted_reduce(x.new_empty(num_tokens * top_k, x.shape[1]), index, weights.float(), num_experts)


def call_linear(bundle: ModuleType, layer: dict[str, Any], task: dict[str, Any]) -> None:
    import torch

    parts = {name: fake(part, bundle) for name, part in layer["tensors"].items()}
    dtype = getattr(torch, layer["dtype"])
    weight, scales = parts["weight"], parts["scales"]
    ahead, split = (importlib.import_module(f"{bundle.__name__}.gemm.{name}") for name in ("ahead", "split"))
    kinds: dict[Any, int] = {}
    shape = weight.device, weight.shape[0], weight.shape[1] * 2
    config_of = config_chooser(bundle, weight.unsqueeze(0), scales, dtype.itemsize)
    for num_tokens in task["tokens"]:
        kind = ahead.unpacks_ahead(*shape, num_tokens), split.choose_split(*shape, num_tokens), config_of(num_tokens)
        kinds.setdefault((num_tokens == 1, *kind), num_tokens)
    for num_tokens in kinds.values():
        x = torch.empty(num_tokens, weight.shape[1] * 2, dtype=dtype, device="cuda:0")
        options = {"b_global_scale": torch.empty(1, device="cuda:0")}
        for activation_format in task["formats"]:
            with contextlib.suppress(OtherLibrary):
                bundle.matmul_2d(x, weight, None, scales, activation_format=activation_format, **options)
            if activation_format is None:
                bundle.matmul_2d(x, weight, None, scales, a_global_scale=torch.empty(1, device="cuda:0"), **options)


def config_chooser(bundle: ModuleType, weight: Any, scales: Any, result_bytes: int) -> Callable[[int], Any]:
    """A function from a call's number of rows to the tiles that it uses on a stack of weights."""
    gemm: Any = importlib.import_module(f"{bundle.__name__}.gemm.config")
    capability: Any = importlib.import_module(f"{bundle.__name__}.gemm.capability")
    device, (num_experts, rows, half) = weight.device, weight.shape
    depth = 2 * half
    # Scales of rows that are too long, or not whole words, are decoded before the GEMM. Other kernels have only one
    # kind of tile.
    has_tiles = capability.kernel_of(device, depth, True) == capability.TENSOR_CORE
    is_read = has_tiles and capability.reads_compressed_on(device, depth, True)
    is_compressed = is_read and isinstance(scales, bundle.NVFP4CSFScales)
    return lambda num_rows: gemm.choose_config(device, rows, depth, num_rows, num_experts, result_bytes, is_compressed)


def cost(job: tuple) -> tuple:
    """A sort key: roughly how long a kernel takes to compile. The largest are started first."""
    kernel, constants, _ = job
    tile, shape = constants.get("TILE"), constants.get("SHAPE")
    size = getattr(tile, "BLOCK_N", 0) * getattr(tile, "BLOCK_T", 0) * (4 if "wgmma" in kernel.fn.__name__ else 1)
    return size, getattr(shape, "COMPRESSED", False), getattr(shape, "GLOBAL_PER_ROW", False)


def compile_kernel(kernel: Any, constants: dict[str, Any], arguments: tuple) -> dict[str, Any]:
    """Compile a kernel. Returns where it is in Triton's cache, and whether it was there before."""
    import triton
    from triton.runtime.cache import get_cache_manager

    hits: list[bool] = []

    def listen(*_: Any, cache_hit: bool = False, **__: Any) -> None:
        hits.append(cache_hit)

    triton.knobs.compilation.listener = listen
    compiled = kernel.run(*arguments, grid=(1,), warmup=True, **constants)
    if triton.__version__.startswith("3.6."):  # its launchers are C code, compiled for each signature
        from triton.backends.nvidia.driver import CudaLauncher

        CudaLauncher(compiled.src, compiled.metadata)
    return {"cache": get_cache_manager(compiled.hash).cache_dir, "compiled": not all(hits)}


if __name__ == "__main__":
    main()
