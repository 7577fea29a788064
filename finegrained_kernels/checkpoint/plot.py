"""Draws what `inspect` reports: exceptions by layer, and bytes by kind of tensor."""

from __future__ import annotations

from pathlib import Path

from finegrained_kernels.checkpoint.errors import CheckpointError
from finegrained_kernels.checkpoint.inspection import InspectReport
from finegrained_kernels.checkpoint.names import layer_number


def draw(report: InspectReport, path: Path) -> None:
    """Draw the report to ``path``, in the format of its suffix.

    Raises:
        CheckpointError: matplotlib is not installed or does not know the suffix, or the file cannot be written.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise CheckpointError("--plot needs matplotlib: pip install matplotlib") from error
    figure = Figure(figsize=(10, 4), layout="constrained")
    exceptions, sizes = figure.subplots(1, 2, gridspec_kw={"width_ratios": (2, 1)})

    lines: dict[str, list[tuple[int, float]]] = {}
    for i, stats in enumerate(report.scales):
        if stats.exception_rate is not None:
            number = layer_number(stats.layer)
            point = i if number is None else number, stats.exception_rate
            lines.setdefault(f"{stats.kind} {stats.projection}", []).append(point)
    for name, points in lines.items():
        exceptions.plot(*zip(*sorted(points), strict=True), "o-", markersize=3, label=name)
    exceptions.set(title="Exceptions", xlabel="layer", ylabel="of all scales, %")
    exceptions.set_ylim(0, None)
    exceptions.xaxis.get_major_locator().set_params(integer=True)
    exceptions.yaxis.set_major_formatter(lambda value, _: f"{100 * value:g}")
    if lines:
        exceptions.legend(fontsize=8)
    else:
        exceptions.text(0.5, 0.5, "no compressed scales", ha="center", transform=exceptions.transAxes)

    scales = sum(stats.stored_bytes for stats in report.scales)
    others = {f"{other.kind}, {other.format}": other.nbytes for other in report.others}
    rest = report.stored_bytes - scales - sum(others.values())
    parts = {"NVFP4 scales": scales, **others, "all else": rest}
    unit = 1e9 if report.stored_bytes >= 1e9 else 1e6
    sizes.barh(list(parts), [size / unit for size in parts.values()])
    sizes.set(title="Bytes", xlabel="GB" if unit == 1e9 else "MB")
    sizes.invert_yaxis()
    figure.suptitle(report.name)
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be written: {getattr(error, 'strerror', None) or error}") from error
