"""How every number here is measured: CUDA graph replay, warm and with L2 flushed, quantiles, roofs in the same run, CSV
rows.

Warm: one graph of back-to-back calls, divided. Cold: one graph of flush, event, call, event, so that each call finds L2
full of other data. Roofs are the fastest of several vectorized kernels over the same number of bytes,
timed the same way in the same run. What is compared is timed in turns, as a GPU's clock drifts with its load.
"""

from __future__ import annotations

import csv
import dataclasses
import functools
import os
import platform
import shutil
import subprocess
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import torch
import triton
import triton.language as tl

COLUMNS = [
    *("device", "driver", "torch", "triton", "commit", "case", "variant", "tokens", "condition"),
    *("us_p20", "us_p50", "us_p80", "bytes", "roof_us", "baseline", "baseline_us"),
]
CALLS = 20
SAMPLES = 30 if torch.cuda.is_available() else 3
FLUSH_BYTES = 256 << 20


@dataclasses.dataclass(frozen=True)
class Timing:
    """Microseconds per call: 20th, 50th and 80th percentile."""

    p20: float
    p50: float
    p80: float


def quantiles(samples: list[float]) -> Timing:
    return Timing(*torch.tensor(samples).quantile(torch.tensor([0.2, 0.5, 0.8])).tolist())


@functools.lru_cache(maxsize=1)
def _warmup_stream() -> torch.cuda.Stream:
    """One stream for all, because torch keeps freed memory for the stream on which it was allocated."""
    return torch.cuda.Stream()


def _capture(body: Callable[[], None]) -> torch.cuda.CUDAGraph:
    stream = _warmup_stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        body()  # compiles and loads outside the capture
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        body()
    return graph


_flush_buffer: torch.Tensor | None = None


def flush_l2() -> None:
    """Fill L2 with clean lines of another buffer."""
    global _flush_buffer
    if _flush_buffer is None:
        _flush_buffer = torch.zeros(FLUSH_BYTES // 4, dtype=torch.int32, device="cuda")
    torch.amax(_flush_buffer, dim=0)


def time_cold(call: Callable[[], None], *, samples: int = 20) -> Timing:
    begin, end = (torch.cuda.Event(enable_timing=True, external=True) for _ in range(2))

    def body() -> None:
        flush_l2()
        begin.record()
        call()
        end.record()

    graph = _capture(body)
    times = []
    for _ in range(samples + 2):
        graph.replay()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1000)
    return quantiles(times[2:])


def time_in_turns(
    calls: dict[str, Callable[[], object]], *, samples: int, flush: bool, repeat: int = 1
) -> dict[str, Timing]:
    """Each call's time. Samples are taken in turns, so that a drift of the clocks does not change differences.

    Each call has a graph, which makes it `repeat` times; `flush` empties L2 before every sample. Every round begins
    with another call, so that none always follows the same one. Without a GPU, the wall clock is used.
    """
    if not torch.cuda.is_available():
        takers = {name: _wall_clock(call) for name, call in calls.items()}
    else:
        takers = {name: _graph_clock(call, flush, repeat) for name, call in calls.items()}
    names = list(calls)
    taken: dict[str, list[float]] = {name: [] for name in names}
    for i in range(samples + 1):
        first = i % len(names)
        for name in names[first:] + names[:first]:
            taken[name].append(takers[name]())
    return {name: quantiles(times[1:]) for name, times in taken.items()}


WARM_BYTES = 2 << 30
"""How many bytes one warm sample moves: about half a millisecond at the speed of memory."""


