"""Figures of the committed results, and of nothing else: `python benchmarks/figures.py [--results DIR] [--out DIR]`.

Needs matplotlib (the `figures` extra).
"""

from __future__ import annotations

import argparse
import csv
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

HERE = Path(__file__).parent
COLORS = {"dense": "#444444", "staged": "#d95f02", "prefetched": "#7570b3", "fused": "#1b9e77"}
MODEL_LAYERS = {"qwen": 48}


def read(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def moe_layer(rows: list[dict[str, str]], model: str, activations: str) -> plt.Figure:
    """Time of the layer by strategy, the same over dense, and the model's scale memory."""
    figure, (absolute, relative, memory) = plt.subplots(1, 3, figsize=(13, 4), width_ratios=(4, 4, 3))
    layer = [row for row in rows if row["case"] == f"{model}_layer_{activations}"]
    for strategy, color in COLORS.items():
        own = sorted((row for row in layer if row["variant"] == strategy), key=lambda row: int(row["tokens"]))
        tokens = [int(row["tokens"]) for row in own]
        times = [float(row["us_p50"]) for row in own]
        absolute.plot(tokens, times, "o-", color=color, label=strategy, markersize=3)
        absolute.fill_between(
            tokens, [float(row["us_p20"]) for row in own], [float(row["us_p80"]) for row in own],
            color=color, alpha=0.2, linewidth=0,
        )  # fmt: skip
        if strategy == "dense":
            roofs = [float(row["roof_us"]) for row in own]
            absolute.plot(tokens, roofs, ":", color="#999999", label="reading the same bytes")
        else:
            ratios = [time / float(row["baseline_us"]) for time, row in zip(times, own, strict=True)]
            relative.plot(tokens, ratios, "o-", color=color, label=strategy, markersize=3)
    relative.axhline(1, color=COLORS["dense"], linewidth=1)
    for axes, title in ((absolute, "one MoE layer, us"), (relative, "time over dense")):
        axes.set(xscale="log", xlabel="tokens", title=title)
        axes.legend(frameon=False, fontsize=8)
    absolute.set_yscale("log")
    plot_memory(memory, {row["variant"]: int(row["bytes"]) for row in rows if row["case"] == f"{model}_memory"}, model)
    where = layer[0]
    figure.suptitle(
        f"{model}, {activations}, {where['device']}, torch {where['torch']}, triton {where['triton']}, "
        f"commit {where['commit']}, L2 flushed",
        fontsize=9,
    )
    figure.tight_layout()
    return figure


def plot_memory(axes: plt.Axes, resident: dict[str, int], model: str) -> None:
    """Scales and scratch of all layers, in GB."""
    layers = MODEL_LAYERS.get(model, 1)
    scratches = {"dense": 0, "staged": 1, "prefetched": 2, "fused": 0}
    for i, (strategy, scratch) in enumerate(scratches.items()):
        scales = layers * resident["scales_dense" if strategy == "dense" else "scales_compressed"] / 1e9
        total = scales + scratch * resident["scratch"] / 1e9
        axes.bar(i, scales, color=COLORS[strategy])
        axes.bar(i, total - scales, bottom=scales, color=COLORS[strategy], alpha=0.4)
        axes.text(i, total, f"{total:.2f}", ha="center", va="bottom", fontsize=8)
    axes.set_xticks(range(len(scratches)), scratches, fontsize=8)
    axes.set_title(f"scales of {layers} layers, and scratch, GB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--results", type=Path, default=HERE / "results")
    parser.add_argument("--out", type=Path, default=HERE / "figures")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    rows = read(arguments.results / "moe_layer.csv")
    for case in sorted({row["case"] for row in rows}):
        model, _, activations = case.partition("_layer_")
        if activations:
            figure = moe_layer(rows, model, activations)
            figure.savefig(arguments.out / f"moe_layer_{model}_{activations}.svg", metadata={"Date": None})
            plt.close(figure)


if __name__ == "__main__":
    main()
