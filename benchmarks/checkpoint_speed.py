"""How fast are checkpoints compressed, verified and restored, compared with copying and hashing the same files?

Bytes are those of the source: N * K / 2 + N * K / 16 for each expert matrix, and a little more. The baseline copies
every shard, flushes it to disk and computes its SHA-256, as anyone would who moves a checkpoint carefully; the roof is
the copy alone. Files come from the page cache (warm). Every action runs in a separate process, and is measured once
everything is loaded, so that its peak memory is its own; that is the case `peak_memory`, in bytes, with those of one
shard.

    python benchmarks/checkpoint_speed.py --directory /path/with/space [--device cuda] [--gigabytes 4]
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT)]

from finegrained_kernels import checkpoint, load  # noqa: E402
from finegrained_kernels.checkpoint.headers import build_header  # noqa: E402

COLUMNS = [
    "device", "driver", "torch", "triton", "commit", "case", "variant", "tokens", "condition", "us_p20", "us_p50",
    "us_p80", "bytes", "roof_us", "baseline", "baseline_us",
]  # fmt: skip
HIDDEN, INTER = 2560, 640  # qwen_gate, qwen_down
CHUNK = 8 << 20
BASELINE = "copy_and_hash"


def make_source(root: Path, *, experts: int, shards: int) -> None:
    """Write a checkpoint of `shards` layers of `experts` experts, one layer per shard; about 1 % of scales are
    exceptions."""
    root.mkdir(parents=True)
    (root / "config.json").write_text(
        json.dumps(
            {"model_type": "qwen3_moe", "quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"}}
        )
    )
    generator = torch.Generator().manual_seed(0)
    planes = []
    for _ in range(32):
        plane = torch.randint(90, 103, (HIDDEN * INTER // 16,), generator=generator, dtype=torch.uint8)
        far = torch.rand(plane.shape, generator=generator) < 0.01
        planes.append(bytes(torch.where(far, plane // 2, plane).tolist()))
    weight = os.urandom(HIDDEN * INTER // 2)
    weight_map = {}
    for layer in range(shards):
        content = {}
        for expert in range(experts):
            for i, projection in enumerate(("down_proj", "gate_proj", "up_proj")):
                n, k = (HIDDEN, INTER) if projection == "down_proj" else (INTER, HIDDEN)
                name = f"model.layers.{layer}.mlp.experts.{expert}.{projection}"
                scales = planes[(3 * expert + i) % len(planes)]
                content[f"{name}.weight_scale"] = ("F8_E4M3", (n, k // 16), scales)
                content[f"{name}.weight"] = ("U8", (n, k // 2), weight)
                content[f"{name}.weight_scale_2"] = ("F32", (), bytes(4))
        order = sorted(content, key=lambda name: (["F32", "F8_E4M3", "U8"].index(content[name][0]), name))
        header = build_header([(name, *content[name][:2]) for name in order], order, {"format": "pt"})
        shard = f"model-{layer + 1:05}-of-{shards:05}.safetensors"
        weight_map.update(dict.fromkeys(order, shard))
        with open(root / shard, "wb") as file:
            file.write(header.raw)
            for name in order:
                file.write(content[name][2])
    (root / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def copy_shards(source: Path, destination: Path, *, hashed: bool) -> None:
    destination.mkdir()
    for path in sorted(source.glob("*.safetensors")):
        copy = destination / path.name
        shutil.copyfile(path, copy)
        with open(copy, "rb") as file:
            os.fsync(file.fileno())
            digest = hashlib.sha256()
            while hashed and (chunk := file.read(CHUNK)):
                digest.update(chunk)


def actions(work: Path, device: str) -> dict[str, Callable[[], object]]:
    """The measured actions by name. Later ones use the results of earlier ones."""
    source = work / "source"
    made: dict[str, Callable[[], object]] = {
        "copy": lambda: copy_shards(source, work / "copy", hashed=False),
        BASELINE: lambda: copy_shards(source, work / BASELINE, hashed=True),
    }
    for layout in ("hf", "container"):
        for jobs in (1, 2, 4):
            name = f"compress_{layout}_jobs_{jobs}"
            made[name] = lambda layout=layout, jobs=jobs, name=name: checkpoint.compress(
                source, work / name, layout=layout, jobs=jobs, device=device
            )
    compressed = work / "compress_hf_jobs_1"
    made["resume_jobs_1"] = lambda: checkpoint.compress(source, compressed, device=device)
    made["verify_jobs_1"] = lambda: checkpoint.verify(compressed, device=device)
    made["restore_jobs_1"] = lambda: checkpoint.restore(compressed, work / "restore_jobs_1", device=device)
    return made


def peak_bytes() -> int:
    """This process's largest resident size. getrusage would also count its parent's pages before the exec."""
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) << 10


def run_action(name: str, work: Path, device: str) -> None:
    """In a separate process: print seconds, and peak bytes before and after."""
    bundle = load()
    warm = torch.full((1, 16, 32), 97, dtype=torch.uint8, device=device)  # loads, and on a GPU compiles, the codec
    fixed, exceptions = bundle.compress_nvfp4_csf_scales(warm)
    bundle.decompress_nvfp4_csf_scales(bundle.prepare_nvfp4_csf_scales(fixed, exceptions, num_rows=16, num_cols=32))
    before = peak_bytes()
    begin, cpu_begin = time.perf_counter(), time.process_time()
    actions(work, device)[name]()
    seconds, cpu_seconds = time.perf_counter() - begin, time.process_time() - cpu_begin
    print(json.dumps([seconds, cpu_seconds, before, peak_bytes()]))


def measure(name: str, work: Path, device: str) -> list[float]:
    """Seconds, CPU seconds, and bytes when loaded and at the peak, of one run with a fresh destination."""
    if (work / name).exists():
        shutil.rmtree(work / name)
    command = [sys.executable, __file__, "--directory", str(work), "--device", device, "--action", name]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return json.loads(output.splitlines()[-1])


def environment(device: str, commit: str | None) -> dict[str, str]:
    """The columns that say where and with what a row was measured; if `commit` is None, git tells it."""

    def output(*command: str) -> str:
        try:
            return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip().split("\n")[0]
        except FileNotFoundError:
            return ""

    models = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    cpu = models[0].split(": ")[1] if models else platform.machine()
    return {
        "device": f"{cpu} ({os.cpu_count()} cores)" + (f", {torch.cuda.get_device_name()}" if device != "cpu" else ""),
        "driver": output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
        if device != "cpu"
        else "",
        "torch": torch.__version__,
        "triton": output(sys.executable, "-c", "import triton; print(triton.__version__)"),
        "commit": commit or output("git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--directory", type=Path, required=True, help="for the files; five times --gigabytes of space")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--gigabytes", type=float, default=2.0)
    parser.add_argument("--shards", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", nargs="+", help="names of the actions to measure; all by default")
    parser.add_argument("--commit", help="for the commit column, where there is no git checkout")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "checkpoints.csv")
    parser.add_argument("--action", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.action:
        return run_action(options.action, options.directory, options.device)

    work = options.directory / "checkpoint_speed"
    shutil.rmtree(work, ignore_errors=True)
    expert_bytes = 3 * HIDDEN * INTER * 9 // 16
    experts = max(1, round(options.gigabytes * 1e9 / options.shards / expert_bytes))
    make_source(work / "source", experts=experts, shards=options.shards)
    sizes = [path.stat().st_size for path in (work / "source").glob("*.safetensors")]
    rows, common = [], environment(options.device, options.commit)
    for name in options.only or actions(work, options.device):
        runs, baselines, roofs = [], [], []
        for _ in range(options.repeats):  # alternating, so that a busy moment affects all three
            roofs.append(measure("copy", work, options.device)[0])
            baselines.append(measure(BASELINE, work, options.device))
            runs.append(measure(name, work, options.device))
        seconds, cpu_seconds, loaded, peak = torch.tensor(runs, dtype=torch.float64).T
        us = (1e6 * seconds.quantile(torch.tensor([0.2, 0.5, 0.8], dtype=torch.float64))).tolist()
        baseline, baseline_cpu = torch.tensor(baselines, dtype=torch.float64)[:, :2].median(0).values.tolist()
        row = common | {"variant": name, "tokens": "", "condition": "warm"}
        times = {column: f"{value:.0f}" for column, value in zip(("us_p20", "us_p50", "us_p80"), us, strict=True)}
        roof = {"roof_us": f"{1e6 * statistics.median(roofs):.0f}"}
        compared = {"baseline": BASELINE, "baseline_us": f"{1e6 * baseline:.0f}"}
        rows.append(row | times | roof | compared | {"case": "checkpoint", "bytes": sum(sizes)})
        rows.append(row | {"case": "peak_memory", "bytes": int(peak.max()), "baseline": f"shard of {max(sizes)} bytes"})
        print(
            f"{name:26} {us[1] / 1e6:6.2f} s  {sum(sizes) / us[1] / 1e3:5.2f} GB/s  {us[1] / 1e6 / baseline:5.2f} x "
            f"{BASELINE} ({cpu_seconds.median() / baseline_cpu:.2f} x its CPU time)  peak {peak.max() / 1e6:.0f} MB "
            f"({loaded.max() / 1e6:.0f} MB when loaded, a shard is {max(sizes) / 1e6:.0f} MB)",
            flush=True,
        )
    options.out.parent.mkdir(parents=True, exist_ok=True)
    with options.out.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    shutil.rmtree(work)


if __name__ == "__main__":
    main()
