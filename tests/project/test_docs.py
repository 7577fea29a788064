"""Every command and every Python block of the documents runs as a reader would type it, in a separate directory."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from kernels.compat import tomllib

import checkpoints
from conftest import REPO_ID, ROOT
from hub import Hub, Repository
from model_hub import ModelHub

DOCUMENTS = ["README.md", "CARD.md", "CONTRIBUTING.md", *(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NOT_COMMANDS = {"", "text", "plane", "fixed", "exceptions"}
"""Kinds of blocks that are diagrams, or the worked example in docs/format.md, which tests/codec/test_csf_codec.py
reads."""

SHELL, PYTHON = {"bash", "sh", "console"}, {"python"}

EXPERTS, LAYER = 128, 3
"""The number of experts and the layer in the Python code of docs/checkpoints.md."""


def blocks(document: str, languages: set[str]) -> list[str]:
    return [body for language, body in FENCE.findall((ROOT / document).read_text()) if language in languages]


def commands() -> Iterator[tuple[str, str]]:
    for document in sorted(DOCUMENTS):
        for block in blocks(document, SHELL):
            for line in block.replace("\\\n", "").splitlines():
                if line.strip() and not line.startswith("#"):
                    yield document, line


MAKE = [(document, line) for document, line in commands() if line.startswith("make ")]


def bf16_model(root: Path) -> None:
    """One layer of many experts in BF16, with short rows."""
    generator = torch.Generator().manual_seed(0)
    tensors = {"model.embed_tokens.weight": torch.randn(16, 64, generator=generator).bfloat16()}
    for expert in range(EXPERTS):
        for name, shape in (("gate_proj", (64, 128)), ("up_proj", (64, 128)), ("down_proj", (128, 64))):
            weight = torch.randn(shape, generator=generator).bfloat16()
            tensors[f"model.layers.{LAYER}.mlp.experts.{expert}.{name}.weight"] = weight
    checkpoints.write_checkpoint(root, tensors, checkpoints.CONFIG)


def transformers_model(root: Path) -> None:
    """A tiny model that transformers loads, with compressed scales."""
    pytest.importorskip("transformers", reason="needs transformers, the extra [transformers]")
    from moe_models import write_checkpoints

    root.parent.mkdir(parents=True)
    write_checkpoints(root.parent / "made", "qwen3_moe")["csf"].rename(root)


def for_this_machine(code: str) -> str:
    """`code`, changed to run on the CPU if there is no GPU."""
    if torch.cuda.is_available():
        return code
    return code.replace('device="cuda"', 'device="cpu"').replace('.to("cuda")', '.to("cpu")')


class Reader:
    """Runs what a reader of a document would run, in a directory with the checkpoints that documents mention, and with
    this repository's examples."""

    def __init__(self, home: Path, bundle_dir: Path, **environment: str) -> None:
        self.home = home
        (home / "examples").symlink_to(ROOT / "examples")
        bin_dir = home / "bin"
        bin_dir.mkdir()
        for name, module in (("python", ""), ("finegrained-kernels", " -m finegrained_kernels")):
            (bin_dir / name).write_text(f'#!/bin/sh\nexec "{sys.executable}"{module} "$@"\n')
            (bin_dir / name).chmod(0o755)
        hidden = ("HF_", "HUGGING", "LOCAL_KERNELS", "KERNELS_")
        self.environment = {name: value for name, value in os.environ.items() if not name.startswith(hidden)}
        self.environment |= {
            "PATH": f"{bin_dir}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "HF_HOME": str(home / "hf"),
            "LOCAL_KERNELS": f"{REPO_ID}={bundle_dir}",
            "OMP_NUM_THREADS": "1",
            **environment,
        }

    def run(self, *command: str) -> str:
        result = subprocess.run(command, cwd=self.home, env=self.environment, capture_output=True, text=True)
        assert result.returncode == 0, f"{' '.join(command)}\n{result.stdout}\n{result.stderr}"
        return result.stdout


def test_every_block_is_of_a_known_kind():
    for document in DOCUMENTS:
        text = (ROOT / document).read_text()
        languages = {language for language, _ in FENCE.findall(text)}
        assert languages <= NOT_COMMANDS | SHELL | PYTHON, document
        assert len(re.findall("^```", text, re.MULTILINE)) == 2 * len(FENCE.findall(text)), document
        assert not re.search(r"^ {4,}(make|python|pip|finegrained-kernels) ", text, re.MULTILINE), document


