"""The built bundle: its content, that builds are reproducible, and the ways in which get_kernel finds it."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest
from kernels import get_local_kernel

from build_bundle import BundleError, build
from conftest import REPO_ID, ROOT
from hub import Hub, Repository

BACKENDS = ("cpu", "cuda", "rocm", "xpu")
CODEC = {
    "NVFP4CSFScales",
    "compress_nvfp4_csf_scales",
    "csf_workspace_size",
    "decompress_nvfp4_csf_scales",
    "prepare_nvfp4_csf_scales",
}

# Load by get_kernel in a fresh process, and use what was loaded.
GET_KERNEL = f"""
import torch
from kernels import get_kernel
bundle = get_kernel("{REPO_ID}", version=1)
scales = (torch.arange(2 * 16 * 4) * 37 % 256).to(torch.uint8).view(2, 16, 4)
fixed, exceptions = bundle.compress_nvfp4_csf_scales(scales)
prepared = bundle.prepare_nvfp4_csf_scales(fixed, exceptions, num_rows=16, num_cols=4)
assert torch.equal(bundle.decompress_nvfp4_csf_scales(prepared).view(torch.uint8), scales)
print(bundle.__name__)
"""

TINY_SOURCE = """\
import torch

from ._ops import add_op_namespace_prefix, ops

__all__ = ["answer"]


@torch.library.custom_op(add_op_namespace_prefix("constant"), mutates_args=())
def _constant(x: torch.Tensor) -> torch.Tensor:
    return torch.full_like(x, VALUE)


def answer():
    return int(ops.constant(torch.zeros(())))
"""


def tiny_tree(directory: Path, source: str = TINY_SOURCE, **files: str) -> Path:
    """A checkout with this project's build.toml and a bundle of one module, plus ``files`` (by path)."""
    module = directory / "torch-ext" / "finegrained_kernels"
    for path, content in {"__init__.py": source.replace("VALUE", "1"), **files}.items():
        (module / path).parent.mkdir(parents=True, exist_ok=True)
        (module / path).write_text(content)
    shutil.copy(ROOT / "build.toml", directory)
    return directory


