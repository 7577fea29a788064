"""README's numbers and the figures come from the committed CSV files: written again, they are the same."""

from __future__ import annotations

import csv
import re
import sys
from pathlib import Path

import pytest

from conftest import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))

import measured
import report

RESULTS = sorted(measured.RESULTS.glob("*.csv"))
MEASURED_COLUMNS = (
    "device,driver,torch,triton,commit,case,variant,tokens,condition,us_p20,us_p50,us_p80,bytes,roof_us,baseline,"
    "baseline_us"
)
UNITS = r"(us|ms|s|seconds|minutes|MB|GB|GiB|GB/s|TB/s|%|percent|times|x)\b|%"


def pinned_matplotlib() -> str:
    return re.search(r"^matplotlib==(\S+)", (ROOT / "requirements" / "dev.txt").read_text(), re.MULTILINE)[1]


def outside_of_measured_part(readme: str) -> str:
    before, _, rest = readme.partition(report.BEGIN)
    return re.sub(r"```.*?```", "", before + rest.partition(report.END)[2], flags=re.DOTALL)


def test_readme_is_what_the_results_give():
    readme = (ROOT / "README.md").read_text()
    assert readme == report.with_measured_part(readme), "run `make figures`"


def test_readme_has_no_other_measured_number():
    found = re.findall(rf"[0-9][0-9.,]* ?(?:{UNITS})", outside_of_measured_part((ROOT / "README.md").read_text()))
    assert not found


@pytest.mark.parametrize("kind", [r"[0-9]+[.][0-9]{2}", r"[0-9.]+ %", r"[0-9]+ MB", r"[0-9.]+ times"])
def test_a_typed_number_is_noticed(kind):
    readme = (ROOT / "README.md").read_text()
    number = re.search(kind, report.measured_part())[0]
    typed = readme.replace(number, ("8" if number[0] == "9" else "9") + number[1:])
    assert typed != readme
    assert typed != report.with_measured_part(typed)
    assert re.findall(rf"[0-9][0-9.,]* ?(?:{UNITS})", "x " + "decodes in 23.7 us")


def test_a_change_has_no_negative_zero():
    assert [report.change(ratio) for ratio in (0.999, 1.001, 0.98, 1.33)] == ["+0 %", "+0 %", "-2 %", "+33 %"]


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.name)
def test_rows_say_where_they_were_measured(path):
    with path.open(newline="") as file:
        header, *rows = csv.reader(file)
    assert rows
    if path.name == "kernel_resources.csv":  # of compilation: nothing ran
        return
    assert ",".join(header) == MEASURED_COLUMNS
    for row in map(dict, (zip(header, row, strict=True) for row in rows)):
        assert row["device"] and row["torch"] and row["case"] and row["condition"] in ("warm", "cold", ""), row
        assert re.fullmatch(r"[0-9a-f]{7,40}", row["commit"]), f"{path.name}: measured on an uncommitted tree: {row}"


def test_stored_bytes_are_those_of_the_encoder(bundle):
    """The arithmetic on csf_decode.csv's bytes, held against what the encoder makes of a stack."""
    from numeric import make_stack

    planes, rows, cols = 3, 32, 40
    stack = make_stack([7, 0, 90], rows, cols, seed=0)
    fixed, words = bundle.compress_nvfp4_csf_scales(stack.planes)
    scales = bundle.prepare_nvfp4_csf_scales(fixed, words, num_rows=rows, num_cols=cols)
    moved = planes * (rows + rows * cols * 3 // 2) + 4 * 97
    nothing = dict.fromkeys(("us_p20", "us_p50", "us_p80", "roof_us", "baseline_us", "tokens"))
    row = measured.Row("", "", "", "small", "full", condition="warm", bytes=moved, baseline="", **nothing)
    measured.STACKS["small"] = (planes, rows, cols)
    try:
        assert measured.num_exceptions(row) == 97
        assert measured.stored_bytes(row) == fixed.nbytes + sum(w.nbytes for w in words)
        assert measured.resident_bytes(row) == scales.nbytes
    finally:
        del measured.STACKS["small"]


def test_figures_are_what_the_results_give(tmp_path):
    matplotlib = pytest.importorskip("matplotlib", reason="needs matplotlib, which `make test` installs")
    import figures

    written = figures.draw(tmp_path / "first")
    again = figures.draw(tmp_path / "second")
    assert [path.name for path in written] == [path.name for path in again]
    assert {path.name for path in figures.OUT.glob("*.svg")} == {path.name for path in written}
    for first, second in zip(written, again, strict=True):
        assert first.read_bytes() == second.read_bytes(), first.name
    if matplotlib.__version__ != pinned_matplotlib():
        pytest.skip(f"the committed figures are matplotlib {pinned_matplotlib()}'s, this is {matplotlib.__version__}")
    for path in written:
        assert path.read_bytes() == (figures.OUT / path.name).read_bytes(), f"{path.name}: run `make figures`"


def fabricated(path: Path, rows: list[tuple]) -> None:
    """Rows in the columns of every result, for drawing only: they never leave the test."""
    columns = MEASURED_COLUMNS.split(",")
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        for case, variant, tokens, us in rows:
            for condition in ("warm", "cold"):
                where = ["a GPU", "", "2.11.0", "3.6.0", "0" * 12, case, variant, tokens, condition]
                writer.writerow([*where, us * 0.9, us, us * 1.1, 600_000_000, 150.0, "dense", 200.0])


def test_what_is_drawn_once_there_are_results(tmp_path, monkeypatch):
    """The parts whose files are not there yet work on files of the agreed columns."""
    pytest.importorskip("matplotlib", reason="needs matplotlib, which `make test` installs")
    import figures

    cases, counts = ("qwen_gate_up", "glm_down"), (1, 64, 4096)
    grid = [(case, count) for case in cases for count in counts]
    fabricated(tmp_path / "fused.csv", [(c, v, n, 100.0 + n) for c, n in grid for v in ("dense", "staged", "fused")])
    fabricated(tmp_path / "nvfp4_gemm.csv", [(c, v, n, 100.0 + n) for c, n in grid for v in ("w4a16", "w4a4")])
    fabricated(tmp_path / "model.csv", [("a model", v, n, 9000.0) for n in counts for v in ("dense", "staged")])
    for name in ("csf_decode", "csf_cpu", "stored_scales", "checkpoints", "checkpoints_h200"):
        (tmp_path / f"{name}.csv").write_text((measured.RESULTS / f"{name}.csv").read_text())
    assert {path.stem for path in figures.draw(tmp_path / "out", tmp_path)} == set(figures.FIGURES)

    monkeypatch.setattr(report, "Table", lambda name: measured.Table(name, tmp_path))
    monkeypatch.setattr(report, "has", lambda name: measured.has(name, tmp_path))
    text = report.measured_part()
    assert "| 512 experts, 1280 x 2560 | 64 | 164.0 | 164.0 (+0 %) | 164.0 (+0 %) |" in text
    assert "| 288 experts, 4096 x 2048 | 4,096 | w4a4 | 4196.0 | 4 % | 0.05 x dense |" in text
