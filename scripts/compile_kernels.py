"""Compile the kernels for every supported architecture, without a GPU, and report what each of them needs.

`python scripts/compile_kernels.py [--csv FILE]` prints registers, shared memory and spills for every kernel and
architecture. It fails if a kernel spills or needs more shared memory than there is, if a codec kernel names an FP8 type
(scale bytes are opaque), if a kernel needs FP8 hardware that its GPU lacks, or if the W4A4 kernel for block-scaled
tensor cores multiplies in another way, or does not pass its scales through tensor memory where there is one.
"""

from __future__ import annotations

import argparse
import csv
import importlib
import itertools
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource

from finegrained_kernels import load
from gemm_cases import EVERYWHERE, Case, gemm_cases

TARGETS = {f"sm_{arch}": GPUTarget("cuda", arch, 32) for arch in (80, 86, 89, 90, 100, 103, 120, 121)} | {
    arch: GPUTarget("hip", arch, 64) for arch in ("gfx942", "gfx950")
}
SHAPES = {"640x160": (640, 160), "2560x40": (2560, 40), "48x10": (48, 10)}
SHARED_BYTES = {"sm_80": 163 << 10, "sm_86": 99 << 10, "sm_89": 99 << 10, "sm_90": 227 << 10,
                "sm_100": 227 << 10, "sm_103": 227 << 10, "sm_120": 99 << 10, "sm_121": 99 << 10,
                "gfx942": 64 << 10, "gfx950": 160 << 10}  # fmt: skip
UNASKED_BYTES = 48 << 10
"""What every program on an NVIDIA GPU may use. Triton requests more if it allocates more by itself."""
PRODUCT = r"(?:tcgen05\.mma|wgmma\.mma_async|mma\.sync)\.\S+"
COLUMNS = ("triton", "arch", "kernel", "registers", "shared_bytes", "spill_bytes")


