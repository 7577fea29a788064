"""Checkpoints from strangers: names, links and sizes that lie, and files with bits or values changed."""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import sys
import tracemalloc
from pathlib import Path

import pytest
import torch

import checkpoints
from attacks import LAYOUTS, another, in_both_layouts, module, one_line, plain, sparse
from finegrained_kernels.checkpoint import (
    CheckpointError,
    compress,
    inspect,
    load_layer_globals,
    load_layer_scales,
    quantize,
    restore,
    verify,
)
from finegrained_kernels.checkpoint.paths import check_inside, check_name
from finegrained_kernels.checkpoint.records import _dump_fields

pytestmark = pytest.mark.usefixtures("bundle")


JOB, VICTIM = "csf_digests/job.json", "victim.txt"


@pytest.fixture(scope="module")
def made(bundle, tmp_path_factory):
    return in_both_layouts(tmp_path_factory.mktemp("made"))


@pytest.fixture(params=LAYOUTS)
def small(request, made, tmp_path):
    """A compressed checkpoint to damage, in a folder of its own."""
    return Path(shutil.copytree(made / request.param, tmp_path / "sandbox" / request.param))


@pytest.fixture
def source(made, tmp_path):
    return Path(shutil.copytree(made / "source", tmp_path / "sandbox" / "source"))


def forge(path: Path, change) -> None:
    """Edit a record and make its digest fit, as an attacker would."""
    document = json.loads(path.read_text())
    change(document)
    for key in ("schema", "digest"):
        document.pop(key, None)
    path.write_bytes(_dump_fields(document))


def surroundings(root: Path, *, but: Path) -> dict[str, str]:
    return {name: digest for name, digest in checkpoints.tree(root).items() if but not in (root / name).parents}


BAD_NAMES = [
    "../victim.txt", "/etc/passwd", "a/../../victim.txt", "./x.json", "sub//x.json", "sub/./x.json", "", ".", "..",
    "C:\\x.json", "C:x.json", "a\\b.json", "a\0b.json", "a\nb.json", ".incomplete/x.json", "csf_digests/x.json",
    ".hidden", "sub/.hidden", "x" * 300, "y/" * 600 + "z", "\ud800.json", 3, None, ["x"], "trailing/",
]  # fmt: skip


@pytest.mark.parametrize("name", BAD_NAMES, ids=ascii)
def test_names_that_no_file_has(name):
    assert "job.json: names the file" in one_line(check_name, name, "job.json")


@pytest.mark.parametrize("name", ["x.json", "sub/x y.json", "ünï.json", "a..b", "name:y.txt"])
def test_names_that_files_have(name):
    assert check_name(name, "job.json") == name


def test_random_names_stay_inside(tmp_path):
    """10,000 names made of what confuses path code. Each is refused or, joined to a folder, is inside it on every
    system."""
    rng = random.Random(20)
    pieces = ["a", "b.json", "..", ".", "/", "//", "\\", "C:", "\0", "\n", "é", "%2e%2e", "~", " ", "\u202e", "\ud834"]
    taken = 0
    for _ in range(10_000):
        name = "".join(rng.choices(pieces, k=rng.randint(1, 8)))
        try:
            check_inside(name, "x")
        except CheckpointError as error:
            assert str(error).isprintable()
            continue
        taken += 1
        joined = tmp_path / name
        assert Path(os.path.normpath(joined)) == joined and tmp_path in joined.parents
        assert joined.relative_to(tmp_path).as_posix() == name
    assert 100 < taken < 9_000


