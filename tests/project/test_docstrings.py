"""The examples in docstrings, of the host package and of the bundle as it is loaded."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
from types import ModuleType

import pytest

import finegrained_kernels


def modules_of(package: ModuleType) -> list[str]:
    """Names of a package's modules that can be imported here: kernels need triton, and integrations the package that
    they integrate."""
    names = [package.__name__]
    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        try:
            importlib.import_module(module.name)
        except ImportError as error:
            assert error.name and not error.name.startswith(package.__name__), error
        else:
            names.append(module.name)
    return names


def run_examples(package: ModuleType) -> int:
    """Run the examples. Returns how many there are; fails if one of them does."""
    attempted = 0
    for name in modules_of(package):
        result = doctest.testmod(importlib.import_module(name))
        assert not result.failed, f"{name}: {result.failed} examples fail"
        attempted += result.attempted
    return attempted


def test_host_package(bundle):
    assert run_examples(finegrained_kernels)


@pytest.mark.kernels_ci
def test_bundle(bundle):
    """It also shows that no module of the bundle needs a GPU to be imported."""
    assert run_examples(bundle)


def test_every_public_name_is_documented(bundle):
    for name in bundle.__all__:
        assert getattr(bundle, name).__doc__, name
    for package in (finegrained_kernels, importlib.import_module("finegrained_kernels.checkpoint")):
        for name in package.__all__:
            assert getattr(package, name).__doc__, f"{package.__name__}.{name}"
