"""Which kernel a GEMM uses, and whether that kernel reads compressed scales. Nothing here imports a kernel."""

from __future__ import annotations

import torch

from .smem_plan import reads_compressed

PORTABLE, TENSOR_CORE, BLOCK_SCALED = "portable", "mma", "sm100_scaled"
"""Kernels, by the names of their modules. On Hopper, others take the place of `mma` and read the same forms of
scales."""


def kernel_of(device: torch.device, depth: int, weight_only: bool) -> str:
    """The kernel for weights with K = `depth` on a GPU, and for 16-bit (`weight_only`) or quantized activations.

    Block-scaled products exist on sm_100 and its successors and on sm_120, and conversions from E4M3 from sm_89 on. For
    the tensor-core kernel, a row of scales has to be whole 32-bit words. In the interpreter on a CPU, it is always the
    portable kernel.
    """
    capability = torch.cuda.get_device_capability(device) if is_nvidia(device) else (0, 0)
    if not weight_only and capability[0] in (10, 12):
        return BLOCK_SCALED
    return TENSOR_CORE if capability >= (8, 9) and depth % 64 == 0 else PORTABLE


def reads_compressed_on(device: torch.device, depth: int, weight_only: bool) -> bool:
    """Whether that kernel reads compressed scales directly. For one that does not, they are decoded first, into new
    memory, unless the caller has decoded them."""
    if kernel_of(device, depth, weight_only) != TENSOR_CORE:
        return True
    return reads_compressed(depth, has_warpgroups=torch.cuda.get_device_capability(device)[0] == 9)


def is_nvidia(device: torch.device) -> bool:
    return device.type == "cuda" and not torch.version.hip