def contents(directory: Path) -> dict[str, bytes]:
    paths = (path for path in directory.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {path.relative_to(directory).as_posix(): path.read_bytes() for path in paths}


def name_in(variant: Path) -> str:
    return json.loads((variant / "metadata.json").read_text())["id"]


def test_build_toml_is_what_kernel_builder_reads():
    rust = pytest.importorskip("kernels._rust", reason="kernels 0.16 has no reader for build.toml")
    backends = rust.Build.open(ROOT).general.backends
    assert sorted(str(backend) for backend in backends) == sorted(BACKENDS)


@pytest.mark.kernels_ci
def test_get_kernel_loads_the_bundle(bundle, bundle_dir):
    assert Path(bundle.__file__).parent.parent == bundle_dir
    assert set(bundle.__all__) >= CODEC
    assert all(hasattr(bundle, name) for name in bundle.__all__)


def test_variants_hold_the_source_and_what_is_generated(bundle_dir):
    assert {path.name for path in bundle_dir.iterdir()} == {f"torch-{backend}" for backend in BACKENDS}
    source = contents(ROOT / "torch-ext" / "finegrained_kernels")
    for variant in bundle_dir.iterdir():
        built = contents(variant)
        assert built.keys() - source.keys() == {"_ops.py", "metadata.json"}
        assert all(built[path] == source[path] for path in built.keys() & source.keys())


def test_same_tree_same_bytes(tmp_path, bundle_dir):
    shutil.copytree(ROOT / "torch-ext", tmp_path / "copy" / "torch-ext")
    shutil.copy(ROOT / "build.toml", tmp_path / "copy")
    module = tmp_path / "copy" / "torch-ext" / "finegrained_kernels"
    (module / "__pycache__").mkdir(exist_ok=True)
    (module / "__pycache__" / "stale.py").write_text("not source")
    (module / "notes.txt").write_text("not among pyext")
    build(tmp_path / "copy", tmp_path / "again")
    assert contents(tmp_path / "again") == contents(bundle_dir)


def test_ids_name_the_content(tmp_path):
    first = build(tiny_tree(tmp_path / "a"), tmp_path / "first")
    second = build(tiny_tree(tmp_path / "b", TINY_SOURCE + "\n"), tmp_path / "second")
    ids = [name_in(variant) for variant in [*first, *second]]
    assert len(set(ids)) == 2 * len(BACKENDS)


def test_two_builds_live_in_one_process(tmp_path):
    one = build(tiny_tree(tmp_path / "a"), tmp_path / "one")
    two = build(tiny_tree(tmp_path / "b", TINY_SOURCE.replace("VALUE", "2")), tmp_path / "two")
    cpu = BACKENDS.index("cpu")
    first, second = get_local_kernel(one[cpu]), get_local_kernel(two[cpu])
    assert (first.answer(), second.answer(), first.answer()) == (1, 2, 1)


def test_a_build_replaces_the_one_before(tmp_path):
    build(tiny_tree(tmp_path / "a", **{"gone.py": "", "deep/gone.py": ""}), tmp_path / "build")
    build(tiny_tree(tmp_path / "b"), tmp_path / "build")
    assert contents(tmp_path / "build" / "torch-cpu").keys() == {"__init__.py", "_ops.py", "metadata.json"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", "build"]


def test_a_build_does_not_replace_anything_else(tmp_path):
    (tmp_path / "precious").write_text("")
    with pytest.raises(BundleError, match="holds more than a bundle"):
        build(tiny_tree(tmp_path / "a"), tmp_path)
    assert (tmp_path / "precious").exists()


OPERATOR = "import torch\n@torch.library.custom_op({name}, mutates_args=())\ndef f(x: torch.Tensor) -> None: ...\n"


@pytest.mark.parametrize(
    ("path", "source", "message"),
    [
        ("__init__.py", "__all__ = sorted(['a'])", "__init__.py:1: __all__ must be assigned a literal list"),
        ("__init__.py", "", "__all__ must be assigned a literal list"),
        ("_ops.py", "", "_ops.py: generated at build time"),
        ("finegrained_kernels/__init__.py", "", "a directory of the bundle's own name"),
        ("part.py", "\nimport numpy as np", "part.py:2: imports 'numpy'"),
        ("part.py", "from finegrained_kernels import formats", "imports 'finegrained_kernels'"),
        ("deep/part.py", "from ... import formats", "deep/part.py:1: a relative import that leaves the bundle"),
        ("part.py", "from .formats import *", "star import"),
        ("part.py", "match 1:\n    case _: pass", "not valid in Python 3.9"),
        ("part.py", OPERATOR.format(name="'csf::f'"), "part.py:2: custom_op must be given a literal"),
        ("part.py", OPERATOR.format(name="add_op_namespace_prefix(NAME)"), "custom_op must be given a literal"),
    ],
)
def test_a_broken_rule_is_named(tmp_path, path, source, message):
    with pytest.raises(BundleError) as error:
        build(tiny_tree(tmp_path / "tree", **{path: source}), tmp_path / "build")
    assert message in str(error.value)
    assert not (tmp_path / "build").exists()


def test_rules_accept_what_bundles_do(tmp_path):
    source = "from __future__ import annotations\nimport json\nimport triton.language as tl\nfrom ..part import f\n"
    part = OPERATOR.format(name='add_op_namespace_prefix("f")') + "@f.register_fake\ndef _(x): ...\n"
    build(tiny_tree(tmp_path / "tree", **{"deep/inner.py": source, "part.py": part}), tmp_path / "build")


@pytest.mark.parametrize("backend", ["cpu", "cuda"])
def test_importing_touches_no_driver(run_python, bundle_dir, backend):
    result = run_python(f"""
import pathlib, sys, torch, kernels
def drivers():
    maps = pathlib.Path("/proc/self/maps").read_text()
    return [name for name in ("libcuda.so", "libamdhip64", "libze_loader") if name in maps]
before = drivers()
kernels.get_local_kernel(pathlib.Path({str(bundle_dir / f"torch-{backend}")!r}))
assert not torch.cuda.is_initialized()
assert drivers() == before
triton_driver = sys.modules.get("triton.runtime.driver")
assert triton_driver is None or triton_driver.driver._active is None
print("imported")
""")
    assert result.stdout == "imported\n"


def test_get_kernel_from_the_hub(run_python, bundle_dir):
    with Hub({REPO_ID: Repository(bundle_dir.parent)}) as hub:
        result = run_python(GET_KERNEL, HF_ENDPOINT=hub.url)
        assert any("/resolve/" in path for path in hub.requests)
    assert result.stdout.strip() in {name_in(variant) for variant in bundle_dir.iterdir()}


def test_get_kernel_offline_after_the_repository_was_fetched(run_python, bundle_dir):
    # The whole repository, by its branch: get_kernel itself fetches one variant by commit, and does not find it again
    # offline.
    fetch = f"import huggingface_hub as h; h.snapshot_download('{REPO_ID}', repo_type='kernel', revision='v1')"
    with Hub({REPO_ID: Repository(bundle_dir.parent)}) as hub:
        run_python(fetch, HF_ENDPOINT=hub.url)
    result = run_python(GET_KERNEL, HF_HUB_OFFLINE="1")
    assert result.stdout.strip() in {name_in(variant) for variant in bundle_dir.iterdir()}


def test_get_kernel_offline_from_a_cache_laid_by_hand(run_python, bundle_dir, tmp_path):
    commit = "0123456789abcdef0123456789abcdef01234567"
    repository = tmp_path / "hf" / "hub" / "kernels--kernels-community--finegrained-kernels"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "v1").write_text(commit)
    shutil.copytree(bundle_dir, repository / "snapshots" / commit / "build")
    result = run_python(GET_KERNEL, HF_HUB_OFFLINE="1")
    assert result.stdout.strip() in {name_in(variant) for variant in bundle_dir.iterdir()}


def test_flake_parses():
    if (nix := shutil.which("nix-instantiate")) is None:
        pytest.skip("needs nix-instantiate (Debian's nix-bin; .ci/unpack-nix fetches it)")
    result = subprocess.run([nix, "--parse", ROOT / "flake.nix"], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert "genKernelFlakeOutputs" in result.stdout
