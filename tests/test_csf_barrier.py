"""Exceptions are stored after the words they overwrite: the barrier between them, in the code as it is compiled.

Stores of one program to one byte are only ordered by it, as different threads make them. Without it a GPU gives the
right bytes nearly always, and an interpreter always.
"""

from __future__ import annotations

import re

import pytest

pytest.importorskip("triton", reason="needs triton, which compiles the kernels")

import compile_kernels


def stores_and_barriers(ptx: str) -> str:
    """The program's global stores and barriers, in their order, as S and B."""
    return "".join({"st": "S", "ba": "B"}[found[:2]] for found in re.findall(r"st\.global|bar\.sync", ptx))


@pytest.mark.parametrize(("layout", "exceptions"), [("rows", "SS"), ("swizzled", "S")])
def test_a_barrier_stands_between_words_and_exceptions(bundle, layout, exceptions):
    """Exceptions are stored by a loop, and in rows by what precedes it for the first block."""
    cases = [case for case in compile_kernels.codec_cases(bundle) if re.match(f"decode .* {layout}", case.name)]
    assert len(cases) >= 6
    for case in cases:
        kernel = compile_kernels.compile_case(case, compile_kernels.TARGETS["sm_90"])
        order = stores_and_barriers(kernel.asm["ptx"])
        assert re.fullmatch(f"B*S+B{exceptions}", order), f"{case.name}: {order}"
