"""The wheel as pip installs it, in an environment with its dependencies and nothing else, and without access to a
hub."""

from __future__ import annotations

import os
import site
import subprocess
import sys
import venv
from email.parser import Parser
from pathlib import Path

import pytest

import checkpoints
from conftest import ROOT

USE = """
import finegrained_kernels, kernels, torch
csf = finegrained_kernels.load()
scales = (torch.arange(2 * 16 * 4) * 37 % 256).to(torch.uint8).view(2, 16, 4)
fixed, exceptions = csf.compress_nvfp4_csf_scales(scales)
prepared = csf.prepare_nvfp4_csf_scales(fixed, exceptions, num_rows=16, num_cols=4)
assert torch.equal(csf.decompress_nvfp4_csf_scales(prepared).view(torch.uint8), scales)
print(csf.__file__)
"""


@pytest.fixture(scope="module")
def environment(tmp_path_factory) -> Path:
    """A new virtual environment with the wheel, installed by pip from its file, and this environment's packages."""
    home = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(home)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    venv.create(home / "venv", with_pip=True)
    (packages,) = (home / "venv").glob("lib/python*/site-packages")
    # A plain path in a .pth file; an editable install of this checkout, which is such a file itself, is not inherited.
    inherited = [*site.getsitepackages(), *(path for path in sys.path if path.endswith("site-packages"))]
    (packages / "inherited.pth").write_text("\n".join(dict.fromkeys(inherited)) + "\n")
    (wheel,) = home.glob("*.whl")
    install = [
        home / "venv/bin/python",
        "-m",
        "pip",
        "install",
        "-q",
        "--no-deps",
        "--no-index",
        "--no-cache-dir",
        wheel,
    ]
    subprocess.run(install, check=True, capture_output=True)
    return home / "venv"


def run(environment: Path, tmp_path: Path, *command: str) -> str:
    hidden = ("HF_", "HUGGING", "LOCAL_KERNELS", "KERNELS_", "PYTHON")
    variables = {name: value for name, value in os.environ.items() if not name.startswith(hidden)}
    variables |= {"HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "1"}
    command = (str(environment / "bin" / command[0]), *command[1:])
    result = subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def test_load_takes_the_packaged_variant(environment, tmp_path):
    path = Path(run(environment, tmp_path, "python", "-c", USE).strip())
    assert path.is_relative_to(environment)
    assert path.parts[-4:-2] == ("_bundle", "build")


def test_the_command_works(environment, tmp_path):
    assert run(environment, tmp_path, "finegrained-kernels", "--version").startswith("finegrained-kernels 0.")
    source = checkpoints.random_moe(hidden=256, inter=128)
    checkpoints.write_checkpoint(tmp_path / "source", source, checkpoints.MODELOPT_CONFIG)
    run(environment, tmp_path, "finegrained-kernels", "compress", "source", "small")
    assert "equal to the source" in run(
        environment, tmp_path, "finegrained-kernels", "verify", "small", "--against", "source"
    )


def test_what_is_in_it(environment):
    (info,) = environment.glob("lib/python*/site-packages/finegrained_kernels-*.dist-info")
    metadata = Parser().parsestr((info / "METADATA").read_text())
    version = metadata["Version"]
    assert f"## {version}" in (ROOT / "CHANGELOG.md").read_text()
    assert (metadata["License-Expression"], metadata["Requires-Python"]) == ("Apache-2.0", ">=3.11")
    assert {path.name for path in (info / "licenses").iterdir()} == {"LICENSE", "NOTICE"}
    installed = {line.partition(",")[0] for line in (info / "RECORD").read_text().splitlines()}
    tops = {path.partition("/")[0] for path in installed if not path.startswith("..")}
    assert tops == {"finegrained_kernels", info.name}
    for backend in ("cpu", "cuda", "rocm", "xpu"):
        assert f"finegrained_kernels/_bundle/build/torch-{backend}/metadata.json" in installed
