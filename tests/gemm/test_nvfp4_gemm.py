"""Every GEMM against float64 dequantize-and-matmul, over one scenario table: all on a GPU, pairwise on the CPU."""

from __future__ import annotations

import importlib
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from gemm_scenarios import ON_CPU, SCENARIOS, Scenario, check_scenario


@pytest.fixture(scope="module")
def reference(bundle):
    return importlib.import_module(f"{bundle.__name__}.nvfp4.reference")


@pytest.mark.parametrize("scenario", ON_CPU, ids=str)
def test_scenario_on_cpu(bundle, reference, scenario):
    check_scenario(bundle, reference, scenario, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("scenario", SCENARIOS, ids=str)
def test_scenario_on_gpu(bundle, reference, scenario):
    check_scenario(bundle, reference, scenario, "cuda")


@pytest.mark.gpu
def test_every_shipped_tile_on_ragged_shapes(bundle, reference, monkeypatch):
    """Each configuration of the tables, with rows, columns and K that its tiles do not divide."""
    configs, launch = (importlib.import_module(f"{bundle.__name__}.gemm.{name}") for name in ("config", "dispatch"))
    tables = (configs.load_table(path.stem) for path in Path(configs.__file__).parent.glob("tables/*.json"))
    shipped = {config for table in tables for entries in table.values() for _, config in entries}
    assert shipped
    for config in sorted(shipped, key=repr):
        if config.warpgroup and torch.cuda.get_device_capability()[0] != 9:
            continue
        monkeypatch.setattr(launch, "choose_config", lambda *_, config=config: config)
        for gate in ("none", "silu"):
            ragged = Scenario(gate=gate, requant=True, experts=3, tokens=150, cols=272, depth=320)
            check_scenario(bundle, reference, ragged, "cuda")
            check_scenario(bundle, reference, replace(ragged, tokens=3, cols=80, depth=64), "cuda")
