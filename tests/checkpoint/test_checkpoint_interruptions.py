"""Commands that are killed, run out of space, share work, or whose source changes: valid files or none, and one
result."""

from __future__ import annotations

import errno
import json
import os
import resource
import shutil
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
from safetensors import safe_open

import checkpoints
from conftest import ROOT
from finegrained_kernels.checkpoint import CheckpointError, compress, quantize, restore, verify
from killing import kill_and_repeat

pytestmark = pytest.mark.usefixtures("bundle")


@pytest.fixture(scope="module")
def source(bundle, tmp_path_factory):
    tensors = checkpoints.random_moe(layers=5, experts=8, hidden=256, inter=256)
    return checkpoints.write_checkpoint(
        tmp_path_factory.mktemp("interruptions") / "source",
        tensors,
        checkpoints.MODELOPT_CONFIG,
        shard_of=checkpoints.by_layer,
    )


def run(code: str, *arguments: object) -> subprocess.CompletedProcess:
    """Run a snippet in a separate process, with the bundle under test."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["hf", "container"])
def test_killed_at_random_moments_then_resumed(source, tmp_path, layout):
    before = checkpoints.tree(source)
    compress(source, tmp_path / "expected", layout=layout)
    counts = kill_and_repeat("compress", source, tmp_path, layout=layout)
    expected = checkpoints.tree(tmp_path / "expected")
    for kill in range(len(counts)):
        assert checkpoints.tree(tmp_path / str(kill)) == expected, f"kill {kill}"
    assert checkpoints.tree(source) == before
    assert len(set(counts)) > 1, f"every kill hit the same state: {counts}"


def test_a_second_run_keeps_what_is_finished_and_sound(source, tmp_path):
    small = tmp_path / "small"
    first = compress(source, small)
    assert (first.shards, first.resumed) == (6, 0)
    expected = checkpoints.tree(small)
    stamps = {path.name: path.stat().st_ino for path in small.glob("*.safetensors")}
    assert compress(source, small).resumed == 6
    assert {path.name: path.stat().st_ino for path in small.glob("*.safetensors")} == stamps

    damaged, lost = sorted(stamps)[1:3]
    with open(small / damaged, "r+b") as file:
        file.seek(-100, os.SEEK_END)
        file.write(bytes(50))
    (small / lost).unlink()
    assert compress(source, small).resumed == 4
    assert checkpoints.tree(small) == expected


def test_a_source_that_changed_is_not_resumed_into(source, tmp_path):
    copy = shutil.copytree(source, tmp_path / "copy")
    compress(copy, tmp_path / "small")
    with open(copy / "model-00002-of-00003.safetensors", "r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last[0] ^ 1]))
    before = checkpoints.tree(tmp_path / "small")
    with pytest.raises(CheckpointError, match="was made from another source: model-00002-of"):
        compress(copy, tmp_path / "small")
    (copy / "tokenizer.json").write_text("[]")
    with pytest.raises(CheckpointError, match="begun from another source"):
        compress(copy, tmp_path / "small")
    assert checkpoints.tree(tmp_path / "small") == before


@contextmanager
def file_size_limit(limit: int):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def assert_nothing_partial(root: Path) -> None:
    for path in root.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            assert file.keys()
    assert not list(root.rglob("*.tmp"))


def test_a_file_that_cannot_grow(source, tmp_path):
    """Like a full disk, but at a known byte: every write past it fails."""
    small, out = tmp_path / "small", tmp_path / "out"
    shard = "model-00002-of-00003.safetensors"
    size = (source / shard).stat().st_size
    with (
        file_size_limit(size // 2),
        pytest.raises(CheckpointError, match=f"safetensors: cannot be written: {os.strerror(errno.EFBIG)}"),
    ):
        compress(source, small)
    assert_nothing_partial(small)
    assert not (small / shard).exists()
    compress(source, small)
    assert verify(small, against=source).faults == []

    with file_size_limit(size // 2), pytest.raises(CheckpointError, match="cannot be written"):
        restore(small, out)
    assert_nothing_partial(out)
    restore(small, out)
    assert checkpoints.tree(out) == checkpoints.tree(source)


@pytest.fixture
def tiny_disk(tmp_path):
    """A file system of 3 MB, if the machine allows to mount one."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(disk)]
    if not shutil.which("mount") or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("this user cannot mount a tmpfs")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def test_a_full_disk(source, tmp_path, tiny_disk, monkeypatch):
    before = checkpoints.tree(source)
    with pytest.raises(CheckpointError, match=r"bytes free, at least .* are needed"):
        compress(source, tiny_disk / "small")
    assert not list(tiny_disk.rglob("*.safetensors"))
    # Another program uses up the space after the check.
    monkeypatch.setattr("finegrained_kernels.checkpoint.compression.check_space", lambda *_: None)
    with pytest.raises(CheckpointError, match="cannot be written: No space left on device"):
        compress(source, tiny_disk / "small", jobs=2)
    assert_nothing_partial(tiny_disk / "small")
    assert checkpoints.tree(source) == before


