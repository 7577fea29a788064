"""Every kernel compiles for every architecture that runs it, in the registers and shared memory there are."""

from __future__ import annotations

import pytest

import compile_kernels


@pytest.fixture(scope="module")
def cases(bundle):
    return compile_kernels.codec_cases(bundle) + compile_kernels.gemm_cases(bundle)


@pytest.mark.parametrize("arch", compile_kernels.TARGETS)
def test_kernels_compile(cases, arch, capsys):
    faults = []
    for case in [case for case in cases if arch in case.archs]:
        kernel = compile_kernels.compile_case(case, compile_kernels.TARGETS[arch])
        registers, shared, spilled = compile_kernels.resources(kernel, arch)
        with capsys.disabled():
            print(compile_kernels.describe(case, arch, registers, shared, spilled))
        faults += compile_kernels.faults_of(case, arch, kernel, shared, spilled)
    assert not faults, faults
