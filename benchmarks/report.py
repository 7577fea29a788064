"""Writes the measured part of README.md from `results/*.csv`, so that no number there is typed.

    python benchmarks/report.py [--check]

A table appears once its file is there. `--check` writes nothing, and fails if README.md is not what would be written.
"""

from __future__ import annotations

import argparse
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

from measured import LAYER, STACKS, Table, dense_bytes, has, num_exceptions, resident_bytes, stored_bytes

README = Path(__file__).resolve().parent.parent / "README.md"
BEGIN = "<!-- benchmarks/report.py writes from here, out of benchmarks/results -->\n"
END = "<!-- to here -->\n"

STACK_HEADER = "whole stack decoded | exceptions | warm, us | of the roof | cold, us | of the roof"
GEMM_NAMES = {
    "qwen_gate_up": "512 experts, 1280 x 2560",
    "qwen_down": "512 experts, 2560 x 640",
    "glm_gate_up": "288 experts, 4096 x 4096",
    "glm_down": "288 experts, 4096 x 2048",
}


def markdown_table(header: str, rows: list[list[str]]) -> str:
    columns = header.count("|") + 1
    lines = [f"| {header} |", "|" + "---|" * columns, *("| " + " | ".join(row) + " |" for row in rows)]
    return "\n".join(lines) + "\n"


def paragraph(text: str) -> str:
    return textwrap.fill(" ".join(text.split()), 120, break_long_words=False, break_on_hyphens=False) + "\n"


def percent(share: float, digits: int = 0) -> str:
    return f"{100 * share:.{digits}f} %"


def change(ratio: float) -> str:
    return f"{round(100 * (ratio - 1)):+d} %"  # an int: no "-0"


def image(name: str, description: str) -> str:
    return f"\n![{description}](docs/figures/{name}.svg)\n"


def version(text: str) -> str:
    """`2.11` of `2.11.0+cu130`."""
    return ".".join(text.split(".")[:2])


def machine(table: Table) -> str:
    (device,), (torch,), (triton,) = (table.values(name) for name in ("device", "torch", "triton"))
    return f"{device}, torch {version(torch)}, triton {version(triton)}"


def sizes() -> str:
    table = Table("csf_decode")
    rows = [table.one(case=case, variant="full", condition="warm") for case in LAYER]
    real = {row.variant: row.bytes for row in Table("stored_scales").select(case="minilm")}
    dense = sum(map(dense_bytes, LAYER))
    share, rate = real["csf"] / real["dense"], real["csf_exceptions"] / 4 / real["dense"]
    stored, resident = (sum(map(size, rows)) / 1e6 for size in (stored_bytes, resident_bytes))
    text = f"""Compressed, the scales of trained weights (all-MiniLM-L6-v2) take {percent(share, 1)} of their bytes;
        {percent(rate, 2)} of them are exceptions. Those of one layer of {STACKS["qwen_gate"][0]} experts take
        {dense / 1e6:.0f} MB as they are, {stored:.0f} MB compressed in a file, and {resident:.0f} MB compressed in
        memory, at the rates of exceptions below."""
    drawn = image("stored_scales", "Bytes of stored scales, dense and compressed, and over the rate of exceptions")
    return paragraph(text) + drawn + image("scale_memory", "Memory that scales take, over resident layers")


def decoding() -> str:
    table = Table("csf_decode")
    rows = []
    for case, shape in STACKS.items():
        warm, cold = (table.one(case=case, variant="full", condition=condition) for condition in ("warm", "cold"))
        cells = [" x ".join(map(str, shape)), percent(num_exceptions(warm) / dense_bytes(case), 2)]
        for row in (warm, cold):
            cells += [f"{row.us:.2f}", percent(row.of_roof)]
        rows.append(cells)
    text = f"""One {machine(table)}, CUDA graph replay. The roof is the best vectorized copy of as many bytes in the
        same run; cold means that L2 held other data. Every row, with versions and commit, is in
        [benchmarks/results](benchmarks/results)."""
    return paragraph(text) + "\n" + markdown_table(STACK_HEADER, rows)


def routing() -> str:
    table = Table("csf_decode")
    planes, rows, cols = STACKS["qwen_gate"]
    known = [row for row in table.select(case="qwen_gate", condition="warm") if row.variant.endswith("_known")]
    counts = [row.variant.split("_")[1] for row in known]
    unknown = [table.one(case="qwen_gate", variant=f"active_{count}", condition="warm") for count in counts]
    lines = [
        ["us", *(f"{row.us:.2f}" for row in unknown)],
        ["us, `max_active` given", *(f"{row.us:.2f}" for row in known)],
        ["us, a copy of their bytes", *(f"{row.roof_us:.2f}" for row in known)],
    ]
    text = f"""Only where tokens went, {rows} x {cols} planes, warm; `max_active` tells the launch how many planes to
        expect:"""
    table_text = markdown_table(" | ".join([f"active of {planes}", *counts]), lines)
    drawn = image("sparse_routing", "Time to decode active experts, over their number, beside a copy of as many bytes")
    return paragraph(text) + "\n" + table_text + drawn


