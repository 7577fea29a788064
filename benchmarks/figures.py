"""Draws every figure of the documents from `results/*.csv`, and from nothing else.

    python benchmarks/figures.py [--results benchmarks/results] [--out docs/figures]

The same rows give the same bytes with the matplotlib that requirements/dev.txt pins. A figure is left out if its file
does not exist yet.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, PercentFormatter
from measured import (
    GEMMS,
    LAYER,
    RESULTS,
    STACKS,
    WEIGHTS,
    Row,
    Table,
    dense_bytes,
    has,
    layer_cases,
    model_calls,
    num_exceptions,
    peer_times,
    resident_bytes,
    stack_cases,
    stored_bytes,
)

OUT = Path(__file__).resolve().parent.parent / "docs" / "figures"
WIDTH = 8.3
"""In inches of 72 points; as wide as a README is shown."""

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
MARKERS = {"dense": "o", "staged": "s", "prefetched": "^", "fused": "D"}
LINES = {"warm": "--", "cold": "-"}
MODEL_LAYERS = {"qwen": 48}


def axes(title: str, columns: int = 1, height: float = 3.2, **options: object) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=(WIDTH, height))
    figure.suptitle(title, fontsize=11)
    return figure, list(figure.subplots(1, columns, squeeze=False, **options)[0])


def measured_on(table: Table) -> str:
    (device,) = table.values("device")
    return device


def stack_name(case: str, separator: str = " x ") -> str:
    planes, rows, cols = STACKS[case]
    return f"{case.replace('_', ' ')}\n{planes}{separator}{rows} x {cols}"


def tokens_axis(axis: Axes, values: Sequence[int | None], ticks: Sequence[int] | None = None) -> None:
    """A logarithmic x axis with the measured values, or some of them, as its ticks."""
    ticks = sorted({value for value in values if value}) if ticks is None else [n for n in ticks if n in values]
    axis.set_xscale("log", base=2)
    axis.set_xticks(ticks, [f"{value:,}" for value in ticks])
    axis.minorticks_off()
    axis.set_xlabel("tokens")


def by_tokens(rows: list[Row]) -> list[Row]:
    return sorted(rows, key=lambda row: row.tokens or 0)


def stored_scales(results: Path) -> Figure:
    table = Table("csf_decode", results)
    figure, (left, right) = axes("Stored scales: stacks with real rates of exceptions, and trained weights", 2)
    for i, case in enumerate(STACKS):
        dense, stored = dense_bytes(case) / 1e6, stored_bytes(table.one(case=case, variant="full", condition="warm"))
        left.bar(i - 0.2, dense, 0.38, color=DENSE, label="dense" if i == 0 else None)
        left.bar(i + 0.2, stored / 1e6, 0.38, color=FUSED, label="CSF" if i == 0 else None)
        left.annotate(f"{stored / 1e6 / dense:.0%}", (i + 0.2, stored / 1e6), xytext=(0, -3), color="white",
                      textcoords="offset points", ha="center", va="top", fontsize=8)  # fmt: skip
    left.set_xticks(range(len(STACKS)), [stack_name(case, " planes\n") for case in STACKS], fontsize=8)
    left.set_ylabel("scales of a stack, MB")
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
    right.set(xlabel="exceptions, of all scales", ylabel="CSF bytes, of dense bytes", ylim=(0, 1.05))
    right.xaxis.set_major_formatter(PercentFormatter(1, 0))
    right.yaxis.set_major_formatter(PercentFormatter(1, 0))
    right.legend(loc="lower right", fontsize=8)
    return figure


def scale_memory(results: Path) -> Figure:
    """Computed from the measured stacks: L layers dense, compressed with one shared workspace, and compressed
    without."""
    table = Table("csf_decode", results)
    dense = sum(map(dense_bytes, LAYER)) / 1e9
    compressed = sum(resident_bytes(table.one(case=case, variant="full", condition="warm")) for case in LAYER) / 1e9
    layers = list(range(0, 65, 8))
    figure, (axis,) = axes("Memory that scales take (computed from the stacks' sizes): layers of 512 experts")
    axis.plot(layers, [n * dense for n in layers], color=DENSE, label="dense, or decoded at load")
    staged = [n * compressed + dense for n in layers]
    axis.plot(layers, staged, color=STAGED, label="staged: compressed, and one layer's workspace")
    axis.plot(layers, [n * compressed for n in layers], color=FUSED, label="fused: compressed, no workspace")
    ends = ((layers[-1] * dense, DENSE, -3), (staged[-1], STAGED, 1), (layers[-1] * compressed, FUSED, -8))
    for end, color, shift in ends:
        axis.annotate(f"{end:.2f} GB", (layers[-1], end), color=color, xytext=(4, shift), textcoords="offset points")
    axis.set(xlabel="resident layers", ylabel="memory for scales, GB", xlim=(0, 70), ylim=(0, None), xticks=layers)
    axis.legend(loc="upper left")
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
        axis.set_xlabel(f"active experts, of {STACKS[case][0]}")
    panels[0].set_ylabel("time, us")
    panels[0].legend()
    return figure


def strategy_latency(results: Path) -> Figure:
    """Top: the time of decoding and GEMM together. Bottom: that time over the GEMM on dense scales."""
    table = Table("fused", results)
    cases = [case for case in GEMMS if table.select(case=case)]
    figure = Figure(figsize=(WIDTH, 5.4))
    figure.suptitle(f"Decode and grouped GEMM: dense scales, staged and fused ({measured_on(table)})", fontsize=11)
    panels = figure.subplots(2, len(cases), squeeze=False, sharex="col", sharey="row")
    for (absolute, relative), case in zip(panels.T, cases, strict=True):
        for condition, line in LINES.items():
            dense = {row.tokens: row.us for row in table.select(case=case, variant="dense", condition=condition)}
            for variant in ("dense", "staged", "fused"):
                rows = by_tokens(table.select(case=case, variant=variant, condition=condition))
                tokens = [row.tokens for row in rows]
                style = {"color": STRATEGIES[variant], "marker": MARKERS[variant], "markersize": 3.5, "linestyle": line}
                absolute.plot(tokens, [row.us for row in rows], **style)
                if variant != "dense":
                    relative.plot(tokens, [row.us / dense[row.tokens] for row in rows], **style)
        relative.axhline(1, color=DENSE, linewidth=1)
        absolute.set_yscale("log")
        absolute.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
        tokens_axis(relative, table.values("tokens", case=case))
        relative.tick_params(axis="x", labelsize=8)
        absolute.set_title(case.replace("_", " ") + "\n{} x {} x {}".format(*GEMMS[case]), fontsize=9)
    panels[0][0].set_ylabel("time, us")
    panels[1][0].set_ylabel("time over dense")
    handles = [
        *(Line2D([], [], color=STRATEGIES[v], marker=MARKERS[v], markersize=4, label=v)
          for v in ("dense", "staged", "fused")),
        *(Line2D([], [], color=ROOF, linestyle=line, label=condition) for condition, line in LINES.items()),
    ]  # fmt: skip
    figure.legend(handles=handles, loc="outside lower center", ncols=6, fontsize=8, columnspacing=1.2)
    return figure


def layer_time(table: Table, model: str, activations: str) -> Figure:
    """Time of a MoE layer by strategy, the same over dense, and the memory of all layers' scales."""
    case = f"{model}_layer_{activations}"
    (device,) = table.values("device", case=case)
    figure = Figure(figsize=(WIDTH, 3.5))
    figure.suptitle(f"One MoE layer, {model}, {activations}, cold ({device})", fontsize=11)
    absolute, relative, memory = figure.subplots(1, 3, gridspec_kw={"width_ratios": (1.25, 1.25, 1)})
    for variant in ("dense", "staged", "fused"):  # prefetched scales are decoded before the call that is timed
        color, rows = STRATEGIES[variant], by_tokens(table.select(case=case, variant=variant))
        tokens = [row.tokens for row in rows]
        style = {"color": color, "marker": MARKERS[variant], "markersize": 3.5, "label": variant}
        absolute.plot(tokens, [row.us for row in rows], **style)
        if variant == "dense":
            roofs = [row.roof_us for row in rows]
            absolute.plot(tokens, roofs, ":", color=ROOF, label="reading as many bytes")
        else:
            relative.plot(tokens, [row.over_baseline for row in rows], **style)
    relative.axhline(1, color=DENSE, linewidth=1)
    for axis, name in ((absolute, "time, us"), (relative, "time over dense")):
        tokens_axis(axis, table.values("tokens", case=case), (1, 16, 256, 4096, 32768))
        axis.tick_params(axis="x", labelsize=8)
        axis.set_ylabel(name)
    absolute.set_yscale("log")
    absolute.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    resident = {row.variant: row.bytes for row in table.select(case=f"{model}_memory")}
    layers = MODEL_LAYERS.get(model, 1)
    for i, (variant, scratches) in enumerate({"dense": 0, "staged": 1, "prefetched": 2, "fused": 0}.items()):
        scales = layers * resident["scales_dense" if variant == "dense" else "scales_compressed"] / 1e9
        scratch = scratches * resident["scratch"] / 1e9
        memory.bar(i, scales, color=STRATEGIES[variant])
        memory.bar(i, scratch, bottom=scales, color=STRATEGIES[variant], alpha=0.4)
        memory.annotate(f"{scales + scratch:.2f}", (i, scales + scratch), ha="center", va="bottom", fontsize=8)
    memory.set_xticks(range(4), ["dense", "staged", "pre-\nfetched", "fused"], fontsize=8)
    memory.grid(axis="x", visible=False)
    memory.set_ylabel(f"scales of {layers} layers, GB\n(light: scratch)")
    memory.set_ylim(0, 1.1 * layers * resident["scales_dense"] / 1e9)
    figure.legend(*absolute.get_legend_handles_labels(), loc="outside lower center", ncols=5, fontsize=8)
    return figure