def test_readme_begins_with_the_commands_that_ci_runs():
    first, second = [line for document, line in commands() if document == "README.md"][:2]
    assert (first, second) == ("make demo", "make test")
    ci = (ROOT / ".ci" / "run").read_text()
    assert "\nmake test " in ci


@pytest.mark.parametrize(("document", "line"), MAKE, ids=[f"{document}: {line}" for document, line in MAKE])
def test_make_knows_the_target(document, line):
    """Make targets are not run inside `make test`: CI runs `test`, and tests/project/test_demo.py what `demo` runs."""
    result = subprocess.run([*line.partition("#")[0].split(), "--dry-run"], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_readme_commands(bundle_dir, tmp_path):
    documents = ("README.md", "docs/bundle.md")
    lines = [line for document, line in commands() if document in documents and not line.startswith("make ")]
    assert [line.split()[:2] for line in lines] == [
        ["python", "examples/generate.py"],
        *(["finegrained-kernels", name] for name in ("compress", "verify", "restore")),
        ["python", "-c"],
    ]
    transformers_model(tmp_path / "path" / "to" / "model-nvfp4-csf")
    source = checkpoints.random_moe(hidden=256, inter=128)
    checkpoints.write_checkpoint(tmp_path / "SRC", source, checkpoints.MODELOPT_CONFIG, shard_of=checkpoints.by_layer)
    with Hub({REPO_ID: Repository(bundle_dir.parent)}) as hub:
        reader = Reader(tmp_path, bundle_dir, HF_ENDPOINT=hub.url)
        printed = [reader.run("bash", "-c", line) for line in lines]
    assert printed[0].endswith("all generate the same tokens\n")
    assert checkpoints.tree(tmp_path / "OUT") == checkpoints.tree(tmp_path / "SRC")
    del reader.environment["LOCAL_KERNELS"]
    reader.environment["HF_HUB_OFFLINE"] = "1"
    found = reader.run("python", "-c", f"import kernels; print(kernels.get_kernel({REPO_ID!r}, version=1).__file__)")
    assert found.startswith(str(tmp_path / "hf"))


@pytest.mark.parametrize("document", ["README.md", "CARD.md", "docs/bundle.md", "docs/transformers.md"])
def test_python_blocks(bundle_dir, tmp_path, document):
    code = "\n".join(blocks(document, PYTHON))
    assert code
    if "model-nvfp4-csf" in code:
        transformers_model(tmp_path / "path" / "to" / "model-nvfp4-csf")
    Reader(tmp_path, bundle_dir).run("python", "-c", for_this_machine(code))


def test_checkpoints_document(bundle_dir, tmp_path):
    """Its commands in order, with a hub on the loopback, then its Python code, on the CPU if there is no GPU."""
    bf16_model(tmp_path / "model-bf16")
    lines = [line for document, line in commands() if document == "docs/checkpoints.md"]
    assert {line.split()[1] for line in lines} == {"compress", "verify", "inspect", "restore", "push", "quantize"}
    with ModelHub("org/model-nvfp4-csf") as hub:
        reader = Reader(tmp_path, bundle_dir, HF_ENDPOINT=hub.url, HF_TOKEN="hf_test", HF_HUB_DISABLE_XET="1")
        for line in lines:
            reader.run("bash", "-c", line)
    assert checkpoints.tree(tmp_path / "model-nvfp4-again") == checkpoints.tree(tmp_path / "model-nvfp4")
    assert "model.safetensors" in hub.files
    code = for_this_machine("\n".join(blocks("docs/checkpoints.md", PYTHON)))
    shapes = reader.run("python", "-c", f"{code}\nprint(scales.shape, tuple(global_scales.shape))").strip()
    assert shapes == f"({EXPERTS}, 32, 8) ({EXPERTS}, 2)"


def test_tutorial(bundle_dir, tmp_path):
    """Its blocks in order; the rows of a plane that it shows are those that its code prints."""
    pytest.importorskip("transformers", reason="needs transformers, the extra [transformers]")
    text = (ROOT / "docs" / "tutorial.md").read_text()
    reader = Reader(tmp_path, bundle_dir)
    printed = []
    for language, body in FENCE.findall(text):
        if language in SHELL:
            printed += [reader.run("bash", "-c", line) for line in body.splitlines()]
        elif language in PYTHON:
            printed.append(reader.run("python", "-c", for_this_machine(body)))
    (shown,) = (body for language, body in FENCE.findall(text) if language == "text")
    assert all(line in map(str.rstrip, "".join(printed).splitlines()) for line in shown.splitlines()), printed
    assert "all generate the same tokens" in "".join(printed)


def test_commands_are_run_by_some_test():
    tested = {"README.md", "docs/bundle.md", "docs/checkpoints.md", "docs/tutorial.md"}
    assert {document for document, line in commands() if not line.startswith("make ")} <= tested
    assert {document for document in DOCUMENTS if blocks(document, PYTHON)} <= tested | {
        "CARD.md",
        "docs/transformers.md",
    }


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_lead_somewhere(document):
    path = ROOT / document
    for target in re.findall(r"\]\(([^)\s]+)\)", path.read_text()):
        if not target.startswith(("http://", "https://")):
            assert (path.parent / target.partition("#")[0]).exists(), f"{document}: {target}"


def test_architecture_names_what_is_there():
    text = (ROOT / "docs" / "architecture.md").read_text()
    tree = text[text.index("## Layout of the tree") :]
    bundle = ROOT / "torch-ext" / "finegrained_kernels"
    folders = (bundle, ROOT / "finegrained_kernels", ROOT / "scripts")
    found = {path.name for folder in folders for path in folder.iterdir() if not path.name.startswith(("_", "."))}
    assert {name for name in found if name not in tree} == set()
    kernels = "\n".join(line for line in text.splitlines() if line.startswith("| `"))
    multiply = [path for path in (bundle / "gemm" / "kernels").glob("*.py") if "_kernel(" in path.read_text()]
    assert multiply and {path.name for path in multiply if f"`kernels/{path.name}`" not in kernels} == set()
    known = {path.name for path in ROOT.rglob("*.py") if ".venv" not in path.parts} | {"_ops.py"}
    assert {name for name in re.findall(r"`(?:[\w./-]+/)?(\w+\.py)`", text) if name not in known} == set()


def test_the_guide_to_the_kernels_names_what_is_there():
    text = (ROOT / "docs" / "kernels.md").read_text()
    sources = {path: path.read_text() for folder in ("torch-ext", "tests", "scripts", "benchmarks")
               for path in (ROOT / folder).rglob("*.py")}  # fmt: skip
    files = {path.name for path in sources}
    assert {name for name in re.findall(r"`(?:[\w./-]+/)?(\w+\.py)`", text) if name not in files} == set()
    words = "\n".join(sources.values())
    names = {name for name in re.findall(r"`(?:\w+\.)?(\w+)`", text) if "_" in name}
    assert len(names) > 40 and {name for name in names if not re.search(rf"\b{name}\b", words)} == set()


def test_the_oldest_python_is_the_same_everywhere():
    """CI shows which one that is by running it."""
    oldest = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"].removeprefix(">=")
    assert f"Python {oldest} or newer" in (ROOT / "README.md").read_text()
    workflow = ROOT / ".github" / "workflows" / "ci.yml"
    if not workflow.exists():
        pytest.skip("needs .github/workflows, which a source distribution lacks")
    tested = re.search(r"python: \[(.*)\]", workflow.read_text())[1]
    assert tested.startswith(f'"{oldest}"')


def test_every_figure_is_shown():
    shown = {name for document in DOCUMENTS for name in re.findall(r"\w+\.svg", (ROOT / document).read_text())}
    assert {path.name for path in (ROOT / "docs" / "figures").iterdir()} == shown


@pytest.mark.parametrize("document", ["README.md", "CARD.md"])
def test_first_documents_are_short(document):
    assert len((ROOT / document).read_text().splitlines()) <= 150


def test_card_has_what_the_hub_reads():
    from huggingface_hub import ModelCard
    from markdown_it import MarkdownIt

    card = ModelCard((ROOT / "CARD.md").read_text())
    assert (card.data.library_name, card.data.license) == ("kernels", "apache-2.0")
    page = MarkdownIt().enable("table").render(card.text)
    assert (page.count("<h1>"), page.count("<table>"), page.count('<code class="language-python">')) == (1, 1, 1)
    assert "|" not in re.sub("<pre>.*?</pre>", "", page, flags=re.DOTALL)
