"""The rows of `results/*.csv`, the only source of reports and figures."""

from __future__ import annotations

import csv
import dataclasses
import re
from pathlib import Path

RESULTS = Path(__file__).resolve().parent / "results"

STACKS = {
    "qwen_gate": (512, 640, 160),
    "qwen_down": (512, 2560, 40),
    "glm_gate": (288, 2048, 256),
    "glm_down": (288, 4096, 128),
}
"""(planes, rows, columns) of the stacks in csf_decode.csv."""

GEMMS = {
    "qwen_gate_up": (512, 1280, 2560),
    "qwen_down": (512, 2560, 640),
    "glm_gate_up": (288, 4096, 4096),
    "glm_down": (288, 4096, 2048),
}
"""(experts, rows, K) of the weights in fused.csv and nvfp4_gemm.csv; gate and up are one GEMM."""

LAYER = ("qwen_gate", "qwen_gate", "qwen_down")
"""The stacks of one layer's gate, up and down projections; case `qwen_layer` in csf_decode.csv."""


WEIGHTS = {
    "qwen3_8b_kv": (1024, 4096),
    "dense_4096": (4096, 4096),
    "qwen3_8b_up": (12288, 4096),
    "qwen3_8b_down": (4096, 12288),
    "dense_8192": (8192, 8192),
    "llama_70b_up": (28672, 8192),
}
"""(rows, K) of the single weights in peers.csv, the smallest first."""

MODELS = {"moe": "qwen3_next", "dense": "qwen3_8b"}
"""How the cases in model.csv begin: those of model.py, and those of dense_model.py."""


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
    us_p50: float | None
    bytes: int
    roof_us: float | None
    baseline: str
    baseline_us: float | None
    scale_bytes: int = 0
    """Resident bytes of scales; only in model.csv, like the next."""
    allocated_bytes: int = 0
    perplexity: float | None = None
    """Only in language_model.csv, like the next."""
    file_bytes: int = 0

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


def model_calls(model: Table, kind: str) -> dict[tuple[str, str], str]:
    """The cases and conditions of one of MODELS, with a description of each call."""
    prefix = MODELS[kind] + "_"
    found = dict.fromkeys((row.case, row.condition) for row in model if row.case.startswith(prefix))
    named = {}
    for case, condition in found:
        phase, number = case.removeprefix(prefix).split("_")
        named[case, condition] = (
            f"prefill, {int(number):,} tokens" if phase == "prefill" else f"decode, batch of {number}"
        )
    return named


def has(name: str, results: Path = RESULTS) -> bool:
    return (results / f"{name}.csv").exists()


def _row(record: dict[str, str]) -> Row:
    def number(column: str) -> float | None:
        return float(record[column]) if record[column] else None

    return Row(
        device=record["device"].replace("(R)", ""),
        **{name: record[name] for name in ("torch", "triton", "case", "variant", "condition", "baseline")},
        **{name: number(name) for name in ("us_p50", "roof_us", "baseline_us")},
        perplexity=float(record["perplexity"]) if record.get("perplexity") else None,
        tokens=int(record["tokens"]) if record["tokens"] else None,
        **{name: int(record.get(name) or 0) for name in ("bytes", "scale_bytes", "allocated_bytes", "file_bytes")},
    )


def layers_of(fused: Table) -> dict[str, list[int]]:
    """Models with both GEMMs in fused.csv, and the numbers of tokens that it has for both."""
    tokens = {case: set(fused.values("tokens", case=case, variant="fused")) for case in GEMMS}
    models = dict.fromkeys(case.split("_")[0] for case in GEMMS)
    both = {model: sorted(tokens[f"{model}_gate_up"] & tokens[f"{model}_down"]) for model in models}
    return {model: counts for model, counts in both.items() if counts}


def layer_us(fused: Table, model: str, variant: str, tokens: int, condition: str) -> float:
    """Time of a layer's two GEMMs, one after the other."""
    cases = (f"{model}_gate_up", f"{model}_down")
    return sum(fused.one(case=case, variant=variant, tokens=tokens, condition=condition).us for case in cases)


def layer_cases(moe_layer: Table) -> list[tuple[str, str]]:
    """(model, format of activations) of the layers in moe_layer.csv."""
    found = (re.fullmatch(r"([a-z]+)_layer_(w\da\d+)", case) for case in moe_layer.values("case"))
    return [(match[1], match[2]) for match in found if match]


def stack_cases(moe_layer: Table) -> list[tuple[str, int, str]]:
    """(model, layers, format of activations) of the stacks of layers with attention in moe_layer.csv."""
    pattern = r"([a-z]+)_(?:prefill|decode)_(\d+)_(w\da\d+)"
    found = (re.fullmatch(pattern, case) for case in moe_layer.values("case"))
    return list(dict.fromkeys((match[1], int(match[2]), match[3]) for match in found if match))


def peer_times(peers: Table, case: str, tokens: int) -> dict[str, float]:
    """Cold times for one weight by variant, and as `peer` that of the faster of the two other NVFP4 libraries."""
    found = {row.variant: row.us for row in peers.select(case=case, tokens=tokens, condition="cold")}
    return found | {"peer": min(found["marlin"], found["humming"])}


def dense_bytes(case: str) -> int:
    """Scale bytes of a stack."""
    planes, rows, cols = STACKS[case]
    return planes * rows * cols


def num_exceptions(row: Row) -> int:
    """Exceptions of the stack that a row of csf_decode.csv has decoded; the row's bytes are bases, codes, exceptions
    and output."""
    planes, rows, cols = STACKS[row.case]
    return (row.bytes - planes * (rows + rows * cols * 3 // 2)) // 4


def stored_bytes(row: Row) -> int:
    """Bytes of that stack's wire form: all that decoding has moved, except its output."""
    return row.bytes - dense_bytes(row.case)


def resident_bytes(row: Row) -> int:
    """Bytes of that stack in memory: the wire form, and 4 bytes for every 1024 (docs/decisions.md, "Codec")."""
    planes, rows, cols = STACKS[row.case]
    return stored_bytes(row) + 4 * (planes * -(-rows * cols // 1024) + 1)
