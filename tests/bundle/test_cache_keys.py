"""The names of kernels in Triton's cache do not depend on which kernel a program launches first."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("triton", reason="needs triton")

PROGRAM = """
import importlib, json, pkgutil, random
from pathlib import Path
import torch
from kernels import get_local_kernel
from triton.runtime.jit import JITCallable, JITFunction

bundle = get_local_kernel(Path({variant!r}))
launching = importlib.import_module(bundle.__name__ + ".launching")
names = [module.name for module in pkgutil.walk_packages(bundle.__path__, bundle.__name__ + ".")]
modules = [importlib.import_module(name) for name in names if not name.endswith("warming_worker")]
functions = {{id(value): value for module in modules for value in vars(module).values()
             if isinstance(value, JITFunction)}}
assert len(functions) > 100

key, under_way, inside = JITCallable.cache_key, [], []
def take(function):
    if under_way and function.hash is None:
        inside.append([under_way[-1].__name__, function.__name__])
    under_way.append(function)
    try:
        return key.fget(function)
    finally:
        under_way.pop()
JITCallable.cache_key = property(take)
JITFunction.run = lambda kernel, *arguments, **options: kernel.cache_key  # as each version of Triton does

order = list(functions.values())
random.Random({seed}).shuffle(order)
for kernel in order:
    launching.bind(kernel)((1,), torch.empty(1))
keys = {{f"{{function.__module__}}.{{function.__name__}}": function.hash for function in order}}
print(json.dumps({{"keys": keys, "inside": sorted(inside)}}))
"""


def test_keys_are_the_same_in_whatever_order_kernels_are_launched(bundle_dir, run_python):
    """In Triton 3.6 a caller's key depends on which of the called functions already have keys; these must always be the
    same."""
    first, second = (
        json.loads(run_python(PROGRAM.format(variant=str(bundle_dir), seed=seed)).stdout) for seed in (1, 2)
    )
    assert first["inside"] == second["inside"]
    assert first["keys"] == second["keys"]
