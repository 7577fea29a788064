"""The machine code of the warpgroup kernel, without a GPU: nothing overwrites the weights that products in flight read.

A warpgroup product reads its left operand from registers until a wait covers it. The assembler does not preserve those
registers, so the kernel has to. Every path from every product is followed in the SASS to the wait that ends it.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

triton = pytest.importorskip("triton")
NVDISASM = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"

COMPILE = """
import importlib
from pathlib import Path
import triton
from kernels import get_local_kernel
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource

bundle = get_local_kernel(Path({variant!r}))
part = lambda name: importlib.import_module(f"{{bundle.__name__}}.gemm.{{name}}")
kernel, operands, plan = part("kernels.sm90_wgmma").nvfp4_wgmma_kernel, part("kernels.operands"), part("smem_plan")
absent = dict.fromkeys(operands.Scales._fields, "constexpr")
scales, depth, gate = operands.Scales(**(absent | {scales})), {depth}, {gate}
compressed = scales.dense == "constexpr"
config = plan.Config({block_n}, 128, {block_t}, {warps}, {stages}, 1, warpgroup=True)
constants = dict(
    SHAPE=operands.Shape(N=272, K=depth, C=depth // 16, GATE=gate, HAS_LIMIT=False, SWIZZLED=False,
                         COMPRESSED=compressed, GLOBAL_PER_ROW=False, ROUNDED=triton.language.bfloat16, BLOCK_E=32),
    TILE=plan.plan_tile(config, 272, depth, gate, has_strip=scales.dense != "*i16", compressed=compressed),
)
signature = dict(
    x_ptr="*bf16", weight=operands.Weight("*i64", scales, scratch="constexpr"),
    routing=operands.Routing("*i32", "constexpr", "*i32", "constexpr"),
    epilogue=operands.Epilogue("constexpr", "i32", "*fp32", "i32", "i32", "fp32", "fp32", "*bf16", "constexpr",
                               "constexpr", "i32"),
    num_rows="i32", num_sources="i32", num_experts="i32", SHAPE="constexpr", TILE="constexpr",
)
constexprs = {{(kernel.arg_names.index(name),): value for name, value in constants.items()}}
aligned = {{}}
def walk(path, kind):
    if isinstance(kind, tuple):
        for i, part in enumerate(kind):
            walk((*path, i), part)
    elif kind.startswith("*"):
        aligned[path] = [["tt.divisibility", 16]]
    elif kind == "constexpr":
        constexprs.setdefault(path, None)
for i, kind in enumerate(signature.values()):
    walk((i,), kind)
source = GluonASTSource(kernel, signature, constexprs, aligned)
compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=dict(num_warps={warps}))
Path("kernel.cubin").write_bytes(compiled.asm["cubin"])
"""

DENSE, WHOLE = {"dense": "*i16"}, {"dense": "*i64"}
COMPRESSED = {"bases": "*u8", "codes": "*i32", "exceptions": "*i32", "exception_offsets": "*i32"}

PRODUCT = re.compile(r"HGMMA\S* R\d+, R(\d+),")
WAIT = re.compile(r"WARPGROUP\.DEPBAR\.LE gsb0, 0x([0-9a-f]+)")
BRANCH = re.compile(r"BRA `\((\.L_x_\d+)\)")
NO_RESULT = ("ST", "LDGSTS", "BAR", "BRA", "HGMMA", "WARPGROUP", "DEPBAR", "ISETP", "FSETP", "R2UR", "EXIT")


def read_sass(cubin: Path) -> tuple[list[str], dict[str, int]]:
    """(instructions, the index of the instruction after each label)."""
    text = subprocess.run([NVDISASM, "-c", cubin], capture_output=True, text=True, check=True).stdout
    instructions, labels = [], {}
    for line in text.splitlines():
        if label := re.match(r"(\.L_x_\d+):", line):
            labels[label[1]] = len(instructions)
        elif code := re.match(r"\s+/\*[0-9a-f]{4,5}\*/\s+([^;]+);", line):
            instructions.append(" ".join(code[1].split()))
    return instructions, labels


def written(instruction: str) -> set[int]:
    """The general registers that an instruction writes."""
    code = re.sub(r"^@!?U?P\w+ ", "", instruction)
    result = re.match(r"(\S+) (?:P\w+, )?R(\d+)", code)
    if code.startswith(NO_RESULT) or result is None:
        return set()
    width = 4 if ".128" in result[1] else 2 if ".64" in result[1] or "WIDE" in result[1] else 1
    return set(range(int(result[2]), int(result[2]) + width))


def overwritten_operands(instructions: list[str], labels: dict[str, int]) -> list[tuple[str, str]]:
    """(product, an instruction that may overwrite its operand before the wait for it)."""
    found = []
    for start, product in enumerate(instructions):
        if not (operand := PRODUCT.search(product)):
            continue
        registers = set(range(int(operand[1]), int(operand[1]) + 4))
        paths, seen = [(start + 1, 0 if "gsb0" in product else -1)], set()  # groups committed after the product's own
        while paths:
            at, later = paths.pop()
            if (at, later) in seen or at == len(instructions):
                continue
            seen.add((at, later))
            code = instructions[at]
            if (wait := WAIT.search(code)) and later >= int(wait[1], 16):
                continue
            if registers & written(code):
                found.append((product, code))
                break
            later = min(later + ("HGMMA" in code and "gsb0" in code), 8)
            if branch := BRANCH.search(code):
                paths.append((labels[branch[1]], later))
            if not code.startswith(("BRA", "EXIT")):
                paths.append((at + 1, later))
    return found


@pytest.mark.slow
@pytest.mark.skipif(not NVDISASM.exists(), reason="this Triton ships no nvdisasm")
@pytest.mark.parametrize(("scales", "depth"), [(DENSE, 320), (COMPRESSED, 640), (COMPRESSED, 4096), (COMPRESSED, 7168)])
@pytest.mark.parametrize(("block_n", "block_t", "warps", "gate"), [(128, 128, 8, True), (64, 64, 4, False)])
def test_products_in_flight_keep_their_operands(
    bundle_dir, run_python, tmp_path, block_n, block_t, warps, gate, scales, depth
):
    check_products(bundle_dir, run_python, tmp_path, (block_n, block_t, warps, 4), gate, scales, depth)


@pytest.mark.slow
@pytest.mark.skipif(not NVDISASM.exists(), reason="this Triton ships no nvdisasm")
@pytest.mark.parametrize(
    ("tile", "gate", "scales", "depth"),
    [
        ((128, 128, 4, 2), True, COMPRESSED, 2560),
        ((128, 128, 4, 2), False, WHOLE, 2048),
        ((128, 128, 8, 4), True, WHOLE, 2560),
        ((128, 64, 4, 3), True, WHOLE, 2560),
    ],
)
def test_products_of_tiles_in_parts_and_of_whole_scales_do_too(
    bundle_dir, run_python, tmp_path, tile, gate, scales, depth
):
    check_products(bundle_dir, run_python, tmp_path, tile, gate, scales, depth)


def check_products(bundle_dir, run_python, tmp_path, tile, gate, scales, depth) -> None:
    tile = dict(zip(("block_n", "block_t", "warps", "stages"), tile, strict=True))
    run_python(COMPILE.format(variant=str(bundle_dir), gate=gate, scales=scales, depth=depth, **tile))
    instructions, labels = read_sass(tmp_path / "kernel.cubin")
    assert sum("HGMMA" in code for code in instructions) >= 16
    assert not overwritten_operands(instructions, labels)
