"""`finegrained-kernels doctor`: what it finds, what it advises, and the command line around it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import finegrained_kernels
from finegrained_kernels import cli, doctor

pytestmark = pytest.mark.usefixtures("bundle")


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    monkeypatch.setattr(doctor.constants, "HF_HUB_OFFLINE", True)


def found(name: str) -> doctor.Finding:
    return next(finding for finding in doctor.findings() if finding.name == name)


def test_all_is_well_here():
    findings = list(doctor.findings())
    assert [finding for finding in findings if finding.state == "fault"] == []
    assert all(finding.advice for finding in findings if finding.state != "ok")
    assert {"bundle", "decoding, cpu", "GEMM, cpu"} <= {finding.name for finding in findings}
    assert "LOCAL_KERNELS" in found("bundle").found


def test_a_torch_without_cuda_beside_a_gpu(monkeypatch):
    monkeypatch.setattr(doctor.shutil, "which", lambda name: "/usr/bin/nvidia-smi")
    monkeypatch.setattr(torch.version, "cuda", None)
    assert found("torch").state == "fault"


def test_a_driver_that_is_too_old(monkeypatch):
    monkeypatch.setattr(doctor.shutil, "which", lambda name: "/usr/bin/nvidia-smi")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert found("GPU").state == "fault" and "nvidia-smi" in found("GPU").advice


@pytest.mark.parametrize(
    ("name", "patches", "said"),
    [
        ("torch", {"torch.version.cuda": "13.0"}, "built for CUDA 13.0"),
        ("torch", {"torch.version.cuda": None, "torch.version.hip": None}, "a build for the CPU"),
        (
            "torch",
            {"shutil.which": lambda _: "nvidia-smi", "torch.version.cuda": None},
            "this machine has an NVIDIA GPU, which this torch cannot use: install one for CUDA",
        ),
        (
            "GPU",
            {"torch.cuda.is_available": lambda: False, "torch.version.cuda": None},
            "none: everything runs on the CPU -> models want a GPU, checkpoints do not",
        ),
        (
            "GPU",
            {
                "shutil.which": lambda _: "nvidia-smi",
                "torch.version.cuda": "13.0",
                "torch.cuda.is_available": lambda: False,
            },
            "torch finds none -> run nvidia-smi: the driver may be too old for this torch",
        ),
        (
            "GPU",
            {
                "torch.cuda.is_available": lambda: True,
                "torch.cuda.get_device_name": lambda: "MI300X",
                "torch.version.hip": "6.4",
            },
            "MI300X: portable Triton kernels -> compiled for gfx942 and gfx950, never run on one",
        ),
        (
            "GPU",
            {
                "torch.cuda.is_available": lambda: True,
                "torch.cuda.get_device_name": lambda: "L40S",
                "torch.version.hip": None,
                "torch.cuda.get_device_capability": lambda: (8, 9),
            },
            "L40S (sm_89): tensor-core kernels -> compiled for it, never run on one",
        ),
        (
            "triton",
            {"importlib.util.find_spec": lambda _: None},
            "not installed -> pip install triton; the CPU does without",
        ),
        (
            "transformers",
            {"finegrained_kernels.doctor.installed": lambda name: {"kernels": "0.16.1"}.get(name)},
            "not installed, kernels 0.16.1 -> only for from_pretrained: pip install transformers accelerate",
        ),
        (
            "transformers",
            {
                "transformers.utils.is_kernels_available": lambda: True,
                "finegrained_kernels.doctor.installed": {"transformers": "5.20.0", "kernels": "0.17.2"}.get,
            },
            "5.20.0, kernels 0.17.2 -> device_map needs it: pip install accelerate",
        ),
        ("hub", {}, "HF_HUB_OFFLINE is set -> the cache, or the copy in this package, is used"),
        (
            "hub",
            {
                "huggingface_hub.constants.HF_HUB_OFFLINE": False,
                "huggingface_hub.constants.ENDPOINT": "http://127.0.0.1:9",
            },
            "is out of reach (ConnectError) -> without it, the copy in this package is used; hub ids do not work",
        ),
    ],
)
def test_what_is_said(monkeypatch, name, patches, said):
    if name == "transformers":
        pytest.importorskip("transformers", reason="needs transformers")
    for target, value in patches.items():
        monkeypatch.setattr(target, value)
    finding = found(name)
    shown = f"{finding.found} -> {finding.advice}" if finding.advice else finding.found
    assert shown.endswith(said), shown


@pytest.mark.parametrize(
    ("capability", "kernels"),
    [((8, 0), "portable"), ((8, 9), "tensor-core"), ((9, 0), "warpgroup"), ((10, 0), "block-scaled")],
)
def test_every_gpu_is_told_its_kernels(capability, kernels):
    assert kernels in doctor.kernels_for(capability)[0]


def test_a_transformers_that_takes_no_kernels_of_this_version(monkeypatch):
    utils = pytest.importorskip("transformers.utils", reason="needs transformers")
    monkeypatch.setattr(utils, "is_kernels_available", lambda: False)
    monkeypatch.setattr(doctor, "version", lambda package: {"transformers": "5.17.0"}.get(package, "0.17.2"))
    finding = found("transformers")
    assert finding.state == "fault" and "pip install 'kernels==0.16.*'" in finding.advice


def test_a_transformers_that_asks_for_kernels_that_nobody_has(monkeypatch):
    utils = pytest.importorskip("transformers.utils", reason="needs transformers")
    monkeypatch.setattr(utils, "is_kernels_available", lambda: False)
    monkeypatch.setattr(doctor, "version", lambda package: {"transformers": "5.24.0"}.get(package, "0.17.2"))
    monkeypatch.setattr(doctor, "requires", lambda _: ["kernels-data>=1", 'kernels<0.19,>=0.18.2; extra == "kernels"'])
    finding = found("transformers")
    assert finding.state == "note" and finding.advice.endswith("needs kernels<0.19,>=0.18.2")


def test_without_triton(monkeypatch):
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: None)
    assert found("triton").state == ("fault" if torch.cuda.is_available() else "note")


def test_a_cache_that_nobody_may_write(monkeypatch, tmp_path):
    def refuse(**_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(doctor.tempfile, "TemporaryFile", refuse)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "not" / "there"))
    finding = found("Triton cache")
    assert finding.state == "fault" and str(tmp_path) in finding.found
    assert finding.advice == "make it writable, or name another: TRITON_CACHE_DIR"
    assert found("hub cache").advice == "make it writable, or name another: HF_HUB_CACHE"


def test_a_hub_out_of_reach(monkeypatch):
    monkeypatch.setattr(doctor.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(doctor.constants, "ENDPOINT", "http://127.0.0.1:9")
    assert found("hub").state == "note" and "out of reach" in found("hub").found


def test_a_bundle_that_does_not_load(monkeypatch):
    def refuse():
        raise finegrained_kernels.BundleUnavailableError("found nowhere. Tried:\n  the hub\nConnect to the hub")

    monkeypatch.setattr(finegrained_kernels, "load", refuse)
    assert (found("bundle").state, found("bundle").advice) == ("fault", "Connect to the hub")


@pytest.mark.parametrize("message", ["", "one line", "Cannot find a build variant for this system in /empty:\n\n"])
def test_a_bundle_that_does_not_load_and_says_little(monkeypatch, message):
    def refuse():
        raise FileNotFoundError(message)

    monkeypatch.setattr(finegrained_kernels, "load", refuse)
    finding = found("bundle")
    assert finding.found == (message.strip() or "FileNotFoundError")
    assert finding.advice == "build or install what LOCAL_KERNELS names again"
    monkeypatch.setattr(doctor.loader, "is_overridden", lambda: False)
    assert found("bundle").advice == "build or install finegrained-kernels again"


@pytest.mark.parametrize(
    ("name", "said"),
    [("decompress_nvfp4_csf_scales", "1 of 5120 bytes differ"), ("matmul_2d", "sums are wrong")],
)
def test_a_bundle_that_is_wrong(monkeypatch, bundle, name, said):
    right = getattr(bundle, name)

    def wrong(*arguments, **options):
        result = right(*arguments, **options)
        result.view(torch.uint8).view(-1)[3] += 1
        return result

    monkeypatch.setattr(bundle, name, wrong)
    monkeypatch.setattr(finegrained_kernels, "load", lambda: bundle)
    (finding,) = [finding for finding in doctor.findings() if finding.state == "fault"]
    assert (finding.found, finding.advice) == (said, "report this, with all lines above")
    result = CliRunner().invoke(cli.app, ["doctor"])
    assert result.exit_code == 1 and "report this" in result.output and "Faults: 1" in result.output


def test_a_check_that_raises_is_a_fault():
    def fail():
        raise RuntimeError("first line\nsecond")

    finding = doctor._works("decoding", fail)
    assert (finding.state, finding.found) == ("fault", "RuntimeError: first line")


def test_the_command_at_80_columns():
    result = CliRunner().invoke(cli.app, ["doctor"], env={"COLUMNS": "80"})
    assert result.exit_code == 0, result.output
    assert "Nothing stands in the way." in result.output
    assert max(map(len, result.output.splitlines())) <= 80


@pytest.mark.parametrize("option", ["-h", "--help"])
@pytest.mark.parametrize("command", [(), ("doctor",), ("compress",), ("verify",)])
def test_help_by_either_name(command, option):
    result = CliRunner().invoke(cli.app, [*command, option])
    assert result.exit_code == 0 and "Usage: " in result.output


def test_the_module_is_the_command(tmp_path):
    command = [sys.executable, "-m", "finegrained_kernels", "--version"]
    root = Path(finegrained_kernels.__file__).parent.parent
    result = subprocess.run(command, capture_output=True, text=True, cwd=root)
    assert result.stdout == f"finegrained-kernels {finegrained_kernels.__version__}\n"