@pytest.mark.parametrize("field", ["rewritten", "copied", "shards"])
@pytest.mark.parametrize("name", ["../victim.txt", "/tmp/victim.txt", "csf_digests/victim.txt", "sub/../x.safetensors"])
def test_a_job_that_names_files_elsewhere(small, tmp_path, field, name):
    content = b"overwritten"
    (small.parent / VICTIM).write_text("mine")
    (small / "csf_digests" / VICTIM).write_bytes(content)
    (small / "csf_digests" / "source" / VICTIM).write_bytes(content)
    value = name if field == "shards" else hashlib.sha256(content).hexdigest()
    forge(small / JOB, lambda job: job[field].update({name: value}))
    before = surroundings(tmp_path, but=small.parent / "out")
    assert "names the file" in one_line(restore, small, small.parent / "out")
    assert any("names the file" in str(fault) for fault in verify(small).faults)
    assert surroundings(tmp_path, but=small.parent / "out") == before


def test_a_job_whose_shards_lie_elsewhere(small):
    forge(small / JOB, lambda job: job["shards"].update({next(iter(job["shards"])): "other.safetensors"}))
    assert "is said to be in" in one_line(restore, small, small.parent / "out")


def test_a_record_of_another_file(small):
    records = sorted((small / "csf_digests" / "shards").iterdir())
    forge(records[1], lambda record: record.update(file="../../victim.safetensors"))
    assert "is of the file" in one_line(restore, small, small.parent / "out")
    assert any("is of the file" in str(fault) for fault in verify(small).faults)


@pytest.mark.parametrize("name", ["./x.safetensors", "sub//x.safetensors", ".incomplete/x.safetensors"])
@pytest.mark.parametrize("command", [compress, quantize])
def test_shards_by_other_spellings(source, name, command):
    shard = "model-00002-of-00003.safetensors"
    (source / name).parent.mkdir(exist_ok=True, parents=True)
    (source / shard).rename(source / name)
    index = source / "model.safetensors.index.json"
    index.write_text(index.read_text().replace(shard, name))
    out = source.parent / "out"
    one_line(command, source, out)
    assert not out.exists()


def test_links_that_leave_the_checkpoint(source, tmp_path):
    (tmp_path / "secret.txt").write_text("secret")
    (source / "notes.txt").symlink_to(tmp_path / "secret.txt")
    out = source.parent / "out"
    assert "notes.txt: is a link to" in one_line(compress, source, out)
    (source / "notes.txt").unlink()
    (source / "notes.txt").symlink_to(tmp_path / "absent")
    assert "leads nowhere" in one_line(compress, source, out)
    (source / "notes.txt").unlink()
    (source / "folder").symlink_to(tmp_path)
    assert "is a link to a directory" in one_line(compress, source, out)
    (source / "folder").unlink()
    shard = next(source.glob("model-00002*"))
    shard.rename(tmp_path / "elsewhere.safetensors")
    shard.symlink_to(tmp_path / "elsewhere.safetensors")
    assert "is a link to" in one_line(compress, source, out)
    assert not out.exists()


def test_links_inside_and_the_hubs_cache(source, tmp_path):
    (source / "copy.json").symlink_to("tokenizer.json")
    compress(source, tmp_path / "small")
    assert not (tmp_path / "small" / "copy.json").is_symlink()
    cache = tmp_path / "models--a--b"
    (cache / "blobs").mkdir(parents=True)
    snapshot = cache / "snapshots" / "abc"
    for name in checkpoints.tree(source):
        blob = cache / "blobs" / hashlib.sha256(name.encode()).hexdigest()
        shutil.copy(source / name, blob)
        (snapshot / name).parent.mkdir(parents=True, exist_ok=True)
        (snapshot / name).symlink_to(os.path.relpath(blob, (snapshot / name).parent))
    compress(snapshot, tmp_path / "cached")
    assert checkpoints.tree(tmp_path / "cached") == checkpoints.tree(tmp_path / "small")


def test_names_that_break_the_list_of_sums(source):
    (source / "two\nlines.txt").write_text("x")
    assert "two\\nlines.txt" in one_line(compress, source, source.parent / "out", layout="container")
    (source / "two\nlines.txt").unlink()
    os.rename(os.fsencode(source / "tokenizer.json"), os.fsencode(source) + b"/tok\xff.json")
    assert "not valid Unicode" in one_line(compress, source, source.parent / "out")


