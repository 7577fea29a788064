"""Scenarios of the GEMMs, each with its float64 result, dequantized and multiplied, and the error that is allowed."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import astuple, dataclass, replace
from itertools import combinations, product
from typing import NamedTuple

import torch


@dataclass(frozen=True)
class Scenario:
    op: str = "grouped"
    activation: str = "w4a16_bf16"
    gate: str = "none"
    requant: bool = False
    routing: str = "uniform"
    layout: str = "dense"
    experts: int = 5
    tokens: int = 9
    top_k: int = 2
    cols: int = 80
    depth: int = 192

    def __str__(self) -> str:
        return "-".join(str(value) for value in self.__dict__.values())


BASE = [
    Scenario(op, activation, gate, requant)
    for op, activation, gate, requant in product(
        ("2d", "batched", "grouped"),
        ("w4a16_bf16", "w4a16_fp16", "w4a4_rowwise", "w4a4_calibrated", "w4a4_per_expert", "w4a4_packed"),
        ("none", "silu", "limited"),
        (False, True),
    )
]
ROUTINGS = [
    Scenario(op, activation, gate, routing=routing, experts=experts, tokens=tokens)
    for op, activation, gate, routing, (experts, tokens) in product(
        ("batched", "grouped"),
        ("w4a16_bf16", "w4a4_per_expert"),
        ("none", "silu"),
        ("uniform", "one_expert", "sentinels", "none", "padded"),
        ((1, 1), (7, 3), (3, 70), (40, 0)),
    )
]
SHAPES = [
    Scenario(op, "w4a16_bf16", gate, requant, layout=layout, cols=cols, depth=depth, tokens=tokens)
    for op, (gate, requant), layout, (cols, depth, tokens) in product(
        ("2d", "grouped"),
        (("none", False), ("silu", True)),
        ("dense", "swizzled"),
        ((16, 32, 1), (64, 64, 5), (704, 96, 17), (128, 2880, 5), (272, 544, 140)),
    )
]
PORTABLE = [replace(s, depth=160) for s in BASE if s.op != "batched" or s.gate == "silu"]
MANY_ROWS = [
    Scenario(op, activation, gate, requant, routing, layout, experts=3, tokens=tokens, cols=cols, depth=depth)
    for op, activation, (gate, requant), routing, layout, (tokens, cols, depth) in product(
        ("2d", "grouped"),
        ("w4a16_bf16", "w4a16_fp16", "w4a4_rowwise"),
        (("none", False), ("limited", True)),
        ("uniform", "one_expert", "sentinels"),
        ("dense",),
        ((150, 80, 320), (230, 272, 256), (140, 48, 64)),
    )
]
SCENARIOS = list(dict.fromkeys(BASE + PORTABLE + ROUTINGS + SHAPES + MANY_ROWS))


def pairwise(scenarios: list[Scenario]) -> list[Scenario]:
    """A few of `scenarios`, so that every two values that occur together in one of them still do."""
    pairs = {s: set(combinations(enumerate(astuple(s)), 2)) for s in scenarios}
    missing = set().union(*pairs.values())
    chosen = []
    while missing:
        chosen.append(max(scenarios, key=lambda s: len(pairs[s] & missing)))
        missing -= pairs[chosen[-1]]
    return chosen


ON_CPU = pairwise([s for s in SCENARIOS if s.tokens < 100 and s.depth < 1000])


@dataclass
class Problem:
    """One scenario's tensors, and its float64 result with the error that a float32 sum may have."""

    args: tuple
    options: dict
    answer: torch.Tensor
    bound: torch.Tensor
    row_expert: torch.Tensor  # of each output row; -1 for none
    output_global: torch.Tensor


