"""Scenarios of GEMMs on compressed scales: results have the bits of dense ones, and are within the error of float64's.

The scenarios are generated so that every two values of two axes occur together, unless `is_possible` says otherwise.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import itertools
import random
import zlib
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from gemm_scenarios import activations, expert_sums, gated_answer, poisoned_memory, routed_rows, routing_options
from numeric import make_coded_planes, oracle_weights

AXES = {
    "op": ("grouped", "batched", "2d"),
    "activation": (
        "w4a16_bf16", "w4a16_fp16", "w4a4_rowwise", "w4a4_calibrated", "w4a4_per_expert", "w4a4_packed",
    ),
    "gate": ("none", "silu", "limited"),
    "requant": (False, True),
    "routing": ("uniform", "one_expert", "sentinels", "none", "padded"),
    "size": ((5, 9), (1, 1), (7, 3), (12, 2), (3, 75)),  # experts, tokens
    "shape": (  # output columns, K
        (48, 96),  # on the portable kernel, on every GPU
        (80, 192), (16, 320),  # the tensor-core kernel decodes these into memory first
        (16, 128), (80, 384), (272, 640), (144, 2560), (32, 2816),
        (48, 4096), (80, 7168),  # decoded in slices
        (32, 3200),  # long rows that cannot be divided into equal parts
        (16, 16000),  # and too long for shared memory
    ),
    "percent": (0, 0.2, 1, 5, 50, 100),
    "kind": ("ordinary", "any", "nan"),
    "output": ("own", "float32"),  # which hides less
}  # fmt: skip
TILES = (  # block_n, block_k, block_t, num_warps, num_stages, programs_per_sm, warpgroup and further fields of `Config`
    None,  # as the bundle chooses
    (64, 256, 8, 4, 3, 3, False),
    (64, 256, 8, 2, 2, 4, False),
    (64, 128, 8, 2, 4, 2, False),
    (128, 128, 8, 2, 3, 4, False),
    (32, 256, 8, 2, 4, 1, False),
    (128, 256, 16, 4, 3, 2, False),
    (64, 512, 8, 4, 3, 1, False),
    (128, 128, 32, 4, 3, 1, False),
    (256, 128, 8, 8, 4, 1, False),
    (64, 128, 64, 4, 4, 2, True),
    (128, 128, 64, 8, 4, 1, True),
    (256, 128, 64, 8, 4, 1, True),
    (128, 128, 128, 8, 4, 1, True),
    (128, 128, 128, 4, 2, 2, True),
    (64, 128, 8, 2, 4, 8, False, 128, 176, 2),  # two chunks requested at a time
    (64, 256, 8, 2, 2, 7, False, 144, 80),  # half of K 2560 decoded at a time
)
TOP_K = 2


def has_tiles(depth: int) -> bool:
    """Whether `TILES` belong to the kernel that reads compressed scales for K = `depth`."""
    return depth % 128 == 0 and depth < 16000


def reads_compressed(depth: int) -> bool:
    """Whether Hopper has a kernel that reads them."""
    return has_tiles(depth) or depth % 64 == 32


def is_possible(choice: dict) -> bool:
    """Whether the values chosen so far are possible together. Tiles are only chosen if there is a kernel that has
    them."""
    tile = choice.get("tile")
    if tile is None:
        return True
    depth = choice["shape"][1] if "shape" in choice else 128
    return has_tiles(depth) and not (tile[6] and choice.get("op") == "batched")


def pairwise(axes: dict[str, tuple], seed: int = 0) -> Iterator[dict]:
    """Choices of one value per axis, until every possible pair of values of two axes has occurred.

    Each choice begins with a new pair, and takes, axis by axis, the value that makes the most new pairs.
    """
    rng = random.Random(seed)

    def pairs_with(choice: dict, axis: str, value: object) -> set:
        return {frozenset([(axis, value), other]) for other in choice.items()}

    missing = {}  # ordered, unlike a set
    for (axis, values), (other, other_values) in itertools.combinations(axes.items(), 2):
        for value, other_value in itertools.product(values, other_values):
            if is_possible({axis: value, other: other_value}):
                missing[frozenset([(axis, value), (other, other_value)])] = axis, value, other, other_value
    while missing:
        axis, value, other, other_value = next(iter(missing.values()))
        choice = {axis: value, other: other_value}
        for axis in rng.sample([name for name in axes if name not in choice], len(axes) - 2):
            values = [value for value in axes[axis] if is_possible({**choice, axis: value})]
            rng.shuffle(values)
            value = max(values, key=lambda v: sum(pair in missing for pair in pairs_with(choice, axis, v)))
            choice[axis] = value
        for pair in itertools.combinations(choice.items(), 2):
            missing.pop(frozenset(pair), None)
        yield choice


def describe(choice: dict) -> str:
    return "-".join(
        "x".join(str(int(part)) for part in value) if isinstance(value, tuple) else str(value)
        for value in choice.values()
    )


def in_order(axes: dict[str, tuple]) -> list[dict]:
    return [{axis: choice[axis] for axis in axes} for choice in pairwise(axes)]


def in_turn(axes: dict[str, tuple], count: int) -> list[dict]:
    """`count` choices that go through each axis' values in order, shifted by one after each round. For tests that take
    too long to see every pair."""
    return [{axis: values[(i + i // len(values)) % len(values)] for axis, values in axes.items()} for i in range(count)]


SMALL = AXES | {"size": ((5, 9), (1, 1), (7, 3)), "shape": ((48, 96), (80, 192), (16, 320), (16, 128), (80, 384))}
"""For interpreted kernels."""
ON_CPU = in_order(AXES)
ON_GPU = in_order({**AXES, "tile": TILES})


@dataclasses.dataclass
class Problem:
    """One scenario's tensors, its float64 result, and the error that float32 sums may have."""

    args: tuple
    options: dict
    compressed: object
    answer: torch.Tensor
    bound: torch.Tensor
    output_global: torch.Tensor