def test_records_of_somebody_else_in_the_source(source):
    (source / "csf_digests" / "shards").mkdir(parents=True)
    (source / "csf_digests" / "job.json").write_text("{}")
    assert "where compress keeps its records" in one_line(compress, source, source.parent / "out")


def test_a_manifest_of_something_else(source):
    (source / "manifest.json").write_text('{"name": "an app"}')
    compress(source, source.parent / "small")
    assert verify(source.parent / "small", against=source).faults == []


def flips(root: Path, count: int, seed: int):
    """Single bits of all files but the model card, in proportion to their sizes, every file at least once."""
    rng = random.Random(seed)
    files = [path for path in sorted(root.rglob("*")) if path.is_file() and path.name != "README.md"]
    chosen = files + rng.choices(files, k=count // 2)
    chosen += rng.choices(files, weights=[path.stat().st_size for path in files], k=count - len(chosen))
    for path in chosen:
        yield path, rng.randrange(8 * path.stat().st_size)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_flipped_bit_is_found(made, tmp_path, layout):
    """150 of each layout here. Each costs a verify; `python tests/checkpoint/test_checkpoint_hostile.py` does 2,000."""
    check_flips(made / layout, tmp_path / "copy", 150, seed=7)


def check_flips(root: Path, copy: Path, count: int, seed: int) -> None:
    shutil.copytree(root, copy)
    assert verify(copy).faults == []
    for path, bit in flips(copy, count, seed):
        content = bytearray(path.read_bytes())
        content[bit // 8] ^= 1 << bit % 8
        path.write_bytes(content)
        try:
            found = [str(fault) for fault in verify(copy).faults]
        except CheckpointError as error:
            found = [str(error)]
        assert found, f"bit {bit} of {path.relative_to(copy)}"
        assert all(text.isprintable() for text in found), found
        content[bit // 8] ^= 1 << bit % 8
        path.write_bytes(content)
    assert verify(copy).faults == []


def mutated(text: bytes, rng: random.Random) -> bytes:
    """Text with a few changes that parsers and their callers may stumble over."""
    data = bytearray(text)
    for _ in range(rng.randint(1, 3)):
        kind = rng.randrange(6)
        at = rng.randrange(max(1, len(data)))
        if kind == 0:
            data[at : at + rng.randint(1, 8)] = rng.randbytes(rng.randint(0, 8))
        elif kind == 1:
            try:
                document = json.loads(data)
            except ValueError:
                continue
            data = bytearray(json.dumps(changed(document, rng)).encode())
        elif kind == 2:
            del data[at : at + rng.randint(1, 200)]
        elif kind == 3 and data:
            data[at] ^= 1 << rng.randrange(8)
        elif kind == 4:
            data = data.replace(b'"', b'"\\ud800', 1) if rng.random() < 0.5 else data * 2
        else:
            data = data.replace(b"safetensors", rng.choice([b"../x", b"\\u0000", b"safetensor", b"/etc/passwd"]), 1)
    return bytes(data)


def changed(value, rng: random.Random):
    """A JSON value with one value in it, at any depth, replaced."""
    odd = [None, True, -1, 1e308, 10**400, "", "../up", "\ud800", [], {}, [1], {"a": None}, "x" * 3000, 2**63]
    if isinstance(value, dict) and value and rng.random() < 0.85:
        key = rng.choice(list(value))
        return (
            {**value, key: changed(value[key], rng)}
            if rng.random() < 0.9
            else {k: v for k, v in value.items() if k != key}
        )
    if isinstance(value, list) and value and rng.random() < 0.85:
        i = rng.randrange(len(value))
        return [*value[:i], changed(value[i], rng), *value[i + 1 :]]
    return rng.choice(odd)


def check_mutations(root: Path, sandbox: Path, count: int, seed: int) -> None:
    """Change small files at random. Nothing outside the destination changes, and refusals are one line."""
    rng = random.Random(seed)
    sandbox.mkdir()
    (sandbox / VICTIM).write_text("mine")
    copies = {name: Path(shutil.copytree(root / name, sandbox / name)) for name in ("source", *LAYOUTS)}
    files = [
        (copy, path) for copy in copies.values() for path in sorted(copy.rglob("*.json")) if path.stat().st_size > 9
    ]
    before, out = checkpoints.tree(sandbox), sandbox / "out"
    for turn in range(count):
        copy, path = rng.choice(files)
        content = path.read_bytes()
        path.write_bytes(mutated(content, rng))
        writes, checks = (compress, inspect) if copy.name == "source" else (restore, verify)
        loads = rng.choice([load_layer_scales, load_layer_globals])
        for call, *arguments in ((inspect,), (checks,), (loads, 0, "up_proj"), (writes, out)):
            try:
                call(copy, *arguments)
            except (CheckpointError, ValueError) as error:
                assert str(error).isprintable(), f"{turn}: {error}"
                assert isinstance(error, CheckpointError), f"{turn}: {path.name}: {error!r}"
        path.write_bytes(content)
        shutil.rmtree(out, ignore_errors=True)
        if turn % 50 == 0:
            assert checkpoints.tree(sandbox) == before, turn
    assert checkpoints.tree(sandbox) == before


def test_mutated_records_indices_and_configs(made, tmp_path):
    """120 here; as a script this file does 10,000."""
    check_mutations(made, tmp_path / "sandbox", 120, seed=11)


def test_exceptions_without_a_bound(tmp_path):
    """A file of 4 KB on disk that claimed 2^32 exceptions used to take 16 GB of memory."""
    (tmp_path / "config.json").write_text("{}")
    sparse(tmp_path / "model.safetensors", module("model.layers.0.mlp.experts.0.up_proj", 16, 2, words=1 << 26))
    tracemalloc.start()
    assert "at most 32 words" in one_line(load_layer_scales, tmp_path, 0, "up_proj")
    assert any("at most 32 words" in str(fault) for fault in verify(tmp_path).faults)
    assert inspect(tmp_path).faults
    assert tracemalloc.get_traced_memory()[1] < 20e6
    tracemalloc.stop()


@pytest.mark.parametrize("expert", ["99999999", "9" * 40, "9" * 5000])
def test_an_expert_of_a_number_beyond_all(tmp_path, expert):
    (tmp_path / "config.json").write_text("{}")
    sparse(tmp_path / "model.safetensors", module(f"model.layers.0.mlp.experts.{expert}.up_proj", 16, 2))
    tracemalloc.start()
    one_line(load_layer_scales, tmp_path, 0, "up_proj")
    inspect(tmp_path)
    assert tracemalloc.get_traced_memory()[1] < 20e6
    tracemalloc.stop()


def test_shapes_of_long_numbers(tmp_path):
    header = {"x": {"dtype": "U8", "shape": [int("7" * 4200)] * 700, "data_offsets": [0, 1]}}
    text = json.dumps(header).encode()
    (tmp_path / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + b"x")
    one_line(inspect, tmp_path)


def test_a_truncated_shard_is_not_shown_as_whole(source):
    shard = next(source.glob("model-00002*"))
    os.truncate(shard, shard.stat().st_size - 1)
    assert "cut short" in one_line(inspect, source)
    header = 8 + int.from_bytes(shard.read_bytes()[:8], "little")
    for path in source.glob("*.safetensors"):
        os.truncate(path, 8 + int.from_bytes(path.read_bytes()[:8], "little"))
    assert header and inspect(source).shards == 3  # headers alone are enough


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 0.0, -1.0])
def test_input_scales_that_are_none(tmp_path, value):
    source = another(tmp_path / "B", 0, plain, checkpoints.CONFIG)
    assert "input_scale must be" in one_line(quantize, source, tmp_path / "out", input_scale=value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0, -0.0])
