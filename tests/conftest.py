"""Fixtures for all tests. Tests use the bundle as a model does: built, and loaded by ``get_kernel``."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import pytest
import torch

from build_bundle import build

ROOT = Path(__file__).resolve().parent.parent
REPO_ID = "kernels-community/finegrained-kernels"


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device (an NVIDIA GPU and its driver); torch finds none")


def pytest_unconfigure() -> None:
    """When Python exits, Triton's binding library would list objects that outlive it: hundreds of lines below the
    summary."""
    sys.stderr.flush()
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


@contextmanager
def untraced() -> Iterator[None]:
    """Run without coverage's tracer, for what is timed."""
    tracer = sys.gettrace()
    sys.settrace(None)
    try:
        yield
    finally:
        sys.settrace(tracer)


@pytest.fixture(scope="session")
def bundle_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """This checkout's bundle, freshly built: the directory with ``torch-cpu`` and the other variants."""
    out = tmp_path_factory.mktemp("bundle") / "build"
    build(ROOT, out)
    return out


@pytest.fixture(scope="session")
def bundle(bundle_dir: Path) -> Iterator[ModuleType]:
    """The bundle's module. ``LOCAL_KERNELS`` stays set for the session, so that ``load()`` and models find it too."""
    from kernels import get_kernel

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCAL_KERNELS", f"{REPO_ID}={bundle_dir}")
        yield get_kernel(REPO_ID, version=1)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Use one thread, for small tensors: several threads would only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def run_python(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess]:
    """Run a snippet in a fresh interpreter, with nothing cached from any hub, and return what it printed.

    It is a separate process because huggingface_hub reads the settings that decide where a bundle comes from once, on
    import. Its environment is this one's without hub settings, plus an empty ``HF_HOME`` and the keyword arguments.
    """

    def run(code: str, *, check: bool = True, **environment: str) -> subprocess.CompletedProcess:
        inherited = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("HF_", "HUGGING", "LOCAL_KERNELS", "KERNELS_"))
        }
        environment = {"HF_HOME": str(tmp_path / "hf"), "PYTHONPATH": str(ROOT), **environment}
        result = subprocess.run(
            [sys.executable, "-c", code], env=inherited | environment, cwd=tmp_path, capture_output=True, text=True
        )
        if check and result.returncode:
            pytest.fail(f"exit status {result.returncode}\n{result.stdout}\n{result.stderr}")
        return result

    return run
