"""The numbers in documents and the figures come from the committed CSV files: written again, they are the same."""

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
MORE_COLUMNS = {
    "model.csv": ",tokens_per_s,scale_bytes,allocated_bytes",
    "peers.csv": ",rel_error",
    "language_model.csv": ",perplexity,file_bytes",
}
CONDITIONS = {"csf_cpu.csv": ("warm", "busy_core"), "eager.csv": ("eager_cpu",)}
CONDITIONS["model.csv"] = ("eager", "graph", "compiled")
UNITS = r"(us|ms|s|seconds|minutes|MB|GB|GiB|GB/s|TB/s|%|percent|times|x)\b|%"


def pinned_matplotlib() -> str:
    return re.search(r"^matplotlib==(\S+)", (ROOT / "requirements" / "dev.txt").read_text(), re.MULTILINE)[1]


def one_line(text: str) -> str:
    return " ".join(text.split())


def outside_of_measured_part(readme: str) -> str:
    before, _, rest = readme.partition(report.BEGIN)
    return re.sub(r"```.*?```", "", before + rest.partition(report.END)[2], flags=re.DOTALL)


@pytest.mark.parametrize("name", report.DOCUMENTS)
def test_documents_are_what_the_results_give(name):
    text = (ROOT / name).read_text()
    assert text == report.with_measured_part(name, text), "run `make figures`"


@pytest.mark.parametrize("name", report.DOCUMENTS)
def test_documents_have_no_other_measured_number(name):
    found = re.findall(rf"[0-9][0-9.,]* ?(?:{UNITS})", outside_of_measured_part((ROOT / name).read_text()))
    assert not found


@pytest.mark.parametrize("kind", [r"[0-9]+[.][0-9]{2}", r"[0-9.]+ %", r"[0-9]+ MB", r"[0-9.]+ times"])
def test_a_typed_number_is_noticed(kind):
    text = (ROOT / "docs/benchmarks.md").read_text()
    number = re.search(kind, report.all_parts())[0]
    typed = text.replace(number, ("8" if number[0] == "9" else "9") + number[1:])
    assert typed != text
    assert typed != report.with_measured_part("docs/benchmarks.md", typed)
    assert re.findall(rf"[0-9][0-9.,]* ?(?:{UNITS})", "x " + "decodes in 23.7 us")


def test_a_change_has_no_negative_zero():
    assert [report.change(ratio) for ratio in (0.999, 1.001, 0.98, 1.33)] == ["+0 %", "+0 %", "-2 %", "+33 %"]


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.name)
def test_rows_say_where_they_were_measured(path):
    with path.open(newline="") as file:
        header, *rows = csv.reader(file)
    assert rows
    if path.name in ("kernel_resources.csv", "mutation_gpu.csv"):  # results of compilation, and of deliberate faults
        return
    assert ",".join(header) == MEASURED_COLUMNS + MORE_COLUMNS.get(path.name, "")
    conditions = CONDITIONS.get(path.name, ("warm", "cold", ""))
    for row in map(dict, (zip(header, row, strict=True) for row in rows)):
        assert row["device"] and row["torch"] and row["case"] and row["condition"] in conditions, row
        assert re.fullmatch(r"[0-9a-f]{7,40}", row["commit"]), f"{path.name}: measured on an uncommitted tree: {row}"