@pytest.mark.parametrize("divides", [False, True])
def test_globals_that_are_no_scales(tmp_path, value, divides):
    tensors = checkpoints.random_moe(layers=1)
    name = "model.layers.0.mlp.experts.1.up_proj.weight_scale_2"
    tensors[name] = torch.tensor(value)
    if divides:
        tensors = checkpoints.as_compressed_tensors(tensors)
        name = name.replace("weight_scale_2", "weight_global_scale")
        tensors[name] = torch.tensor([0.0 if value == float("inf") else value])
    config = checkpoints.COMPRESSED_TENSORS_CONFIG if divides else checkpoints.MODELOPT_CONFIG
    root = checkpoints.write_checkpoint(tmp_path / "S", tensors, config)
    assert f"{name}: is " in one_line(load_layer_globals, root, 0, "up_proj")


def test_an_index_without_metadata(source):
    index = source / "model.safetensors.index.json"
    checkpoints.edit_json(index, lambda document: document.update(metadata=None))
    compress(source, source.parent / "small")
    assert verify(source.parent / "small", against=source).faults == []
    checkpoints.edit_json(index, lambda document: document.update(metadata=[1]))
    assert "metadata must be an object" in one_line(compress, source, source.parent / "other")


@pytest.mark.parametrize("device", ["meta", "nonsense", "mps"])
def test_devices_that_hold_no_bytes(source, device):
    assert "cannot be used" in one_line(compress, source, source.parent / "out", device=device)
    assert not (source.parent / "out").exists()


