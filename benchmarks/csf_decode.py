"""How close to the speed of memory is decoding? Every kernel is checked bit for bit in the run that times it.

`python benchmarks/csf_decode.py [--out benchmarks/results/csf_decode.csv]`, on a GPU, with the bundle built; `--tiny`
runs small stacks, on a CPU too, to see that it runs.

Decoding E planes of N x C moves `E * (N + N * C / 2 + N * C) + 4 * exceptions` bytes; a copy reads half of them and
writes half. The copy is the roof. Sparse decoding is compared with a copy of the active planes' bytes. Each is timed in
turns with its copies.
"""

from __future__ import annotations

import argparse
import importlib
import time
from collections.abc import Sequence
from pathlib import Path

import harness
import torch
from scale_planes import make_planes, moved_bytes

from finegrained_kernels import load

CASES = {
    "qwen_gate": (512, 640, 160, 1.02),
    "qwen_down": (512, 2560, 40, 0.22),
    "glm_gate": (288, 2048, 256, 0.30),
    "glm_down": (288, 4096, 128, 0.30),
}
TINY_CASES = dict.fromkeys(CASES, (6, 16, 32, 1.0))
ACTIVE = (0, 1, 8, 64, 256, 512)
TINY_ACTIVE = (0, 1, 6)
OFFSETS, SWIZZLED_OFFSETS = range(1, 16), (1, 8, 15)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def routing(num_planes: int, num_active: int, seed: int = 0) -> torch.Tensor:
    """`expert_start` with one row for each of `num_active` experts chosen at random."""
    rows = torch.zeros(num_planes, dtype=torch.int32)
    rows[torch.randperm(num_planes, generator=torch.Generator().manual_seed(seed))[:num_active]] = 1
    return torch.cat([rows.new_zeros(1), rows.cumsum(0, dtype=torch.int32)]).to(DEVICE)


class Case:
    """Scales of one geometry and rate of exceptions, their plain bytes, and a poisoned workspace to decode into."""

    def __init__(self, bundle, cases: dict[str, tuple], name: str, percent: float | None = None) -> None:
        self.bundle, self.name = bundle, name
        *shape, real_percent = cases[name]
        self.planes = make_planes(*shape, real_percent if percent is None else percent, device=DEVICE)
        fixed, exceptions = bundle.compress_nvfp4_csf_scales(self.planes)
        self.scales = bundle.prepare_nvfp4_csf_scales(fixed, exceptions, num_rows=shape[1], num_cols=shape[2])
        size = bundle.csf_workspace_size(self.scales, swizzled=True)
        self.buffer = torch.empty(size + 64, dtype=torch.uint8, device=DEVICE)
        self.moved = moved_bytes(*shape, self.scales.exceptions.numel())

    def decoder(self, expert_start=None, *, offset: int = 0, swizzled: bool = False, **options):
        """A call that decodes, compared with the plain bytes; guard bytes and inactive planes have to stay poisoned."""
        expected = self.bundle.swizzle_mx_scales(self.planes) if swizzled else self.planes
        if expert_start is not None:
            expected = expected.clone()
            expected[expert_start[1:] == expert_start[:-1]] = 0x7F
        workspace = self.buffer[offset : offset + expected.numel()]

        def call() -> None:
            self.bundle.decompress_nvfp4_csf_scales(
                self.scales, workspace=workspace, expert_start=expert_start, swizzled=swizzled, **options
            )

        self.buffer.fill_(0x7F)
        call()
        assert torch.equal(workspace.view(expected.shape), expected), (self.name, offset, swizzled, options)
        outside = torch.cat([self.buffer[:offset], self.buffer[offset + expected.numel() :]])
        assert bool((outside == 0x7F).all()), (self.name, offset, swizzled, options)
        return call


def bench_decode(bundle, results: harness.Results, cases: dict[str, tuple], active: tuple[int, ...]) -> None:
    for name in cases:
        for percent in (None, 0.0, 5.0):
            case = Case(bundle, cases, name, percent)
            variant = "full" if percent is None else f"rate_{percent:g}"
            calls = {variant: case.decoder()}
            if percent is None:
                calls |= {f"offset_{offset}": case.decoder(offset=offset) for offset in OFFSETS}
                calls |= {"swizzled": case.decoder(swizzled=True)}
                for offset in SWIZZLED_OFFSETS:
                    calls[f"swizzled_offset_{offset}"] = case.decoder(offset=offset, swizzled=True)
            for condition, (timings, roof) in harness.time_beside_copies(calls, case.moved).items():
                for variant, timing in timings.items():
                    aligned, is_offset, _ = variant.rpartition("offset")
                    baseline = (aligned.rstrip("_") or "full") if is_offset else "copy"
                    results.add(
                        name, variant, condition, timing, moved=case.moved, roof_us=roof.p50, baseline=baseline,
                        baseline_us=timings[baseline].p50 if is_offset else roof.p50,
                    )  # fmt: skip


def bench_sparse(bundle, results: harness.Results, cases: dict[str, tuple], active: tuple[int, ...]) -> None:
    for name in ("qwen_gate", "qwen_down"):
        case = Case(bundle, cases, name)
        for num_active in active:
            expert_start = routing(case.scales.num_planes, num_active)
            moved = case.moved * num_active // case.scales.num_planes
            calls = {
                f"active_{num_active}": case.decoder(expert_start),
                f"active_{num_active}_known": case.decoder(expert_start, max_active=num_active),
            }
            for condition, (timings, roof) in harness.time_beside_copies(calls, max(moved, 32)).items():
                for variant, timing in timings.items():
                    results.add(
                        name, variant, condition, timing, moved=moved, roof_us=roof.p50, baseline="copy",
                        baseline_us=roof.p50,
                    )  # fmt: skip


