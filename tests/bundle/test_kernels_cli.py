"""The `kernels` command on this repository: it describes the bundle, and runs the hub's benchmark."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import ROOT

for package in ("sigstore", "tabulate"):
    pytest.importorskip(package, reason="needs sigstore and tabulate, which `make check` installs")


@pytest.fixture
def repository(bundle_dir: Path, tmp_path: Path) -> Path:
    """The files that are uploaded to the hub, or as many of them as the command reads."""
    shutil.copytree(bundle_dir, tmp_path / "build")
    (tmp_path / "benchmarks").mkdir()
    for path in (ROOT / "benchmarks").glob("benchmark*.py"):
        shutil.copy(path, tmp_path / "benchmarks")
    return tmp_path


def kernels(repository: Path, *arguments: str) -> str:
    command = [sys.executable, "-c", "from kernels.cli import main; main()", *arguments]
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    result = subprocess.run(command, cwd=repository, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout + result.stderr


def test_info(repository):
    described = kernels(repository, "info", ".")
    for line in ("Name: finegrained-kernels", "Version: 1", "License: Apache-2.0", "Backends: cpu, cuda, rocm, xpu"):
        assert line in described


def test_benchmark(repository):
    table = kernels(repository, "benchmark", ".", "--iterations", "2", "--warmup", "0")
    rows = [line for line in table.splitlines() if "CSFScales" in line and "│" in line]
    assert len(rows) == 3 and all("✓" in row for row in rows), table
