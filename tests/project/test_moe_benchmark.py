"""The benchmarks of layers and models, run from end to end on tiny ones, write the promised columns, and can be
plotted."""

from __future__ import annotations

import csv
import importlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
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


@pytest.fixture
def timeline(monkeypatch):
    pytest.importorskip("triton", reason="needs triton, which the benchmarks' roofs are written in")
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("prefetch_timeline")


@pytest.mark.parametrize(("end", "exposed"), [(90, 0), (100, 0), (130, 30)])
def test_exposed_is_what_a_prefetched_layer_waits(timeline, end, exposed):
    at = {us: (lambda us=us: float(us)) for us in (10, 20, 100, end)}
    marks = timeline.LayerMarks(True, at[10], at[100], (at[20], at[end]))
    assert marks.spans() == {"attention_with_prefetch": 90, "expansion_beside": end - 20, "exposed": exposed}
    alone = timeline.LayerMarks(False, at[10], at[100], (at[100], at[end]))
    assert alone.spans() == {"attention_alone": 90, "expansion": end - 100}


@pytest.mark.parametrize(("exposed", "loss", "shares"), [(0, -5, (1, 1)), (10, 0, (0.9, 0.9)), (10, 20, (0.9, 0.7))])
def test_hidden_counts_what_is_exposed_and_what_attention_loses(timeline, exposed, loss, shares):
    timing = timeline.harness.Timing
    spans = {"expansion": 100.0, "exposed": exposed, "attention_loss": loss}
    assert timeline.hidden({name: timing(0, us, 0) for name, us in spans.items()}) == pytest.approx(shares)


def test_whole_model_runs_small(bundle_dir, tmp_path):
    pytest.importorskip("transformers", reason="needs the extra [transformers]")
    pytest.importorskip("triton", reason="needs triton, which the benchmarks' roofs are written in")
    out = tmp_path / "model.csv"
    sizes = ("--layers", "2", "--samples", "1", "--prefill", "16", "--decode", "1")
    run("model.py", bundle_dir, "--tiny", *sizes, "--out", str(out), "--commit", "abc")
    header, *lines = out.read_text().splitlines()
    assert header == f"{COLUMNS},tokens_per_s,scale_bytes,allocated_bytes"
    rows = list(csv.DictReader(lines, header.split(",")))
    assert {(row["case"], row["variant"], row["tokens"]) for row in rows} == {
        (f"qwen3_next_{case}", variant, tokens)
        for case, tokens in (("prefill_16", "16"), ("decode_1", "1"))
        for variant in STRATEGIES
    }
    scales = {row["variant"]: int(row["scale_bytes"]) for row in rows}
    assert scales["staged"] == scales["prefetched"] == scales["fused"] < scales["dense"]
    for row in rows:
        assert row["baseline"] == "dense" and float(row["tokens_per_s"]) > 0
        assert int(row["bytes"]) >= int(row["allocated_bytes"]) > int(row["scale_bytes"])


@pytest.mark.slow
def test_dense_model_runs_small(bundle_dir, tmp_path):
    pytest.importorskip("transformers", reason="needs the extra [transformers]")
    pytest.importorskip("triton", reason="needs triton, which the benchmarks' roofs are written in")
    out = tmp_path / "model.csv"
    header = f"{COLUMNS},tokens_per_s,scale_bytes,allocated_bytes"
    kept = ",,,,,qwen3_8b_decode_1,bf16,1,graph,,,,,,,,,,"
    out.write_text(f"{header}\n{kept}\n")
    run("dense_model.py", bundle_dir, "--tiny", "--out", str(out), "--commit", "abc")
    assert out.read_text().splitlines()[:2] == [header, kept]
    _, *rows = csv.DictReader(out.read_text().splitlines())
    assert [(row["case"], row["variant"]) for row in rows] == [
        (f"qwen3_8b_{case}", variant) for case in ("prefill_16", "decode_1") for variant in ("bf16", "dense", "fused")
    ]
    sizes = {row["variant"]: (int(row["scale_bytes"]), int(row["allocated_bytes"])) for row in rows}
    assert sizes["bf16"][0] == 0 < sizes["fused"][0] < sizes["dense"][0]
    assert sizes["fused"][1] < sizes["dense"][1] < sizes["bf16"][1]


def test_figure_of_the_results(results, bundle_dir, tmp_path):
    pytest.importorskip("matplotlib", reason="needs matplotlib, the `figures` extra")
    run("figures.py", bundle_dir, "--results", str(results.parent), "--out", str(tmp_path))
    assert {path.name for path in tmp_path.iterdir()} == {"moe_layer_tiny_w4a16.svg", "moe_stack_tiny_w4a16.svg"}
    assert all("time over dense" in path.read_text() for path in tmp_path.iterdir())