def codec_cases(bundle: ModuleType) -> list[Case]:
    """Every variant of the codec's kernels that a launcher can request, at real shapes and an awkward one."""
    decode = importlib.import_module(f"{bundle.__name__}.csf.decode_triton")
    encode = importlib.import_module(f"{bundle.__name__}.csf.encode_triton")
    csf = importlib.import_module(f"{bundle.__name__}.formats").NVFP4_CSF
    decode_pointers = {
        "out_ptr": "*u8",
        "stream": decode.Stream("*u8", "*u8", "*i32", "*i32"),
        "expert_start_ptr": "*i32",
    }
    encode_pointers = {"planes_ptr": "*u8", "fixed_ptr": "*u8", "slab_counts_ptr": "*i32"}
    encode_pointers |= {"slab_ends_ptr": "*i32", "words_ptr": "*u32"}
    encode_pointers |= dict.fromkeys(("plane_counts_ptr", "plane_ends_ptr", "host_ends_ptr"), "*i64")
    cases = []
    for shape, (rows, cols) in SHAPES.items():
        plane = {"NUM_ROWS": rows, "NUM_COLS": cols}
        slabs = {"NUM_SLABS": rows // csf.rows_per_slab, "SLAB_BYTES": csf.slab_bytes(cols)}
        launches = itertools.product(("rows", "swizzled"), (True, False), ("", " routed", " routed to many"))
        for layout, aligned, routing in launches:
            config = decode.decode_config(
                132, 512, rows, cols, routed=bool(routing), swizzled=layout == "swizzled",
                max_active=512 if routing.endswith("many") else None,
            )  # fmt: skip
            config = {**config}
            warps, _ = config.pop("num_warps"), config.pop("grid")
            launch = decode.DecodeLaunch(**config, SWIZZLED=layout == "swizzled", ALIGNED=aligned, ROUTED=bool(routing))
            name = f"decode {shape} {layout}{routing}{'' if aligned else ' unaligned'}"
            constants = {"PLANE": decode.plane_of(rows, cols), "LAUNCH": launch}
            cases.append(codec_case(name, decode.decode_kernel, constants, decode_pointers, warps))
        for name, extent in (("choose", cols), ("scan", rows), ("write", cols)):
            config = getattr(encode, f"{name}_config")(extent)
            warps = config.pop("num_warps")
            constants = plane | slabs | config
            kernel = getattr(encode, f"{name}_kernel")
            cases.append(codec_case(f"{name} {shape}", kernel, constants, encode_pointers, warps))
    config = encode.ends_config()
    warps = config.pop("num_warps")
    return [*cases, codec_case("ends", encode.ends_kernel, config, encode_pointers, warps)]


def codec_case(name: str, kernel: Any, constants: dict, pointers: dict, num_warps: int) -> Case:
    constants = {key: value for key, value in constants.items() if key in kernel.arg_names}
    types = {key: pointers.get(key, "i32") for key in kernel.arg_names if key not in constants}
    return Case(name, kernel, constants, types, {"num_warps": num_warps}, EVERYWHERE)


def compile_case(case: Case, target: GPUTarget) -> Any:
    """The compiled kernel. Pointers are assumed to be 16-byte aligned, except for the output of unaligned decoding."""
    names = case.kernel.arg_names
    signature = {name: case.types.get(name, "constexpr") for name in names}
    unaligned = set() if getattr(case.constants.get("LAUNCH"), "ALIGNED", True) else {"out_ptr"}
    constants = {(names.index(name),): value for name, value in case.constants.items()}
    attributes = {}
    for name, kind in case.types.items():
        for path, part in leaves((names.index(name),), kind):
            if part == "constexpr":
                constants[path] = None
            elif part.startswith("*") and name not in unaligned:
                attributes[path] = [["tt.divisibility", 16]]
    source = (GluonASTSource if case.kernel.is_gluon() else ASTSource)(
        fn=case.kernel,
        signature=signature,
        constexprs=constants,
        attrs=attributes,
    )
    return triton.compile(source, target=target, options=case.options)


def leaves(path: tuple[int, ...], kind: Any) -> Iterator[tuple[tuple[int, ...], str]]:
    """(path, type) of an argument, or of everything in a group of them."""
    if not isinstance(kind, tuple):
        yield path, kind
    else:
        for i, part in enumerate(kind):
            yield from leaves((*path, i), part)


def resources(kernel: Any, arch: str) -> tuple[int, int, int]:
    """Registers per thread, shared memory per program, and bytes spilled per thread, as reported by the assembler."""
    if "ptx" not in kernel.asm:
        text = kernel.asm["amdgcn"]
        registers, spilled = (
            int(re.search(rf"\.{key}:\s+(\d+)", text)[1]) for key in ("vgpr_count", "private_segment_fixed_size")
        )
        return registers, kernel.metadata.shared, spilled
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(kernel.asm["ptx"])
        file.flush()
        ptxas = get_ptxas(TARGETS[arch].arch).path
        target = re.search(r"\.target (\w+)", kernel.asm["ptx"])[1]
        command = [ptxas, "-v", f"-arch={target}", file.name, "-o", os.devnull]
        report = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    registers = int(re.search(r"Used (\d+) registers", report)[1])
    declared = re.search(r"(\d+) bytes smem", report)  # in PTX, unknown to Triton
    shared = kernel.metadata.shared + int(declared[1] if declared else 0)
    return registers, shared, int(re.search(r"(\d+) bytes spill stores", report)[1])


def describe(case: Case, arch: str, registers: int, shared: int, spilled: int) -> str:
    return f"{case.name:40} {arch:7} {registers:4} registers {shared:6} B shared {spilled:4} B spilled"


def faults_of(case: Case, arch: str, kernel: Any, shared: int, spilled: int) -> list[str]:
    faults = [f"{case.name} spills {spilled} bytes on {arch}"] if spilled else []
    if shared > SHARED_BYTES[arch]:
        faults.append(f"{case.name} takes {shared} bytes of shared memory on {arch}, which has {SHARED_BYTES[arch]}")
    is_asked_for = case.kernel.__name__ == "nvfp4_split_kernel"  # by launching.py
    if kernel.metadata.shared <= UNASKED_BYTES < shared and not is_asked_for:
        faults.append(f"{case.name} takes {shared} bytes of shared memory, for which Triton does not ask {arch}")
    if case.kernel.__name__ in ("decode_kernel", "choose_kernel", "write_kernel") and re.search(
        r"f8E|e4m3|e5m2", kernel.asm["ttir"]
    ):
        faults.append(f"{case.name} names an FP8 type")
    if arch in ("sm_80", "sm_86") and (found := re.search(r"e4m3\w*|e5m2\w*", kernel.asm["ptx"])):
        faults.append(f"{case.name} needs FP8 hardware on {arch}, which has none: {found[0]}")
    if case.kernel.__name__ == "scaled_gemm_kernel":
        products = set(re.findall(PRODUCT, kernel.asm["ptx"]))
        if not products or not all("kind::mxf4nvf4.block_scale" in product for product in products):
            faults.append(f"{case.name} multiplies by {products} on {arch}, not by block-scaled NVFP4")
        to_tensor_memory = re.findall(r"tcgen05\.(?:st|cp)\.\S+", kernel.asm["ptx"])
        if arch in ("sm_100", "sm_103") and not to_tensor_memory:
            faults.append(f"{case.name} takes no scales to tensor memory on {arch}")
    return faults


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--csv", type=Path, help="also write the table here")
    parser.add_argument("--arch", nargs="*", choices=TARGETS, default=list(TARGETS))
    arguments = parser.parse_args()
    rows, faults = [], []
    bundle = load()
    for case in codec_cases(bundle) + gemm_cases(bundle):
        for arch in [arch for arch in arguments.arch if arch in case.archs]:
            kernel = compile_case(case, TARGETS[arch])
            taken = resources(kernel, arch)
            rows.append((triton.__version__, arch, case.name, *taken))
            print(describe(case, arch, *taken), flush=True)
            faults += faults_of(case, arch, kernel, *taken[1:])
    if arguments.csv:
        with arguments.csv.open("w", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(COLUMNS)
            writer.writerows(rows)
    print(f"{len(rows)} kernels compiled, {len(faults)} faults", *faults, sep="\n")
    return 1 if faults else 0


if __name__ == "__main__":
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
    sys.exit(main())