def stack_time(table: Table, model: str, layers: int, activations: str) -> Figure:
    """Alternating attention and MoE layers, by strategy, over dense: prefill of one sequence, and decoding of many."""
    phases = {phase: f"{model}_{phase}_{layers}_{activations}" for phase in ("prefill", "decode")}
    phases = {phase: case for phase, case in phases.items() if table.select(case=case)}
    (device,) = table.values("device", case=next(iter(phases.values())))
    title = f"Attention and MoE, {layers} layers each, {model}, {activations}, warm ({device})"
    figure, panels = axes(title, len(phases), 3.3)
    shown = {
        "staged": ("staged", "-"),
        "prefetched": ("prefetched", "-"),
        "prefetched_2": ("prefetched, two scratches", ":"),
        "fused": ("fused", "-"),
        "default": ("default, with a prefetcher", ":"),
    }
    for axis, (phase, case) in zip(panels, phases.items(), strict=True):
        for variant, (label, line) in shown.items():
            rows = by_tokens(table.select(case=case, variant=variant))
            name = variant.removesuffix("_2")
            axis.plot([row.tokens for row in rows], [row.over_baseline for row in rows], line, markersize=4,
                      color=STRATEGIES.get(name, ROOF), marker=MARKERS.get(name, "x"), label=label)  # fmt: skip
        axis.axhline(1, color=DENSE, linewidth=1)
        tokens_axis(axis, table.values("tokens", case=case))
        axis.set_title("prefill of one sequence" if phase == "prefill" else "decode, a token a sequence", fontsize=9)
        axis.set_ylabel("time over dense")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=5, fontsize=8)
    return figure


