"""The MoE benchmark runs from end to end on tiny layers, writes the columns that are promised, and can be plotted."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
COLUMNS = (
    "device,driver,torch,triton,commit,case,variant,tokens,condition,us_p20,us_p50,us_p80,bytes,roof_us,baseline,"
    "baseline_us"
)
STRATEGIES = {"dense", "staged", "prefetched", "fused"}


def run(script: str, bundle_dir: Path, *arguments: str) -> None:
    environment = os.environ | {
        "LOCAL_KERNELS": f"kernels-community/finegrained-kernels={bundle_dir}",
        "PYTHONPATH": str(ROOT),
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, str(ROOT / "benchmarks" / script), *arguments]
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.fixture(scope="module")
def results(bundle_dir, tmp_path_factory) -> Path:
    pytest.importorskip("triton", reason="needs triton, which the benchmarks' roofs are written in")
    out = tmp_path_factory.mktemp("results") / "moe_layer.csv"
    run("moe_layer.py", bundle_dir, "--shape", "tiny", "--layers", "2", "--samples", "1", "--out", str(out),
        "--commit", "abc")  # fmt: skip
    return out


def test_moe_layer_writes_every_row(results):
    text = results.read_text()
    assert text.splitlines()[0] == COLUMNS
    rows = list(csv.DictReader(text.splitlines()))
    variants = {}
    for row in rows:
        variants.setdefault((row["case"], row["tokens"]), set()).add(row["variant"])
        assert row["commit"] == "abc" and int(row["bytes"]) >= 0
        assert row["case"] == "tiny_memory" or 0 < float(row["us_p20"]) <= float(row["us_p50"]) <= float(row["us_p80"])
    stack = STRATEGIES | {"prefetched_2", "default"}
    assert variants == {
        ("tiny_memory", ""): {"weights", "scales_dense", "scales_compressed", "scratch"},
        ("tiny_layer_w4a16", "1"): STRATEGIES,
        ("tiny_layer_w4a16", "24"): STRATEGIES,
        ("tiny_paths_w4a16", "2"): {f"{name}_{path}" for name in STRATEGIES for path in ("batched", "grouped")},
        ("tiny_stack_2", ""): {"expansion"},
        ("tiny_prefill_2_w4a16", "24"): stack,
        ("tiny_decode_2_w4a16", "2"): stack,
    }


def test_figure_of_the_results(results, bundle_dir, tmp_path):
    pytest.importorskip("matplotlib", reason="needs matplotlib, the `figures` extra")
    run("figures.py", bundle_dir, "--results", str(results.parent), "--out", str(tmp_path))
    assert {path.name for path in tmp_path.iterdir()} == {"moe_layer_tiny_w4a16.svg", "moe_stack_tiny_w4a16.svg"}
    assert all("time over dense" in path.read_text() for path in tmp_path.iterdir())
