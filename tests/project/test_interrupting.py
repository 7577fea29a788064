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


AT_THE_END = """
import atexit, os, signal, sys
sys.argv[1:] = ["--version"]
signal.signal(signal.SIGINT, signal.{handler})
atexit.register(lambda: os.kill(os.getpid(), signal.SIGINT))
from finegrained_kernels.__main__ import main
main()
"""


@pytest.mark.parametrize("handler", ["default_int_handler", "SIG_IGN"])
def test_when_all_is_done(handler):
    """While Python ends, which takes torch a while; in a job in the background, which ignores Ctrl-C, in any case."""
    program = AT_THE_END.format(handler=handler)
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT)
    assert (result.returncode, result.stderr) == (0, "")