def build(bundle, choice: dict, device: str) -> Problem:
    seed = zlib.crc32(describe(choice).encode())
    torch.manual_seed(seed)
    s = SimpleNamespace(**choice, top_k=TOP_K)
    (s.experts, s.tokens), (s.cols, s.depth) = s.size, s.shape
    if s.op == "2d":
        s.experts, s.top_k = 1, 1
    halves = 1 if s.gate == "none" else 2
    stack = make_coded_planes((s.experts, halves * s.cols, s.depth // 16), s.percent, s.kind, seed)
    packed = torch.randint(0, 256, (s.experts, halves * s.cols, s.depth // 2), dtype=torch.uint8)
    weight = oracle_weights(packed, stack.planes)
    b_global = torch.rand(s.experts, halves).add_(0.5).div_(weight.nan_to_num().square().mean().sqrt() * s.depth**0.5)
    weight = weight.unflatten(1, (halves, -1)).to(device) * b_global[:, :, None, None].to(device).double()
    stack = stack.to(device)
    compressed = bundle.prepare_nvfp4_csf_scales(stack.fixed, stack.words, **stack.geometry)

    rows = routed_rows(s, device)
    reference = importlib.import_module(f"{bundle.__name__}.nvfp4.reference")
    a = torch.randn(s.tokens, s.depth).to(device)
    a, a_scales, options, values = activations(bundle, reference, s, a, rows)
    options |= {"b_global_scale": b_global.to(device), "gate": halves == 2}
    options |= {"output_dtype": torch.float32} if s.output == "float32" else {}
    b, planes = packed.to(device), stack.planes.view(torch.float8_e4m3fn)
    if s.op == "2d":
        b, planes, options["b_global_scale"] = b[0], planes[0], options["b_global_scale"][0]
    options |= routing_options(bundle, s, rows)
    if halves == 1:
        options["b_global_scale"] = options["b_global_scale"][..., 0]

    sums, bounds = expert_sums(values, weight, rows.expert)
    answer, bound = sums[:, 0], bounds[:, 0]
    if halves == 2:
        alpha, limit = (1.702, 1.5) if s.gate == "limited" else (1.0, None)
        if limit:
            options |= {"swiglu_alpha": alpha, "swiglu_limit": limit}
        answer, bound = gated_answer(*sums.unbind(1), *bounds.unbind(1), alpha, limit)
    answer, bound = (torch.where((rows.expert >= 0)[:, None], tensor, 0.0) for tensor in (answer, bound))
    output_global = torch.rand(s.experts, device=device) * 0.1 + 0.01
    return Problem((a, b, a_scales, planes), options, compressed, answer, bound, output_global)


def bits(outputs: torch.Tensor | tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    return [output.view(torch.uint8) for output in (outputs if isinstance(outputs, tuple) else (outputs,))]


def assert_within(out: torch.Tensor, problem: Problem) -> None:
    """Check that results are within the bound, and NaN exactly where float64 is."""
    is_nan = problem.answer.isnan()
    assert torch.equal(out.isnan(), is_nan)
    error = (out.double() - problem.answer).abs()
    allowed = problem.bound + torch.finfo(out.dtype).eps * (problem.answer.abs() + problem.bound) + 2.0**-25
    wrong = (error > allowed) & ~is_nan
    assert not wrong.any(), f"{wrong.sum()} of {wrong.numel()}, {(error / allowed)[wrong].max():.3g} x the bound"


def check_scenario(bundle, choice: dict, device: str) -> None:
    problem = build(bundle, choice, device)
    matmul = getattr(bundle, f"matmul_{choice['op']}")
    a, b, a_scales, planes = problem.args
    with poisoned_memory():
        out = matmul(a, b, a_scales, problem.compressed, **problem.options)
    assert_within(out, problem)
    options, got = problem.options, out
    if choice["requant"]:
        options = options | {"quantize_output": True, "output_global_scale": problem.output_global}
        with poisoned_memory():
            got = matmul(a, b, a_scales, problem.compressed, **options)
    with poisoned_memory():
        want = matmul(a, b, a_scales, planes, **options)
    for one, other in zip(bits(got), bits(want), strict=True):
        assert torch.equal(one, other), f"{(one != other).sum()} of {one.numel()} bytes differ from dense scales'"


def check_every_byte(bundle, depth: int, percent: float, device: str) -> None:
    """Weights are 1, and row c of the activations has a single 1, in group c, so each result is a scale."""
    experts, rows, cols = 3, 272, depth // 16
    stack = make_coded_planes((experts, rows, cols), percent, "any", depth)
    scales = bundle.prepare_nvfp4_csf_scales(stack.fixed, stack.words, **stack.geometry).to(device)
    packed = torch.full((experts, rows, depth // 2), 0x22, dtype=torch.uint8)
    group = torch.arange(cols)
    x = torch.zeros(cols, depth, dtype=torch.bfloat16)
    x[group, 16 * group + group % 16] = 1
    start = torch.arange(experts + 1, dtype=torch.int32) * cols
    with poisoned_memory():
        out = bundle.matmul_grouped(
            x.to(device), packed.to(device), None, scales, expert_start=start.to(device),
            gather_idx=group.repeat(experts).to(device), activation_format="bf16",
        )  # fmt: skip
    expected = oracle_weights(packed, stack.planes)[..., ::16].transpose(1, 2).flatten(0, 1)
    wrong = (out.cpu().double() != expected).nonzero()
    assert not len(wrong), f"{len(wrong)} of {expected.numel()}, the first at (expert * C + column, row) {wrong[0]}"


@contextlib.contextmanager
def one_configuration(bundle, depth: int, tile: tuple | None) -> Iterator[list]:
    """Dense scales get the same configuration as compressed ones, `tile` or the bundle's choice. Yields the scales that
    were decoded into memory."""
    plan, launch = (importlib.import_module(f"{bundle.__name__}.gemm.{name}") for name in ("smem_plan", "dispatch"))
    choose, decompress, decoded = launch.choose_config, launch.decompress_nvfp4_csf_scales, []
    fixed = None if tile is None else plan.with_strip(plan.Config(*tile), depth)

    def noted(scales, **options):
        decoded.append(scales)
        return decompress(scales, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "choose_config", lambda *args: fixed or choose(*args[:-1], has_tiles(depth)))
        patch.setattr(launch, "decompress_nvfp4_csf_scales", noted)
        yield decoded


@contextlib.contextmanager
def on_portable_kernel(bundle) -> Iterator[None]:
    """Every GEMM runs on the kernel in plain Triton, whatever the GPU."""
    names = ("gemm.api", "gemm.config", "gemm.dispatch", "plans")
    api, config, launch, plans = (importlib.import_module(f"{bundle.__name__}.{name}") for name in names)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(api, "_run_on_device", lambda gemm: launch.run_on_gpu(gemm, config.PORTABLE))
        patch.setattr(plans, "_is_planned", lambda tensor: False)  # no call of another kernel is replayed
        yield
