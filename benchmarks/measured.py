"""The rows of `results/*.csv`, for reports and figures: what both draw on, and all that they draw on."""

from __future__ import annotations

import csv
import dataclasses
from pathlib import Path

RESULTS = Path(__file__).resolve().parent / "results"

STACKS = {
    "qwen_gate": (512, 640, 160),
    "qwen_down": (512, 2560, 40),
    "glm_gate": (288, 2048, 256),
    "glm_down": (288, 4096, 128),
}
"""Planes, rows and columns of the stacks in csf_decode.csv."""

LAYER = ("qwen_gate", "qwen_gate", "qwen_down")
"""The stacks of one layer's gate, up and down projections: case `qwen_layer` in csf_decode.csv."""


@dataclasses.dataclass(frozen=True)
class Row:
    """One measurement; times in microseconds, None where the row has none."""

    device: str
    torch: str
    triton: str
    case: str
    variant: str
    tokens: int | None
    condition: str
    us_p20: float | None
    us_p50: float | None
    us_p80: float | None
    bytes: int
    roof_us: float | None
    baseline: str
    baseline_us: float | None

    @property
    def us(self) -> float:
        if self.us_p50 is None:
            raise ValueError(f"{self.case} {self.variant} {self.condition}: a row without a time")
        return self.us_p50

    @property
    def of_roof(self) -> float:
        return (self.roof_us or 0.0) / self.us

    @property
    def over_baseline(self) -> float:
        if self.baseline_us is None:
            raise ValueError(f"{self.case} {self.variant} {self.condition}: a row without a baseline")
        return self.us / self.baseline_us


class Table(list[Row]):
    """The rows of one file."""

    def __init__(self, name: str, results: Path = RESULTS) -> None:
        self.name = name
        with (results / f"{name}.csv").open(newline="") as file:
            super().__init__(_row(record) for record in csv.DictReader(file))

    def select(self, **wanted: object) -> list[Row]:
        return [row for row in self if all(getattr(row, name) == value for name, value in wanted.items())]

    def one(self, **wanted: object) -> Row:
        """The only row with these values."""
        found = self.select(**wanted)
        if len(found) != 1:
            raise LookupError(f"{self.name}.csv has {len(found)} rows with {wanted}, expected one")
        return found[0]

    def values(self, name: str, **wanted: object) -> list:
        """The different values of a column, in the order of the file."""
        return list(dict.fromkeys(getattr(row, name) for row in self.select(**wanted)))


def has(name: str, results: Path = RESULTS) -> bool:
    return (results / f"{name}.csv").exists()


def _row(record: dict[str, str]) -> Row:
    def number(column: str) -> float | None:
        return float(record[column]) if record[column] else None

    return Row(
        device=record["device"].replace("(R)", ""),
        **{name: record[name] for name in ("torch", "triton", "case", "variant", "condition", "baseline")},
        **{name: number(name) for name in ("us_p20", "us_p50", "us_p80", "roof_us", "baseline_us")},
        tokens=int(record["tokens"]) if record["tokens"] else None,
        bytes=int(record["bytes"] or 0),
    )


def dense_bytes(case: str) -> int:
    """Scale bytes of a stack."""
    planes, rows, cols = STACKS[case]
    return planes * rows * cols


def num_exceptions(row: Row) -> int:
    """Of the stack that a row of csf_decode.csv decoded: its bytes are bases, codes, exceptions and output."""
    planes, rows, cols = STACKS[row.case]
    return (row.bytes - planes * (rows + rows * cols * 3 // 2)) // 4


def stored_bytes(row: Row) -> int:
    """The wire form of that stack: all that decoding moved, but its output."""
    return row.bytes - dense_bytes(row.case)


def resident_bytes(row: Row) -> int:
    """What that stack takes in memory: the wire form, and 4 bytes every 1024 (docs/decisions.md, "Codec")."""
    planes, rows, cols = STACKS[row.case]
    return stored_bytes(row) + 4 * (planes * -(-rows * cols // 1024) + 1)
