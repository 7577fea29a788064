"""Every kernel compiles for every architecture that runs it, fits in registers and shared memory, and takes what the
committed table says."""

from __future__ import annotations

import csv

import pytest
import triton

import compile_kernels
import estimate_gains
from conftest import ROOT

TABLE = ROOT / "benchmarks" / "results" / "kernel_resources.csv"
REFRESH = f"python scripts/compile_kernels.py --csv {TABLE.relative_to(ROOT)}"


@pytest.fixture(scope="module")
def cases(bundle):
    return compile_kernels.codec_cases(bundle) + compile_kernels.gemm_cases(bundle)


@pytest.mark.slow
@pytest.mark.parametrize("arch", compile_kernels.TARGETS)
def test_kernels_compile(cases, arch):
    faults, rows = [], []
    for case in [case for case in cases if arch in case.archs]:
        kernel = compile_kernels.compile_case(case, compile_kernels.TARGETS[arch])
        registers, shared, spilled = compile_kernels.resources(kernel, arch)
        print(compile_kernels.describe(case, arch, registers, shared, spilled))
        faults += compile_kernels.faults_of(case, arch, kernel, shared, spilled)
        rows.append([case.name, *map(str, (registers, shared, spilled))])
    assert not faults, faults
    with TABLE.open(newline="") as file:
        header, *table = csv.reader(file)
    assert tuple(header) == compile_kernels.COLUMNS
    committed = [row[2:] for row in table if row[1] == arch]
    assert [name for name, *_ in rows] == [name for name, *_ in committed], REFRESH
    if {row[0] for row in table} == {triton.__version__}:  # another compiler gives other numbers
        differing = [(row, was) for row, was in zip(rows, committed, strict=True) if row != was]
        assert not differing, REFRESH


@pytest.mark.slow
def test_computed_gains_are_up_to_date(bundle):
    text = (ROOT / "docs" / "kernels.md").read_text()
    if f"Triton {triton.__version__}" not in text:
        pytest.skip(f"computed with another compiler than {triton.__version__}")
    missing = [line for line in estimate_gains.table(bundle) if line not in text.splitlines()]
    assert not missing, "python scripts/estimate_gains.py"
