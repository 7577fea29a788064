"""One source, one command, one directory: what happens with another one, after an interruption, or after a change."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import checkpoints
from attacks import LAYOUTS, another, in_both_layouts, module, one_line, plain, sparse
from conftest import ROOT
from finegrained_kernels.checkpoint import (
    compress,
    inspect,
    load_layer_scales,
    quantize,
    restore,
    verify,
)
from finegrained_kernels.checkpoint.claims import Claim
from finegrained_kernels.checkpoint.stream import AtomicFile
from killing import kill_and_repeat

pytestmark = pytest.mark.usefixtures("bundle")


@pytest.fixture(scope="module")
def made(bundle, tmp_path_factory):
    return in_both_layouts(tmp_path_factory.mktemp("made"))


@pytest.fixture
def source(made, tmp_path):
    return Path(shutil.copytree(made / "source", tmp_path / "sandbox" / "source"))


def commands(tmp_path):
    """(name, call, first source, other source) for each command that writes."""
    first, second = another(tmp_path / "S", 0), another(tmp_path / "S2", 1)
    yield "compress", compress, first, second
    compress(first, tmp_path / "C"), compress(second, tmp_path / "C2")
    yield "restore", restore, tmp_path / "C", tmp_path / "C2"
    sources = [another(tmp_path / name, seed, plain, checkpoints.CONFIG) for name, seed in (("B", 0), ("B2", 1))]
    yield "quantize", quantize, *sources


def test_another_source_into_a_finished_directory(tmp_path):
    for name, call, first, second in commands(tmp_path):
        out = tmp_path / f"out-{name}"
        call(first, out)
        before = checkpoints.tree(out)
        assert str(out) in one_line(call, second, out)
        assert checkpoints.tree(out) == before, name
        shutil.rmtree(out)
        shutil.copytree(second, out)  # a directory that this command never made
        before = checkpoints.tree(out)
        one_line(call, first, out)
        assert checkpoints.tree(out) == before, name


class Interrupted(Exception):
    pass


def test_another_source_into_an_unfinished_directory(tmp_path, monkeypatch):
    module = {
        "compress": "compression.publish",
        "restore": "restoration._restore_files",
        "quantize": "quantization.write_file",
    }

    def interrupt(*_, **__):
        raise Interrupted

    for name, call, first, second in commands(tmp_path):
        out = tmp_path / f"out-{name}"
        with monkeypatch.context() as patch, pytest.raises(Interrupted):
            patch.setattr(f"finegrained_kernels.checkpoint.{module[name]}", interrupt)
            call(first, out)
        before = checkpoints.tree(out)
        text = one_line(call, second, out)
        assert f"was begun by `{name} {first.resolve()}`" in text
        for other in (compress, quantize):  # as a source of something else
            assert f"run `{name} {first.resolve()}` on it again" in one_line(other, out, tmp_path / "elsewhere")
        for reader in (inspect, load_layer_scales, restore):
            arguments = {"inspect": (), "load_layer_scales": (0, "up_proj"), "restore": (tmp_path / "elsewhere",)}
            one_line(reader, out, *arguments[reader.__name__])
        assert any(fault.file == ".incomplete" for fault in verify(out).faults) or name != "compress"
        assert {k: v for k, v in checkpoints.tree(out).items() if not k.endswith("-lock")} == {
            k: v for k, v in before.items() if not k.endswith("-lock")
        }
        call(first, out)
        assert not (out / ".incomplete").exists()


RACE = """
import sys
from pathlib import Path
from finegrained_kernels import load
from finegrained_kernels import checkpoint
load()
command, source, destination, gate = sys.argv[1:]
print("ready", flush=True)
while not Path(gate).exists():
    pass
try:
    getattr(checkpoint, command)(source, destination, jobs=1)
except checkpoint.CheckpointError as error:
    print(error)
    sys.exit(3)
