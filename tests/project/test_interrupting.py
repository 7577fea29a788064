"""Ctrl-C at any moment of the program: one line, status 130, and never a traceback."""

from __future__ import annotations

import subprocess
import sys

import pytest
from typer.testing import CliRunner

import checkpoints
from conftest import ROOT
from finegrained_kernels.checkpoint import commands
from finegrained_kernels.cli import app

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
"""Runs the program, and sends Ctrl-C at an event that Python audits: an import, or the opening of a file."""


@pytest.mark.parametrize("module", ["finegrained_kernels.cli", "torch", "torch.nn.modules"])
def test_while_it_starts(module):
    command = [sys.executable, "-c", PROGRAM, "import", module, "compress", "nothing", "nowhere"]
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert (result.returncode, result.stdout, result.stderr) == (130, "", "interrupted\n")


def test_while_it_works(tmp_path):
    source = tmp_path / "source"
    checkpoints.write_checkpoint(source, checkpoints.random_moe(hidden=64, inter=32), checkpoints.MODELOPT_CONFIG)
    arguments = ["open", str(source / "config.json"), "compress", str(source), str(tmp_path / "out")]
    result = subprocess.run([sys.executable, "-c", PROGRAM, *arguments], capture_output=True, text=True, cwd=ROOT)
    assert (result.returncode, result.stdout, result.stderr) == (130, "", "interrupted; run again to resume\n")


@pytest.mark.parametrize(
    ("command", "resumes"),
    [("compress", True), ("quantize", True), ("restore", True), ("verify", False), ("inspect", False), ("push", False)],
)
def test_whether_it_resumes_is_said(tmp_path, monkeypatch, command, resumes):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    for name in (command, "bytes_to_check", "restored_bytes"):
        monkeypatch.setattr(commands.checkpoints if name == command else commands, name, interrupt)
    second = [] if command in ("verify", "inspect") else ["a/b"]
    result = CliRunner().invoke(app, [command, str(tmp_path), *second])
    assert (result.exit_code, result.stdout) == (130, "")
    assert result.stderr == ("interrupted; run again to resume\n" if resumes else "interrupted\n")


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
    """While Python exits, which takes a while with torch; and in a background job, which always ignores Ctrl-C."""
    program = AT_THE_END.format(handler=handler)
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT)
    assert (result.returncode, result.stderr) == (0, "")
