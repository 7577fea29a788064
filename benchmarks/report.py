"""Writes the measured parts of README.md and docs/benchmarks.md from `results/*.csv`, so that no number is typed.

    python benchmarks/report.py [--check]

A table appears once its file exists. `--check` writes nothing, and fails if a document is not what would be written.
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
    WEIGHTS,
    Row,
    Table,
    dense_bytes,
    has,
    layer_cases,
    layer_us,
    layers_of,
    model_calls,
    num_exceptions,
    peer_times,
    resident_bytes,
    stack_cases,
    stored_bytes,
)

ROOT = Path(__file__).resolve().parent.parent
BEGIN = "<!-- benchmarks/report.py writes from here, out of benchmarks/results -->\n"
END = "<!-- to here -->\n"

TIMELINE_TOKENS = 8192
SUMMARY_TOKENS = (1, 16, 256, 4096, 32_768)
LAYER_FIGURE = (
    "Time and memory of a layer by strategy, over tokens",
    "Fused: GEMMs read compressed scales, in the time of dense ones and little more than half of their memory. "
    "Staged: they are decoded first, which costs most where few tokens meet many weights.",
)
PEERS_FIGURE = (
    "Times of one weight's product over ours, of the faster peer and of torch's bf16, over tokens",
    "Above the line, ours is faster. With many tokens bf16 is faster, but its weights take almost four times the "
    "memory.",
)
PEER_TOKENS = (1, 16, 64, 512, 1024, 4096)
STACK_HEADER = "planes, rows, columns | exceptions | warm, us | of the roof | cold, us | of the roof | swizzled, warm"


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


def image(name: str, shows: str, caption: str, folder: str = "figures") -> str:
    """A figure, and a caption that says what to see in it."""
    return f"\n![{shows}]({folder}/{name}.svg)\n\n{paragraph(f'*{caption}*')}"


def version(text: str) -> str:
    """`2.11` of `2.11.0+cu130`."""
    return ".".join(text.split(".")[:2])


def machine(table: Table) -> str:
    """The device and versions with which all rows were measured. Raises if they differ."""
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
    text = f"""Compressed, the scales of a trained model (all-MiniLM-L6-v2) take {percent(share, 1)} of their bytes;
        {percent(rate, 2)} of them are exceptions, which are stored apart. The scales of one layer of
        {STACKS["qwen_gate"][0]} experts take {dense / 1e6:.0f} MB as they are, {stored:.0f} MB compressed in a file and
        {resident:.0f} MB compressed in memory, at the rates of exceptions in the next table."""
    drawn = image(
        "stored_scales",
        "Bytes of stored scales, dense and compressed, and over the rate of exceptions",
        "Left: four stacks as they are stored. Right: what exceptions cost; trained weights have few.",
    )
    drawn += image(
        "scale_memory",
        "Memory that scales take, over resident layers",
        "Computed from the sizes above. What lies below the grey line is left for the KV cache.",
    )
    return "### Sizes\n\n" + paragraph(text) + drawn


def decoding() -> str:
    table = Table("csf_decode")
    rows = []
    for case, shape in STACKS.items():
        warm, cold = (table.one(case=case, variant="full", condition=condition) for condition in ("warm", "cold"))
        cells = [" x ".join(map(str, shape)), percent(num_exceptions(warm) / dense_bytes(case), 2)]
        for row in (warm, cold):
            cells += [f"{row.us:.2f}", percent(row.of_roof)]
        rows.append([*cells, percent(table.one(case=case, variant="swizzled", condition="warm").of_roof)])
    text = f"""Whole stacks, decoded on one {machine(table)}. The last column is the swizzled form's share of the
        roof."""
    return "### Decoding\n\n" + paragraph(text) + "\n" + markdown_table(STACK_HEADER, rows)


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
    text = f"""Only the experts that have tokens, with planes of {rows} x {cols}, warm. `max_active` tells the launch
        how many to expect:"""
    table_text = markdown_table(" | ".join([f"active of {planes}", *counts]), lines)
    drawn = image(
        "sparse_routing",
        "Time to decode active experts, over their number, and to copy as many bytes",
        "The time grows with the number of experts that are decoded, not with the number that the layer has.",
    )
    return paragraph(text) + "\n" + table_text + drawn


def encoding() -> str:
    gpu, cpu = Table("csf_decode"), Table("csf_cpu")
    compress, wall, prepare = (
        gpu.one(case="qwen_layer", variant=name).us for name in ("compress", "compress_wall", "prepare_wall")
    )
    decode, encode = (cpu.one(variant=name, condition="warm") for name in ("full", "compress"))
    return "### Compressing\n\n" + paragraph(
        f"""Compressing {sum(map(dense_bytes, LAYER)) / 1e6:.0f} MB of scales, in {len(LAYER)} stacks, takes the GPU
        {compress:.0f} us. The calls take {wall:.0f} us of wall time, since each waits for its number of exceptions;
        preparing the result takes another {prepare:.0f} us. An eager call of `decompress_nvfp4_csf_scales` takes the
        CPU {gpu.one(variant="eager_call").us:.0f} us. On {decode.device} the first stack decodes in
        {decode.us / 1e3:.1f} ms, {1 / decode.over_baseline:.1f} times as fast as the formula written in torch, and
        compresses in {encode.us / 1e3:.0f} ms."""
    )


def checkpoints() -> str:
    cpu, gpu = Table("checkpoints"), Table("checkpoints_h200")
    two, four = (t.one(case="checkpoint", variant=f"compress_hf_jobs_{n}") for t, n in ((cpu, 2), (gpu, 4)))
    return paragraph(
        f"""A checkpoint of {two.bytes / 1e9:.0f} GB is compressed in {two.us / 1e6:.2f} s on {two.device},
        {two.over_baseline:.2f} times as long as copying and hashing it takes; with {four.device}, one process
        compresses {four.bytes / 1e9:.0f} GB from memory in {four.us / 1e6:.2f} s."""
    )


def gemm_name(case: str) -> str:
    """The name of a `case` of nvfp4_gemm.csv: experts, rows and K."""
    experts, rows, depth = GEMMS[case]
    return f"{experts} experts, {rows} x {depth}"


def gemms() -> str:
    """Few tokens, compared with the roof of memory; many tokens, compared with torch's GEMMs of bf16 weights."""
    table = Table("nvfp4_gemm")
    few: dict[str, dict[int, str]] = {}
    many = []
    for row in table.select(condition="cold", variant="w4a16"):
        if row.case not in GEMMS:  # one weight: `peers` has those
            continue
        calls = {r.variant: r for r in table.select(condition="cold", case=row.case, tokens=row.tokens)}
        name, others = gemm_name(row.case), calls.get("torch_grouped_mm")
        if others is None:
            best = calls.get("w4a16_batched", row) if row.tokens == 1 else row  # as `moe_forward` chooses
            few.setdefault(name, {})[row.tokens] = f"{best.us:.1f} ({percent(best.of_roof)})"
            continue
        ours = (calls.get(variant) for variant in ("w4a16", "w4a4"))
        cells = (f"{call.us:,.1f} ({others.us / call.us:.2f} x)" if call else "" for call in ours)
        many.append([name, f"{row.tokens:,}", f"{others.us:,.1f}", *cells])
    text = f"""GEMMs on dense scales, cold ({machine(table)}). First few tokens, with bf16 activations, in us, and in
        parentheses the share of the roof, which here is reading weights and scales once."""
    counts = sorted({tokens for cells in few.values() for tokens in cells})
    header = " | ".join(["weights", *(f"{tokens} token{'s' * (tokens > 1)}" for tokens in counts)])
    rows = [[name, *(cells.get(tokens, "") for tokens in counts)] for name, cells in few.items()]
    parts = ["### GEMMs\n", paragraph(text), markdown_table(header, rows)] if rows else []
    if many:
        text = """Then many tokens, beside torch's bf16 GEMMs; in parentheses how many times as fast as those. Torch's
            grouped GEMM gets rows that are gathered already, and applies no gate."""
        header = "weights | tokens | torch, bf16, us | W4A16, us | W4A4, us"
        parts += [paragraph(text), markdown_table(header, many)]
    return "\n".join(parts)