def routing_ids(s: Scenario) -> torch.Tensor:
    ids = torch.randint(0, s.experts, (s.tokens, s.top_k))
    if s.routing == "one_expert":
        ids[:] = s.experts - 1
    if s.routing == "sentinels":
        ids = torch.randint(-2, s.experts + 3, (s.tokens, s.top_k))
        ids[: s.tokens // 3] = torch.iinfo(torch.int32).max
    if s.routing == "none":
        ids[:] = s.experts
    return ids.int()


class RoutedRows(NamedTuple):
    """For each output row: the expert, or -1 for none, and the row of the activations that it reads."""

    ids: torch.Tensor  # as passed to the call, int32
    expert: torch.Tensor
    source: torch.Tensor


def routed_rows(s: Scenario, device: str) -> RoutedRows:
    """The rows of `s`, drawn at random."""
    ids = routing_ids(s) if s.op != "2d" else torch.zeros(s.tokens, 1, dtype=torch.int32)
    flat = ids.flatten().to(device)
    expert = torch.where((flat >= 0) & (flat < s.experts), flat, -1).long()
    return RoutedRows(flat, expert, torch.arange(len(flat), device=device) // s.top_k)


def routing_options(bundle, s: Scenario, rows: RoutedRows) -> dict:
    """The call's routing arguments; none for a single weight."""
    if s.op == "2d":
        return {}
    if s.op == "batched":
        return {"expert_ids": rows.ids, "gather_idx": rows.source.int()}
    start, gather, scatter = bundle.compute_grouped_scheduling(rows.ids.view(-1, s.top_k), s.experts, s.top_k)
    if s.routing == "padded":
        start = torch.cat([start, start.new_full((9,), 1 << 30)])
    return {"expert_start": start, "gather_idx": gather, "scatter_idx": scatter}


def activations(bundle, reference, s: Scenario, a: torch.Tensor, rows: RoutedRows):
    """(A, As, options, float64 values of each routed row's activations)."""
    sources = rows.source
    if s.activation.startswith("w4a16"):
        a = a.half() if s.activation.endswith("fp16") else a.bfloat16()
        return a, None, {"activation_format": "bf16"}, a.double()[sources]
    a = a.bfloat16()
    expert_global = torch.rand(s.experts) * 1e-2 + 1e-3
    if s.activation == "w4a4_per_expert":
        row_global = expert_global[rows.expert.clamp(min=0).cpu()].unsqueeze(1).to(a.device)
        packed, scales, _ = bundle.nvfp4_act_quant(a[sources], row_global)
        values = reference.dequantize_nvfp4(packed, scales) * row_global
        a_global = expert_global[0] if s.op == "2d" else expert_global
        return a, None, {"a_global_scale": a_global.to(a.device)}, values
    a_global = None if s.activation == "w4a4_rowwise" else torch.tensor(0.003, device=a.device)
    packed, scales, a_global = bundle.nvfp4_act_quant(a, a_global)
    values = (reference.dequantize_nvfp4(packed, scales) * a_global)[sources]
    if s.activation == "w4a4_packed":
        return packed, scales, {"a_global_scale": a_global}, values
    return a, None, {} if s.activation == "w4a4_rowwise" else {"a_global_scale": a_global}, values


def expert_sums(values: torch.Tensor, weight: torch.Tensor, row_expert: torch.Tensor):
    """Float64 sums [S, halves, N] of each row with its expert's weights [E, halves, N, K], and the error that a sum of
    K float32 products may have if every addition is truncated: K * 2^-23 of the sum of magnitudes."""
    sums = torch.zeros(len(values), *weight.shape[1:3], dtype=torch.float64, device=values.device)
    magnitudes = torch.zeros_like(sums)
    for expert in row_expert.unique().tolist():
        rows = row_expert == expert
        if expert >= 0:
            sums[rows] = torch.einsum("sk,hnk->shn", values[rows], weight[expert])
            magnitudes[rows] = torch.einsum("sk,hnk->shn", values[rows].abs(), weight[expert].abs())
    return sums, magnitudes * (values.shape[1] + 4) * 2.0**-23


def gated_answer(gate, up, gate_bound, up_bound, alpha, limit):
    """silu(gate) * up and its error: |silu'| <= 1.1 for x * sigmoid(alpha x), whatever alpha; clamps do not add any."""
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    silu = gate * torch.sigmoid(alpha * gate)
    bound = 1.1 * gate_bound * (up.abs() + up_bound) + silu.abs() * up_bound + 2.0**-19 * (silu * up).abs()
    return silu * up, bound


def build(bundle, reference, s: Scenario, device: str) -> Problem:
    torch.manual_seed(zlib.crc32(str(s).encode()))
    if s.op == "2d":
        s = replace(s, experts=1, top_k=1)
    halves = 1 if s.gate == "none" else 2
    rows = routed_rows(s, device)
    weight = torch.randn(s.experts, halves, s.cols, s.depth) / s.depth**0.5
    packed, scales, b_global = bundle.nvfp4_quantize_two_level(weight.to(device))
    b = packed.flatten(1, 2)
    bs = scales.flatten(1, 2)
    dense_weight = reference.dequantize_nvfp4(packed, scales, b_global)
    if s.layout == "swizzled":
        bs = bundle.swizzle_mx_scales(bs)
    a = torch.randn(s.tokens, s.depth).to(device)

    a_arg, as_arg, options, values = activations(bundle, reference, s, a, rows)
    options |= {"b_global_scale": b_global if s.op != "2d" else b_global[0]} | routing_options(bundle, s, rows)
    if s.op == "2d":
        b, bs = b[0], bs[0]
    output_global = torch.rand(s.experts, device=device) * 0.1 + 0.01
    if s.op == "2d":
        output_global = output_global[:1]
    options["gate"] = s.gate != "none"

    sums, bounds = expert_sums(values, dense_weight, rows.expert)
    if halves == 1:
        answer, bound = sums[:, 0], bounds[:, 0]
    else:
        alpha, limit = (1.702, 0.4) if s.gate == "limited" else (1.0, None)
        if s.gate == "limited":
            options |= {"swiglu_alpha": alpha, "swiglu_limit": limit}
        answer, bound = gated_answer(*sums.unbind(1), *bounds.unbind(1), alpha, limit)
    answer = torch.where((rows.expert >= 0)[:, None], answer, 0.0)
    return Problem((a_arg, b, as_arg, bs), options, answer, bound, rows.expert, output_global)


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """New tensors are filled with NaN, or with 0xFF if they hold integers."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)  # with `fill_uninitialized_memory`, on by default
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def check_scenario(bundle, reference, scenario: Scenario, device: str) -> None:
    problem = build(bundle, reference, scenario, device)
    run = getattr(bundle, f"matmul_{scenario.op}")
    with poisoned_memory():
        out = run(*problem.args, **problem.options)
    eps = torch.finfo(out.dtype).eps
    error = (out.double() - problem.answer).abs()
    allowed = problem.bound + eps * (problem.answer.abs() + problem.bound) + 2.0**-25
    assert out.shape == problem.answer.shape
    assert bool((error <= allowed).all()), f"worst {(error / allowed).max():.3g} x the bound"
    if scenario.requant:
        with poisoned_memory():
            packed, scales = run(
                *problem.args, **problem.options, quantize_output=True, output_global_scale=problem.output_global
            )
        row_global = problem.output_global[problem.row_expert.clamp(min=0)].unsqueeze(1)
        want_packed, want_scales, _ = bundle.nvfp4_act_quant(out, row_global)
        assert torch.equal(scales.view(torch.uint8), want_scales.view(torch.uint8))
        assert torch.equal(packed, want_packed)
