"""Damaged checkpoints: every fault is found and named by shard and tensor, and nothing wrong is ever written."""

from __future__ import annotations

import shutil
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import checkpoints
from finegrained_kernels.checkpoint import CheckpointError, compress, inspect, restore, verify
from finegrained_kernels.checkpoint.headers import read_header

pytestmark = pytest.mark.usefixtures("bundle")

SHARD = "model-00002-of-00003.safetensors"
EXPERT = "model.layers.0.mlp.experts.1"
WEIGHT, SCALE = f"{EXPERT}.up_proj.weight", f"{EXPERT}.up_proj.weight_scale"
FIXED, EXCEPTIONS = f"{SCALE}.nvfp4_csf_fixed", f"{SCALE}.nvfp4_csf_exceptions"


@pytest.fixture(scope="module")
def source(bundle, tmp_path_factory):
    return checkpoints.write_checkpoint(
        tmp_path_factory.mktemp("faults") / "source",
        checkpoints.random_moe(),
        checkpoints.MODELOPT_CONFIG,
        shard_of=checkpoints.by_layer,
    )


@pytest.fixture(scope="module")
def compressed(source):
    for layout in ("hf", "container"):
        compress(source, source.parent / layout, layout=layout)
    return source.parent


@pytest.fixture(params=["hf", "container"])
def small(request, compressed, tmp_path):
    """A compressed checkpoint to damage, of either layout."""
    return shutil.copytree(compressed / request.param, tmp_path / request.param)


def shard_path(root: Path) -> Path:
    return next(root.rglob(SHARD))


def overwrite(root: Path, tensor: str, change: Callable[[bytes], bytes]) -> None:
    """Change a tensor's bytes in place, and nothing else."""
    path = shard_path(root)
    header = read_header(path, path.name)
    info = header.tensors[tensor]
    with open(path, "r+b") as file:
        file.seek(header.data_start + info.begin)
        data = file.read(info.nbytes)
        file.seek(header.data_start + info.begin)
        file.write(change(data))


def flip(data: bytes) -> bytes:
    return bytes([data[0] ^ 0x10]) + data[1:]


def found(root: Path, **options) -> set[tuple[str, str | None]]:
    """Shard and tensor of every fault, shards by their bare name."""
    return {(Path(fault.file).name, fault.tensor) for fault in verify(root, **options).faults}


def assert_not_restored(root: Path, *names: str) -> None:
    out = root.parent / "out"
    with pytest.raises(CheckpointError) as error:
        restore(root, out)
    assert all(name in str(error.value) for name in names), error.value
    assert not list(out.rglob(SHARD))


def test_sound_checkpoints_have_no_faults(small, source):
    assert found(small) == found(small, against=source) == set()


@pytest.mark.parametrize("tensor", [WEIGHT, f"{EXPERT}.up_proj.weight_scale_2", FIXED, EXCEPTIONS])
def test_a_flipped_bit(small, source, tensor):
    overwrite(small, tensor, flip)
    own = (SHARD, tensor)
    for faults in (found(small), found(small, against=source)):
        assert own in faults
        assert faults <= {own, (SHARD, SCALE), (SHARD, None)}, faults  # None is for the container's digest of the shard
    assert_not_restored(small, SHARD)


def test_a_change_that_no_tensor_checksum_sees(small):
    pattern = int(f"{0x104C11DB7:b}"[::-1], 2)  # CRC-32's polynomial: adding it to bytes leaves their CRC-32

    def forge(data: bytes) -> bytes:
        changed = (int.from_bytes(data, "little") ^ pattern).to_bytes(len(data), "little")
        assert zlib.crc32(changed) == zlib.crc32(data)
        return changed

    overwrite(small, WEIGHT, forge)
    assert found(small) == {(SHARD, None)}
    assert_not_restored(small, SHARD)


def test_a_zeroed_span_names_every_tensor_in_it(small):
    path = shard_path(small)
    header = read_header(path, path.name)
    order = header.in_data_order()
    first = next(i for i, (name, _) in enumerate(order) if name == FIXED)
    spanned = order[first : first + 3]
    with open(path, "r+b") as file:
        file.seek(header.data_start + spanned[0][1].begin)
        file.write(bytes(spanned[-1][1].end - spanned[0][1].begin))
    assert {(SHARD, name) for name, _ in spanned} <= found(small)
    assert_not_restored(small, SHARD, SCALE)


