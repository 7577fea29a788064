"""Which kernel a GEMM runs on, and whether it reads compressed scales: facts of a GPU and a GEMM that need no kernel to
be imported."""

from __future__ import annotations

import torch

from .smem_plan import reads_compressed

PORTABLE, TENSOR_CORE, BLOCK_SCALED = "portable", "mma", "sm100_scaled"
"""Kernels, by their module. Hopper has further ones, which take the place of `mma` and read what it reads."""


def kernel_of(device: torch.device, depth: int, weight_only: bool) -> str:
    """The kernel for weights of `depth` K on a GPU, and for activations of 16 bits (`weight_only`) or quantized ones.

    Block-scaled products exist on sm_100 and its successors and on sm_120; conversions of E4M3 from sm_89 on. Rows of
    scales have to be whole 32-bit words for the tensor-core kernel. Interpreted on a CPU, GEMMs are the portable one's.
    """
    capability = torch.cuda.get_device_capability(device) if is_nvidia(device) else (0, 0)
    if not weight_only and capability[0] in (10, 12):
        return BLOCK_SCALED
    return TENSOR_CORE if capability >= (8, 9) and depth % 64 == 0 else PORTABLE


def reads_compressed_on(device: torch.device, depth: int, weight_only: bool) -> bool:
    """Whether that kernel reads compressed scales as they are. What does not has them decoded first: into new memory,
    unless the caller has decoded them."""
    if kernel_of(device, depth, weight_only) != TENSOR_CORE:
        return True
    return reads_compressed(depth, has_warpgroups=torch.cuda.get_device_capability(device)[0] == 9)


def is_nvidia(device: torch.device) -> bool:
    return device.type == "cuda" and not torch.version.hip