def strategies() -> str:
    """A layer's GEMMs on dense scales: what staged and fused add to their time, and how much less fused adds."""
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
    text = f"""The two grouped GEMMs of a layer alone, gate with up, then down, and what decoding adds to them, cold
        ({machine(table)}):"""
    header = "layer, hidden x intermediate | tokens | dense scales, us | staged, us | fused, us | fused saves, us"
    drawn = image(
        "strategy_latency",
        "Decoding and GEMM by strategy, warm and cold, and the same over dense scales",
        "Below: staged costs most where few tokens meet many weights; fused stays at the line of dense scales.",
    )
    return paragraph(text) + "\n" + markdown_table(header, rows) + drawn


def moe_layer() -> str:
    """A layer's time by strategy and number of tokens."""
    table = Table("moe_layer")
    case = "qwen_layer_w4a16"
    variants = ("dense", "staged", "fused")
    rows = []
    for tokens in table.values("tokens", case=case):
        dense, *others = (table.one(case=case, tokens=tokens, variant=name, condition="cold").us for name in variants)
        cells = (f"{us:,.0f} ({change(us / dense)})" for us in others)
        rows.append([f"{tokens:,}", f"{dense:,.0f}", *cells])
    text = f"""A whole layer of experts, routing to weighted sum, cold, qwen's shape with bf16 activations
        ({machine(table)}):"""
    header = "tokens | dense scales, us | compressed, staged, us | compressed, fused, us"
    written = "### Layers of experts\n\n" + paragraph(text) + "\n" + markdown_table(header, rows)
    for model, kind in layer_cases(table):
        written += image(f"moe_layer_{model}_{kind}", *LAYER_FIGURE)
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
        text = f"""A stack of {layers} such layers, each with attention before it, takes this much longer, warm, than
            with dense scales, over prefill and decode: {", ".join(added)}. Prefetching decodes all experts on a side
            stream while attention runs. In a decode step attention is too short to hide that, so `moe_forward` does not
            choose it there by itself. With {TIMELINE_TOKENS:,} tokens, decoding alone takes
            {timeline["expansion"]:.0f} us; beside attention, the layers wait {timeline["exposed"]:.0f} us for it, but
            attention takes {timeline["attention_loss"]:.0f} us longer."""
        written += "\n" + paragraph(text)
        written += image(
            f"moe_stack_{model}_{kind}",
            "Time of layers with attention by strategy, over tokens",
            "Prefetching pays off if attention is long; otherwise, reading compressed scales in the GEMM is best.",
        )
    return written