@pytest.mark.parametrize("cut", [1, 3000])
def test_a_truncated_shard(small, source, cut):
    path = shard_path(small)
    header = read_header(path, path.name)
    size = path.stat().st_size - cut
    lost = next(name for name, info in header.in_data_order() if header.data_start + info.end > size)
    with open(path, "r+b") as file:
        file.truncate(size)
    for options in ({}, {"against": source}):
        assert found(small, **options) == {(SHARD, lost)}
    assert_not_restored(small, SHARD, lost)


def test_a_shard_of_garbage(small):
    shard_path(small).write_bytes(b"\xff" * 5000)
    assert found(small) == {(SHARD, None)}
    with open(shard_path(small), "w") as file:
        file.write("")
    assert found(small) == {(SHARD, None)}


def test_an_appended_byte(small):
    with open(shard_path(small), "ab") as file:
        file.write(b"x")
    assert found(small) == {(SHARD, None)}


def rewrite(root: Path, change: Callable[[checkpoints.Tensors], object]) -> None:
    path = shard_path(root)
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, {"format": "pt"})


@pytest.mark.parametrize(("lost", "left"), [(FIXED, EXCEPTIONS), (EXCEPTIONS, FIXED)])
def test_a_missing_half_of_a_pair(small, lost, left):
    rewrite(small, lambda tensors: tensors.pop(lost))
    faults = found(small)
    assert {(SHARD, lost), (SHARD, left)} <= faults  # missing, unpaired
    assert_not_restored(small, left)


@pytest.mark.parametrize("tensor", [WEIGHT, f"{EXPERT}.up_proj.weight_scale_2"])
def test_a_missing_tensor(small, tensor):
    rewrite(small, lambda tensors: tensors.pop(tensor))
    assert (SHARD, tensor) in found(small)
    assert_not_restored(small, tensor)


@pytest.mark.parametrize(
    ("tensor", "change"),
    [
        (FIXED, lambda t: t.view(torch.int8)),
        (FIXED, lambda t: t[:-1].contiguous()),
        (EXCEPTIONS, lambda t: t.view(torch.int32)),
        (WEIGHT, lambda t: t.view(torch.float8_e4m3fn)),
        (f"{EXPERT}.up_proj.weight_scale_2", lambda t: t.bfloat16()),
    ],
    ids=["signed", "short", "int32", "float8", "bfloat16"],
)
def test_a_wrong_dtype_or_shape(small, tensor, change):
    rewrite(small, lambda tensors: tensors.update({tensor: change(tensors[tensor])}))
    faults = [fault for fault in verify(small).faults if "expected" in fault.message or "must be" in fault.message]
    assert any(tensor in str(fault) for fault in faults), faults
    assert_not_restored(small, tensor)


@pytest.mark.parametrize(
    "words",
    [[5, 3], [3, 3], [0xFFFFFF], [0xFF << 24 | 64 * 4]],
    ids=["unsorted", "repeated", "far", "just beyond"],
)
def test_malformed_exceptions_that_fit_their_digest(small, words):
    """Without digests, as in files of other programs, the decoder's own checks report it, with the tensor's name."""
    shutil.rmtree(small / "csf_digests")
    (small / "SHA256SUMS").unlink(missing_ok=True)
    rewrite(small, lambda tensors: tensors.update({EXCEPTIONS: torch.tensor(words).to(torch.uint32)}))
    report = verify(small)
    assert not report.has_digests
    assert (SHARD, EXCEPTIONS) in {(Path(fault.file).name, fault.tensor) for fault in report.faults}


def test_a_base_out_of_range_without_digests(small, source):
    shutil.rmtree(small / "csf_digests")
    (small / "SHA256SUMS").unlink(missing_ok=True)
    overwrite(small, FIXED, lambda data: b"\xf1" + data[1:])
    assert (SHARD, FIXED) in found(small)
    overwrite(small, FIXED, lambda data: bytes([data[1]]) + data[1:])
    assert (SHARD, SCALE) in found(small, against=source)


