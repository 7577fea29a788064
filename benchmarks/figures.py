"""Draws every figure of the documents from `results/*.csv`, and from nothing else.

    python benchmarks/figures.py [--results benchmarks/results] [--out docs/figures]

The same rows give the same bytes, under the matplotlib that requirements/dev.txt pins. A figure whose file is not
there yet is left out.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, PercentFormatter
from measured import (
    GEMMS,
    LAYER,
    RESULTS,
    STACKS,
    Row,
    Table,
    dense_bytes,
    has,
    layer_cases,
    layer_us,
    layers_of,
    num_exceptions,
    resident_bytes,
    stack_cases,
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
WARM, COLD = "#b5403a", "#2b6ca3"
STRATEGIES = {"dense": DENSE, "staged": STAGED, "prefetched": OTHER, "fused": FUSED}
MARKERS = {"dense": "o", "staged": "s", "prefetched": "^", "fused": "D"}
LINES = {"warm": "--", "cold": "-"}
MODEL_LAYERS = {"qwen": 48}
STAGING_OVERHEAD = (1.09, 1.32)
"""Published: a staging implementation of this format adds 9 to 32 % to the dense GEMM, on a B200."""


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
    right.set(xlabel="exceptions, of all scales", ylabel="CSF bytes, of dense bytes", ylim=(0.4, 1.05))
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
    ends = ((layers[-1] * dense, DENSE, -3), (staged[-1], STAGED, 1), (layers[-1] * compressed, FUSED, -8))
    for end, color, shift in ends:
        axis.annotate(f"{end:.2f} GB", (layers[-1], end), color=color, xytext=(4, shift), textcoords="offset points")
    axis.set(xlabel="resident layers", ylabel="memory for scales, GB", xlim=(0, 70), ylim=(0, None), xticks=layers)
    axis.legend(loc="upper left")
    return figure


def decode_roof(results: Path) -> Figure:
    table = Table("csf_decode", results)
    figure, (axis,) = axes(f"Decoding whole stacks, of the speed of a copy of as many bytes ({measured_on(table)})")
    for shift, condition, color in ((-0.2, "warm", WARM), (0.2, "cold", COLD)):
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
        axis.set_xlabel(f"active experts, of {STACKS[case][0]}")
    panels[0].set_ylabel("time, us")
    panels[0].legend()
    return figure


def bandwidth_roofline(results: Path) -> Figure:
    """What is bound by memory: the bytes that each call moved a second, over their number, and the roofs of its run.

    Decoding of whole stacks, and of active experts where the launch knows how many; GEMMs of up to 64 tokens.
    """
    figure, (speed, share) = axes("Decoding, and GEMMs of up to 64 tokens, under the roof of their run; cold", 2, 3.8)
    for name, label, roof, color in (
        ("csf_decode", "decoding", "copy", FUSED), ("nvfp4_gemm", "GEMM", "read-only sweep", STAGED)
    ):  # fmt: skip
        if not has(name, results):
            continue
        table = Table(name, results)
        rows = [row for row in table.select(condition="cold") if row.bytes and is_bound_by_memory(row)]
        rows.sort(key=lambda row: row.bytes)
        moved = [row.bytes for row in rows]
        speed.plot(moved, [row.bytes / (row.roof_us or 0) / 1e6 for row in rows], "--", color=color, linewidth=1,
                   label=f"roof: {roof}")  # fmt: skip
        for axis, values in ((speed, [row.bytes / row.us / 1e6 for row in rows]), (share, [r.of_roof for r in rows])):
            axis.plot(moved, values, MARKERS["fused" if roof == "copy" else "staged"], markersize=4, color=color,
                      label=f"{label} ({measured_on(table)})")  # fmt: skip
    for axis in (speed, share):
        axis.set(xscale="log", xlabel="bytes moved")
        axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value / 1e6:g} MB"))
    speed.set(yscale="log", ylabel="TB/s")
    speed.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    speed.legend(loc="lower right", fontsize=8)
    share.axhline(1, color=ROOF, linewidth=1)
    share.set(ylabel="speed, of the roof", ylim=(0, 1.08))
    share.yaxis.set_major_formatter(PercentFormatter(1, 0))
    return figure


def is_bound_by_memory(row: Row) -> bool:
    if row.tokens is None:
        return row.variant == "full" or row.variant.endswith("_known")
    return row.tokens <= 64 and row.case in GEMMS and row.variant.startswith("w4a16")


def strategy_latency(results: Path) -> Figure:
    """Above what decode and GEMM take together, below what that is of the GEMM on dense scales."""
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
        relative.axhspan(*STAGING_OVERHEAD, color=STAGED, alpha=0.14, linewidth=0)
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
        Patch(color=STAGED, alpha=0.14, label="staging as published, on a B200: 9 to 32 % more"),
    ]  # fmt: skip
    figure.legend(handles=handles, loc="outside lower center", ncols=6, fontsize=8, columnspacing=1.2)
    return figure


def staging_saved(results: Path) -> Figure:
    """What a layer's two GEMMs take less when they read compressed scales than when those are staged."""
    table = Table("fused", results)
    models = layers_of(table)
    figure, panels = axes(f"Time that fused saves of staged, a MoE layer ({measured_on(table)})", len(models), 3.2)
    for axis, (model, tokens) in zip(panels, models.items(), strict=True):
        for condition, color in (("warm", WARM), ("cold", COLD)):
            staged, fused = (
                [layer_us(table, model, variant, count, condition) for count in tokens]
                for variant in ("staged", "fused")
            )
            saved = [before - after for before, after in zip(staged, fused, strict=True)]
            axis.plot(tokens, saved, "o-", markersize=4, color=color, label=f"its two grouped GEMMs, {condition}")
        case = f"{model}_layer_w4a16"
        if has("moe_layer", results) and (rows := Table("moe_layer", results).select(case=case, variant="fused")):
            layer = Table("moe_layer", results)
            saved = [layer.one(case=case, variant="staged", tokens=row.tokens).us - row.us for row in rows]
            axis.plot([row.tokens for row in rows], saved, "D:", markersize=4, color=ROOF, label="whole layer, cold")
            tokens = sorted({*tokens, *(row.tokens for row in rows)})
        axis.axhline(0, color=DENSE, linewidth=1)
        tokens_axis(axis, tokens, (1, 8, 64, 512, 4096, 32768))
        experts, rows, depth = GEMMS[f"{model}_gate_up"]
        axis.set_title(f"{model}: {experts} experts, {depth} x {rows // 2}", fontsize=9)
        axis.set_ylabel("us saved a layer")
        axis.legend(fontsize=8)
    return figure


