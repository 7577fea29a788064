"""What the first launch of a program would do before anything is launched, done earlier: a second of the CPU, and
nothing of the GPU."""

from __future__ import annotations

import contextlib
import functools
import importlib

import torch

_WITH_KERNELS = (
    *("csf.decode_triton", "gemm.kernels.mma", "gemm.kernels.sm90_split", "gemm.kernels.sm90_wgmma"),
    *("gemm.kernels.unpack_ahead", "moe.reduction_triton", "moe.routing_triton", "nvfp4.quantize_triton"),
)
"""Modules that calls on NVIDIA GPUs launch kernels of."""


@functools.lru_cache(maxsize=1)
def prepare_launches() -> None:
    """Import the kernels and take the digests that name what is compiled: of their sources, of Triton and its
    compilers. What fails here is said by the first launch."""
    if torch.version.cuda is None:
        return
    with contextlib.suppress(Exception):
        cache_keys, launching, *modules = (  # Triton may be absent where only the CPU is used
            importlib.import_module(f"{__package__}.{name}") for name in ("cache_keys", "launching", *_WITH_KERNELS)
        )
        for module in modules:
            cache_keys.take_keys(module)
        launching.empty_kernel.warmup(grid=(1,))
