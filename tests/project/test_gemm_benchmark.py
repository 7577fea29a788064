"""The kernels' benchmarks on small shapes, on a CPU: they check results before timing, and write the promised
columns."""

from __future__ import annotations

import csv
from itertools import product
from pathlib import Path

import pytest

pytest.importorskip("triton")
ROOT = Path(__file__).resolve().parent.parent.parent
COLUMNS = (
    "device,driver,torch,triton,commit,case,variant,tokens,condition,"
    "us_p20,us_p50,us_p80,bytes,roof_us,baseline,baseline_us"
)  # fmt: skip
CASES = ("qwen_gate_up", "qwen_down", "glm_gate_up", "glm_down")
EXPECTED = {
    "nvfp4_gemm": {
        *product(CASES, ("w4a16", "w4a16_batched"), ("1", "8"), ("warm", "cold")),
        *product(CASES[:2], ("torch_grouped_mm", "w4a16", "w4a4"), ("16",), ("warm", "cold")),
        *product(("dense_4096",), ("torch_bf16", "w4a16"), ("1", "16"), ("warm", "cold")),
    },
    "fused": {
        *product(CASES, ("dense", "staged", "fused"), ("1", "16"), ("warm", "cold")),
        *product(CASES, ("portable_dense", "portable_fused"), ("1", "16"), ("warm", "cold")),
        *product(CASES, ("dense_batched", "staged_batched", "fused_batched"), ("1",), ("warm", "cold")),
    },
}
ARGUMENTS = ["--tiny", "--commit", "abc", "--out", "out.csv"]
RUN = """
import runpy, sys
import torch
torch.cuda.is_available = lambda: False
sys.path.insert(0, {folder!r})
sys.argv = ["benchmark", *{arguments!r}]
runpy.run_path({folder!r} + "/{name}.py", run_name="__main__")
"""


@pytest.fixture
def run_benchmark(bundle_dir, run_python):
    local = {"LOCAL_KERNELS": f"kernels-community/finegrained-kernels={bundle_dir}"}

    def run(name: str, *arguments: str) -> str:
        code = RUN.format(folder=str(ROOT / "benchmarks"), name=name, arguments=arguments)
        return run_python(code, OMP_NUM_THREADS="1", **local).stdout

    return run


def read_rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        assert file.readline().strip() == COLUMNS
        return list(csv.DictReader(file, COLUMNS.split(",")))


def test_the_comparison_with_peers_runs_without_them(run_benchmark, tmp_path):
    run_benchmark("peers/compare", *ARGUMENTS)
    with (tmp_path / "out.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert ",".join(rows[0]) == COLUMNS + ",rel_error"
    assert all(float(row["rel_error"]) < 0.01 for row in rows)
    ours, conditions = ("ours_dense", "ours_fused"), ("warm", "cold")
    assert {(row["case"], row["variant"], row["tokens"], row["condition"]) for row in rows} == {
        *product(("dense_4096",), (*ours, "torch_bf16"), ("1", "16"), conditions),
        *product(("qwen",), ours, ("1", "16"), conditions),
    }


def test_layers_run_from_resident_scales(run_benchmark, tmp_path):
    out = run_benchmark("resident_scales", *ARGUMENTS, "--layers", "3", "--tokens", "1", "40")
    assert "every layer ran, outputs right" in out
    rows = {(row["variant"], row["tokens"]): row for row in read_rows(tmp_path / "out.csv")}
    assert set(rows) == {(name, "") for name in ("scales_compressed", "scales_dense", "weights")} | {
        ("fused", "1"), ("fused", "40")
    }  # fmt: skip
    compressed, dense = (int(rows[name, ""]["bytes"]) for name in ("scales_compressed", "scales_dense"))
    assert dense == 3 * 16 * (128 * 8 + 128 * 4) and dense / 2 < compressed < dense
    assert int(rows["fused", "40"]["bytes"]) == compressed > int(rows["fused", "1"]["bytes"]) > 0


def test_decoding_benchmark_runs_small(run_benchmark, tmp_path):
    run_benchmark("csf_decode", *ARGUMENTS)
    rows = read_rows(tmp_path / "out.csv")
    variants = {}
    for row in rows:
        variants.setdefault(row["case"], set()).add(row["variant"])
        assert 0 <= float(row["us_p20"]) <= float(row["us_p50"]) <= float(row["us_p80"])
    decoded = {"full", "rate_0", "rate_5", "swizzled"}
    decoded |= {f"offset_{n}" for n in range(1, 16)} | {f"swizzled_offset_{n}" for n in (1, 8, 15)}
    active = {f"active_{n}{known}" for n in (0, 1, 6) for known in ("", "_known")}
    assert variants == {
        "qwen_gate": decoded | active,
        "qwen_down": decoded | active,
        "glm_gate": decoded,
        "glm_down": decoded,
        "qwen_layer": {"compress", "compress_wall", "prepare_wall"},
        "tiny": {"eager_call"},
    }


@pytest.mark.parametrize("name", EXPECTED)
def test_gemm_benchmark_runs_small(run_benchmark, tmp_path, name):
    run_benchmark(name, *ARGUMENTS)
    rows = read_rows(tmp_path / "out.csv")
    assert {(row["case"], row["variant"], row["tokens"], row["condition"]) for row in rows} == EXPECTED[name]
    assert len(rows) == len(EXPECTED[name])
    for row in rows:
        assert row["commit"] == "abc" and int(row["bytes"]) > 0
        assert 0 < float(row["us_p20"]) <= float(row["us_p50"]) <= float(row["us_p80"])
        assert float(row["roof_us"]) > 0 and row["baseline"] and float(row["baseline_us"]) > 0
