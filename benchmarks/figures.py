"""Draws every figure of the documents from `results/*.csv`, and from nothing else.

    python benchmarks/figures.py [--results benchmarks/results] [--out docs/figures]

The same rows give the same bytes, under the matplotlib that requirements/dev.txt pins. A figure whose file is not
there yet is left out.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, PercentFormatter
from measured import (
    LAYER,
    RESULTS,
    STACKS,
    Row,
    Table,
    dense_bytes,
    has,
    num_exceptions,
    resident_bytes,
    stored_bytes,
)

OUT = Path(__file__).resolve().parent.parent / "docs" / "figures"
WIDTH = 8.3
"""Inches of 72 points: as wide as a README is shown."""

STYLE = {
    "svg.hashsalt": "finegrained-kernels",
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#dddddd",
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "figure.constrained_layout.use": True,
}
METADATA = {"Date": None, "Creator": None}
DENSE, STAGED, FUSED, ROOF, OTHER = "#666666", "#d95f02", "#1b9e77", "#222222", "#7570b3"
STRATEGIES = {"dense": DENSE, "staged": STAGED, "prefetched": OTHER, "fused": FUSED}
MODEL_LAYERS = {"qwen": 48}
STAGING_OVERHEAD = (1.09, 1.32)
"""Published: a staging implementation of this format adds 9 to 32 % to the dense GEMM, on a B200."""


def axes(title: str, columns: int = 1, height: float = 3.2) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=(WIDTH, height))
    figure.suptitle(title, fontsize=11)
    return figure, list(figure.subplots(1, columns, squeeze=False)[0])


def measured_on(table: Table) -> str:
    (device,) = table.values("device")
    return device


def stack_name(case: str, separator: str = " x ") -> str:
    planes, rows, cols = STACKS[case]
    return f"{case.replace('_', ' ')}\n{planes}{separator}{rows} x {cols}"


def doubling(axis: Axes, values: list[int], label: str) -> None:
    """A logarithmic x axis with the measured values as its ticks."""
    axis.set_xscale("log", base=2)
    axis.set_xticks(values, [f"{value:,}" for value in values])
    axis.minorticks_off()
    axis.set_xlabel(label)


def stored_scales(results: Path) -> Figure:
    table = Table("csf_decode", results)
    figure, (left, right) = axes("Stored scales: stacks with real rates of exceptions, and trained weights", 2)
    for i, case in enumerate(STACKS):
        dense, stored = dense_bytes(case) / 1e6, stored_bytes(table.one(case=case, variant="full", condition="warm"))
        left.bar(i - 0.2, dense, 0.38, color=DENSE, label="dense" if i == 0 else None)
        left.bar(i + 0.2, stored / 1e6, 0.38, color=FUSED, label="CSF" if i == 0 else None)
        left.annotate(f"{stored / 1e6 / dense:.1%}", (i + 0.2, stored / 1e6), ha="center", va="bottom", fontsize=8)
    left.set_xticks(range(len(STACKS)), [stack_name(case, " planes\n") for case in STACKS], fontsize=8)
    left.set_ylabel("MB a stack")
    left.legend()
    for case, marker in zip(STACKS, "os^D", strict=True):
        rows = [row for row in table.select(case=case, condition="warm") if row.variant.startswith(("full", "rate"))]
        rows.sort(key=num_exceptions)
        rates = [num_exceptions(row) / dense_bytes(case) for row in rows]
        shares = [stored_bytes(row) / dense_bytes(case) for row in rows]
        right.plot(rates, shares, marker=marker, markersize=4, label=case.replace("_", " "))
    real = {row.variant: row.bytes for row in Table("stored_scales", results).select(case="minilm")}
    rate, share = real["csf_exceptions"] / 4 / real["dense"], real["csf"] / real["dense"]
    right.plot([rate], [share], "*", color=ROOF, markersize=10, label="all-MiniLM-L6-v2")
    right.axhline(1, color=DENSE, linewidth=1)
    right.set(xlabel="exceptions, of all scales", ylabel="CSF, of dense bytes", ylim=(0.4, 1.05))
    right.xaxis.set_major_formatter(PercentFormatter(1, 0))
    right.yaxis.set_major_formatter(PercentFormatter(1, 0))
    right.legend(loc="upper left", bbox_to_anchor=(0, 0.93), fontsize=8)
    return figure


def scale_memory(results: Path) -> Figure:
    """Arithmetic on the measured stacks: L layers dense, compressed with one shared workspace, compressed alone."""
    table = Table("csf_decode", results)
    dense = sum(map(dense_bytes, LAYER)) / 1e9
    compressed = sum(resident_bytes(table.one(case=case, variant="full", condition="warm")) for case in LAYER) / 1e9
    layers = list(range(0, 65, 8))
    figure, (axis,) = axes("Memory that scales take, layers of 512 experts, gate and up 640 x 160, down 2560 x 40")
    axis.plot(layers, [n * dense for n in layers], color=DENSE, label="dense, or decoded at load")
    staged = [n * compressed + dense for n in layers]
    axis.plot(layers, staged, color=STAGED, label="staged: compressed, and one layer's workspace")
    axis.plot(layers, [n * compressed for n in layers], color=FUSED, label="fused: compressed, no workspace")
    for values, color in (([n * dense for n in layers], DENSE), ([n * compressed for n in layers], FUSED)):
        axis.annotate(f"{values[-1]:.2f} GB", (layers[-1], values[-1]), color=color, xytext=(4, -3),
                      textcoords="offset points")  # fmt: skip
    axis.set(xlabel="resident layers", ylabel="GB", xlim=(0, 70), ylim=(0, None), xticks=layers)
    axis.legend(loc="upper left")
    return figure


def decode_roof(results: Path) -> Figure:
    table = Table("csf_decode", results)
    figure, (axis,) = axes(f"Decoding whole stacks, of the speed of a copy of as many bytes ({measured_on(table)})")
    for shift, condition, color in ((-0.2, "warm", STAGED), (0.2, "cold", OTHER)):
        for i, case in enumerate(STACKS):
            row = table.one(case=case, variant="full", condition=condition)
            spread = [[(row.roof_us / row.us) - (row.roof_us / row.us_p80)], [(row.roof_us / row.us_p20) - row.of_roof]]
            axis.bar(i + shift, row.of_roof, 0.36, color=color, label=condition if i == 0 else None, yerr=spread,
                     error_kw={"linewidth": 1})  # fmt: skip
            axis.annotate(f"{row.us:.1f} us", (i + shift, 0.03), ha="center", color="white", fontsize=8)
    axis.axhline(1, color=ROOF, linewidth=1)
    axis.set_xticks(range(len(STACKS)), map(stack_name, STACKS))
    axis.set(ylabel="of the roof, median\n(bars: 20th to 80th percentile)", ylim=(0, 1.15))
    axis.yaxis.set_major_formatter(PercentFormatter(1, 0))
    axis.legend(ncols=2, loc="upper right")
    return figure


def sparse_routing(results: Path) -> Figure:
    table = Table("csf_decode", results)
    figure, panels = axes(f"Decoding only active experts, warm ({measured_on(table)})", 2, 3.4)
    for axis, case in zip(panels, ("qwen_gate", "qwen_down"), strict=True):
        known = [row for row in table.select(case=case, condition="warm") if row.variant.endswith("_known")]
        counts = [int(row.variant.split("_")[1]) for row in known]
        unknown = [table.one(case=case, variant=f"active_{count}", condition="warm") for count in counts]
        for rows, color, label in ((unknown, STAGED, "decode"), (known, FUSED, "decode, max_active given")):
            axis.plot(counts, [row.us for row in rows], "o-", markersize=4, color=color, label=label)
        copy = [row.roof_us for row in known]
        axis.plot(counts, copy, "--", color=ROOF, label="a copy of as many bytes")
        axis.set_xscale("symlog", base=2, linthresh=1)
        axis.set_yscale("log")
        axis.set_xticks(counts, [str(count) for count in counts])
        axis.set_yticks([1, 2, 5, 10, 20, 50], ["1", "2", "5", "10", "20", "50"])
        axis.minorticks_off()
        axis.set_title(stack_name(case).replace("\n", ": "))
        axis.set(xlabel=f"active experts, of {STACKS[case][0]}", ylabel="us")
    panels[0].legend()
    return figure


def bandwidth_roofline(results: Path) -> Figure:
    """Decoding and GEMMs are bound by memory: what each moved a second, over the bytes, under the roof of its run."""
    figure, (axis,) = axes("Memory traffic of decoding and GEMMs, cold", height=3.6)
    shown: list[Row] = []
    for name, label, marker, color in (
        ("csf_decode", "decoding", "o", FUSED), ("nvfp4_gemm", "GEMM", "s", STAGED)
    ):  # fmt: skip
        if not has(name, results):
            continue
        table = Table(name, results)
        rows = [row for row in table.select(condition="cold") if row.bytes > 1e5 and row.roof_us]
        rows = [row for row in rows if not row.variant.startswith("offset")]
        speeds = [row.bytes / row.us / 1e6 for row in rows]
        label = f"{label} ({measured_on(table)})"
        axis.plot([row.bytes for row in rows], speeds, marker, markersize=4, color=color, label=label)
        shown += rows
    shown.sort(key=lambda row: row.bytes)
    roofs = [row.bytes / row.roof_us / 1e6 for row in shown]
    axis.plot([row.bytes for row in shown], roofs, "_", color=ROOF, label="roof measured in the same run")
    axis.set(xscale="log", yscale="log", xlabel="bytes moved", ylabel="TB/s")
    axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value / 1e6:g} MB"))
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.legend(loc="lower right")
    return figure


def strategy_latency(results: Path) -> Figure:
    """Decode and GEMM with compressed scales, of the GEMM on dense scales in the same run."""
    table = Table("fused", results)
    cases = table.values("case")
    figure, panels = axes(f"Decode and GEMM, of the same GEMM on dense scales ({measured_on(table)})", len(cases), 3.6)
    for axis, case in zip(panels, cases, strict=True):
        tokens = sorted(table.values("tokens", case=case))
        for condition, line in (("warm", "--"), ("cold", "-")):
            for variant in ("staged", "fused"):
                ratios = [
                    table.one(case=case, tokens=count, variant=variant, condition=condition).us
                    / table.one(case=case, tokens=count, variant="dense", condition=condition).us
                    for count in tokens
                ]
                axis.plot(tokens, ratios, f"o{line}", markersize=4, color=STRATEGIES[variant],
                          label=f"{variant}, {condition}")  # fmt: skip
        axis.axhline(1, color=DENSE, linewidth=1)
        axis.axhspan(*STAGING_OVERHEAD, color=STAGED, alpha=0.12, label="published staging (B200)")
        doubling(axis, tokens, "tokens")
        axis.set_title(case.replace("_", " "))
    panels[0].set_ylabel("x dense")
    panels[0].legend(fontsize=7)
    return figure


def layer_time(table: Table, model: str, activations: str) -> Figure:
    """Time of a MoE layer by strategy, the same over dense, and the memory of all layers' scales."""
    case = f"{model}_layer_{activations}"
    (device,) = table.values("device", case=case)
    title = f"One MoE layer, {model}, {activations}, L2 flushed ({device})"
    figure, (absolute, relative, memory) = axes(title, 3, 3.4)
    for variant, color in STRATEGIES.items():
        rows = sorted(table.select(case=case, variant=variant), key=lambda row: row.tokens or 0)
        tokens = [row.tokens for row in rows]
        absolute.plot(tokens, [row.us for row in rows], "o-", markersize=3, color=color, label=variant)
        if variant == "dense":
            roofs = [row.roof_us for row in rows]
            absolute.plot(tokens, roofs, ":", color=ROOF, label="reading as many bytes")
        else:
            ratios = [row.over_baseline for row in rows]
            relative.plot(tokens, ratios, "o-", markersize=3, color=color, label=variant)
    relative.axhline(1, color=DENSE, linewidth=1)
    for axis, name in ((absolute, "time, us"), (relative, "time over dense")):
        axis.set(xscale="log", xlabel="tokens", title=name)
        axis.legend(fontsize=7)
    absolute.set_yscale("log")
    resident = {row.variant: row.bytes for row in table.select(case=f"{model}_memory")}
    layers = MODEL_LAYERS.get(model, 1)
    for i, (variant, scratches) in enumerate({"dense": 0, "staged": 1, "prefetched": 2, "fused": 0}.items()):
        scales = layers * resident["scales_dense" if variant == "dense" else "scales_compressed"] / 1e9
        scratch = scratches * resident["scratch"] / 1e9
        memory.bar(i, scales, color=STRATEGIES[variant])
        memory.bar(i, scratch, bottom=scales, color=STRATEGIES[variant], alpha=0.4)
        memory.annotate(f"{scales + scratch:.2f}", (i, scales + scratch), ha="center", va="bottom", fontsize=8)
    memory.set_xticks(range(4), ["dense", "staged", "pre-\nfetched", "fused"], fontsize=8)
    memory.set_title(f"scales of {layers} layers, GB\n(light: scratch)")
    return figure


