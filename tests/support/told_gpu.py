"""A GPU that exists only in what the bundle is told, for `warm_up` on machines without one."""

from __future__ import annotations

import importlib
from types import ModuleType, SimpleNamespace

import pytest
import torch

TOLD = torch.device("cuda", 99)
"""No machine has it, so nothing that the bundle remembers about it is used for a real device."""


def beside_an_h200(bundle: ModuleType, patch: pytest.MonkeyPatch) -> ModuleType:
    """Have `bundle` compile for an H200. Returns its module `warming`."""
    warming = importlib.import_module(f"{bundle.__name__}.warming")
    patch.setattr(warming, "_gpu_of", lambda layers, device: TOLD)
    facts = {
        "get_device_capability": (9, 0),
        "get_device_name": "NVIDIA H200",
        "get_device_properties": SimpleNamespace(multi_processor_count=132),
        "current_device": TOLD.index,
    }
    for name, fact in facts.items():
        patch.setattr(torch.cuda, name, lambda device=None, fact=fact: fact)
    return warming
