"""What launchers need to know about the device of a tensor."""

from __future__ import annotations

import contextlib
import functools

import torch


@functools.lru_cache(maxsize=None)
def num_sms(device: torch.device) -> int:
    """Multiprocessors of a GPU; 4 for the CPU, where kernels run only interpreted."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


def on_device(device: torch.device) -> contextlib.AbstractContextManager:
    """Make `device` current while a kernel is launched on its tensors; free when it already is."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return contextlib.nullcontext()
    return torch.cuda.device(device)
