"""Barriers in the compiled code of the GEMM kernels: on every path, between the steps that they have to separate.

Without one, a GPU is still right nearly always. Strips of scales are accessed by our own PTX, of which Triton knows
nothing. Neither does it know that one warpgroup's products read a stage that another's copies overwrite.
"""

from __future__ import annotations

import re

import pytest

pytest.importorskip("triton", reason="needs triton, which compiles the kernels")

import compile_kernels
import gemm_cases

KINDS = {
    "window": r"st\.shared\.(?:v[24]\.b32|b64)",
    "exception": r"st\.shared\.u8",
    "read": r"ld\.shared",
    "global window": r"st\.global\.v[24]\.b32",
    "global exception": r"st\.global\.b8",
}
"""How our own instructions access a strip, and how kernels in Triton access their memory for decoded scales."""
FOREIGN = {"barrier": r"bar\.sync", "product": r"wgmma\.mma_async", "copy": r"cp\.async\.c[ag]"}
AMD = {
    "barrier": r"s_barrier",
    "global window": r"global_store_dwordx[24]",
    "global exception": r"global_store_byte",
    "global read": r"load_ubyte",
}
"""The same in code for AMD GPUs, which has no PTX of ours."""
ONE_STRIP = [
    ("window", "exception"), ("window", "read"), ("exception", "read"), ("read", "window"), ("exception", "window"),
]  # fmt: skip
WARPGROUPS = [("window", "exception"), ("product", "copy")]
"""Two strips may be read and written at the same time: this tile's and the next one's."""
IN_TRITON = [("global window", "global exception"), ("global window", "copy"), ("global exception", "copy")]
ON_AMD = [("global window", "global exception"), ("global window", "global read"), ("global exception", "global read")]


def read_code(text: str) -> tuple[list[tuple[str, str | None, bool]], dict[str, int]]:
    """([(kind, label to which it may jump, whether the next step may follow)], the step before which each label is)."""
    steps, labels, is_ours = [], {}, False
    foreign = AMD if ".amdgcn_target" in text else FOREIGN
    for line in text.splitlines():
        line = line.strip()
        if line.startswith("// begin inline asm"):
            is_ours = True
        elif line.startswith("// end inline asm"):
            is_ours = False
        elif label := re.match(r"(\$L__BB\w+|\.LBB\w+):", line):
            labels[label[1]] = len(steps)
        elif jump := re.match(r"(?:(@!?%p\d+ )?bra(?:\.uni)?|s_(c?)branch\w*) \s*([$.]L\w+)", line):
            steps.append(("jump", jump[3], bool(jump[1] or jump[2])))
        elif line.startswith(("ret;", "s_endpgm")):
            steps.append(("end", None, False))
        else:
            kinds = KINDS | foreign if is_ours else foreign
            steps += [(kind, None, True) for kind, pattern in kinds.items() if re.search(pattern, line)]
    return steps, labels


def unguarded(text: str, before: str, after: str) -> bool:
    """Whether there is a path without a barrier from a step of kind `before` to one of kind `after`."""
    steps, labels = read_code(text)
    kinds = {kind for kind, _, _ in steps}
    assert {before, after, "barrier"} <= kinds, f"{before}, {after}: only {sorted(kinds)} found"
    for start, (kind, _, _) in enumerate(steps):
        if kind != before:
            continue
        paths, seen = [start + 1], set()
        while paths:
            at = paths.pop()
            if at in seen or at == len(steps):
                continue
            seen.add(at)
            kind, label, goes_on = steps[at]
            if kind == after:
                return True
            if kind == "barrier":
                continue
            paths += [labels[label]] if label else []
            paths += [at + 1] if goes_on else []
    return False


@pytest.fixture(scope="module")
def cases(bundle) -> dict:
    return {case.name: case for case in gemm_cases.gemm_cases(bundle)}


@pytest.mark.parametrize(
    ("name", "rules"),
    [
        ("mma 64x256x8 fused gated", ONE_STRIP),
        ("mma 64x256x8 fused sliced", ONE_STRIP),
        ("mma 64x128x8 2560x640, 8 tokens", [("window", "read"), ("read", "window")]),  # dense scales that come whole
        ("wgmma 128x128x64 fused 2560x640, 4096 tokens", WARPGROUPS),
        ("wgmma 128x128x128 fused 640x2560, 16384 tokens", WARPGROUPS),
        ("wgmma 128x128x64 640x2560, 4096 tokens", WARPGROUPS[1:]),
        ("portable fused down", IN_TRITON),
        ("scaled fused prefill down", IN_TRITON),
    ],
)
def test_no_path_goes_past_a_barrier(cases, name, rules):
    arch = "sm_90" if "sm_90" in cases[name].archs else "sm_100"
    text = compile_kernels.compile_case(cases[name], compile_kernels.TARGETS[arch]).asm["ptx"]
    assert [rule for rule in rules if unguarded(text, *rule)] == []


def test_no_path_goes_past_a_barrier_on_amd(cases):
    text = compile_kernels.compile_case(cases["portable fused down"], compile_kernels.TARGETS["gfx942"]).asm["amdgcn"]
    assert [rule for rule in ON_AMD if unguarded(text, *rule)] == []


def test_a_path_without_a_barrier_is_found():
    """Through a loop, over a jump, and in straight order."""
    body = "\n".join(
        ["$L__BB0_1:", "// begin inline asm", "{0}", "// end inline asm", "{1}", "@%p1 bra $L__BB0_2;", "bar.sync 0;",
         "$L__BB0_2:", "// begin inline asm", "{2}", "// end inline asm", "@!%p2 bra $L__BB0_1;", "ret;"]
    )  # fmt: skip
    write, read = "st.shared.v2.b32 [%r1], {%r2, %r3};", "ld.shared.b16 %rs1, [%r4];"
    assert unguarded(body.format(write, "", read), "window", "read")
    assert not unguarded(body.format(write, "bar.sync 0;", read), "window", "read")
    assert unguarded(body.format(write, "bar.sync 0;", read), "read", "window")
    assert not unguarded(body.format(write, "bar.sync 0;", read + "\nret;"), "read", "window")