def encode_kernels(bundle, planes: torch.Tensor, fixed: torch.Tensor, exceptions: Sequence[torch.Tensor]):
    """Launch what `compress` launches for `planes`, without the host's part, into separate memory."""
    encode = importlib.import_module(f"{bundle.__name__}.csf.encode_triton")
    fixed = torch.empty_like(fixed)
    slab_ends = planes.new_empty(len(planes), planes.shape[1] // 16, dtype=torch.int32)
    plane_ends = planes.new_empty(len(planes), dtype=torch.int64)
    host_ends = torch.empty(len(planes), dtype=torch.int64, pin_memory=True)
    words = planes.new_empty(sum(map(len, exceptions)), dtype=torch.uint32)

    def call() -> None:
        encode.launch_choose(planes, fixed, slab_ends)
        encode.launch_scan(slab_ends, plane_ends)
        encode.launch_ends(plane_ends, host_ends)
        encode.launch_write(planes, fixed, slab_ends, plane_ends, words)

    return call


def bench_compress(bundle, results: harness.Results, cases: dict[str, tuple], active: tuple[int, ...]) -> None:
    """157 MB of scales, in two stacks like gate and one like down: the kernels in one graph, and by the wall clock."""
    stacks = [Case(bundle, cases, name).planes for name in ("qwen_gate", "qwen_gate", "qwen_down")]
    wire, calls = [], []
    for planes in stacks:
        fixed, exceptions = bundle.compress_nvfp4_csf_scales(planes)
        cpu_fixed, cpu_exceptions = bundle.compress_nvfp4_csf_scales(planes[:2].cpu())
        assert torch.equal(fixed[:2].cpu(), cpu_fixed)
        for words, cpu_words in zip(exceptions[:2], cpu_exceptions, strict=True):
            assert torch.equal(words.cpu().view(torch.int32), cpu_words.view(torch.int32))
        wire.append((fixed, exceptions, planes.shape))
        if planes.is_cuda:
            calls.append(encode_kernels(bundle, planes, fixed, exceptions))
    moved = sum(2 * planes.numel() + fixed.numel() for planes, (fixed, _, _) in zip(stacks, wire, strict=True))
    timings, roof = harness.time_beside_copies({"compress": lambda: [call() for call in calls]}, moved)["warm"]
    results.add("qwen_layer", "compress", "warm", timings["compress"], moved=moved, roof_us=roof.p50, baseline="copy",
                baseline_us=roof.p50)  # fmt: skip

    def prepare() -> None:
        for fixed, exceptions, (_, rows, cols) in wire:
            bundle.prepare_nvfp4_csf_scales(fixed, exceptions, num_rows=rows, num_cols=cols)

    def compress() -> None:
        for planes in stacks:
            bundle.compress_nvfp4_csf_scales(planes)

    moved = sum(2 * fixed.numel() for fixed, _, _ in wire)
    for variant, call in (("compress_wall", compress), ("prepare_wall", prepare)):
        results.add("qwen_layer", variant, "warm", wall_clock(call), moved=moved, roof_us=roof.p50)


def bench_eager(bundle, results: harness.Results, cases: dict[str, tuple], active: tuple[int, ...]) -> None:
    """CPU time of an eager call, on a stack that is too small for the GPU to matter."""
    planes = make_planes(2, 16, 16, 1.0, device=DEVICE)
    scales = bundle.prepare_nvfp4_csf_scales(*bundle.compress_nvfp4_csf_scales(planes), num_rows=16, num_cols=16)
    workspace = torch.empty(bundle.csf_workspace_size(scales), dtype=torch.uint8, device=DEVICE)
    timing = wall_clock(lambda: bundle.decompress_nvfp4_csf_scales(scales, workspace=workspace), calls=200)
    results.add("tiny", "eager_call", "warm", timing, moved=2 * 16 * 16, roof_us=timing.p50)


def wall_clock(call, *, calls: int = 1, samples: int = 15) -> harness.Timing:
    times = []
    synchronize = torch.cuda.synchronize if DEVICE == "cuda" else torch.cpu.synchronize
    for _ in range(samples + 3):
        synchronize()
        begin = time.perf_counter()
        for _ in range(calls):
            call()
        synchronize()
        times.append((time.perf_counter() - begin) * 1e6 / calls)
    return harness.quantiles(times[3:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results/csf_decode.csv")
    parser.add_argument("--commit", help="for the commit column, where there is no git checkout")
    parser.add_argument("--tiny", action="store_true", help="small stacks: does it run?")
    arguments = parser.parse_args()
    if not (arguments.tiny or DEVICE == "cuda"):
        parser.error("real shapes need a CUDA device; --tiny runs without one")
    results = harness.Results(arguments.out, arguments.commit)
    sizes = (TINY_CASES, TINY_ACTIVE) if arguments.tiny else (CASES, ACTIVE)
    bundle = load()
    for bench in (bench_decode, bench_sparse, bench_compress, bench_eager):
        bench(bundle, results, *sizes)


if __name__ == "__main__":
    main()