def layer_times(results: Path) -> dict[str, Figure]:
    """Figures of moe_layer.csv by name: for its layers and stacks, by model and format of activations."""
    if not has("moe_layer", results):
        return {}
    table = Table("moe_layer", results)
    figures = {f"moe_layer_{model}_{kind}": layer_time(table, model, kind) for model, kind in layer_cases(table)}
    for model, layers, kind in stack_cases(table):
        figures[f"moe_stack_{model}_{kind}"] = stack_time(table, model, layers, kind)
    return figures


def model_speed(results: Path) -> Figure:
    """Tokens per second of a whole model by strategy, over those with dense scales, and all of its allocated memory."""
    table = Table("model", results)
    calls = model_calls(table, "moe")
    cases = [case for case, _ in calls]
    figure = Figure(figsize=(WIDTH, 3.2))
    figure.suptitle(f"Speed and memory of a whole model ({measured_on(table)})", fontsize=11)
    speed, memory = figure.subplots(1, 2, gridspec_kw={"width_ratios": (3, 1)})
    variants = [name for name in STRATEGIES if table.select(case=cases[0], variant=name)]
    width = 0.8 / len(variants)
    for i, variant in enumerate(variants):
        places = [place + (i - (len(variants) - 1) / 2) * width for place in range(len(cases))]
        shares = [1 / table.one(case=case, variant=variant).over_baseline for case in cases]
        speed.bar(places, shares, 0.92 * width, color=STRATEGIES[variant], label=variant)
        allocated = table.select(case=cases[0], variant=variant)[0].allocated_bytes / 1e9
        memory.bar(i, allocated, color=STRATEGIES[variant])
        memory.annotate(f"{allocated:.1f}", (i, allocated), ha="center", va="bottom", fontsize=8)
    speed.set_xticks(range(len(cases)), [name.replace(", ", "\n") for name in calls.values()], fontsize=8)
    speed.set(ylabel="tokens per second,\nof those with dense scales", ylim=(0, 1.1))
    speed.yaxis.set_major_formatter(PercentFormatter(1, 0))
    memory.set_xticks(range(len(variants)), [v.replace("prefetched", "pre-\nfetched") for v in variants], fontsize=8)
    memory.set_ylabel("memory allocated, GB")
    for axis in (speed, memory):
        axis.grid(axis="x", visible=False)
    figure.legend(*speed.get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize=8)
    return figure


