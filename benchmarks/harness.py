"""How every number here is measured: CUDA graph replay, warm and L2-flushed, quantiles, same-run roofs, CSV rows.

Warm: one graph of `CALLS` back-to-back calls, divided. Cold: one graph of flush, event, call, event, so that each
call finds L2 full of other data. Roofs are the fastest of several vectorized kernels over the same number of bytes,
timed the same way in the same run.
"""

from __future__ import annotations

import csv
import dataclasses
import platform
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import torch
import triton
import triton.language as tl

COLUMNS = [
    *("device", "driver", "torch", "triton", "commit", "case", "variant", "tokens", "condition"),
    *("us_p20", "us_p50", "us_p80", "bytes", "roof_us", "baseline", "baseline_us"),
]
CALLS = 20
FLUSH_BYTES = 256 << 20


@dataclasses.dataclass(frozen=True)
class Timing:
    """Microseconds a call: 20th, 50th and 80th percentile."""

    p20: float
    p50: float
    p80: float


def quantiles(samples: list[float]) -> Timing:
    return Timing(*torch.tensor(samples).quantile(torch.tensor([0.2, 0.5, 0.8])).tolist())


def _capture(body: Callable[[], None]) -> torch.cuda.CUDAGraph:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        body()  # compiles and loads outside the capture
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        body()
    return graph


def time_warm(call: Callable[[], None], *, samples: int = 20) -> Timing:
    def body() -> None:
        for _ in range(CALLS):
            call()

    graph = _capture(body)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    times = []
    for _ in range(samples + 2):
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1000 / CALLS)
    return quantiles(times[2:])


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


TIMERS = {"warm": time_warm, "cold": time_cold}


def time_in_turns(calls: dict[str, Callable[[], object]], *, samples: int, flush: bool) -> dict[str, Timing]:
    """Each call's time, one sample of each after the other, so that a drift of the clocks changes no difference.

    One graph a call; `flush` empties L2 before every sample. Without a GPU: by the wall clock.
    """
    if not torch.cuda.is_available():
        takers = {name: _wall_clock(call) for name, call in calls.items()}
    else:
        takers = {name: _graph_clock(call, flush) for name, call in calls.items()}
    rounds = [{name: take() for name, take in takers.items()} for _ in range(samples + 1)]
    return {name: quantiles([taken[name] for taken in rounds[1:]]) for name in calls}


def _graph_clock(call: Callable[[], object], flush: bool) -> Callable[[], float]:
    begin, end = (torch.cuda.Event(enable_timing=True, external=True) for _ in range(2))

    def body() -> None:
        if flush:
            flush_l2()
        begin.record()
        call()
        end.record()

    graph = _capture(body)

    def take() -> float:
        graph.replay()
        torch.cuda.synchronize()
        return begin.elapsed_time(end) * 1000

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


def copy_roof(moved_bytes: int) -> dict[str, Timing]:
    """The fastest copy that reads half of `moved_bytes` and writes half, by condition."""
    words = max(1, moved_bytes // 16)
    src, dst = (torch.empty(words, dtype=torch.int64, device="cuda").random_() for _ in range(2))
    calls = [lambda: dst.copy_(src)]
    for block, warps in ((512, 4), (1024, 4), (2048, 4), (2048, 8), (4096, 8)):
        grid = triton.cdiv(words, block)
        calls.append(lambda b=block, w=warps, g=grid: _copy_kernel[(g,)](dst, src, words, BLOCK=b, num_warps=w))
    return {name: min((timer(call) for call in calls), key=lambda t: t.p50) for name, timer in TIMERS.items()}


def environment(commit: str | None) -> dict[str, str]:
    """The columns that say where and on what a row was measured; `commit` is asked of git if None."""

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


class Results:
    """Rows of one CSV file, written when closed."""

    def __init__(self, path: Path, commit: str | None = None) -> None:
        self.path, self.rows, self.environment = path, [], environment(commit)

    def add(self, case: str, variant: str, condition: str, timing: Timing, *, moved: int, roof_us: float,
            tokens: int | str = "", baseline: str = "", baseline_us: float | str = "") -> None:  # fmt: skip
        self.rows.append(
            self.environment
            | {"case": case, "variant": variant, "tokens": tokens, "condition": condition, "bytes": moved}
            | {f"us_{name}": f"{value:.2f}" for name, value in dataclasses.asdict(timing).items()}
            | {"roof_us": f"{roof_us:.2f}", "baseline": baseline}
            | {"baseline_us": baseline_us if isinstance(baseline_us, str) else f"{baseline_us:.2f}"}
        )
        share = roof_us / timing.p50
        print(
            f"{case:12} {f'{variant} {tokens}':24} {condition:5} "
            f"{timing.p50:8.2f} us ({timing.p20:.2f} to {timing.p80:.2f}) "
            f"{moved / timing.p50 / 1e6:6.2f} TB/s  {share:6.1%} of the roof",
            flush=True,
        )

    def write(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("w", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
            writer.writeheader()
            writer.writerows(self.rows)