def test_processes_share_the_work(source, tmp_path):
    compress(source, tmp_path / "alone")
    code = "import sys\nfrom finegrained_kernels.checkpoint import compress\ncompress(*sys.argv[1:])"
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", code, str(source), str(tmp_path / "shared")]
    processes = [subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) for _ in range(3)]
    for process in processes:
        _, errors = process.communicate()
        assert process.returncode == 0, errors
    assert checkpoints.tree(tmp_path / "shared") == checkpoints.tree(tmp_path / "alone")


def test_a_failing_shard_stops_the_others(source, tmp_path, monkeypatch):
    from finegrained_kernels.checkpoint.shards import ShardWork

    original = ShardWork.compress

    def failing(self, shard, stop):
        if shard.startswith("model-00003"):
            raise CheckpointError("broken")
        time.sleep(0.05)
        original(self, shard, stop)

    monkeypatch.setattr(ShardWork, "compress", failing)
    with pytest.raises(CheckpointError, match="broken"):
        compress(source, tmp_path / "small", jobs=3)
    assert len(list((tmp_path / "small").glob("*.safetensors"))) < 5
    monkeypatch.undo()
    compress(source, tmp_path / "small")
    assert verify(tmp_path / "small", against=source).faults == []


def test_restore_and_quantize_go_on_after_an_interruption(source, tmp_path, monkeypatch):
    compress(source, tmp_path / "small")
    out = tmp_path / "out"

    class Interrupted(Exception):
        pass

    def interrupt(*_, **__):
        raise Interrupted

    with monkeypatch.context() as patch, pytest.raises(Interrupted):
        patch.setattr("finegrained_kernels.checkpoint.restoration._restore_files", interrupt)
        restore(tmp_path / "small", out)
    (out / "model-00002-of-00003.safetensors").unlink()
    with open(out / "model-00004-of-00003.safetensors", "ab") as file:
        file.write(b"x")
    (out / ".incomplete" / "leftover.csf-tmp").write_text("half a shard")
    assert restore(tmp_path / "small", out).resumed == 4
    assert checkpoints.tree(out) == checkpoints.tree(source)
    assert restore(tmp_path / "small", out).resumed == 6

    plain = checkpoints.write_checkpoint(
        tmp_path / "plain", checkpoints.minilm_moe(), checkpoints.CONFIG, shard_of=checkpoints.by_layer
    )
    quantize(plain, tmp_path / "expected")
    with monkeypatch.context() as patch, pytest.raises(Interrupted):
        patch.setattr("finegrained_kernels.checkpoint.quantization.write_file", interrupt)
        quantize(plain, tmp_path / "nvfp4")
    quantize(plain, tmp_path / "nvfp4")
    assert checkpoints.tree(tmp_path / "nvfp4") == checkpoints.tree(tmp_path / "expected")


MEMORY = """
import json, sys
from pathlib import Path
from finegrained_kernels import load
from finegrained_kernels.checkpoint import compress, restore, verify
load()
def peak():
    status = Path("/proc/self/status").read_text()  # getrusage would count the parent's pages before the exec
    return int(status.split("VmHWM:")[1].split()[0]) << 10
peaks = {"load": peak()}
source, root, layout = sys.argv[1:]
for name, call in {
    "compress": lambda: compress(source, f"{root}/small", layout=layout),
    "verify": lambda: verify(f"{root}/small", against=source),
    "restore": lambda: restore(f"{root}/small", f"{root}/out"),
}.items():
    call()
    peaks[name] = peak()
print(json.dumps(peaks))
"""


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["hf", "container"])
def test_peak_memory_is_one_shard_and_200_mb(bundle, tmp_path, layout):
    """The interpreter, torch and the bundle included."""
    source = checkpoints.write_checkpoint(
        tmp_path / "source",
        checkpoints.random_moe(layers=1, experts=24, hidden=2048, inter=2048),
        checkpoints.MODELOPT_CONFIG,
        shard_of=checkpoints.by_layer,
    )
    shard = max(path.stat().st_size for path in source.glob("*.safetensors"))
    result = run(MEMORY, source, tmp_path, layout)
    assert result.returncode == 0, result.stderr
    peaks = json.loads(result.stdout)
    loaded = peaks.pop("load")
    for name, peak in peaks.items():
        figures = f"{name}: {peak / 1e6:.0f} MB, {loaded / 1e6:.0f} MB when loaded, for a shard of {shard / 1e6:.0f} MB"
        assert peak < shard + 200e6, figures
        assert peak < loaded + 100e6, figures
        print(figures)
