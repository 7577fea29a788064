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

from measured import (
    GEMMS,
    LAYER,
    STACKS,
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

README = Path(__file__).resolve().parent.parent / "README.md"
BEGIN = "<!-- benchmarks/report.py writes from here, out of benchmarks/results -->\n"
END = "<!-- to here -->\n"

TIMELINE_TOKENS = 8192
STACK_HEADER = "whole stack decoded | exceptions | warm, us | of the roof | cold, us | of the roof | swizzled, warm"


def markdown_table(header: str, rows: list[list[str]]) -> str:
    columns = header.count("|") + 1
    lines = [f"| {header} |", "|" + "---|" * columns, *("| " + " | ".join(row) + " |" for row in rows)]
    return "\n".join(lines) + "\n"


def paragraph(text: str) -> str:
    kept = " ".join(text.split()).replace(" %", "\0%")  # no line begins with the sign
    return textwrap.fill(kept, 120, break_long_words=False, break_on_hyphens=False).replace("\0", " ") + "\n"


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
    """What all rows were measured on and with; an error if they differ, as their numbers would stand side by side."""
    found = {f"{row.device}, torch {version(row.torch)}, triton {version(row.triton)}" for row in table}
    if len(found) != 1:
        raise ValueError(f"{table.name}.csv: expected rows of one device and one torch, got {sorted(found)}")
    return found.pop()


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
        rows.append([*cells, percent(table.one(case=case, variant="swizzled", condition="warm").of_roof)])
    text = f"""One {machine(table)}, CUDA graph replay. The roof is the best vectorized copy of as many bytes in the
        same run; cold means that L2 held other data. The last column is of the roof, for the form that block-scaled
        MMA reads. Every row, with versions and commit, is in [benchmarks/results](benchmarks/results)."""
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


def gemm_name(case: str) -> str:
    """`case` of nvfp4_gemm.csv: rows by K, of all experts or of one weight."""
    if case not in GEMMS:
        return "one, " + " x ".join(case.split("_")[1:] * 2)
    experts, rows, depth = GEMMS[case]
    return f"{experts} experts, {rows} x {depth}"


def gemms() -> str:
    """Few tokens beside the roof of memory, many beside torch's GEMMs of bf16 weights."""
    table = Table("nvfp4_gemm")
    few: dict[str, dict[int, str]] = {}
    many = []
    for row in table.select(condition="cold", variant="w4a16"):
        calls = {r.variant: r for r in table.select(condition="cold", case=row.case, tokens=row.tokens)}
        name, others = gemm_name(row.case), calls.get("torch_grouped_mm") or calls.get("torch_bf16")
        if others is None:
            best = calls.get("w4a16_batched", row) if row.tokens == 1 else row  # as `moe_forward` chooses
            few.setdefault(name, {})[row.tokens] = f"{best.us:.1f} ({percent(best.of_roof)})"
            continue
        ours = (calls.get(variant) for variant in ("w4a16", "w4a4"))
        cells = (f"{call.us:,.1f} ({others.us / call.us:.2f} x)" if call else "" for call in ours)
        many.append([name, f"{row.tokens:,}", f"{others.us:,.1f}", *cells])
    text = f"""GEMMs on dense scales, cold ({machine(table)}). Few tokens, top 8, bf16 activations: us, and in
        parentheses the speed, of the roof, a read-only sweep of weights and scales."""
    counts = sorted({tokens for cells in few.values() for tokens in cells})
    header = " | ".join(["weights", *(f"{tokens} token{'s' * (tokens > 1)}" for tokens in counts)])
    rows = [[name, *(cells.get(tokens, "") for tokens in counts)] for name, cells in few.items()]
    parts = [paragraph(text), markdown_table(header, rows)] if rows else []
    if many:
        text = """Many tokens, and a single weight (`matmul_2d`), beside torch's bf16 GEMMs, and how many times as fast
            as these. Torch's grouped GEMM gets its rows gathered, and leaves the gate to others."""
        header = "weights | tokens | torch, bf16, us | W4A16, us | W4A4, us"
        parts += [paragraph(text), markdown_table(header, many)]
    return "\n".join(parts)


def strategies() -> str:
    """A layer's GEMMs on dense scales, staged and fused, what the last two add, and what fused saves of staged."""
    table = Table("fused")
    rows = []
    for model, counts in layers_of(table).items():
        experts, width, depth = GEMMS[f"{model}_gate_up"]
        for tokens in counts:
            dense, staged, fused = (
                layer_us(table, model, variant, tokens, "cold") for variant in ("dense", "staged", "fused")
            )
            cells = [f"{experts} experts, {depth} x {width // 2}", f"{tokens:,}", f"{dense:,.1f}"]
            cells += [f"{us:,.1f} ({change(us / dense)})" for us in (staged, fused)]
            rows.append([*cells, f"{staged - fused:,.1f}"])
    text = f"""The grouped GEMMs of a layer alone, gate with up and down, and what decoding adds to them, cold
        ({machine(table)}):"""
    header = "layer | tokens | dense scales, us | staged, us | fused, us | fused saves of staged, us"
    drawn = image("strategy_latency", "Decode and GEMM by strategy, warm and cold, beside what staging costs elsewhere")
    drawn += image("staging_saved", "Time a layer that fused saves of staged, over tokens")
    return paragraph(text) + "\n" + markdown_table(header, rows) + drawn


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
    header = "tokens | dense scales, us | compressed, staged, us | compressed, fused, us"
    written = paragraph(text) + "\n" + markdown_table(header, rows)
    for model, kind in layer_cases(table):
        written += image(f"moe_layer_{model}_{kind}", "Time and memory of a layer by strategy, over tokens")
    for model, layers, kind in stack_cases(table):
        cases = [f"{model}_{phase}_{layers}_{kind}" for phase in ("prefill", "decode")]
        added = []
        for variant in ("staged", "prefetched", "fused"):
            ratios = [row.over_baseline for c in cases for row in table.select(case=c, variant=variant)]
            added.append(f"{variant} {change(min(ratios))} to {change(max(ratios))}")
        timeline = {
            name: table.one(case=cases[0], variant=f"timeline_{name}", tokens=TIMELINE_TOKENS).us
            for name in ("expansion", "exposed", "attention_loss")
        }
        text = f"""In a stack of {layers} such layers with attention before each, warm, prefill and decode, over dense
            scales: {", ".join(added)}. Prefetched decodes every expert on a side stream, while attention runs, which
            decode is too short for: left to itself, `moe_forward` does not. On the GPU's timeline of
            {TIMELINE_TOKENS:,} tokens, the layers wait for {timeline["exposed"]:.0f} of the
            {timeline["expansion"]:.0f} us that decoding takes alone; attention beside it takes
            {timeline["attention_loss"]:.0f} us longer."""
        written += "\n" + paragraph(text)
        written += image(f"moe_stack_{model}_{kind}", "Time of layers with attention by strategy, over tokens")
    return written


def model() -> str:
    """Tokens a second of a whole model, and its memory."""
    table = Table("model")
    variants = [name for name in ("dense", "staged", "prefetched", "fused") if table.select(variant=name)]
    rows = []
    for case in table.values("case"):
        dense, *others = (table.one(case=case, variant=variant) for variant in variants)
        phase, number = case.split("_")
        name = f"prefill, {int(number):,} tokens" if phase == "prefill" else f"decode, batch of {number}"
        cells = [f"{1e6 * row.tokens / row.us:,.0f} ({change(dense.us / row.us)})" for row in others]
        rows.append([f"{name}, {dense.condition}", f"{1e6 * dense.tokens / dense.us:,.0f}", *cells])
    of_each = [table.select(variant=variant)[0] for variant in variants]
    rows.append(["scales, GB", *(f"{row.scale_bytes / 1e9:.2f}" for row in of_each)])
    rows.append(["allocated in all, GB", *(f"{row.allocated_bytes / 1e9:.2f}" for row in of_each)])
    layers = round(of_each[0].scale_bytes / sum(map(dense_bytes, LAYER)))
    text = f"""A whole model in transformers, tokens a second: {layers} layers of 512 experts of the same sizes, top 10,
        with full attention and random weights ({machine(table)}). Eager calls of few tokens are bound by the CPU that
        launches them."""
    drawn = image("model_speed", "Tokens a second of a model by strategy, over its memory")
    return paragraph(text) + "\n" + markdown_table(" | ".join(["", *variants]), rows) + drawn


SECTIONS: list[tuple[tuple[str, ...], Callable[[], str]]] = [
    (("csf_decode", "stored_scales"), sizes),
    (("csf_decode",), decoding),
    (("csf_decode",), routing),
    (("moe_layer",), moe_layer),
    (("fused",), strategies),
    (("nvfp4_gemm",), gemms),
    (("model",), model),
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