def model() -> str:
    """Tokens per second of a whole model of experts, and its memory."""
    table = Table("model")
    calls = model_calls(table, "moe")
    first = next(iter(calls))[0]
    variants = [name for name in ("dense", "staged", "prefetched", "fused") if table.select(case=first, variant=name)]
    rows = []
    for (case, condition), name in calls.items():
        dense, *others = (table.one(case=case, condition=condition, variant=variant) for variant in variants)
        cells = [f"{speed(row)} ({change(dense.us / row.us)})" for row in others]
        rows.append([f"{name}, {condition}", speed(dense), *cells])
    of_each = [table.select(case=first, variant=variant)[0] for variant in variants]
    rows.append(["scales, GB", *(f"{row.scale_bytes / 1e9:.2f}" for row in of_each)])
    rows.append(["allocated in all, GB", *(f"{row.allocated_bytes / 1e9:.2f}" for row in of_each)])
    text = f"""A whole model in transformers, in tokens per second: 24 layers of 512 experts of the same sizes, 10 for
        each token, with full attention and random weights ({machine(table)})."""
    drawn = image(
        "model_speed",
        "Tokens per second of a model by strategy, and its memory",
        "Fused: the speed of dense scales in less memory. Scales are a ninth of the weights, so the total changes "
        "little.",
    )
    return "### A whole model\n\n" + paragraph(text) + "\n" + markdown_table(" | ".join(["", *variants]), rows) + drawn