def layer_time(table: Table, model: str, activations: str) -> Figure:
    """Time of a MoE layer by strategy, the same over dense, and the memory of all layers' scales."""
    case = f"{model}_layer_{activations}"
    (device,) = table.values("device", case=case)
    figure = Figure(figsize=(WIDTH, 3.5))
    figure.suptitle(f"One MoE layer, {model}, {activations}, cold ({device})", fontsize=11)
    absolute, relative, memory = figure.subplots(1, 3, gridspec_kw={"width_ratios": (1.25, 1.25, 1)})
    for variant, color in STRATEGIES.items():
        rows = by_tokens(table.select(case=case, variant=variant))
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
    """Attention and MoE layers in turns, by strategy, over dense: prefill of one sequence, decode of many."""
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
    """Figures of moe_layer.csv by name: of its layers and stacks, by model and format of activations."""
    if not has("moe_layer", results):
        return {}
    table = Table("moe_layer", results)
    figures = {f"moe_layer_{model}_{kind}": layer_time(table, model, kind) for model, kind in layer_cases(table)}
    for model, layers, kind in stack_cases(table):
        figures[f"moe_stack_{model}_{kind}"] = stack_time(table, model, layers, kind)
    return figures


def model_speed(results: Path) -> Figure:
    """Tokens a second of a whole model by strategy, over all memory that it has allocated."""
    table = Table("model", results)
    cases = table.values("case")
    figure, panels = axes(f"Speed and memory of a whole model ({measured_on(table)})", len(cases), 3.2)
    for axis, case in zip(panels, cases, strict=True):
        rows = {row.variant: row for row in table.select(case=case)}
        for variant in (name for name in STRATEGIES if name in rows):
            row = rows[variant]
            axis.plot(row.allocated_bytes / 1e9, 1e6 * (row.tokens or 0) / row.us, MARKERS[variant], markersize=7,
                      color=STRATEGIES[variant], label=variant)  # fmt: skip
        phase, number = case.split("_")
        axis.set_title(
            f"{phase},\n" + (f"{int(number):,} tokens" if phase == "prefill" else f"batch of {number}"), fontsize=9
        )
        axis.margins(x=0.25)
        axis.set_ylim(0, 1.15 * max(1e6 * (row.tokens or 0) / row.us for row in rows.values()))
        axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
        axis.tick_params(labelsize=8)
    panels[0].set_ylabel("tokens a second")
    panels[len(panels) // 2].set_xlabel("memory allocated for weights, scales and workspace, GB")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize=8)
    return figure


FIGURES: dict[str, tuple[tuple[str, ...], Callable[[Path], Figure]]] = {
    "stored_scales": (("csf_decode", "stored_scales"), stored_scales),
    "scale_memory": (("csf_decode",), scale_memory),
    "decode_roof": (("csf_decode",), decode_roof),
    "sparse_routing": (("csf_decode",), sparse_routing),
    "bandwidth_roofline": (("csf_decode",), bandwidth_roofline),
    "strategy_latency": (("fused",), strategy_latency),
    "staging_saved": (("fused",), staging_saved),
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
