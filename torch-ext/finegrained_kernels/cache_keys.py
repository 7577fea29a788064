"""Gives kernels the same names in Triton's cache in every program, whichever kernel it launches first.

Triton names compiled code by a key, computed from the source of the kernel and of all functions that it calls. In
Triton 3.6 this key depends on which of the called functions already had a key: those that had one count with their
globals, the others without. So a program that launches kernels in another order would compile again what `warm_up` or
an earlier program has already put into the cache. Here the keys of all functions of a module are computed together, in
the order in which they are defined, after those of the modules that it imports.
"""

from __future__ import annotations

import sys
import threading
from types import ModuleType
from typing import Any

from triton.runtime.jit import JITCallable, JITFunction

_PACKAGE = __name__.rpartition(".")[0]

_LOCK = threading.RLock()
_taken: set[str] = set()


def take_key(kernel: Any) -> None:
    """Compute the keys of a kernel and of its whole module; Triton then keeps them. An interpreted kernel has none."""
    if isinstance(kernel, JITFunction) and kernel.__module__ not in _taken:
        take_keys(sys.modules[kernel.__module__])


def take_keys(module: ModuleType) -> None:
    """Compute the keys of a module's functions in the order of their definition, after those of modules that it
    imports."""
    with _LOCK:
        if module.__name__ in _taken:
            return
        for value in list(vars(module).values()):
            if isinstance(value, ModuleType) and value.__name__.startswith(f"{_PACKAGE}."):
                take_keys(value)
            elif isinstance(value, JITCallable):
                if value.__module__ != module.__name__:
                    take_keys(sys.modules[value.__module__])
                _ = value.cache_key
        _taken.add(module.__name__)
