"""What commands print: sizes and counts in words, and a table of scales that fits into a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import takewhile

from rich import box
from rich.table import Table

from finegrained_kernels.checkpoint.errors import printable
from finegrained_kernels.checkpoint.inspection import ScaleStats


def count_text(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def size_text(count: float) -> str:
    for unit, digits in (("B", 0), ("kB", 1), ("MB", 1), ("GB", 2)):
        if count < 1000 or unit == "GB":
            return f"{count:,.{digits}f} {unit}"
        count /= 1000
    raise AssertionError


def common_algorithm(scales: Sequence[ScaleStats]) -> str | None:
    """The algorithm, if all have the same; else None."""
    algorithms = {stats.algorithm for stats in scales}
    return algorithms.pop() if len(algorithms) == 1 else None


def scales_table(scales: Sequence[ScaleStats], layers: bool = False) -> Table:
    """A table with a row for each kind of layer and projection, or with ``layers`` for each layer."""
    prefix = common_prefix([stats.layer for stats in scales]) if layers else ""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 0, 0, 1), pad_edge=False)
    table.add_column(printable(f"scales of {prefix}*") if prefix else "scales", overflow="fold")
    for name in ("layers", "planes", "each", "dense", "stored", "exceptions"):
        if not (layers and name == "layers"):
            table.add_column(name, justify="right", no_wrap=True)
    if layers:
        for stats in scales:
            name, _, *cells = _row(f"{stats.layer.removeprefix(prefix)}.{stats.projection}", [stats])
            table.add_row(name, *cells)
    else:
        for row in by_kind(scales, common_algorithm(scales)):
            table.add_row(*row)
    return table


def common_prefix(names: Sequence[str]) -> str:
    """What several names begin with, up to a dot, so that only the rest has to fit on the screen."""
    if len(set(names)) < 2:
        return ""
    columns = zip(*(name.split(".")[:-1] for name in names), strict=False)
    return "".join(f"{parts[0]}." for parts in takewhile(lambda parts: len(set(parts)) == 1, columns))


def by_kind(scales: Sequence[ScaleStats], common: str | None) -> Iterator[tuple[str, ...]]:
    """A row for each kind, projection, algorithm and size, over all layers. ``common`` is the algorithm if all have the
    same."""
    groups: dict[tuple, list[ScaleStats]] = {}
    for stats in scales:
        groups.setdefault((stats.kind, stats.projection, stats.algorithm, stats.rows, stats.cols), []).append(stats)
    for (kind, projection, algorithm, *_), group in groups.items():
        yield _row(f"{kind} {projection}" + (f" ({algorithm})" if algorithm not in (None, common) else ""), group)


def _row(name: str, group: Sequence[ScaleStats]) -> tuple[str, ...]:
    compressed = [stats for stats in group if stats.exception_rate is not None]
    decoded = sum(stats.compressed * stats.rows * stats.cols for stats in compressed)
    rate = f"{sum(stats.exceptions for stats in compressed) / decoded:.2%}" if decoded else "dense"
    return (
        printable(name),
        str(len({stats.layer for stats in group})),
        f"{sum(stats.planes for stats in group):,}",
        f"{group[0].rows} x {group[0].cols}",
        size_text(sum(stats.dense_bytes for stats in group)),
        size_text(sum(stats.stored_bytes for stats in group)),
        rate,
    )
