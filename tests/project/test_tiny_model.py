"""The model to try things on is the same each time, and is not written over anything."""

from __future__ import annotations

import sys

import pytest
from typer.testing import CliRunner

from finegrained_kernels import tiny_model
from finegrained_kernels.cli import app

pytest.importorskip("transformers", reason="needs transformers, the extra [transformers]")


def test_the_same_seed_gives_the_same_bytes(tmp_path):
    for name in ("first", "second"):
        tiny_model.write(tmp_path / name)
    first, second = (sorted((tmp_path / name).iterdir()) for name in ("first", "second"))
    assert [path.name for path in first] == [path.name for path in second]
    assert all(a.read_bytes() == b.read_bytes() for a, b in zip(first, second, strict=True))


def test_text_survives_its_tokenizer():
    text = "Ünïcode,\n\ttabs and  spaces"
    tokenizer = tiny_model.byte_tokenizer()
    ids = tokenizer.encode(text).ids
    assert len(ids) == len(text.encode()) and tokenizer.decode(ids) == text


def test_nothing_is_overwritten(tmp_path):
    (tmp_path / "mine").write_text("mine")
    for path in (tmp_path, tmp_path / "mine"):
        result = CliRunner().invoke(app, ["tiny-model", str(path)])
        assert result.exit_code == 1 and result.stderr == f"error: {path}: expected a new or empty directory\n"
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_without_transformers(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    result = CliRunner().invoke(app, ["tiny-model", str(tmp_path / "model")])
    assert result.exit_code == 1 and result.stderr.endswith("; pip install transformers accelerate\n")
