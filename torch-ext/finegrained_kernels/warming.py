"""Kernels compiled before they are needed: `warm_up`."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import pickle
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Union

import torch

from .csf.scales import NVFP4CSFScales
from .device import num_sms
from .first_launch import prepare_launches
from .moe.experts import NVFP4Experts
from .moe.routing import INDEX_DTYPES

_WORKER_BYTES = 1 << 30
"""Bytes of memory that a process needs for Triton and a running compiler."""

_EXPERT_FIELDS = (
    *("gate_up", "gate_up_scales", "gate_up_global", "gate_up_input_global"),
    *("down", "down_scales", "down_global", "down_input_global"),
)
Layer = Union[NVFP4Experts, "tuple[torch.Tensor, torch.Tensor | NVFP4CSFScales]"]


def warm_up(
    layers: Layer | Sequence[Layer],
    *,
    tokens: Iterable[int] = range(1, 16385),
    formats: Sequence[str | None] = ("bf16", None),
    top_k: int = 8,
    dtype: torch.dtype = torch.bfloat16,
    index_dtype: torch.dtype = torch.int64,
    device: torch.device | str | None = None,
    max_workers: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> int:
    """Compile the kernels that calls of `layers` will launch, in parallel, into Triton's cache, where this program and
    later ones find them.

    The kernels are those that the default rules choose for calls of `moe_forward` without `strategy`, and of
    `matmul_2d` without gate or requantized output. Layers of equal shapes share them. A separate program compiles them,
    which imports only this bundle's kernels and sees no GPU; it runs as many processes as there are cores and memory
    for.

    Args:
        layers: `NVFP4Experts`, or pairs of a weight uint8 `[N, K / 2]` and its scales, as `matmul_2d` takes them; one
            or several. Only shapes and dtypes are read, so tensors may be on the meta device.
        tokens: the numbers of tokens that a call may have.
        formats: values of `activation_format`.
        top_k: experts per token.
        dtype: of the activations.
        index_dtype: of `top_k_index`, torch.int64 or torch.int32.
        device: the GPU; by default the layers', or the current one if they are on the meta device.
        max_workers: how many processes may run at a time.
        progress: called with (kernels that are ready, all kernels) each time one becomes ready.

    Returns:
        How many kernels are ready; 0, immediately, if there is no NVIDIA GPU or no Triton for it.

    Raises:
        ValueError, TypeError: naming the argument.
        RuntimeError: the program failed. The message has its output.
    """
    is_pair = isinstance(layers, tuple) and len(layers) == 2 and isinstance(layers[0], torch.Tensor)
    several: list[Any] = [layers] if is_pair or isinstance(layers, NVFP4Experts) else list(layers)
    if index_dtype not in INDEX_DTYPES:
        raise TypeError(f"index_dtype: expected torch.int32 or torch.int64, got {index_dtype}")
    described = {json.dumps(_describe(layer, top_k, dtype)): None for layer in several}
    counts = sorted({*map(int, tokens)})
    if counts and counts[0] < 1:
        raise ValueError(f"tokens: expected positive numbers, got {counts[0]}")
    for name in formats:
        if name not in (None, "bf16"):
            raise ValueError(f"formats: expected None or 'bf16', got {name!r}")
    gpu = _gpu_of(several, device)
    if gpu is None or not described or not counts or not formats:
        return 0
    task = {
        "name": __name__.rpartition(".")[0],
        "directory": str(Path(__file__).parent),
        "device": _facts_of(gpu),
        "layers": list(map(json.loads, described)),
        "tokens": counts,
        "formats": list(formats),
        "index_dtype": _name_of(index_dtype),
    }
    record = _record_of(task)
    known = _read_record(record)
    if known is not None:
        prepare_launches()
        if progress is not None:
            progress(len(known), len(known))
        return len(known)
    workers = max(1, min(max_workers or _num_cores(), _num_cores(), _free_bytes() // _WORKER_BYTES))
    known_first = {name: task[name] for name in ("name", "directory", "device")}
    caches = _compile({**known_first, "sys_path": sys.path, "workers": workers}, lambda: _jobs_of(task, gpu), progress)
    record.parent.mkdir(parents=True, exist_ok=True)
    partial = record.with_suffix(f".{os.getpid()}")
    partial.write_text(json.dumps(caches))
    partial.replace(record)
    return len(caches)


def _describe(layer: Layer, top_k: int, dtype: torch.dtype) -> dict[str, Any]:
    if isinstance(layer, NVFP4Experts):
        tensors = {name: _describe_tensor(getattr(layer, name)) for name in _EXPERT_FIELDS}
        return {"kind": "experts", "tensors": tensors, "top_k": top_k, "dtype": _name_of(dtype)}
    if not isinstance(layer, tuple) or len(layer) != 2 or not isinstance(layer[0], torch.Tensor):
        raise TypeError(f"layers: expected NVFP4Experts or pairs of weight and scales, got {type(layer).__name__}")
    parts = {"weight": _describe_tensor(layer[0]), "scales": _describe_tensor(layer[1])}
    return {"kind": "linear", "tensors": parts, "dtype": _name_of(dtype)}


def _describe_tensor(value: torch.Tensor | NVFP4CSFScales | None) -> dict[str, Any] | None:
    if value is None:
        return None
    if isinstance(value, NVFP4CSFScales):
        parts = value.state_dict().items()  # kernels do not depend on the number of exceptions
        return {name: {**_shape_of(part), **({"shape": [64]} if name == "exceptions" else {})} for name, part in parts}
    return _shape_of(value)


def _shape_of(tensor: torch.Tensor) -> dict[str, Any]:
    return {"shape": list(tensor.shape), "dtype": _name_of(tensor.dtype)}


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).partition(".")[2]


def _gpu_of(layers: Sequence[Layer], device: torch.device | str | None) -> torch.device | None:
    """The GPU to compile for; None if there is none on which `launching.py` launches these kernels itself."""
    if device is None:
        first = layers[0] if layers else None
        tensor = first.gate_up if isinstance(first, NVFP4Experts) else first[0] if first else None
        device = "cuda" if tensor is None or tensor.device.type == "meta" else tensor.device
    device = torch.device(device)
    if device.type != "cuda" or torch.version.cuda is None or not torch.cuda.is_available():
        return None
    try:
        import triton  # noqa: F401  (may be absent where only the CPU is used)
    except ImportError:
        return None
    return torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)


def _facts_of(device: torch.device) -> dict[str, Any]:
    capability = torch.cuda.get_device_capability(device)
    return {"capability": capability, "name": torch.cuda.get_device_name(device), "num_sms": num_sms(device)}


def _record_of(task: dict[str, Any]) -> Path:
    """The file in Triton's cache that lists what an equal warm-up has compiled there."""
    import triton

    versions = torch.__version__, triton.__version__, sys.version
    digest = hashlib.sha256(json.dumps([task, versions]).encode()).hexdigest()
    return Path(triton.knobs.cache.dir) / f"warm_up_{digest[:32]}.json"