"""


@pytest.mark.slow
def test_two_sources_at_once(tmp_path):
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    for name, call, *sources in commands(tmp_path):
        alone = []
        for i, path in enumerate(sources):
            call(path, tmp_path / f"alone-{name}-{i}")
            alone.append(checkpoints.tree(tmp_path / f"alone-{name}-{i}"))
        out, gate = tmp_path / f"raced-{name}", tmp_path / f"gate-{name}"
        processes = [
            subprocess.Popen(
                [sys.executable, "-c", RACE, name, str(path), str(out), str(gate)],
                env=environment,
                stdout=subprocess.PIPE,
                text=True,
            )
            for path in sources
        ]
        for process in processes:
            assert process.stdout.readline() == "ready\n"
        gate.touch()
        codes = [process.wait() for process in processes]
        assert sorted(codes) == [0, 3], name
        assert checkpoints.tree(out) == alone[codes.index(0)], name


def test_a_stale_claim_of_a_source_that_moved(tmp_path, monkeypatch):
    """The advice in the message works: after removing the folder, finished shards are kept if they match the source."""
    source = another(tmp_path / "S")

    def interrupt(*_, **__):
        raise Interrupted

    with monkeypatch.context() as patch, pytest.raises(Interrupted):
        patch.setattr("finegrained_kernels.checkpoint.compression.publish", interrupt)
        compress(source, tmp_path / "out")
    moved = source.rename(tmp_path / "moved")
    one_line(compress, moved, tmp_path / "out")
    shutil.rmtree(tmp_path / "out" / ".incomplete")
    assert compress(moved, tmp_path / "out").resumed == 3
    assert verify(tmp_path / "out", against=moved).faults == []


def test_a_file_of_the_users_in_the_work_folder_is_not_removed(source, tmp_path):
    out = tmp_path / "out"
    (out / ".incomplete").mkdir(parents=True)
    (out / ".incomplete" / "notes.txt").write_text("mine")
    assert "notes.txt" in one_line(compress, source, out)
    assert checkpoints.tree(out) == {".incomplete/notes.txt": hashlib.sha256(b"mine").hexdigest()}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["quantize", "restore"])
def test_killed_at_random_moments(tmp_path, name):
    """`compress` is killed in test_checkpoint_interruptions.py."""
    big = checkpoints.random_moe(layers=3, experts=8, hidden=256, inter=256)
    source = checkpoints.write_checkpoint(
        tmp_path / "S", big, checkpoints.MODELOPT_CONFIG, shard_of=checkpoints.by_layer
    )
    if name == "restore":
        compress(source, tmp_path / "C")
        source, expected = tmp_path / "C", checkpoints.tree(source)
    else:
        weights = {k: torch.randn(v.shape[0], 2 * v.shape[1]) if v.dtype == torch.uint8 else v for k, v in big.items()}
        weights = {k: v for k, v in weights.items() if k.endswith(".weight")}
        source = checkpoints.write_checkpoint(
            tmp_path / "B", weights, checkpoints.CONFIG, shard_of=checkpoints.by_layer
        )
        quantize(source, tmp_path / "expected")
        expected = checkpoints.tree(tmp_path / "expected")
    (tmp_path / "runs").mkdir()
    for kill in range(len(kill_and_repeat(name, source, tmp_path / "runs"))):
        assert checkpoints.tree(tmp_path / "runs" / str(kill)) == expected, kill


def test_quantize_ends_where_its_source_does(tmp_path, monkeypatch):
    """If a source was cut short while it was read, a loop used to read nothing forever."""
    source = another(tmp_path / "B", 0, plain, checkpoints.CONFIG)
    original = os.pread

    def cut(fd, size, offset):
        path = os.readlink(f"/proc/self/fd/{fd}")
        if path.endswith(".safetensors") and offset > 0:
            os.truncate(path, offset)
        return original(fd, size, offset)

    monkeypatch.setattr(os, "pread", cut)
    assert "cut short" in one_line(quantize, source, tmp_path / "out", jobs=1)


@pytest.mark.parametrize("command", [compress, quantize])
def test_a_source_that_changes_while_it_is_read(tmp_path, monkeypatch, command):
    source = another(tmp_path / "S", 0, *([plain, checkpoints.CONFIG] if command is quantize else []))
    original = AtomicFile.write

    def write(self, data):
        for path in source.glob("*.safetensors"):
            with open(path, "r+b") as file:
                file.seek(-1, os.SEEK_END)
                file.write(b"U")
        return original(self, data)

    monkeypatch.setattr(AtomicFile, "write", write)
    assert "changed while it was read" in one_line(command, source, tmp_path / "out", jobs=1)


def test_a_plane_that_changes_between_the_passes(source, monkeypatch):
    """Its old times are restored, so only the bytes tell."""
    from finegrained_kernels.checkpoint.shards import ShardWork

    original = ShardWork._encode

    def encode(self, shard, header, fd, spool):
        result = original(self, shard, header, fd, spool)
        if result[0]:
            name = next(iter(result[0]))
            path, place = self.source.root / shard, header.data_start + header.tensors[name].begin
            times = path.stat()
            with open(path, "r+b") as file:
                file.seek(place)
                byte = file.read(1)
                file.seek(place)
                file.write(bytes([byte[0] ^ 1]))
            os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
        return result

    monkeypatch.setattr(ShardWork, "_encode", encode)
    assert "weight_scale: changed while it was read" in one_line(compress, source, source.parent / "out", jobs=1)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_permissions_are_kept(source, tmp_path, layout):
    modes = {
        "tokenizer.json": 0o600,
        "config.json": 0o640,
        "model-00002-of-00003.safetensors": 0o600,
        "README.md": 0o444,
    }
    for name, mode in modes.items():
        (source / name).chmod(mode)
    compress(source, tmp_path / "small", layout=layout)
    restore(tmp_path / "small", tmp_path / "again")
    assert {name: (tmp_path / "again" / name).stat().st_mode & 0o777 for name in modes} == modes


MEMORY = """
import sys
from pathlib import Path
from finegrained_kernels import load
from finegrained_kernels.checkpoint import compress
load()
def peak():
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) << 10
before = peak()
compress(*sys.argv[1:], jobs=1)
print(peak() - before)
"""


def test_memory_does_not_grow_with_the_scales_of_a_shard(tmp_path):
    """There are 52 MB of scales, of which only a few planes are in memory at a time."""
    (tmp_path / "S").mkdir()
    (tmp_path / "S" / "config.json").write_text(json.dumps(checkpoints.MODELOPT_CONFIG))
    experts = [module(f"model.layers.0.mlp.experts.{i}.up_proj", 2560, 160) for i in range(128)]
    sparse(tmp_path / "S" / "model.safetensors", {name: entry for parts in experts for name, entry in parts.items()})
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", MEMORY, str(tmp_path / "S"), str(tmp_path / "D")]
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert int(result.stdout) < 60e6


def test_a_shard_that_goes_while_its_source_is_read(source, tmp_path):
    headers = {"model-00009-of-00009.safetensors": None}
    assert "model-00009-of-00009.safetensors cannot be read" in one_line(Claim.of, "compress", source, headers, {})
