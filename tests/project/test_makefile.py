"""What `make` sets up: when, with which torch, and for which Python; and what it says if it cannot."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys

import pytest
from kernels.compat import tomllib
from packaging.specifiers import SpecifierSet

import set_up
from conftest import ROOT

with_make = pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
PINNED = "torch==2.13.0"


@pytest.fixture
def ran(monkeypatch, tmp_path):
    """A function that calls `main()` of scripts/set_up.py with every command recorded instead of run, and returns its
    output and the commands."""
    commands = []

    def record(command, **options):
        commands.append([str(part) for part in command])
        if "venv" in commands[-1]:
            (tmp_path / "venv").mkdir(exist_ok=True)
        fails = command[1] == "-c" and command[2] in missing
        return subprocess.CompletedProcess(command, int(fails), stdout=str(tmp_path))

    missing: set[str] = set()

    def run(*arguments: str, without: str = "") -> tuple[str | None, list[list[str]]]:
        commands.clear()
        missing.clear()
        missing.add(without)
        monkeypatch.setattr(sys, "argv", ["set_up.py", str(tmp_path / "venv"), *arguments])
        return set_up.main(), list(commands)

    monkeypatch.setattr(set_up.subprocess, "run", record)
    return run


def test_an_environment_is_made_once(ran, capsys):
    said, commands = ran("--torch", PINNED)
    assert said is None
    assert any(PINNED in command for command in commands)
    assert "once: pip downloads" in capsys.readouterr().out
    assert ran("--torch", PINNED) == (None, [])
    assert capsys.readouterr().out == ""


def test_an_empty_torch_replaces_the_pinned_one(ran):
    """README has `make demo TORCH=` after `make demo`, which must not continue with the torch that the latter
    installed."""
    ran("--torch", PINNED)
    said, commands = ran()
    assert said is None
    assert any("--clear" in command for command in commands)
    assert not any(part.startswith("torch=") for command in commands for part in command)


def test_the_torch_that_was_there_serves_all_later_targets(ran):
    ran()
    assert ran() == ran("--torch", PINNED) == (None, [])


def test_a_python_without_torch_is_told_so_before_anything_is_downloaded(ran):
    said, commands = ran(without="import torch")
    assert "which has none" in said
    assert not any("pip" in command for command in commands)


def test_another_python_makes_another_environment(ran, monkeypatch):
    ran("--torch", PINNED)
    monkeypatch.setattr(set_up.platform, "python_version", lambda: "3.99.0")
    assert ran("--torch", PINNED, "--any-python") == (None, [])
    _, commands = ran("--torch", PINNED)
    assert any("--clear" in command for command in commands)


def test_changed_requirements_are_installed(ran, monkeypatch):
    ran("--torch", PINNED)
    monkeypatch.setattr(set_up, "digest_of", lambda paths: "other")
    _, commands = ran("--torch", PINNED)
    assert any("--clear" in command for command in commands)


def test_what_make_check_needs_is_added_once(ran):
    ran("--torch", PINNED)
    _, commands = ran("--torch", PINNED, "--check")
    assert [command[-1] for command in commands] == [str(ROOT / "requirements" / "check.txt")]
    assert ran("--torch", PINNED, "--check") == (None, [])


def test_a_python_that_is_too_old_is_told_so(ran, monkeypatch):
    monkeypatch.setattr(set_up.sys, "version_info", (3, 10, 13))
    said, commands = ran("--torch", PINNED)
    assert re.fullmatch(r"finegrained-kernels needs Python 3.11 or newer, and .* is 3.10.13. Name another.*", said)
    assert commands == []


@pytest.mark.parametrize(("code", "how"), [(1, "ended with status 1"), (-9, "was stopped by signal 9")])
def test_an_interrupted_installation_is_begun_again(ran, monkeypatch, tmp_path, code, how):
    def fail(command, **_):
        raise subprocess.CalledProcessError(code, command)

    recorded = set_up.subprocess.run
    monkeypatch.setattr(set_up.subprocess, "run", fail)
    said, _ = ran("--torch", PINNED)
    assert re.fullmatch(rf"setting up .* failed: `.*` {how}\. Run the same command again to begin anew", said)
    monkeypatch.setattr(set_up.subprocess, "run", recorded)
    (tmp_path / "venv").mkdir(exist_ok=True)
    (tmp_path / "venv" / ".ready").write_text("{")
    assert ran("--torch", PINNED)[1]


def test_ctrl_c_is_one_line(ran, monkeypatch):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(set_up.subprocess, "run", interrupt)
    said, _ = ran("--torch", PINNED)
    assert re.fullmatch(r"interrupted while setting up .*: the same command begins anew", said)


@with_make
@pytest.mark.parametrize("settings", [(), ("PYTHON=python3",), ("TORCH=",)])
def test_make_hands_over_what_it_was_told(settings):
    command = ["make", "--dry-run", "demo", *settings]
    # Inside `make test`, make would inherit settings, and print its directory.
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS", "PYTHON"))}
    result = subprocess.run(command, cwd=ROOT, env=clean, check=True, capture_output=True, text=True)
    line = result.stdout.splitlines()[0]
    assert ("--any-python" in line) == ("PYTHON=python3" not in settings)
    assert (PINNED in line) == ("TORCH=" not in settings)


def test_the_oldest_python_is_the_one_in_pyproject():
    oldest = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"]
    assert oldest == f">={'.'.join(map(str, set_up.OLDEST))}"


@pytest.mark.skipif(shutil.which("python3.10") is None, reason="needs a Python older than the project's oldest")
def test_an_old_python_can_read_the_script():
    command = ["python3.10", str(ROOT / "scripts" / "set_up.py"), "nowhere"]
    result = subprocess.run(command, capture_output=True, text=True)
    if "command not found" in result.stderr:
        pytest.skip("needs a Python older than the project's oldest")
    assert result.returncode == 1
    assert "needs Python 3.11 or newer" in result.stderr and result.stderr.count("\n") == 1


@pytest.mark.parametrize("path", sorted((ROOT / "requirements").glob("*.txt")), ids=lambda path: path.name)
def test_what_is_pinned_installs_on_the_oldest_python(path):
    oldest = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"].removeprefix(">=")
    for name in re.findall(r"^([\w-]+)==", path.read_text(), re.MULTILINE):
        try:
            wanted = importlib.metadata.metadata(name)["Requires-Python"]
        except importlib.metadata.PackageNotFoundError:
            continue  # `make check` installs it
        assert SpecifierSet(wanted or "").contains(f"{oldest}.99"), f"{name}: {wanted}"
