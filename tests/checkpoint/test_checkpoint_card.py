"""The model card of compressed checkpoints, and what transformers says about them without the package."""

from __future__ import annotations

import json
import re
import shutil

import pytest

import checkpoints
from conftest import ROOT
from finegrained_kernels import __version__
from finegrained_kernels.checkpoint import compress, restore, verify
from model_hub import REPO, ModelHub

pytestmark = pytest.mark.usefixtures("bundle")

CARD = "---\nlicense: apache-2.0\ntags: [x]\n---\n\n# A model\r\n\nWith text: é"


def write(root, **extra):
    return checkpoints.write_checkpoint(root, checkpoints.random_moe(), checkpoints.MODELOPT_CONFIG, **extra)


@pytest.mark.parametrize("layout", ["hf", "container"])
def test_the_card_gains_a_section_and_is_given_back(tmp_path, layout):
    source = write(tmp_path / "source")
    (source / "README.md").write_bytes(CARD.encode())
    report = compress(source, tmp_path / "small", layout=layout)
    path = tmp_path / "small" / ("metadata" if layout == "container" else ".") / "README.md"
    card = path.read_bytes().decode()
    assert card.startswith(CARD + "\n\n<!--")
    for part in (
        f"{report.compressed:,} NVFP4 scale tensors",
        f"{report.dense_bytes:,} bytes of them take\n{report.compressed_bytes:,}",
        f"finegrained-kernels](https://huggingface.co/kernels-community/finegrained-kernels), {__version__} or later",
        "`csf_digests/job.json`",
    ):
        assert part in card
    code = re.search(r"```python\n(.*?)```", card, re.DOTALL)[1]
    assert len(code.splitlines()) == 2 and compile(code, "card", "exec")
    assert verify(tmp_path / "small", against=source).faults == []
    restore(tmp_path / "small", tmp_path / "restored")
    assert checkpoints.tree(tmp_path / "restored") == checkpoints.tree(source)


def test_a_checkpoint_without_a_card_gets_one(tmp_path):
    source = write(tmp_path / "source")
    (source / "README.md").unlink()
    compress(source, tmp_path / "small")
    compress(source, tmp_path / "small")  # again: nothing is added twice
    assert (tmp_path / "small" / "README.md").read_text().count("## Compressed NVFP4 scales") == 1
    assert verify(tmp_path / "small", against=source).faults == []
    restore(tmp_path / "small", tmp_path / "restored")
    assert checkpoints.tree(tmp_path / "restored") == checkpoints.tree(source)


def test_a_card_without_the_section_is_pushed_with_it(tmp_path, run_python):
    source = write(tmp_path / "source")
    small = tmp_path / "small"
    compress(source, small)
    written = (small / "README.md").read_bytes()
    (small / "README.md").write_text("# Mine\n")
    before = checkpoints.tree(small)
    with ModelHub() as hub:
        code = f"from finegrained_kernels.checkpoint import push\npush({str(small)!r}, {REPO!r})"
        run_python(code, HF_ENDPOINT=hub.url, HF_TOKEN="hf_test", HF_HUB_DISABLE_XET="1")
    assert hub.files["README.md"] == written.replace(b"# A model", b"# Mine")
    assert checkpoints.tree(small) == before and hub.files.keys() == before.keys()


LOAD = """
import sys
from transformers import AutoModelForCausalLM
try:
    AutoModelForCausalLM.from_pretrained({root!r})
except Exception as error:
    print(type(error).__name__, error)
"""


def test_transformers_without_the_package_names_it(tmp_path, run_python):
    """Without the name that compress wrote, transformers says what docs/transformers.md quotes."""
    pytest.importorskip("transformers")
    config = checkpoints.MODELOPT_CONFIG | {"num_hidden_layers": 2, "num_experts": 4, "vocab_size": 96}
    source = checkpoints.write_checkpoint(tmp_path / "source", checkpoints.random_moe(), config)
    compress(source, tmp_path / "small")
    bare = shutil.copytree(tmp_path / "small", tmp_path / "bare")
    checkpoints.edit_json(bare / "config.json", lambda config: config.pop("transformers_weights"))
    said, quoted = run_python("".join(LOAD.format(root=str(root)) for root in (tmp_path / "small", bare))).stdout.split(
        "\nRuntimeError "
    )
    assert "pip install finegrained-kernels, import finegrained_kernels.integrations.transformers" in said
    quote = "You set `ignore_mismatched_sizes` to `False`"
    assert quote in quoted and quote in (ROOT / "docs" / "transformers.md").read_text()
    kept = json.loads((source / "config.json").read_text()) | {"transformers_weights": "mine.safetensors"}
    checkpoints.write_json(source / "config.json", kept)  # what somebody set deliberately stays
    compress(source, tmp_path / "other")
    assert json.loads((tmp_path / "other" / "config.json").read_text())["transformers_weights"] == "mine.safetensors"
