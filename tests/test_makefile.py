"""When `make` sets up its virtual environment, and with which torch."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from conftest import ROOT

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="needs make")


def set_up(venv: Path, *settings: str) -> list[str]:
    """The commands that would make the virtual environment."""
    command = ["make", "--dry-run", "bundle", f"VENV={venv}", *settings]
    lines = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.splitlines()
    return [line for line in lines if "-m venv" in line or "-m pip" in line]


def test_an_empty_torch_replaces_the_pinned_one(tmp_path):
    """README has `make demo TORCH=` after `make demo`: it must not go on with the torch that this installed."""
    assert "torch==" in set_up(tmp_path)[1]
    (tmp_path / ".ready").touch()
    assert set_up(tmp_path) == []
    venv, *installs = set_up(tmp_path, "TORCH=")
    assert "--clear" in venv
    assert not any("torch==" in line for line in installs if "import triton" not in line)


def test_the_torch_that_was_there_serves_all_later_targets(tmp_path):
    for stamp in (".ready", ".inherited"):
        (tmp_path / stamp).touch()
    assert set_up(tmp_path) == set_up(tmp_path, "TORCH=") == []
