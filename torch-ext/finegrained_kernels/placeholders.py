"""Tensors that claim to be on a GPU: they have a shape, strides and a dtype, but no memory.

Torch's own fake tensors would do as well, but they import torch's compiler, which takes longer than compiling a kernel.
"""

from __future__ import annotations

import functools
from typing import Any, Callable

import torch
from torch.overrides import TorchFunctionMode


@functools.lru_cache(maxsize=None)
def _type_on(device: torch.device) -> type[torch.Tensor]:
    """The type of tensors on the meta device that claim to be on this GPU."""
    return type("Placeholder", (torch.Tensor,), {"device": device, "is_cuda": True})


class Placeholders(TorchFunctionMode):
    """While this mode is active in a thread, torch creates placeholders there, and operators run on the meta device."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._type = _type_on(device)

    def __torch_function__(
        self, function: Callable, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = {name: _as_kind(torch.Tensor, value) for name, value in (kwargs or {}).items()}
        if kwargs.get("device") is not None:
            kwargs["device"] = "meta"
        if function is torch.arange:  # nobody reads them, and torch would import sympy for them
            function = torch.empty
        return _as_kind(self._type, function(*_as_kind(torch.Tensor, args), **kwargs))


def _as_kind(kind: type, value: Any) -> Any:
    """`value`, with tensors on the meta device in it as tensors of this type."""
    if isinstance(value, torch.Tensor):
        return value.as_subclass(kind) if value.is_meta and type(value) is not kind else value
    return type(value)(_as_kind(kind, item) for item in value) if type(value) in (tuple, list) else value
