"""The MoE benchmark runs from end to end on tiny layers, writes the columns that are promised, and can be plotted."""

from __future__ import annotations

import csv
import os
import shutil
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
SPANS = {"expansion", "expansion_beside", "exposed", "attention_alone", "attention_with_prefetch", "attention_loss"}
TIMELINE = {f"timeline_{span}" for span in SPANS}
MAY_BE_ZERO = {"timeline_exposed", "timeline_attention_loss"}
ARGUMENTS = ("--shape", "tiny", "--layers", "2", "--samples", "1")


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
    run("moe_layer.py", bundle_dir, *ARGUMENTS, "--out", str(out), "--commit", "abc")
    return out


def test_moe_layer_writes_every_row(results):
    text = results.read_text()
    assert text.splitlines()[0] == COLUMNS
    rows = list(csv.DictReader(text.splitlines()))
    variants = {}
    for row in rows:
        variants.setdefault((row["case"], row["tokens"]), set()).add(row["variant"])
        assert row["commit"] == "abc" and int(row["bytes"]) >= 0
        if row["case"] != "tiny_memory":
            assert float(row["us_p20"]) <= float(row["us_p50"]) <= float(row["us_p80"])
            assert float(row["us_p20"]) > 0 or row["variant"] in MAY_BE_ZERO
    stack = STRATEGIES | {"prefetched_2", "default"}
    assert variants == {
        ("tiny_memory", ""): {"weights", "scales_dense", "scales_compressed", "scratch"},
        ("tiny_layer_w4a16", "1"): STRATEGIES,
        ("tiny_layer_w4a16", "24"): STRATEGIES,
        ("tiny_paths_w4a16", "2"): {f"{name}_{path}" for name in STRATEGIES for path in ("batched", "grouped")},
        ("tiny_stack_2", ""): {"expansion"},
        ("tiny_prefill_2_w4a16", "24"): stack | TIMELINE,
        ("tiny_decode_2_w4a16", "2"): stack,
    }


def test_rows_measured_anew_replace_their_own_alone(results, bundle_dir, tmp_path):
    out = tmp_path / "moe_layer.csv"
    shutil.copy(results, out)
    run("moe_layer.py", bundle_dir, *ARGUMENTS, "--only", "paths", "--merge", "--out", str(out), "--commit", "def")
    before, after = (list(csv.DictReader(path.read_text().splitlines())) for path in (results, out))
    others = [row for row in before if row["case"] != "tiny_paths_w4a16"]
    anew = [row for row in after if row["commit"] == "def"]
    assert after == others + anew and len(after) == len(before)
    assert {row["case"] for row in anew} == {"tiny_paths_w4a16"}


def test_figure_of_the_results(results, bundle_dir, tmp_path):
    pytest.importorskip("matplotlib", reason="needs matplotlib, the `figures` extra")
    run("figures.py", bundle_dir, "--results", str(results.parent), "--out", str(tmp_path))
    (figure,) = tmp_path.iterdir()
    assert figure.name == "moe_layer_tiny_w4a16.svg" and "time over dense" in figure.read_text()