def layer_times(results: Path) -> dict[str, Figure]:
    """A figure a model and format of activations in moe_layer.csv, by name."""
    if not has("moe_layer", results):
        return {}
    table = Table("moe_layer", results)
    cases = [case.split("_layer_") for case in table.values("case") if "_layer_" in case]
    return {f"moe_layer_{model}_{kind}": layer_time(table, model, kind) for model, kind in cases}


def model_speed(results: Path) -> Figure:
    """Rows of model.csv for decoding: a step of `tokens` sequences, `bytes` the peak memory."""
    table = Table("model", results)
    figure, (axis,) = axes(f"Decoding speed and memory of a whole model ({measured_on(table)})", height=3.6)
    for i, variant in enumerate(table.values("variant")):
        rows = [row for row in table.select(variant=variant) if row.case.startswith("decode")]
        axis.plot([row.bytes / 1e9 for row in rows], [1e6 * (row.tokens or 1) / row.us for row in rows], "o",
                  color=STRATEGIES.get(variant, f"C{i}"), label=variant)  # fmt: skip
        for row in rows:
            axis.annotate(f"{row.case}, {row.tokens}", (row.bytes / 1e9, 1e6 * (row.tokens or 1) / row.us),
                          xytext=(4, 4), textcoords="offset points", fontsize=7)  # fmt: skip
    axis.set(xlabel="peak memory, GB", ylabel="tokens a second", ylim=(0, None))
    axis.legend()
    return figure


