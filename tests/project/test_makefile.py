"""What `make` sets up: when, with which torch, and for which Python."""

from __future__ import annotations

import importlib.metadata
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from kernels.compat import tomllib
from packaging.specifiers import SpecifierSet

from conftest import ROOT

with_make = pytest.mark.skipif(shutil.which("make") is None, reason="needs make")


def set_up(venv: Path, *settings: str) -> list[str]:
    """The commands that would make the virtual environment."""
    command = ["make", "--dry-run", "bundle", f"VENV={venv}", *settings]
    lines = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.splitlines()
    return [line for line in lines if "-m venv" in line or "-m pip" in line]


@with_make
def test_an_empty_torch_replaces_the_pinned_one(tmp_path):
    """README has `make demo TORCH=` after `make demo`: it must not go on with the torch that this installed."""
    assert "torch==" in set_up(tmp_path)[1]
    (tmp_path / ".ready").touch()
    assert set_up(tmp_path) == []
    venv, *installs = set_up(tmp_path, "TORCH=")
    assert "--clear" in venv
    assert not any("torch==" in line for line in installs if "import triton" not in line)


@with_make
def test_the_torch_that_was_there_serves_all_later_targets(tmp_path):
    for stamp in (".ready", ".inherited"):
        (tmp_path / stamp).touch()
    assert set_up(tmp_path) == set_up(tmp_path, "TORCH=") == []


@pytest.mark.parametrize("path", sorted((ROOT / "requirements").glob("*.txt")), ids=lambda path: path.name)
def test_what_is_pinned_installs_on_the_oldest_python(path):
    oldest = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"].removeprefix(">=")
    for name in re.findall(r"^([\w-]+)==", path.read_text(), re.MULTILINE):
        try:
            wanted = importlib.metadata.metadata(name)["Requires-Python"]
        except importlib.metadata.PackageNotFoundError:
            continue  # `make check` installs it
        assert SpecifierSet(wanted or "").contains(f"{oldest}.99"), f"{name}: {wanted}"
