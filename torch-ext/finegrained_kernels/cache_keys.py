"""Names in Triton's cache that are the same in every program, whichever kernel it launches first.

Triton names what it compiles by a key of the kernel's source and of all that this calls. Triton 3.6 lets that key
depend on which of the called functions had theirs taken before: they count with their globals if so, and without if
not. A program that launches kernels in another order would then compile what lies in the cache already, made by
`warm_up` or by the program before. Here the functions of a module have theirs taken together, in the order in which
they stand in it, and after those of the modules that it imports.
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
    """Take the key of a kernel, which Triton then keeps, and those of its module. An interpreted kernel has none."""
    if isinstance(kernel, JITFunction) and kernel.__module__ not in _taken:
        take_keys(sys.modules[kernel.__module__])


def take_keys(module: ModuleType) -> None:
    """Take the keys of a module's functions as they stand in it, those of modules that it imports first."""
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