def encoding() -> str:
    gpu, cpu = Table("csf_decode"), Table("csf_cpu")
    compress, wall, prepare = (
        gpu.one(case="qwen_layer", variant=name).us for name in ("compress", "compress_wall", "prepare_wall")
    )
    decode, encode = cpu.one(variant="full"), cpu.one(variant="compress")
    return paragraph(
        f"""Compressing {sum(map(dense_bytes, LAYER)) / 1e6:.0f} MB of scales, {len(LAYER)} stacks, takes the GPU
        {compress:.0f} us; by the clock the calls take {wall:.0f} us, as each waits for the count of exceptions.
        Preparing them takes {prepare:.0f} us by the clock. An eager call of `decompress_nvfp4_csf_scales` costs the
        CPU {gpu.one(variant="eager_call").us:.0f} us. On {decode.device} the first stack decodes in
        {decode.us / 1e3:.1f} ms, {1 / decode.over_baseline:.1f} times as fast as the formula written in torch, and
        compresses in {encode.us / 1e3:.0f} ms."""
    )


def checkpoints() -> str:
    cpu, gpu = Table("checkpoints"), Table("checkpoints_h200")
    two, four = (t.one(case="checkpoint", variant=f"compress_hf_jobs_{n}") for t, n in ((cpu, 2), (gpu, 4)))
    return paragraph(
        f"""Compressing a checkpoint of {two.bytes / 1e9:.0f} GB takes {two.us / 1e6:.2f} s on {two.device},
        {two.over_baseline:.2f} times as long as copying and hashing it; with {four.device}, one process compresses
        {four.bytes / 1e9:.0f} GB from memory in {four.us / 1e6:.2f} s."""
    )


def gemms() -> str:
    table = Table("nvfp4_gemm")
    rows = []
    for row in table.select(condition="cold"):
        baseline = f"{1 / row.over_baseline:.2f} x {row.baseline}" if row.baseline_us else ""
        cells = [GEMM_NAMES.get(row.case, row.case), f"{row.tokens:,}", row.variant, f"{row.us:.1f}"]
        rows.append([*cells, percent(row.of_roof), baseline])
    header = "weights | tokens | GEMM | cold, us | of the roof | speed"
    return paragraph(f"GEMMs on dense scales ({machine(table)}):") + "\n" + markdown_table(header, rows)


def strategies() -> str:
    """Dense, staged and fused side by side, and what the last two add to the first."""
    table = Table("fused")
    rows = []
    for case in table.values("case"):
        for tokens in table.values("tokens", case=case):
            dense, staged, fused = (
                table.one(case=case, tokens=tokens, variant=variant, condition="cold").us
                for variant in ("dense", "staged", "fused")
            )
            cells = [GEMM_NAMES.get(case, case), f"{tokens:,}", f"{dense:.1f}"]
            rows.append([*cells, *(f"{us:.1f} ({change(us / dense)})" for us in (staged, fused))])
    header = "weights | tokens | dense scales, us | staged, us | fused, us"
    drawn = image("strategy_latency", "Decode and GEMM with compressed scales, of the GEMM on dense scales")
    return paragraph(f"Decoding and GEMM, cold ({machine(table)}):") + "\n" + markdown_table(header, rows) + drawn


def moe_layer() -> str:
    """A layer's time by strategy, over its tokens."""
    table = Table("moe_layer")
    case = "qwen_layer_w4a16"
    variants = ("dense", "staged", "fused")
    rows = []
    for tokens in table.values("tokens", case=case):
        dense, *others = (table.one(case=case, tokens=tokens, variant=name, condition="cold").us for name in variants)
        cells = (f"{us:,.0f} ({change(us / dense)})" for us in others)
        rows.append([f"{tokens:,}", f"{dense:,.0f}", *cells])
    text = f"""A whole MoE layer, cold: 512 experts, hidden size 2560, intermediate size 640, top 8, bf16 activations
        ({machine(table)}). Staged decodes in the call; fused multiplies compressed scales, and needs no scratch."""
    drawn = image("moe_layer_qwen_w4a16", "Time and memory of a layer by strategy, over tokens")
    header = "tokens | dense scales, us | compressed, staged, us | compressed, fused, us"
    return paragraph(text) + "\n" + markdown_table(header, rows) + drawn


SECTIONS: list[tuple[tuple[str, ...], Callable[[], str]]] = [
    (("csf_decode", "stored_scales"), sizes),
    (("csf_decode",), decoding),
    (("csf_decode",), routing),
    (("moe_layer",), moe_layer),
    (("fused",), strategies),
    (("nvfp4_gemm",), gemms),
    (("csf_decode", "csf_cpu"), encoding),
    (("checkpoints", "checkpoints_h200"), checkpoints),
]
"""Which files each part needs, and what writes it."""


def measured_part() -> str:
    return "\n".join(write() for files, write in SECTIONS if all(map(has, files)))


def with_measured_part(readme: str) -> str:
    before, begin, rest = readme.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise SystemExit(f"{README.name} lacks a line {(begin and END) or BEGIN!r}")
    return f"{before}{BEGIN}\n{measured_part()}\n{END}{after}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="only compare")
    check = parser.parse_args().check
    before = README.read_text()
    after = with_measured_part(before)
    if check and before != after:
        print("README.md: its measured part is not what benchmarks/results gives: python benchmarks/report.py")
        return 1
    if not check:
        README.write_text(after)
    return 0


if __name__ == "__main__":
    sys.exit(main())