def test_a_config_that_was_edited_is_a_fault(made, tmp_path):
    copy = Path(shutil.copytree(made / "hf", tmp_path / "copy"))
    checkpoints.edit_json(copy / "config.json", lambda config: config.update(hidden_size=65))
    faults = [str(fault) for fault in verify(copy, against=made / "source").faults]
    assert any("'hidden_size' is not what it was in the source" in fault for fault in faults)


def test_a_flipped_bit_makes_no_record_an_earlier_version(small):
    """The names of the two versions differ by one bit, and with the earlier one digests would not be compared."""
    for path in sorted((small / "csf_digests").rglob("*.json")):
        content = path.read_bytes()
        if b'"finegrained-kernels-csf-digests/3"' not in content:
            continue
        path.write_bytes(content.replace(b"-csf-digests/3", b"-csf-digests/2", 1))
        try:
            faults = [str(fault) for fault in verify(small).faults]
        except CheckpointError as error:
            faults = [str(error)]
        assert any("but with a digest" in fault for fault in faults), path
        path.write_bytes(content)


def test_results_of_an_earlier_version_are_taken(made, tmp_path):
    """Its records have no digests of themselves, and no digest of config.json as it was written."""
    copy = Path(shutil.copytree(made / "hf", tmp_path / "copy"))
    (copy / "csf_digests" / "written.json").unlink()
    for path in (copy / "csf_digests").rglob("*.json"):
        document = json.loads(path.read_text())
        if "digest" in document:
            del document["digest"]
            document.pop("source_headers", None)
            document["schema"] = "finegrained-kernels-csf-digests/2"
            path.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n")
    assert verify(copy, against=made / "source").faults == []
    restore(copy, tmp_path / "again")
    assert checkpoints.tree(tmp_path / "again") == checkpoints.tree(made / "source")
    assert compress(made / "source", copy).resumed == 3


if __name__ == "__main__":  # the long runs: python tests/checkpoint/test_checkpoint_hostile.py [seed]
    import tempfile

    seed = int(sys.argv[1]) if len(sys.argv) > 1 else 0
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder)
        another(base / "source", 0)
        for each in LAYOUTS:
            compress(base / "source", base / each, layout=each)
            check_flips(base / each, base / f"copy-{each}", 1000, seed)
            print(f"1000 flipped bits of {each}: all found", flush=True)
        check_mutations(base, base / "sandbox", 10_000, seed)
        print("10000 mutated files: nothing outside changed, every refusal one line")
