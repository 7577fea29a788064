"""Ctrl-C at any moment of the program: one line, status 130, and never a traceback."""

from __future__ import annotations

import subprocess
import sys

import pytest

import checkpoints
from conftest import ROOT

PROGRAM = """
import os, runpy, signal, sys
sys.argv, event, name = ["finegrained-kernels", *sys.argv[3:]], *sys.argv[1:3]
def hook(seen, arguments):
    if event == seen and name in map(str, arguments):
        os.kill(os.getpid(), signal.SIGINT)
sys.addaudithook(hook)
signal.signal(signal.SIGINT, signal.default_int_handler)  # as for a program that a terminal starts
runpy.run_module("finegrained_kernels", run_name="__main__", alter_sys=True)
"""
"""Runs the program, and presses Ctrl-C at an event that Python audits: an import, or a file that is opened."""


@pytest.mark.parametrize("module", ["finegrained_kernels.cli", "typer", "torch", "torch.nn.modules", "kernels"])
def test_while_it_starts(module):
    command = [sys.executable, "-c", PROGRAM, "import", module, "compress", "nothing", "nowhere"]
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert (result.returncode, result.stdout, result.stderr) == (130, "", "interrupted\n")


@pytest.mark.parametrize(
    ("command", "said"),
    [("compress", "interrupted; run again to resume\n"), ("inspect", "interrupted\n")],
)
def test_while_it_works(tmp_path, command, said):
    source = tmp_path / "source"
    checkpoints.write_checkpoint(source, checkpoints.random_moe(hidden=64, inter=32), checkpoints.MODELOPT_CONFIG)
    destination = [str(tmp_path / "out")] if command == "compress" else []
    arguments = ["open", str(source / "config.json"), command, str(source), *destination]
    result = subprocess.run([sys.executable, "-c", PROGRAM, *arguments], capture_output=True, text=True, cwd=ROOT)
    assert (result.returncode, result.stdout, result.stderr) == (130, "", said)


def test_a_background_job_ignores_it():
    """As Python does in a process that starts with SIGINT ignored."""
    program = (
        "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN); import os, sys; sys.argv[1:] = ['--version']\n"
    )
    program += "from finegrained_kernels.__main__ import main\nimport atexit\n"
    program += "atexit.register(lambda: os.kill(os.getpid(), signal.SIGINT))\nmain()"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT)
    assert (result.returncode, result.stderr) == (0, "")