def peers(results: Path) -> Figure:
    """One weight: how many times as long as ours the faster peer takes, and torch's bf16."""
    table = Table("peers", results)
    figure, panels = axes(f"One weight's product, cold, over the time of ours ({measured_on(table)})", 2, sharey=True)
    titles = {"peer": "the faster of Marlin and Humming", "torch_bf16": "torch, bf16 weights"}
    for axis, (variant, title) in zip(panels, titles.items(), strict=True):
        for (case, shape), marker in zip(WEIGHTS.items(), "os^Dvp", strict=True):
            counts = table.values("tokens", case=case)
            times = [peer_times(table, case, tokens) for tokens in counts]
            ratios = [found[variant] / found["ours_dense"] for found in times]
            axis.plot(counts, ratios, marker=marker, markersize=4, label=" x ".join(map(str, shape)))
        axis.axhline(1, color=ROOF, linewidth=1)
        axis.set_title(title)
        tokens_axis(axis, table.values("tokens"), ticks=(1, 8, 64, 512, 4096))
    panels[0].set(ylabel="times as long as ours", ylim=(0, None))
    panels[1].legend(fontsize=8)
    return figure


FIGURES: dict[str, tuple[tuple[str, ...], Callable[[Path], Figure]]] = {
    "stored_scales": (("csf_decode", "stored_scales"), stored_scales),
    "scale_memory": (("csf_decode",), scale_memory),
    "sparse_routing": (("csf_decode",), sparse_routing),
    "strategy_latency": (("fused",), strategy_latency),
    "model_speed": (("model",), model_speed),
    "peers": (("peers",), peers),
}
"""The files that each figure needs, and the function that draws it."""


def draw(out: Path, results: Path = RESULTS) -> list[Path]:
    """Write all figures that can be drawn, as SVG. Returns their paths."""
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