def speed(row: Row) -> str:
    """Tokens per second."""
    return f"{1e6 * (row.tokens or 0) / row.us:,.0f}"


def dense_model() -> str:
    """Tokens per second of a dense model, beside the same one in bf16, and its memory; nothing without its rows."""
    table = Table("model")
    variants = ("bf16", "dense", "fused")
    rows, calls = [], model_calls(table, "dense")
    if not calls:
        return ""
    for (case, condition), name in calls.items():
        bf16, *others = (table.one(case=case, condition=condition, variant=variant) for variant in variants)
        rows.append(
            [f"{name}, {condition}", speed(bf16), *(f"{speed(row)} ({bf16.us / row.us:.2f} x)" for row in others)]
        )
    of_each = [table.select(case=next(iter(calls))[0], variant=variant)[0] for variant in variants]
    rows.append(["scales, GB", *(f"{row.scale_bytes / 1e9:.2f}" for row in of_each)])
    rows.append(["allocated in all, GB", *(f"{row.allocated_bytes / 1e9:.2f}" for row in of_each)])
    is_compiled = any(condition == "compiled" for _, condition in calls)
    compiled = ' or by `torch.compile` with mode "reduce-overhead" ("compiled")' if is_compiled else ""
    text = f"""A dense model in transformers, in tokens per second, beside the same one in bf16: a Qwen3 of 8B shapes
        (36 layers, hidden size 4096, intermediate size 12288) with random weights, whose linear layers except the head
        are NVFP4, W4A16 ({machine(table)}). Decoding is a step after 256 tokens, by a CUDA graph of the eager model
        ("graph"){compiled}."""
    header = " | bf16 | NVFP4, dense scales | NVFP4, compressed scales"
    return "### A dense model\n\n" + paragraph(text) + "\n" + markdown_table(header, rows)


def language_model() -> str:
    """What quantization costs a real model."""
    table = Table("language_model")
    names = {
        "bf16": "bf16", "nvfp4": "NVFP4", "nvfp4_csf": "NVFP4, compressed", "nvfp4_mse": "NVFP4, `--scales mse`"
    }  # fmt: skip
    cases = table.values("case")
    rows = [
        [name, *(f"{row.perplexity:.2f}" for row in found), f"{found[0].file_bytes / 1e6:.1f}"]
        for variant, name in names.items()
        if (found := [table.one(case=case, variant=variant) for case in cases])
    ]
    tokens = table[0].tokens
    text = f"""A real language model, SmolLM2-135M-Instruct, with all linear layers except the head quantized by
        `finegrained-kernels quantize`, W4A16: perplexity of a text of {tokens} tokens (the beginning of Alice's
        Adventures in Wonderland), run in fp16, and the size of its safetensors files. Compressed scales are the same
        scales."""
    places = {
        "smollm2_cpu": "CPU",
        "smollm2_cuda": next((row.device for row in table if row.case.endswith("cuda")), ""),
    }
    header = " | ".join(["", *(f"perplexity, {places[case]}" for case in cases), "files, MB"])
    return "### What quantization costs\n\n" + paragraph(text) + "\n" + markdown_table(header, rows)


def peers() -> str:
    """One weight, compared with its peers."""
    table = Table("peers")
    text = f"""One weight (`matmul_2d`, bf16 activations), cold, on one {machine(table)}, in us: ours on dense scales
        and on compressed ones, and in the same run Marlin (vLLM 0.26.0), Humming (0.1.10) and torch's bf16 product of
        the dequantized weight."""
    rows = []
    for case, (weight_rows, depth) in WEIGHTS.items():
        for tokens in table.values("tokens", case=case):
            times = peer_times(table, case, tokens)
            cells = (f"{times[name]:,.1f}" for name in ("ours_dense", "ours_fused", "marlin", "humming", "torch_bf16"))
            rows.append([f"{weight_rows} x {depth}", f"{tokens:,}", *cells])
    header = "weight | tokens | ours, dense | ours, compressed | Marlin | Humming | torch, bf16"
    return "### One weight\n\n" + paragraph(text) + "\n" + markdown_table(header, rows) + image("peers", *PEERS_FIGURE)