FIGURES: dict[str, tuple[tuple[str, ...], Callable[[Path], Figure]]] = {
    "stored_scales": (("csf_decode", "stored_scales"), stored_scales),
    "scale_memory": (("csf_decode",), scale_memory),
    "decode_roof": (("csf_decode",), decode_roof),
    "sparse_routing": (("csf_decode",), sparse_routing),
    "bandwidth_roofline": (("csf_decode",), bandwidth_roofline),
    "strategy_latency": (("fused",), strategy_latency),
    "model_speed": (("model",), model_speed),
}
"""Which files each needs, and what draws it."""


def draw(out: Path, results: Path = RESULTS) -> list[Path]:
    """Write all that can be drawn, as SVG, and return what was written."""
    out.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context(matplotlib.rcParamsDefault):
        matplotlib.rcParams.update(STYLE)
        figures = {
            name: figure(results)
            for name, (files, figure) in FIGURES.items()
            if all(has(file, results) for file in files)
        } | layer_times(results)
        for name, figure in figures.items():
            figure.savefig(out / f"{name}.svg", metadata=METADATA)
    return [out / f"{name}.svg" for name in figures]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--results", type=Path, default=RESULTS, help="directory of the CSV files")
    parser.add_argument("--out", type=Path, default=OUT, help="directory to write to")
    arguments = parser.parse_args()
    for path in draw(arguments.out, arguments.results):
        print(path)


if __name__ == "__main__":
    main()
