"""``finegrained-kernels doctor``: says what would run on this machine, and what to do about what would not."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import os
import platform
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from types import ModuleType
from typing import Literal

import huggingface_hub
import torch
from huggingface_hub import constants

import finegrained_kernels
from finegrained_kernels import loader

HUB_SECONDS = 5.0
PAIRS = {"5.17": "0.16", "5.20": "0.17", "5.21": "0.17", "5.22": "0.17"}
"""The version of kernels that each version of transformers works with. With any other version, transformers does not
fetch kernels from the hub itself. Later versions may require one that is not released yet; then nothing is wrong
here."""


@dataclasses.dataclass(frozen=True)
class Finding:
    """The result of one check. `advice` says what to do if `state` is not "ok"."""

    name: str
    state: Literal["ok", "note", "fault"]
    found: str
    advice: str = ""


def findings() -> Iterator[Finding]:
    """Do all checks, one after the other; a check may depend on earlier ones."""
    yield Finding("finegrained-kernels", "ok", f"{finegrained_kernels.__version__}, Python {platform.python_version()}")
    yield _torch()
    yield _gpu()
    yield _triton()
    yield _transformers()
    yield _hub()
    for name, path in (("hub cache", Path(constants.HF_HUB_CACHE)), ("Triton cache", triton_cache())):
        yield _writable(name, path)
    yield from _bundle()


def installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _torch() -> Finding:
    builds = {"CUDA": torch.version.cuda, "ROCm": torch.version.hip, "XPU": getattr(torch.version, "xpu", None)}
    build = next((f"built for {name} {number}" for name, number in builds.items() if number), "a build for the CPU")
    found = f"{torch.__version__}, {build}"
    if shutil.which("nvidia-smi") and not torch.version.cuda:
        return Finding(
            "torch", "fault", found, "this machine has an NVIDIA GPU, which this torch cannot use: install one for CUDA"
        )
    return Finding("torch", "ok", found)


def kernels_for(capability: tuple[int, int]) -> tuple[str, str]:
    """Which GEMM kernels run on an NVIDIA GPU, and how well that is tested."""
    if capability < (8, 9):
        return "portable Triton kernels", "compiled for it, never run on one"
    if capability[0] in (10, 12):
        return "tensor-core kernels, block-scaled for W4A4", "compiled for it, never run on one"
    if capability[0] == 9:
        return "tensor-core and warpgroup kernels", "measured on an H200"
    return "tensor-core kernels", "compiled for it, never run on one"


def _gpu() -> Finding:
    if not torch.cuda.is_available():
        if torch.version.cuda and shutil.which("nvidia-smi"):
            return Finding(
                "GPU", "fault", "torch finds none", "run nvidia-smi: the driver may be too old for this torch"
            )
        return Finding("GPU", "note", "none: everything runs on the CPU", "models want a GPU, checkpoints do not")
    name = torch.cuda.get_device_name()
    if torch.version.hip:
        compiled = "compiled for gfx942 and gfx950, never run on one"
        return Finding("GPU", "note", f"{name}: portable Triton kernels", compiled)
    major, minor = torch.cuda.get_device_capability()
    kernels, known = kernels_for((major, minor))
    found = f"{name} (sm_{major}{minor}): {kernels}"
    return Finding("GPU", "ok", found) if major == 9 else Finding("GPU", "note", found, known)


def _triton() -> Finding:
    number = installed("triton") or installed("pytorch-triton-rocm") or installed("triton-windows")
    if importlib.util.find_spec("triton") is None:
        state: Literal["fault", "note"] = "fault" if torch.cuda.is_available() else "note"
        return Finding("triton", state, "not installed", "pip install triton; the CPU does without")
    return Finding("triton", "ok", number or "installed")


def _transformers() -> Finding:
    number, kernels = installed("transformers"), installed("kernels")
    found = f"{number or 'not installed'}, kernels {kernels}"
    if number is None:
        advice = "only for from_pretrained: pip install transformers accelerate"
        return Finding("transformers", "note", found, advice)
    from transformers.utils import is_kernels_available

    if not is_kernels_available():
        wanted = PAIRS.get(".".join(number.split(".")[:2]))
        if wanted is None:
            advice = f"models load all the same; what transformers itself fetches needs {_asked_for()}"
            return Finding("transformers", "note", found, advice)
        advice = f"it works with kernels {wanted}: pip install 'kernels=={wanted}.*'"
        return Finding("transformers", "fault", f"{found}, which transformers does not accept", advice)
    if installed("accelerate") is None:
        return Finding("transformers", "note", found, "device_map needs it: pip install accelerate")
    return Finding("transformers", "ok", found)


def _asked_for() -> str:
    """Which version of kernels the installed transformers requires."""
    declared = (text.partition(";")[0].strip() for text in requires("transformers") or ())
    return next((text for text in declared if re.match(r"kernels\b(?!-)", text)), "another version of kernels")


def _hub() -> Finding:
    endpoint = constants.ENDPOINT
    if constants.HF_HUB_OFFLINE:
        return Finding("hub", "note", "HF_HUB_OFFLINE is set", "the cache, or the copy in this package, is used")
    try:
        # Any answer will do, even that the page does not exist.
        huggingface_hub.get_session().head(endpoint, timeout=HUB_SECONDS)
    except Exception as error:  # from whichever HTTP library huggingface_hub uses
        advice = "without it, the copy in this package is used; hub ids do not work"
        return Finding("hub", "note", f"{endpoint} is out of reach ({type(error).__name__})", advice)
    return Finding("hub", "ok", f"{endpoint} answers")


def triton_cache() -> Path:
    """Where compiled kernels are kept between runs."""
    return Path(os.environ.get("TRITON_CACHE_DIR") or Path.home() / ".triton" / "cache")


def _writable(name: str, path: Path) -> Finding:
    existing = next(parent for parent in (path, *path.parents) if parent.exists())
    try:
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError as error:
        advice = f"make it writable, or name another: {'TRITON_CACHE_DIR' if 'Triton' in name else 'HF_HUB_CACHE'}"
        return Finding(name, "fault", f"{path}: {error.strerror}", advice)
    return Finding(name, "ok", f"{path}, {shutil.disk_usage(existing).free / 1e9:,.0f} GB free")


def _bundle() -> Iterator[Finding]:
    try:
        bundle = finegrained_kernels.load()
    except Exception as error:  # whatever a broken bundle raises
        first, *more = [line for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
        whence = "what LOCAL_KERNELS names" if loader.is_overridden() else "finegrained-kernels"
        advice = more[-1].strip() if more else f"build or install {whence} again"
        yield Finding("bundle", "fault", first, advice)
        return
    module = Path(str(bundle.__file__))
    yield Finding("bundle", "ok", f"{module.parent}, from {_origin(module)}")
    devices = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    for device in devices:
        yield _works(f"decoding, {device}", functools.partial(_round_trip, bundle, device))
        yield _works(f"GEMM, {device}", functools.partial(_product, bundle, device))


def _origin(module: Path) -> str:
    if loader.is_overridden():
        return "LOCAL_KERNELS"
    if Path(constants.HF_HUB_CACHE) in module.parents:
        return "the hub"
    return "this package" if "_bundle" in module.parts else "this checkout"


def _works(name: str, check: Callable[[], str]) -> Finding:
    try:
        wrong = check()
    except Exception as error:  # whatever a compiler or a driver raises
        first = (str(error).strip().splitlines() or [""])[0]
        wrong = f"{type(error).__name__}: {first}"
    advice = "report this, with all lines above"
    return Finding(name, "fault", wrong, advice) if wrong else Finding(name, "ok", "every byte right")


def _round_trip(bundle: ModuleType, device: str) -> str:
    """Decode planes that hold every byte value. Returns what is wrong, or an empty string."""
    scales = torch.arange(2 * 64 * 40, device=device).mul(7).remainder(256).to(torch.uint8).view(2, 64, 40)
    fixed, exceptions = bundle.compress_nvfp4_csf_scales(scales)
    prepared = bundle.prepare_nvfp4_csf_scales(fixed, exceptions, num_rows=64, num_cols=40)
    decoded = bundle.decompress_nvfp4_csf_scales(prepared).view(torch.uint8)
    return "" if torch.equal(decoded, scales) else f"{int((decoded != scales).sum())} of {scales.numel()} bytes differ"


def _product(bundle: ModuleType, device: str) -> str:
    """Multiply weights of 1 by whole numbers, which is exact. Returns what is wrong, or an empty string."""
    depth = 128
    weight = torch.full((64, depth // 2), 0x22, dtype=torch.uint8, device=device)  # E2M1 0x2 is 1
    scales = torch.full((64, depth // 16), 0x38, dtype=torch.uint8, device=device)  # E4M3 0x38 is 1
    rows = torch.arange(3, device=device, dtype=torch.bfloat16).view(3, 1).expand(3, depth).contiguous()
    product = bundle.matmul_2d(rows, weight, None, scales.view(torch.float8_e4m3fn), activation_format="bf16")
    expected = (torch.arange(3, device=device) * depth).to(torch.bfloat16).view(3, 1).expand(3, 64)
    return "" if torch.equal(product, expected) else "sums are wrong"
