"""Small tensors that many calls read and none writes, made once for each device."""

from __future__ import annotations

from typing import Any, Callable

import torch

from .recording import current_recorder

_MAX_CONSTANTS = 4096
_constants: dict[tuple, torch.Tensor] = {}


def constant(make: Callable[..., torch.Tensor], *arguments: Any, device: torch.device) -> torch.Tensor:
    """The tensor `make(*arguments, device=device)`, kept for later calls. `make` is a module-level function that
    depends on its arguments alone. Do not return the tensor to a user, who might write to it.

    The tensor is complete before it is kept, so that any stream may read it. Inside a graph capture (where it belongs
    to the graph) and on a CPU (where it costs little) a new one is made by every call.
    """
    if torch.compiler.is_compiling() or not _is_kept(device):
        return make(*arguments, device=device)
    recorder = current_recorder()
    if torch._C._len_torch_dispatch_stack() > (0 if recorder is None else 1):
        return make(*arguments, device=device)
    key = (make, device, *map(repr, arguments))  # as texts: -0.0 is not 0.0, and NaN is NaN
    kept = _constants.get(key)
    if kept is None:
        kept = make(*arguments, device=device)
        if kept.is_meta:  # a placeholder
            return kept
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return kept
        if device.type != "cpu":
            getattr(torch, device.type).current_stream(device).synchronize()
        if len(_constants) >= _MAX_CONSTANTS:
            _constants.clear()
        _constants[key] = kept
    if recorder is not None:
        recorder.constants.append(kept)
    return kept


def _is_kept(device: torch.device) -> bool:
    return device.type != "cpu"
