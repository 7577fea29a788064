"""Which GEMMs a device has: facts that need no kernel to be imported."""

from __future__ import annotations

import torch

from .smem_plan import reads_compressed


def has_tensor_core_kernel(device: torch.device) -> bool:
    """sm_89 and later, which convert E4M3."""
    return is_nvidia(device) and torch.cuda.get_device_capability(device) >= (8, 9)


def has_scaled_kernel(device: torch.device) -> bool:
    """Whether tensor cores multiply block-scaled NVFP4: sm_100 and its successors, sm_120."""
    return is_nvidia(device) and torch.cuda.get_device_capability(device)[0] in (10, 12)


def reads_compressed_on(device: torch.device, depth: int) -> bool:
    """Whether every GEMM on `device` reads compressed scales of rows of `depth` weights as they are. The others decode
    them first: into new memory, unless the caller has."""
    if device.type == "cpu":
        return True
    return has_tensor_core_kernel(device) and not has_scaled_kernel(device) and reads_compressed(depth)


def is_nvidia(device: torch.device) -> bool:
    return device.type == "cuda" and not torch.version.hip
