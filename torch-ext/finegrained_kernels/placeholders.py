"""Tensors on a GPU that is not there: they have a shape, strides and a dtype, but no memory.

Torch's own fake tensors would do as well, but they import torch's compiler, which takes longer than compiling a kernel.
"""

from __future__ import annotations

from typing import Any, Callable

import torch
from torch.overrides import TorchFunctionMode

DEVICE = torch.device("cuda", 0)


class Placeholder(torch.Tensor):
    """A tensor on the meta device that claims to be on a GPU."""

    device = DEVICE
    is_cuda = True


class Placeholders(TorchFunctionMode):
    """While this mode is active, torch creates placeholders, and operators run on the meta device."""

    def __torch_function__(
        self, function: Callable, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = {name: _as_kind(torch.Tensor, value) for name, value in (kwargs or {}).items()}
        if kwargs.get("device") is not None:
            kwargs["device"] = "meta"
        if function is torch.arange:  # nobody reads them, and torch would import sympy for them
            function = torch.empty
        return _as_kind(Placeholder, function(*_as_kind(torch.Tensor, args), **kwargs))


def _as_kind(kind: type, value: Any) -> Any:
    """`value`, with every meta tensor in it turned into a tensor of this type."""
    if isinstance(value, torch.Tensor):
        return value.as_subclass(kind) if value.is_meta and type(value) is not kind else value
    return type(value)(_as_kind(kind, item) for item in value) if type(value) in (tuple, list) else value
