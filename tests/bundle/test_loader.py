"""``finegrained_kernels.load()``: which copy of the bundle it returns, and which failures it does not hide."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import finegrained_kernels
from conftest import REPO_ID, ROOT
from finegrained_kernels import loader
from hub import Hub, Repository

NOWHERE = "http://127.0.0.1:9"  # the discard port: connections are refused at once
LOAD = "import finegrained_kernels as fk; print(fk.load().__file__)"
LOAD_CAUGHT = """
import finegrained_kernels as fk
try:
    fk.load({arguments})
except Exception as error:
    print(type(error).__name__, error)
"""


@pytest.fixture(scope="session")
def wheels(tmp_path_factory) -> list[Path]:
    """The wheel, built twice, the second time from a copy of the tree in another place."""
    copy = tmp_path_factory.mktemp("copy") / "tree"
    shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".*", "build", "dist", "__pycache__", "*.egg-info"))
    built = []
    for name, tree in (("first", ROOT), ("second", copy)):
        out = tmp_path_factory.mktemp(name)
        command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(out)]
        result = subprocess.run(command, cwd=tree, capture_output=True, text=True)
        assert result.returncode == 0, result.stderr
        built += out.glob("*.whl")
    return built


@pytest.fixture
def installed(tmp_path, wheels) -> Path:
    """A directory for PYTHONPATH in which the wheel is installed."""
    with zipfile.ZipFile(wheels[0]) as wheel:
        wheel.extractall(tmp_path / "site")
    return tmp_path / "site"


def variant_of_this_torch(installed: Path) -> Path:
    (package,) = installed.glob("finegrained_kernels/_bundle/build")
    return package / f"torch-{loader._torch_backend()}"


def test_wheel_is_reproducible(wheels):
    first, second = wheels
    assert first.name == second.name
    assert first.read_bytes() == second.read_bytes()


@pytest.mark.kernels_ci
def test_load_is_get_kernel(bundle, monkeypatch):
    monkeypatch.setattr(loader, "_loaded", {})
    assert finegrained_kernels.load() is bundle
    monkeypatch.setattr(loader, "get_kernel", lambda *_, **__: pytest.fail("looked for the bundle a second time"))
    assert finegrained_kernels.load() is bundle
    assert finegrained_kernels.load(version=1) is bundle


def test_local_copy_with_content_already_loaded_is_that_module(bundle, bundle_dir, tmp_path):
    twin = shutil.copytree(bundle_dir, tmp_path / "build") / Path(bundle.__file__).parent.name
    assert loader._load_local(twin, loader._torch_backend()) is bundle


def test_from_the_hub_then_from_the_wheel_offline(run_python, bundle_dir, installed, tmp_path):
    with Hub({REPO_ID: Repository(bundle_dir.parent)}) as hub:
        online = run_python(LOAD, HF_ENDPOINT=hub.url, PYTHONPATH=str(installed))
    assert online.stdout.startswith(str(tmp_path / "hf"))
    offline = run_python(LOAD, HF_HUB_OFFLINE="1", PYTHONPATH=str(installed))
    assert offline.stdout.startswith(str(variant_of_this_torch(installed)))


def test_wheel_where_the_hub_is_out_of_reach(run_python, installed):
    result = run_python(LOAD, HF_ENDPOINT=NOWHERE, PYTHONPATH=str(installed))
    assert result.stdout.startswith(str(variant_of_this_torch(installed)))


@pytest.mark.parametrize("lacks", ["repository", "version", "variant"])
def test_wheel_where_the_hub_lacks_the_bundle(run_python, bundle_dir, installed, tmp_path, lacks):
    source = bundle_dir.parent
    if lacks == "variant":
        source = tmp_path / "other"
        shutil.copytree(bundle_dir / "torch-rocm", source / "build" / "torch-neuron")
    repositories = {REPO_ID: Repository(source, version=7 if lacks == "version" else 1)}
    with Hub({} if lacks == "repository" else repositories) as hub:
        result = run_python(LOAD, HF_ENDPOINT=hub.url, PYTHONPATH=str(installed))
    assert result.stdout.startswith(str(variant_of_this_torch(installed)))


def test_checkout_without_the_hub(run_python, bundle_dir, tmp_path):
    checkout = tmp_path / "checkout"
    shutil.copytree(ROOT / "finegrained_kernels", checkout / "finegrained_kernels")
    shutil.copytree(bundle_dir, checkout / "build")
    result = run_python(LOAD, HF_HUB_OFFLINE="1", PYTHONPATH=str(checkout))
    assert result.stdout.startswith(str(checkout / "build"))


def test_nothing_found_says_what_was_tried_and_what_to_do(run_python, tmp_path):
    shutil.copytree(ROOT / "finegrained_kernels", tmp_path / "bare" / "finegrained_kernels")
    result = run_python(LOAD_CAUGHT.format(arguments=""), HF_ENDPOINT=NOWHERE, PYTHONPATH=str(tmp_path / "bare"))
    assert result.stdout.startswith("BundleUnavailableError")
    for text in (f"get_kernel('{REPO_ID}'", "Connection refused", "_bundle", "make bundle", "LOCAL_KERNELS="):
        assert text in result.stdout


def test_the_wheel_does_not_stand_in_for_another_version(run_python, installed):
    requests = ("version=2", "revision='main'", "repo_id='someone/else'")
    code = "".join(LOAD_CAUGHT.format(arguments=request) for request in requests)
    result = run_python(code, HF_HUB_OFFLINE="1", PYTHONPATH=str(installed))
    assert result.stdout.count("BundleUnavailableError") == len(requests)


def test_untrusted_publisher_is_an_error(run_python, bundle_dir, installed):
    # Even while another error, one that would count as an absent hub, is being handled.
    code = f"try:\n    raise ConnectionError\nexcept ConnectionError:\n    {LOAD.replace('; ', chr(10) + '    ')}"
    with Hub({REPO_ID: Repository(bundle_dir.parent)}, trusted=False) as hub:
        result = run_python(code, check=False, HF_ENDPOINT=hub.url, PYTHONPATH=str(installed))
        assert "is not from a trusted publisher" in result.stderr
        trusting = run_python(
            LOAD.replace("load()", "load(trust_remote_code=True)"), HF_ENDPOINT=hub.url, PYTHONPATH=str(installed)
        )
    assert result.returncode
    assert "hf" in Path(trusting.stdout).parts


def test_local_kernels_that_is_not_there_is_an_error(run_python, installed, tmp_path):
    result = run_python(
        LOAD_CAUGHT.format(arguments=""), LOCAL_KERNELS=f"{REPO_ID}={tmp_path / 'gone'}", PYTHONPATH=str(installed)
    )
    assert result.stdout.startswith("FileNotFoundError")
    assert str(tmp_path / "gone") in result.stdout


def test_tampered_wheel_does_not_run(run_python, installed):
    source = variant_of_this_torch(installed) / "__init__.py"
    source.write_text(source.read_text() + "\nprint('ran')\n")
    result = run_python(LOAD_CAUGHT.format(arguments=""), HF_HUB_OFFLINE="1", PYTHONPATH=str(installed))
    assert result.stdout.startswith("BundleIntegrityError")
    assert "__init__.py" in result.stdout
    assert "ran" not in result.stdout.split()


def test_tampered_hub_is_an_error(run_python, bundle_dir, installed):
    repository = Repository(bundle_dir.parent)
    path = f"build/torch-{loader._torch_backend()}/__init__.py"
    repository.files[path] += b"\n"
    with Hub({REPO_ID: repository}) as hub:
        result = run_python(LOAD_CAUGHT.format(arguments=""), HF_ENDPOINT=hub.url, PYTHONPATH=str(installed))
    assert result.stdout.startswith("BundleIntegrityError")


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("no metadata", ""),
        ("not JSON", ""),
        ("no digest", "metadata.json carries no digest to check the files against"),
        ("extra file", "extra.py"),
        ("missing file", "_ops.py"),
    ],
)
def test_every_kind_of_damage_is_noticed(bundle_dir, tmp_path, fault, said):
    variant = shutil.copytree(bundle_dir / "torch-cpu", tmp_path / "torch-cpu")
    loader._verify(variant)
    metadata = variant / "metadata.json"
    if fault == "no metadata":
        metadata.unlink()
    elif fault == "not JSON":
        metadata.write_text(metadata.read_text()[:-3])
    elif fault == "no digest":
        metadata.write_text(metadata.read_text().replace('"digest"', '"digests"'))
    elif fault == "extra file":
        (variant / "extra.py").touch()
    else:
        (variant / "_ops.py").unlink()
    advice = "; remove this copy, then install or download it again, or rebuild it"
    with pytest.raises(finegrained_kernels.BundleIntegrityError, match=f"torch-cpu: .*{said}.*{advice}$"):
        loader._verify(variant)


PLANTED = """
import importlib._bootstrap_external, importlib.util, pathlib, sys
source = pathlib.Path(sys.argv[1])
code = compile("print('planted'); raise SystemExit(7)", str(source), "exec")
status = source.stat()
data = importlib._bootstrap_external._code_to_timestamp_pyc(code, int(status.st_mtime), status.st_size)
cache = pathlib.Path(importlib.util.cache_from_source(source))
cache.parent.mkdir(exist_ok=True)
cache.write_bytes(data)
"""


@pytest.mark.parametrize("module", ["__init__.py", "csf/scales.py", "gemm/cpu.py"])
@pytest.mark.parametrize("named", [False, True], ids=["packaged", "LOCAL_KERNELS"])
def test_planted_bytecode_does_not_run(installed, run_python, module, named):
    """The bytecode has the size and time of the source, and the sources match their digest."""
    variant = variant_of_this_torch(installed)
    subprocess.run([sys.executable, "-c", PLANTED, str(variant / module)], check=True)
    environment = {"LOCAL_KERNELS": f"{REPO_ID}={variant.parent}"} if named else {}
    code = "import finegrained_kernels as fk, torch; fk.load().matmul_2d(torch.ones(1, 32).bfloat16(), "
    code += "torch.zeros(16, 16, dtype=torch.uint8), None, torch.zeros(16, 2).to(torch.float8_e4m3fn), "
    code += "activation_format='bf16'); print('fine')"
    result = run_python(code, PYTHONPATH=str(installed), HF_ENDPOINT=NOWHERE, **environment)
    assert result.stdout == "fine\n"


def test_a_packaged_copy_of_another_version_is_refused(installed, run_python):
    metadata = variant_of_this_torch(installed) / "metadata.json"
    metadata.write_text(metadata.read_text().replace('"version": 1', '"version": 2'))
    result = run_python(LOAD_CAUGHT.format(arguments=""), PYTHONPATH=str(installed), HF_ENDPOINT=NOWHERE)
    assert "BundleIntegrityError" in result.stdout and "says version 2, expected 1" in result.stdout