@pytest.mark.parametrize(
    "shard", ["../x.safetensors", "/etc/x.safetensors", "a/../../x.safetensors", "C:\\x.safetensors"]
)
@pytest.mark.parametrize("command", [compress, inspect, verify])
def test_an_index_that_points_outside(compressed, tmp_path, shard, command):
    root = shutil.copytree(compressed / ("hf" if command is verify else "source"), tmp_path / "copy")
    index = root / "model.safetensors.index.json"
    checkpoints.edit_json(index, lambda document: document["weight_map"].update({WEIGHT: shard}))
    if command is verify:
        assert "not a path inside" in str(verify(root).faults[0])
        return
    with pytest.raises(CheckpointError, match=r"model.safetensors.index.json: .* not a path inside"):
        command(root, tmp_path / "out") if command is compress else command(root)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda index: index["weight_map"].update({WEIGHT: "absent.safetensors"}),
            "shard absent.safetensors does not exist",
        ),
        (
            lambda index: index["weight_map"].update({WEIGHT: "model-00003-of-00003.safetensors"}),
            f"{WEIGHT}: said to be in",
        ),
        (lambda index: index["weight_map"].pop(WEIGHT), f"{WEIGHT}: missing here"),
        (lambda index: index["weight_map"].update(ghost=SHARD), "ghost: said to be in"),
        (lambda index: index.update(weight_map=[]), "weight_map must be an object"),
        (lambda index: index["weight_map"].update({WEIGHT: 3}), "which is not a text"),
    ],
)
def test_an_index_that_does_not_fit(source, tmp_path, change, message):
    root = shutil.copytree(source, tmp_path / "copy")
    checkpoints.edit_json(root / "model.safetensors.index.json", change)
    with pytest.raises(CheckpointError, match=message):
        compress(root, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda layers: layers.pop("model.layers.0.mlp.experts"), "model.layers.0.mlp.experts"),
        (
            lambda layers: layers["model.layers.0.mlp.experts"].pop("weight_scale_encoding"),
            "model.layers.0.mlp.experts",
        ),
        (
            lambda layers: layers["model.layers.1.mlp.experts"].update(weight_scale_encoding="zip"),
            "model.layers.1.mlp.experts",
        ),
        (
            lambda layers: layers.update({"model.layers.7.mlp.experts": {"weight_scale_encoding": "csf"}}),
            "model.layers.7.mlp.experts",
        ),
        (
            lambda layers: layers["model.layers.0.mlp.shared_expert.up_proj"].pop("weight_scale_encoding"),
            "model.layers.0.mlp.shared_expert.up_proj",
        ),
    ],
)
def test_a_config_that_marks_other_layers(small, change, expected):
    path = next(path for path in small.rglob("config.json") if path.parent.name != "source")
    checkpoints.edit_json(path, lambda config: change(config["quantization_config"]["quantized_layers"]))
    faults = found(small) - {("config.json", None), ("SHA256SUMS", None)}
    assert faults == {("config.json", expected)}


def test_the_model_card_may_change(compressed, source, tmp_path):
    small = shutil.copytree(compressed / "hf", tmp_path / "hf")
    (small / "README.md").write_text("# Now with compressed scales\n")
    assert found(small) == set()
    restore(small, tmp_path / "out")
    assert checkpoints.tree(tmp_path / "out") == checkpoints.tree(source)


def test_other_files_are_checked_too(small):
    path = next(small.rglob("tokenizer.json"))
    path.write_text("{ }")
    assert found(small) == {("tokenizer.json", None)}
    path.unlink()
    assert found(small) == {("tokenizer.json", None)}
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        restore(small, small.parent / "out")


def test_damaged_records_are_reported(small):
    record = small / "csf_digests" / "shards" / f"{SHARD}.json"
    record.write_text(record.read_text()[:-20])
    assert (f"{SHARD}.json", None) in found(small)
    record.unlink()
    assert (f"{SHARD}.json", None) in found(small)
    assert_not_restored(small, f"{SHARD}.json")


def test_a_record_that_lies(small):
    record = small / "csf_digests" / "shards" / f"{SHARD}.json"
    checkpoints.edit_json(record, lambda document: document.update(sha256="0" * 64))
    assert found(small) == {(f"{SHARD}.json", None)}  # by its own digest
    assert_not_restored(small, SHARD)


