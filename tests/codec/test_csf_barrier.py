"""Exceptions are stored after the words that they overwrite: the compiled code has a barrier between them.

Only a barrier orders a program's stores to one byte, because they are made by different threads. Without it a GPU gives
the right bytes nearly always, and an interpreter always.
"""

from __future__ import annotations

import re

import pytest

pytest.importorskip("triton", reason="needs triton, which compiles the kernels")

import compile_kernels


def stores_and_barriers(ptx: str) -> str:
    """The program's global stores and barriers, in order, as S and B."""
    return "".join({"st": "S", "ba": "B"}[found[:2]] for found in re.findall(r"st\.global|bar\.sync", ptx))


@pytest.mark.parametrize("layout", ["rows", "swizzled"])
def test_a_barrier_stands_between_words_and_exceptions(bundle, layout):
    """A tile's last barrier is only followed by two stores of exceptions, of the first block and in a loop."""
    cases = [case for case in compile_kernels.codec_cases(bundle) if re.match(f"decode .* {layout}", case.name)]
    assert len(cases) >= 6
    for case in cases:
        kernel = compile_kernels.compile_case(case, compile_kernels.TARGETS["sm_90"])
        order = stores_and_barriers(kernel.asm["ptx"])
        tiles = 2 if case.constants["LAUNCH"].ROUTED and case.constants["LAUNCH"].MANY else 1
        assert order.endswith("SBSS") and len(re.findall(r"SBSS(?!S)", order)) == tiles, f"{case.name}: {order}"