def test_stored_bytes_are_those_of_the_encoder(bundle):
    """The arithmetic on the bytes in csf_decode.csv, compared with the encoder's result for a stack."""
    from numeric import make_stack

    planes, rows, cols = 3, 32, 40
    stack = make_stack([7, 0, 90], rows, cols, seed=0)
    fixed, words = bundle.compress_nvfp4_csf_scales(stack.planes)
    scales = bundle.prepare_nvfp4_csf_scales(fixed, words, num_rows=rows, num_cols=cols)
    moved = planes * (rows + rows * cols * 3 // 2) + 4 * 97
    nothing = dict.fromkeys(("us_p50", "roof_us", "baseline_us", "tokens"))
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


VARIANTS = ("dense", "staged", "prefetched", "fused")
DENSE = ("bf16", "dense", "fused")
CASES = tuple(measured.GEMMS)


def fabricated(path: Path, rows: list[tuple], conditions: tuple[str, ...] = ("warm", "cold"), more: str = "") -> None:
    """Rows with the columns of every result, only for drawing; they never leave the test."""
    columns = (MEASURED_COLUMNS + more).split(",")
    kept = path.read_text() if path.exists() else ",".join(columns) + "\n"
    on = measured.Table("moe_layer")[0]
    with path.open("w", newline="") as file:
        file.write(kept)
        writer = csv.writer(file, lineterminator="\n")
        for case, variant, tokens, us in rows:
            for condition in conditions:
                where = [on.device, "", on.torch, on.triton, "0" * 12, case, variant, tokens, condition]
                sizes = [1.0, 24 * 157_286_400, 40_000_000_000] if more else []
                writer.writerow([*where, us * 0.9, us, us * 1.1, 600_000_000, 150.0, "dense", 200.0, *sizes])


def test_what_is_drawn_once_there_are_results(tmp_path, monkeypatch):
    """Parts whose files do not exist yet work with files that have the columns of their benchmarks."""
    pytest.importorskip("matplotlib", reason="needs matplotlib, which `make test` installs")
    import figures

    for path in RESULTS:
        (tmp_path / path.name).write_text(path.read_text())
    for name in ("fused.csv", "nvfp4_gemm.csv", "model.csv"):
        (tmp_path / name).unlink(missing_ok=True)
    lines = (tmp_path / "moe_layer.csv").read_text().splitlines(keepends=True)
    lines = [line for line in lines if ",qwen_layer_w4a16," in line or ",qwen_memory" in line]
    (tmp_path / "moe_layer.csv").write_text("".join([MEASURED_COLUMNS + "\n", *lines]))

    grid = [(case, tokens) for case in CASES for tokens in (1, 64, 4096)]
    fused = [(c, v, n, 100.0 + n + 7 * i) for c, n in grid for i, v in enumerate(("dense", "staged", "fused"))]
    fabricated(tmp_path / "fused.csv", [*fused, ("qwen_down", "fused_batched", 1, 50.0)])
    gemms = [(c, v, n, 100.0 + n) for c, n in grid for v in ("w4a16", "w4a4")]
    gemms += [("qwen_down", "torch_grouped_mm", 4096, 8392.0), ("qwen_down", "w4a16_batched", 1, 75.0)]
    gemms += [("dense_4096", "w4a16", 16, 12345.0)]
    fabricated(tmp_path / "nvfp4_gemm.csv", gemms)
    stack = [(f"qwen_{p}_4_w4a16", v, n, 220.0) for p in ("prefill", "decode") for n in (8, 64) for v in VARIANTS]
    stack += [("qwen_decode_4_w4a16", v, n, 210.0) for n in (8, 64) for v in ("prefetched_2", "default")]
    timeline = {"timeline_expansion": 420.0, "timeline_exposed": 1.0, "timeline_attention_loss": 270.0}
    stack += [("qwen_prefill_4_w4a16", name, report.TIMELINE_TOKENS, us) for name, us in timeline.items()]
    fabricated(tmp_path / "moe_layer.csv", stack, ("warm",))
    calls = [("prefill_2048", 2048, 40_960.0, "eager"), ("decode_8", 8, 8_000.0, "graph")]
    kinds = (("qwen3_next", VARIANTS, calls), ("qwen3_8b", DENSE, [*calls, ("decode_8", 8, 4_000.0, "compiled")]))
    for model, variants, case, tokens, us, condition in [(m, v, *call) for m, v, calls in kinds for call in calls]:
        rows = [(f"{model}_{case}", variant, tokens, us / (1 + (variant == "fused"))) for variant in variants]
        fabricated(tmp_path / "model.csv", rows, (condition,), MORE_COLUMNS["model.csv"])

    drawn = figures.draw(tmp_path / "out", tmp_path)
    named = {path.name for path in drawn}
    assert named == {f"{name}.svg" for name in (*figures.FIGURES, "moe_layer_qwen_w4a16", "moe_stack_qwen_w4a16")}
    for first, second in zip(drawn, figures.draw(tmp_path / "again", tmp_path), strict=True):
        assert first.read_bytes() == second.read_bytes(), first.name

    monkeypatch.setattr(report, "Table", lambda name: measured.Table(name, tmp_path))
    monkeypatch.setattr(report, "has", lambda name: measured.has(name, tmp_path))
    text = report.all_parts()
    assert "| 512 experts, 2560 x 640 | 64 | 328.0 | 342.0 (+4 %) | 356.0 (+9 %) | -14.0 |" in text
    assert "| 512 experts, 2560 x 640 | 75.0 (200 %) | 164.0 (91 %) |" in text
    assert "| 512 experts, 2560 x 640 | 4,096 | 8,392.0 | 4,196.0 (2.00 x) | 4,196.0 (2.00 x) |" in text
    assert "12,345.0" not in text, "peers.csv has what one weight takes"
    assert "4 such layers, each with attention before it" in text and "staged +10 % to +10 %" in one_line(text)
    assert "With 8,192 tokens, decoding alone takes 420 us; beside attention, the layers wait 1 us" in one_line(text)
    assert "| decode, batch of 8, graph | 1,000 | 1,000 (+0 %) | 1,000 (+0 %) | 2,000 (+100 %) |" in text
    assert "| decode, batch of 8, compiled | 2,000 | 2,000 (1.00 x) | 4,000 (2.00 x) |" in text
    assert "24 layers of 512 experts" in text and "| allocated in all, GB | 40.00 |" in text
    shown = set(re.findall(r"\w+\.svg", text))
    assert shown == named, "a figure that no document shows"
    assert not re.search(r"^%|\n%", text)