def _read_record(record: Path) -> list[str] | None:
    """The kernels that the record lists, if all of them are in the cache."""
    try:
        caches = json.loads(record.read_text())
    except (OSError, ValueError):
        return None
    return caches if all(any(Path(cache).glob("*.cubin")) for cache in caches) else None


def _jobs_of(task: dict[str, Any], device: torch.device) -> list[tuple]:
    from .warming_calls import find_kernels  # Triton may be absent where only the CPU is used

    return [tuple(job) for job in find_kernels(task, device).values()]


def _compile(
    known_first: dict[str, Any], jobs: Callable[[], list[tuple]], progress: Callable[[int, int], None] | None
) -> list[str]:
    """Run the program that compiles `jobs()`. Returns where each kernel is in Triton's cache."""
    program = [sys.executable, str(Path(__file__).with_name("warming_worker.py"))]
    caches: list[str] = []
    total = 0
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, start_new_session=True
        )
        assert process.stdin is not None and process.stdout is not None
        try:
            with contextlib.suppress(BrokenPipeError), process.stdin as stdin:
                stdin.write(json.dumps(known_first).encode() + b"\n")
                stdin.flush()  # it imports what it needs meanwhile
                pickle.dump(jobs(), stdin)
            prepare_launches()
            for line in process.stdout:
                said = json.loads(line) if line.startswith(b"{") else {}
                total = said.get("total", total)
                if "cache" in said:
                    caches.append(said["cache"])
                    if progress is not None:
                        progress(len(caches), total)
            status = process.wait()
        except BaseException:
            _kill_all(process)
            raise
        if status:
            errors.seek(0)
            text = errors.read()[-2000:].decode(errors="replace")
            text = text or f"the program that compiles them ended with status {status}"
            raise RuntimeError(f"compiling kernels ahead failed: {text}")
    return sorted(caches)


def _kill_all(process: subprocess.Popen) -> None:
    """Kill a program and the processes that it started; together they are a process group."""
    if hasattr(os, "killpg"):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    process.wait()


def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _free_bytes() -> int:
    """Bytes of memory that are free; enough for one process if the system does not tell."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return _WORKER_BYTES
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable")), _WORKER_BYTES)
