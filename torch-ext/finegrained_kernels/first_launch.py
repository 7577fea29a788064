"""Does earlier what a program's first launch would do before it launches anything. That is a second of CPU time, and no
GPU time."""

from __future__ import annotations

import contextlib
import functools
import importlib

import torch

_WITH_KERNELS = (
    *("csf.decode_triton", "gemm.kernels.mma", "gemm.kernels.sm90_split", "gemm.kernels.sm90_wgmma"),
    *("gemm.kernels.unpack_ahead", "moe.reduction_triton", "moe.routing_triton", "nvfp4.quantize_triton"),
)
"""The modules whose kernels are launched by calls on NVIDIA GPUs."""


@functools.lru_cache(maxsize=1)
def prepare_launches() -> None:
    """Import the kernels and compute the digests that name compiled binaries: those of the kernels' sources, of Triton
    and of its compilers. Failures are ignored here, and reported by the first launch."""
    if torch.version.cuda is None:
        return
    with contextlib.suppress(Exception):
        cache_keys, launching, *modules = (  # Triton may be absent where only the CPU is used
            importlib.import_module(f"{__package__}.{name}") for name in ("cache_keys", "launching", *_WITH_KERNELS)
        )
        for module in modules:
            cache_keys.take_keys(module)
        launching.empty_kernel.warmup(grid=(1,))