def conditions(moved: int) -> dict[str, dict]:
    """Options of `time_in_turns` for calls that move `moved` bytes: warm, repeated if they are short, and cold."""
    repeat = max(3, min(CALLS, WARM_BYTES // max(1, moved)))
    return {
        "warm": {"samples": SAMPLES, "flush": False, "repeat": repeat},
        "cold": {"samples": SAMPLES, "flush": True},
    }


def _graph_clock(call: Callable[[], object], flush: bool, repeat: int) -> Callable[[], float]:
    begin, end = (torch.cuda.Event(enable_timing=True, external=True) for _ in range(2))

    def body() -> None:
        if flush:
            flush_l2()
        begin.record()
        for _ in range(repeat):
            call()
        end.record()

    graph = _capture(body)

    def take() -> float:
        graph.replay()
        torch.cuda.synchronize()
        return begin.elapsed_time(end) * 1000 / repeat

    return take


def _wall_clock(call: Callable[[], object]) -> Callable[[], float]:
    def take() -> float:
        start = time.perf_counter()
        call()
        return (time.perf_counter() - start) * 1e6

    return take


@triton.jit
def _copy_kernel(out_ptr, in_ptr, num_words, BLOCK: tl.constexpr):
    for i in range(tl.program_id(0) * BLOCK, num_words, tl.num_programs(0) * BLOCK):
        offs = i.to(tl.int64) + tl.arange(0, BLOCK)
        tl.store(out_ptr + offs, tl.load(in_ptr + offs, mask=offs < num_words), mask=offs < num_words)


def time_beside_copies(
    calls: dict[str, Callable[[], object]], moved: int
) -> dict[str, tuple[dict[str, Timing], Timing]]:
    """By condition: timings of `calls`, and of the fastest copy that reads half of `moved` bytes and writes half."""
    words, device = max(1, moved // 16), "cuda" if torch.cuda.is_available() else "cpu"
    src, dst = (torch.empty(words, dtype=torch.int64, device=device).random_() for _ in range(2))
    copies: dict[tuple, Callable[[], object]] = {("torch",): functools.partial(dst.copy_, src)}
    for block, warps in ((512, 4), (1024, 4), (2048, 4), (2048, 8), (4096, 8)) if src.is_cuda else ():
        launch = _copy_kernel[(triton.cdiv(words, block),)]
        copies[block, warps] = functools.partial(launch, dst, src, words, BLOCK=block, num_warps=warps)
    found = {}
    for condition, options in conditions(moved).items():
        timings = time_in_turns(calls | copies, **options)
        roof = min((timings[name] for name in copies), key=lambda timing: timing.p50)
        found[condition] = ({name: timings[name] for name in calls}, roof)
    return found


def environment(commit: str | None) -> dict[str, str]:
    """The columns that say where and with what a row was measured; if `commit` is None, git tells it."""

    def output(*command: str) -> str:
        if shutil.which(command[0]) is None:
            return ""
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip().split("\n")[0]

    return {
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine(),
        "driver": output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "commit": commit or output("git", "describe", "--always", "--dirty", "--abbrev=12"),
    }


def cpu_environment() -> dict[str, str]:
    """The same for what runs on one thread of the CPU."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    models = [line.partition(": ")[2] for line in lines if line.startswith("model name")]
    return environment(None) | {"device": f"{models[0] if models else platform.machine()}, 1 thread", "driver": ""}


class Results:
    """Rows of one CSV file. Each row is written as soon as it is measured.

    `merge` keeps the rows that the file had before, except those of a case, variant and condition that is measured now.
    """

    def __init__(
        self, path: Path, commit: str | None = None, *, merge: bool = False, columns: list[str] = COLUMNS
    ) -> None:
        self.path, self.columns, self.environment = path, columns, environment(commit)
        self.rows: list[dict] = []
        self.kept: list[dict] = []
        if merge and path.exists():
            with path.open(newline="") as file:
                reader = csv.DictReader(file)
                self.kept = list(reader)
            if reader.fieldnames != columns:
                raise SystemExit(f"{path} has other columns, expected {columns}, got {reader.fieldnames}")

    def append(self, case: str, variant: str, timing: Timing | None = None, **columns: object) -> None:
        """Add a row with the environment's columns and the given ones; others stay empty."""
        row = dict.fromkeys(self.columns, "") | self.environment | {"case": case, "variant": variant} | columns
        if timing is not None:
            row |= {f"us_{name}": f"{value:.2f}" for name, value in dataclasses.asdict(timing).items()}
        self.rows.append(row)
        self.write()

    def add(self, case: str, variant: str, condition: str, timing: Timing, *, moved: int, roof_us: float,
            tokens: int | str = "", baseline: str = "", baseline_us: float | str = "") -> None:  # fmt: skip
        self.append(
            case, variant, timing, tokens=tokens, condition=condition, bytes=moved, roof_us=f"{roof_us:.2f}",
            baseline=baseline, baseline_us=baseline_us if isinstance(baseline_us, str) else f"{baseline_us:.2f}",
        )  # fmt: skip
        share = roof_us / timing.p50
        print(
            f"{case:12} {f'{variant} {tokens}':24} {condition:5} "
            f"{timing.p50:8.2f} us ({timing.p20:.2f} to {timing.p80:.2f}) "
            f"{moved / timing.p50 / 1e6:6.2f} TB/s  {share:6.1%} of the roof",
            flush=True,
        )

    def write(self) -> None:

        def key(row: dict) -> tuple:
            return row["case"], row["variant"], row["condition"]

        measured = {key(row) for row in self.rows}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("w", newline="") as file:
            writer = csv.DictWriter(file, self.columns, lineterminator="\n")
            writer.writeheader()
            writer.writerows(row for row in self.kept if key(row) not in measured)
            writer.writerows(self.rows)


MAX_PROCESSES = 14


def num_processes() -> int:
    """How many processes this machine's cores allow, and the GPU's memory with a layer in each process."""
    return max(1, min(MAX_PROCESSES, len(os.sched_getaffinity(0)) - 2))


def compile_ahead(launch: Callable[..., None], jobs: Iterable[tuple], processes: int | None = None) -> None:
    """Call `launch(*job)` for each job, in separate processes, so that timed code finds its kernels in the disk cache.

    A launch that fails is reported and ignored: its kernel is compiled when it is needed, or fails again then.
    """
    jobs = list(jobs)
    processes = min(num_processes() if processes is None else processes, len(jobs))
    if not processes:
        return
    began = time.monotonic()
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        futures = {pool.submit(launch, *job): job for job in jobs}
        for future, job in futures.items():
            if future.exception() is not None:
                print(f"compiling ahead, {job}: {future.exception()!r}"[:500], flush=True)
    print(f"{len(jobs)} launches compiled in {time.monotonic() - began:.0f} s", flush=True)
