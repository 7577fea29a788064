"""The kernel in plain Triton, on a GPU that also has others: dense and compressed scales give the same results."""

from __future__ import annotations

import importlib

import pytest

from fused_scenarios import AXES, ON_CPU, check_every_byte, check_scenario, describe, on_portable_kernel
from gemm_scenarios import ON_CPU as DENSE_SCENARIOS
from gemm_scenarios import check_scenario as check_dense_scenario


@pytest.mark.gpu
@pytest.mark.parametrize("scenario", DENSE_SCENARIOS, ids=str)
def test_dense_scenario(bundle, scenario):
    reference = importlib.import_module(f"{bundle.__name__}.nvfp4.reference")
    with on_portable_kernel(bundle):
        check_dense_scenario(bundle, reference, scenario, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("choice", ON_CPU, ids=describe)
def test_compressed_scenario(bundle, choice):
    with on_portable_kernel(bundle):
        check_scenario(bundle, choice, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("depth", [32, 96, 160, 640, 2880, 4096, 16000])
def test_every_byte_arrives(bundle, depth):
    with on_portable_kernel(bundle):
        for percent in AXES["percent"]:
            check_every_byte(bundle, depth, percent, "cuda")
