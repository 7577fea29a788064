"""Gather the peers of compare.py, once, into benchmarks/local/peers, 40 MiB, which git ignores.

    python benchmarks/peers/prepare.py              # needs pip, xz and a package index; about 3 minutes
    python benchmarks/peers/compare.py              # on a GPU machine (sm_90, torch 2.11, CUDA 13)

The peers are what a user would run instead, and are never committed: Marlin from vllm 0.26.0 (its two libraries, of
whose code only what sm_90 selects is kept) and humming-kernels 0.1.10. If the GPU machine has no network, copy the
folder to it.
"""

from __future__ import annotations

import argparse
import ast
import collections
import struct
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PEERS = Path(__file__).resolve().parent.parent / "local" / "peers"
VLLM, HUMMING, ELFTOOLS = "vllm==0.26.0", "humming-kernels==0.1.10", "pyelftools==0.33"
LIBRARIES = ("_C_stable_libtorch.abi3.so", "_moe_C_stable_libtorch.abi3.so")
QUANTIZATION = "model_executor/layers/quantization/utils/"
FUNCTIONS = {
    "_custom_ops.py": ("gptq_marlin_repack", "marlin_gemm", "moe_sum", "moe_wna16_marlin_gemm", "moe_align_block_size"),
    QUANTIZATION + "marlin_utils.py": ("get_scale_perms", "marlin_permute_scales", "marlin_make_workspace_new"),
    QUANTIZATION + "marlin_utils_fp4.py": (
        "_nvfp4_compute_scale_factor", "nvfp4_marlin_process_scales", "nvfp4_marlin_process_global_scale",
        "_repack_marlin_experts",
    ),
    "model_executor/layers/fused_moe/moe_align_block_size.py": ("moe_align_block_size",),
}  # fmt: skip
HEAD = '''"""Functions of vllm 0.26.0 (Apache-2.0) as they are; what they import of vllm is the few names below."""

from __future__ import annotations

import math
import types

import torch


class ScalarType:
    def __init__(self, id: int) -> None:
        self.id = id


FLOAT4_E2M1F = ScalarType(562949953487106)


class logger:
    @staticmethod
    def warning_once(*args):
        print("vllm warning:", *args, flush=True)


class triton:
    @staticmethod
    def cdiv(a, b):
        return -(-a // b)


def round_up(x, y):
    return (x + y - 1) // y * y


def num_compute_units(index=None):
    return torch.cuda.get_device_properties(index or 0).multi_processor_count if torch.cuda.is_available() else 4


'''
TAIL = """


ops = types.SimpleNamespace(
    gptq_marlin_repack=gptq_marlin_repack, marlin_gemm=marlin_gemm, moe_sum=moe_sum,
    moe_wna16_marlin_gemm=moe_wna16_marlin_gemm, moe_align_block_size=_moe_align_block_size_op,
)
"""


def download(requirement: str, into: Path, *options: str) -> Path:
    print("fetching", requirement, flush=True)
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(into), *options, requirement]
    subprocess.run(command, check=True)
    name = requirement.split("==")[0].replace("-", "_")
    return next(into.glob(f"{name}-*.whl"))


def functions(package: Path) -> str:
    """The source of the functions in the wheel."""
    parts = []
    for path, names in FUNCTIONS.items():
        source = (package / path).read_text()
        found = {node.name: node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)}
        for name in names:
            text = ast.get_source_segment(source, found[name])
            if path == "_custom_ops.py" and name == "moe_align_block_size":
                text = text.replace(f"def {name}", f"def _{name}_op")
            parts.append(f"# {path}:{found[name].lineno}\n{text}")
    return HEAD + "\n\n\n".join(parts) + TAIL


def section(data: bytes, name: str) -> tuple[int, int]:
    """(offset, size) of a section of an ELF file."""
    (table,) = struct.unpack_from("<Q", data, 0x28)
    size, count, names = struct.unpack_from("<HHH", data, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", data, table + i * size) for i in range(count)]
    for header in headers:
        start = headers[names][4] + header[0]
        if data[start : data.index(b"\0", start)].decode() == name:
            return header[4], header[5]
    raise ValueError(f"no section {name}")


def entries(data: bytes, offset: int, size: int):
    """(fat binary, entry, kind, architecture, header bytes, payload bytes) of every entry."""
    at, end = offset, offset + size
    while at + 16 <= end:
        magic, _, header, body = struct.unpack_from("<IHHQ", data, at)
        if magic != 0xBA55ED50:
            at += 8
            continue
        entry = at + header
        while entry < at + header + body:
            kind, _, head, payload, _, _, _, _, arch = struct.unpack_from("<HHIQIIHHI", data, entry)
            yield at, entry, kind, arch, head, payload
            entry += head + payload
        at += header + body


def trimmed(library: bytes) -> bytes:
    """The library, in which every fat binary has only what an sm_90 device selects: its machine code, or else the
    newest PTX. Offsets stay the same; what is left out is zero, and compresses to nothing."""
    data, groups = bytearray(library), collections.defaultdict(list)
    for found in entries(library, *section(library, ".nv_fatbin")):
        groups[found[0]].append(found)
    for at, found in groups.items():
        _, _, header, body = struct.unpack_from("<IHHQ", library, at)
        code = [one for one in found if one[2] == 2 and one[3] == 90]
        ptx = sorted((one for one in found if one[2] == 1 and one[3] <= 90), key=lambda one: one[3])
        chosen = code or ptx[-1:] or [min(found, key=lambda one: one[5])]
        kept = b"".join(library[one[1] : one[1] + one[4] + one[5]] for one in chosen)
        data[at + header : at + header + body] = kept + bytes(body - len(kept))
        struct.pack_into("<Q", data, at + 8, len(kept))
    return bytes(data)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=PEERS)
    out = parser.parse_args().out
    if (out / "vllm_marlin.py").is_file():
        raise SystemExit(f"{out} is complete; remove it to gather it again")
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as directory:
        scratch = Path(directory)
        wheel = download(VLLM, scratch, "--only-binary=:all:", "--platform", "manylinux_2_28_x86_64")
        with zipfile.ZipFile(wheel) as archive:
            wanted = [f"vllm/{path}" for path in (*LIBRARIES, *FUNCTIONS)]
            archive.extractall(scratch, wanted)
            licenses = [name for name in archive.namelist() if name.endswith("LICENSE")]
            (out / "LICENSE.vllm").write_bytes(archive.read(licenses[0]))
        for name in LIBRARIES:
            path = out / name
            path.write_bytes(trimmed((scratch / "vllm" / name).read_bytes()))
            print("compressing", name, flush=True)
            subprocess.run(["xz", "-6", "-T0", "-f", str(path)], check=True)
        for requirement in (HUMMING, ELFTOOLS):
            with zipfile.ZipFile(download(requirement, scratch)) as archive:
                archive.extractall(out / "humming_site")
        (out / "vllm_marlin.py").write_text(functions(scratch / "vllm"))
    size = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
    print(f"{out}: {size / 2**20:.1f} MiB")


if __name__ == "__main__":
    main()
