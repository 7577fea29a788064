"""What launchers need on the host: properties of a tensor's device, and arithmetic for grids and blocks."""

from __future__ import annotations

import contextlib
import functools

import torch


@functools.lru_cache(maxsize=None)
def num_sms(device: torch.device) -> int:
    """The number of multiprocessors of a GPU; 4 for the CPU, where kernels only run in the interpreter."""
    if device.type == "cpu":
        return 4
    properties = getattr(torch, device.type).get_device_properties(device)
    return properties.multi_processor_count if device.type == "cuda" else properties.max_compute_units


def on_device(device: torch.device) -> contextlib.AbstractContextManager:
    """Make `device` current while a kernel is launched on its tensors; free when it already is."""
    if device.type == "cpu" or device.index == getattr(torch, device.type).current_device():
        return contextlib.nullcontext()
    return getattr(torch, device.type).device(device)


def cdiv(a: int, b: int) -> int:
    """`a / b` rounded up. Triton's `cdiv` can also be called from kernels, and so takes as much CPU time as all checks
    of a call."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """The smallest power of two not below `n`."""
    return 1 << (n - 1).bit_length()