def peers_summary() -> str:
    """README's part of it: ours, the faster peer, and bf16."""
    table = Table("peers")
    rows = []
    for case, (weight_rows, depth) in WEIGHTS.items():
        found = (peer_times(table, case, tokens) for tokens in PEER_TOKENS)
        cells = (" / ".join(f"{times[name]:,.0f}" for name in ("ours_dense", "peer", "torch_bf16")) for times in found)
        rows.append([f"{weight_rows} x {depth}", *cells])
    text = f"""One weight times the tokens that a column names, on one {machine(table)}, in us, cold: ours on dense
        scales / the faster of Marlin and Humming / torch in bf16."""
    header = " | ".join(["weight", *(f"{tokens:,}" for tokens in PEER_TOKENS)])
    drawn = image("peers", *PEERS_FIGURE, folder="docs/figures")
    return "\n" + paragraph(text) + "\n" + markdown_table(header, rows) + drawn


def summary() -> str:
    """README's measured part: a layer of experts, the memory of its scales, and one weight beside its peers."""
    table = Table("moe_layer")
    case, variants = "qwen_layer_w4a16", ("dense", "staged", "fused")
    rows = []
    for tokens in SUMMARY_TOKENS:
        dense, *others = (table.one(case=case, tokens=tokens, variant=name, condition="cold").us for name in variants)
        rows.append([f"{tokens:,}", f"{dense:,.0f}", *(f"{us:,.0f} ({change(us / dense)})" for us in others)])
    resident = {row.variant: row.bytes / 1e6 for row in table.select(case="qwen_memory")}
    dense, compressed, scratch = (resident[name] for name in ("scales_dense", "scales_compressed", "scratch"))
    memory = (f"{dense:.0f}", f"{compressed:.0f}, and {scratch:.0f} once for all layers", f"{compressed:.0f}")
    rows.append(["scales of a layer, MB", *memory])
    text = f"""A layer of 512 experts (hidden size 2560, intermediate size 640, top 8, bf16 activations) on one
        {machine(table)}: microseconds per call, with none of its data in the GPU's L2 cache."""
    header = "tokens | dense scales | compressed, decoded before the GEMMs | compressed, read by the GEMMs"
    drawn = image("moe_layer_qwen_w4a16", *LAYER_FIGURE, folder="docs/figures")
    return paragraph(text) + "\n" + markdown_table(header, rows) + drawn + (peers_summary() if has("peers") else "")


SECTIONS: list[tuple[tuple[str, ...], Callable[[], str]]] = [
    (("csf_decode", "stored_scales"), sizes),
    (("csf_decode",), decoding),
    (("csf_decode",), routing),
    (("moe_layer",), moe_layer),
    (("fused",), strategies),
    (("nvfp4_gemm",), gemms),
    (("peers",), peers),
    (("model",), model),
    (("model",), dense_model),
    (("language_model",), language_model),
    (("csf_decode", "csf_cpu"), encoding),
    (("checkpoints", "checkpoints_h200"), checkpoints),
]
"""The files that each part needs, and the function that writes it."""


def all_parts() -> str:
    """The measured part of docs/benchmarks.md."""
    return "\n".join(filter(None, (write() for files, write in SECTIONS if all(map(has, files)))))


DOCUMENTS: dict[str, Callable[[], str]] = {"README.md": summary, "docs/benchmarks.md": all_parts}
"""Documents with a measured part, and the function that writes it."""


def with_measured_part(name: str, text: str) -> str:
    """`text`, the document `name` of `DOCUMENTS`, with its measured part written anew."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise SystemExit(f"{name} lacks a line {(begin and END) or BEGIN!r}")
    return f"{before}{BEGIN}\n{DOCUMENTS[name]()}\n{END}{after}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="only compare")
    check = parser.parse_args().check
    stale = []
    for name in DOCUMENTS:
        before = (ROOT / name).read_text()
        after = with_measured_part(name, before)
        stale += [name] if before != after else []
        if not check:
            (ROOT / name).write_text(after)
    if check and stale:
        print(f"{', '.join(stale)}: not what benchmarks/results gives: python benchmarks/report.py")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
