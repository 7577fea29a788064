"""GEMMs on compressed scales: the dense result to the bit under one configuration, and float64's within its error."""

from __future__ import annotations

import importlib
import itertools

import pytest
import torch

from fused_scenarios import (
    AXES,
    ON_CPU,
    ON_GPU,
    TILES,
    check_scenario,
    describe,
    is_possible,
    one_configuration,
    reads_compressed,
)
from gemm_scenarios import poisoned_memory
from numeric import make_coded_planes, oracle_weights


def needs_hopper(tile: tuple | None) -> bool:
    return tile is not None and tile[6] and torch.cuda.get_device_capability()[0] != 9


def test_every_pair_is_in_a_scenario():
    axes = {**AXES, "tile": TILES}
    met = {pair for choice in ON_GPU for pair in itertools.combinations(choice.items(), 2)}
    for (axis, values), (other, other_values) in itertools.combinations(axes.items(), 2):
        for value, other_value in itertools.product(values, other_values):
            pair = (axis, value), (other, other_value)
            assert (pair in met) == is_possible(dict(pair)), pair
    assert all(map(is_possible, ON_GPU))


@pytest.mark.parametrize("choice", ON_CPU, ids=describe)
def test_scenario_on_cpu(bundle, choice):
    check_scenario(bundle, choice, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("choice", ON_GPU, ids=describe)
def test_scenario_on_gpu(bundle, choice):
    if needs_hopper(choice["tile"]):
        pytest.skip("needs a Hopper GPU (sm_90) for warpgroup products")
    depth = choice["shape"][1]
    with one_configuration(bundle, depth, choice["tile"]) as decoded:
        check_scenario(bundle, choice, "cuda")
    if torch.cuda.get_device_capability()[0] == 9:
        assert bool(decoded) != reads_compressed(depth)


def check_every_byte(bundle, depth: int, percent: float, device: str) -> None:
    """Weights are 1, and row c of the activations has one 1, in group c: a result is a scale."""
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


@pytest.mark.parametrize("percent", AXES["percent"])
@pytest.mark.parametrize("depth", [96, 2816, 4096])
def test_every_byte_arrives_on_cpu(bundle, depth, percent):
    check_every_byte(bundle, depth, percent, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("depth", [128, 384, 640, 2560, 2816, 3200, 4096, 7168])
@pytest.mark.parametrize("tile", TILES[1:], ids=lambda tile: "x".join(str(int(part)) for part in tile))
def test_every_byte_arrives_on_gpu(bundle, tile, depth):
    if needs_hopper(tile):
        pytest.skip("needs a Hopper GPU (sm_90) for warpgroup products")
    with one_configuration(bundle, depth, tile) as decoded:
        for percent in AXES["percent"]:
            check_every_byte(bundle, depth, percent, "cuda")
    assert not decoded, "scales went through memory"


@pytest.mark.gpu
@pytest.mark.parametrize("tile", [TILES[1], TILES[10], TILES[11], TILES[14]], ids=str)
def test_every_byte_arrives_where_a_program_has_many_tiles(bundle, monkeypatch, tile):
    """One strip is filled again while others still read it, two take turns."""
    if needs_hopper(tile):
        pytest.skip("needs a Hopper GPU (sm_90) for warpgroup products")
    monkeypatch.setattr(importlib.import_module(f"{bundle.__name__}.gemm.dispatch"), "num_sms", lambda device: 1)
    with one_configuration(bundle, 640, tile):
        check_every_byte(bundle, 640, 5, "cuda")