def test_an_interrupted_checkpoint_is_not_taken_for_a_whole_one(small):
    (small / ".incomplete").mkdir()
    assert found(small) == {(".incomplete", None)}


def test_against_another_source(compressed, tmp_path):
    tensors = checkpoints.random_moe()
    tensors[SCALE] = tensors[SCALE].view(torch.uint8).clone().fill_(9).view(torch.float8_e4m3fn)
    tensors[WEIGHT] = tensors[WEIGHT] ^ 1
    tensors.pop("model.embed_tokens.weight")
    other = checkpoints.write_checkpoint(tmp_path / "other", tensors, {}, shard_of=checkpoints.by_layer)
    small = compressed / "hf"
    expected = {(SHARD, SCALE), (SHARD, WEIGHT), ("model-00001-of-00003.safetensors", "model.embed_tokens.weight")}
    with pytest.raises(CheckpointError, match=r"model\.safetensors\.index\.json"):
        (other / "model.safetensors.index.json").write_text("{")
        verify(small, against=other)
    shutil.rmtree(other)
    other = checkpoints.write_checkpoint(tmp_path / "other", tensors, {}, shard_of=checkpoints.by_layer)
    assert found(small, against=other) == expected


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.update({SCALE: t[SCALE].view(torch.uint8)}), rf"{SHARD}: {SCALE}: expected F8_E4M3 \[64, 4\]"),
        (lambda t: t.update({SCALE: t[SCALE].float()}), rf"{SHARD}: {SCALE}: expected F8_E4M3"),
        (
            lambda t: t.update({SCALE: torch.cat([t[SCALE].view(torch.uint8)] * 2).view(torch.float8_e4m3fn)}),
            "got F8_E4M3",
        ),
        (lambda t: t.pop(WEIGHT), f"{SCALE}: no weight beside it"),
        (lambda t: t.pop(f"{EXPERT}.up_proj.weight_scale_2"), f"{SCALE}: no second-level scale"),
        (lambda t: t.update({f"{EXPERT}.up_proj.weight_scale_2": torch.ones(2)}), "expected one F32 value"),
        (lambda t: t.update({FIXED: torch.zeros(4, 48, dtype=torch.uint8)}), "dense as .* too"),
    ],
)
def test_sources_that_break_the_rules_are_refused(tmp_path, change, message):
    tensors = checkpoints.random_moe()
    change(tensors)
    root = checkpoints.write_checkpoint(
        tmp_path / "source", tensors, checkpoints.MODELOPT_CONFIG, shard_of=checkpoints.by_layer
    )
    with pytest.raises(CheckpointError, match=message):
        compress(root, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_truncated_source_is_refused(source, tmp_path):
    root = shutil.copytree(source, tmp_path / "copy")
    with open(root / SHARD, "r+b") as file:
        file.truncate((root / SHARD).stat().st_size - 1)
    with pytest.raises(CheckpointError, match=f"{SHARD}: .*: cut short"):
        compress(root, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_requests_that_make_no_sense_are_refused(source, compressed, tmp_path):
    def refused(message: str, root: Path, destination: Path, **options) -> None:
        with pytest.raises(CheckpointError, match=message):
            compress(root, destination, **options)

    refused("is not a directory", tmp_path / "absent", tmp_path / "out")
    refused("separate directories", source, source)
    refused("separate directories", source, source / "out")
    refused("separate directories", source, source.parent)
    refused("layout must be", source, tmp_path / "out", layout="zip")
    refused("no pattern matches any of its 26", source, tmp_path / "out", include=["nothing"])
    refused("compressed already", compressed / "hf", tmp_path / "out")
    refused("jobs must be at least 1", source, tmp_path / "out", jobs=0)
    refused("device 'abacus' cannot be used", source, tmp_path / "out", device="abacus")
    refused("other options", source, compressed / "hf", layout="container")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("")
    refused("holds other files", source, tmp_path / "mine")
    plain = checkpoints.write_checkpoint(tmp_path / "plain", {"a.weight": torch.ones(3)}, checkpoints.CONFIG)
    refused("has no NVFP4 scales", plain, tmp_path / "out")
    (source.parent / "bare").mkdir(exist_ok=True)
    refused("no index .* no safetensors file", source.parent / "bare", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    with pytest.raises(CheckpointError, match="no csf_digests"):
        restore(source, tmp_path / "out")
