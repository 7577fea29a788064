"""GEMMs on compressed scales: the bits of the dense result with the same configuration, close enough to float64's."""

from __future__ import annotations

import importlib
import itertools

import pytest
import torch

from fused_scenarios import (
    AXES,
    ON_CPU,
    ON_GPU,
    SMALL,
    TILES,
    check_every_byte,
    check_scenario,
    describe,
    in_turn,
    is_possible,
    one_configuration,
    reads_compressed,
)


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


def test_every_value_has_its_turn():
    """For the values that interpreted kernels see."""
    choices = in_turn(SMALL, 24)
    assert all(sum(choice[axis] == value for choice in choices) > 1 for axis in SMALL for value in SMALL[axis])


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
    """A single strip is filled again while others still read it; two strips are used in turns."""
    if needs_hopper(tile):
        pytest.skip("needs a Hopper GPU (sm_90) for warpgroup products")
    monkeypatch.setattr(importlib.import_module(f"{bundle.__name__}.gemm.dispatch"), "num_sms", lambda device: 1)
    with one_configuration(bundle, 640, tile):
        check_every_byte(bundle, 640, 5, "cuda")
