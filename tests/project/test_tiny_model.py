"""The model to try things on: the same each time, and refused where it would overwrite something."""

from __future__ import annotations

import sys

import pytest

from finegrained_kernels import tiny_model

pytest.importorskip("transformers", reason="needs transformers, the extra [transformers]")


def run(monkeypatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["tiny_model", *arguments])
    return tiny_model.main()


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


def test_nothing_is_overwritten(tmp_path, monkeypatch, capsys):
    (tmp_path / "mine").write_text("mine")
    assert run(monkeypatch, str(tmp_path)) == run(monkeypatch, str(tmp_path / "mine")) == 1
    assert capsys.readouterr().err.count("expected a new or empty directory") == 2
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_without_transformers(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert run(monkeypatch, str(tmp_path / "model")) == 1
    assert "pip install transformers" in capsys.readouterr().err
