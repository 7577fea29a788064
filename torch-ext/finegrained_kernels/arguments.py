"""Argument checks that public functions share: can kernels read this tensor, and can float32 hold this number?"""

from __future__ import annotations

import torch

DEVICE_TYPES = ("cpu", "cuda", "xpu")


def kind_of(value: object) -> str:
    """How messages name what was passed: a tensor by its dtype, anything else by its type. A numpy array of uint8 is
    not torch.uint8."""
    if isinstance(value, torch.Tensor):
        return str(value.dtype)
    kind = type(value)
    return kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"


def no_dense_tensor(value: object) -> str | None:
    """What `value` is instead, if it is not a dense tensor on a CPU or GPU; None if it is one."""
    if not isinstance(value, torch.Tensor):
        return kind_of(value)
    if value.device.type not in DEVICE_TYPES:
        return f"a tensor on {value.device}"
    return None if value.layout is torch.strided else f"a tensor of layout {value.layout}"


def as_float32(name: str, value: object) -> float:
    """A Python or numpy number that float32 can hold; NaN and infinities pass.

    Raises:
        TypeError: it is not a number.
        ValueError: it is too large for float32.
    """
    try:
        if isinstance(value, (str, bytes, bytearray)):
            raise TypeError
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        raise TypeError(f"{name}: expected a number, got {kind_of(value)}") from None
    except OverflowError:
        number = float("nan")
    too_large = number != float("inf") and number != -float("inf") and abs(number) > torch.finfo(torch.float32).max
    if too_large or (number != number and isinstance(value, int)):
        raise ValueError(f"{name}: expected a number that float32 can hold, got {str(value)[:40]}")
    return number
