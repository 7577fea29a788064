"""What linters do not check: sizes, star imports, options in environment variables, and what CI runs."""

from __future__ import annotations

import ast
import importlib
import re
import runpy
import subprocess
from pathlib import Path

import pytest

from conftest import ROOT

FOLDERS = ("benchmarks", "examples", "finegrained_kernels", "scripts", "tests", "torch-ext")
NOT_OURS = {"_bundle", "local"}  # a copy, and what benchmarks fetch
SOURCES = sorted(p for folder in FOLDERS for p in (ROOT / folder).rglob("*.py") if not NOT_OURS & {*p.parts})
MAX_LINES = 500
MAX_PARAMETERS, MAX_KERNEL_PARAMETERS = 10, 14
PUBLIC_GEMMS = {"matmul_2d", "matmul_batched", "matmul_grouped"}  # every option is an argument, as users expect
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
with_workflows = pytest.mark.skipif(not WORKFLOWS, reason="needs .github/workflows, which a source distribution lacks")


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_files_are_short_and_import_names(path: Path):
    text = path.read_text()
    assert text.count("\n") <= MAX_LINES
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom):
            assert all(name.name != "*" for name in node.names), f"line {node.lineno}: a star import"


def parameters(function: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) -> int:
    named = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
    return len(named) + (function.args.vararg is not None) + (function.args.kwarg is not None)


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_functions_take_few_arguments(path: Path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            name = getattr(node, "name", "lambda")
            most = MAX_KERNEL_PARAMETERS if name.endswith("_kernel") else MAX_PARAMETERS
            assert parameters(node) <= most or name in PUBLIC_GEMMS, f"{name}, line {node.lineno}"


def test_the_bundle_has_no_options_in_the_environment():
    for path in (ROOT / "torch-ext").rglob("*.py"):
        assert not re.search(r"\bos\.(environ|getenv)", path.read_text()), path


def steps(workflow: Path) -> list[str]:
    """The commands of its `run:` steps, in both of YAML's forms, found without a YAML parser."""
    text = workflow.read_text()
    blocks = re.findall(r"^( *)(?:- )?run: \|\n((?:\1 +.*\n|\n)+)", text, re.MULTILINE)
    return re.findall(r"run: (?!\|)(.+)", text) + [block for _, block in blocks]


@with_workflows
@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_what_workflows_run_is_shell_that_exists(path: Path):
    found = steps(path)
    assert len(found) == len(re.findall(r"\brun:", path.read_text()))
    makefile = (ROOT / "Makefile").read_text()
    for command in found:
        shell = re.sub(r"\$\{\{.*?\}\}", "x", command)
        assert subprocess.run(["bash", "-n", "-c", shell], capture_output=True).returncode == 0, command
        for target in re.findall(r"\bmake (\w+)", command):
            assert re.search(rf"^{target}:", makefile, re.MULTILINE), f"make {target}"
        for script in re.findall(r"(?:scripts|benchmarks|tests)/[\w./]+\.py", command):
            assert (ROOT / script).exists(), script


@with_workflows
@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_workflows_may_only_read_unless_a_job_says_otherwise(path: Path):
    text = path.read_text()
    assert "\npermissions:\n  contents: read\n" in text
    assert text.count("timeout-minutes:") == text.count("runs-on:")


def test_tests_do_not_import_one_another():
    """What several tests need is in tests/support, so no test depends on another."""
    importing = re.compile(r"^\s*(?:from|import) test_\w+", re.MULTILINE)
    assert not [path for path in (ROOT / "tests").rglob("*.py") if importing.search(path.read_text())]


def test_benchmarks_do_not_import_one_another():
    """What several benchmarks share is in modules that measure nothing: `HELPERS` in benchmarks/run.py."""
    folder = ROOT / "benchmarks"
    benchmarks = {path.stem for path in folder.glob("*.py")} - runpy.run_path(str(folder / "run.py"))["HELPERS"]
    importing = re.compile(rf"^(?:from|import) ({'|'.join(benchmarks)})\b", re.MULTILINE)
    assert not [(path, found) for path in folder.rglob("*.py") if (found := importing.findall(path.read_text()))]


@pytest.mark.parametrize("name", ["mutation_check", "mutation_check_gpu"])
def test_deliberate_faults_are_where_the_code_is(name):
    pytest.importorskip("triton")
    for fault in importlib.import_module(name).FAULTS:
        assert (ROOT / fault.path).read_text().count(fault.before) == 1, fault.name
