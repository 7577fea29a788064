"""Damage that leaves every tensor's bytes alone: shard headers, config.json and the index."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

import checkpoints
from finegrained_kernels.checkpoint import CheckpointError, compress, inspect, load_layer_scales, verify

pytestmark = pytest.mark.usefixtures("bundle")

SHARD = "model-00002-of-00003.safetensors"
WEIGHT = "model.layers.0.mlp.experts.1.up_proj.weight"


@pytest.fixture(scope="module")
def compressed(bundle, tmp_path_factory):
    root = tmp_path_factory.mktemp("headers")
    checkpoints.write_checkpoint(
        root / "source", checkpoints.random_moe(), checkpoints.MODELOPT_CONFIG, shard_of=checkpoints.by_layer
    )
    compress(root / "source", root / "hf")
    return root / "hf"


@pytest.fixture
def small(compressed, tmp_path):
    return shutil.copytree(compressed, tmp_path / "hf")


def edit_header(root: Path, change) -> None:
    """Rewrite a shard's header, leaving its data as it is."""
    path = next(root.rglob(SHARD))
    raw = path.read_bytes()
    size = int.from_bytes(raw[:8], "little")
    document = json.loads(raw[8 : 8 + size])
    change(document)
    text = json.dumps(document).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + size :])


def faults(root: Path) -> set[tuple[str, str | None]]:
    return {(Path(fault.file).name, fault.tensor) for fault in verify(root).faults}


def test_rewriting_a_header_alike_is_no_fault(small):
    edit_header(small, lambda document: None)
    assert faults(small) == set()


@pytest.mark.parametrize(
    "change",
    [
        lambda entry: entry["shape"].reverse(),
        lambda entry: entry.update(dtype="I8"),
        lambda entry: entry.update(dtype="F16", shape=[entry["shape"][0], entry["shape"][1] // 2]),
    ],
    ids=["shape", "signedness", "dtype"],
)
def test_a_tensor_that_its_header_now_reads_otherwise(small, change):
    edit_header(small, lambda document: change(document[WEIGHT]))
    assert (SHARD, WEIGHT) in faults(small)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda entry: entry.pop("dtype"), "expected a dtype"),
        (lambda entry: entry.update(dtype=["U8"]), "expected a dtype"),
        (lambda entry: entry.update(dtype=None), "unknown dtype None"),
        (lambda entry: entry.update(shape=""), "a list of sizes"),
        (lambda entry: entry.update(shape=[entry["shape"]]), "a list of sizes"),
        (lambda entry: entry.update(shape=[True]), "is not made of sizes"),
        (lambda entry: entry.update(shape=[10**400], data_offsets=[0, 10**400]), "more than any file holds"),
        (lambda entry: entry.update(data_offsets=[str(offset) for offset in entry["data_offsets"]]), "two integers"),
        (lambda entry: entry.update(data_offsets=[*entry["data_offsets"], 0]), "two integers"),
        (lambda entry: entry.update(data_offsets=[entry["data_offsets"][0], None]), "two integers"),
    ],
    ids=["gone", "list", "null", "text", "nested", "bool", "huge", "texts", "three", "open"],
)
def test_an_entry_that_says_something_else_is_named(small, change, message):
    edit_header(small, lambda document: change(document[WEIGHT]))
    with pytest.raises(CheckpointError, match=message) as raised:
        inspect(small)
    assert [(fault.file, fault.tensor) for fault in raised.value.faults] == [(SHARD, WEIGHT)]
    assert (SHARD, WEIGHT) in faults(small)


@pytest.mark.parametrize(
    "text", [b"[]", b"3", b"{", b"\xff{}", b'{"x": 1.0}', b'{"x": NaN}', '{"é": []}'.encode("utf-16")]
)
def test_text_that_is_no_header(small, text):
    path = small / SHARD
    path.write_bytes(len(text).to_bytes(8, "little") + text)
    with pytest.raises(CheckpointError, match=rf"^{SHARD}: not a safetensors header: .{{1,200}}$"):
        inspect(small)


@pytest.mark.parametrize("metadata", [None, {"format": "tf"}, {"format": 3}, ["pt"]], ids=["gone", "tf", "int", "list"])
def test_metadata_that_changed(small, metadata):
    def change(document):
        document.pop("__metadata__")
        if metadata is not None:
            document["__metadata__"] = metadata

    edit_header(small, change)
    assert (SHARD, None) in faults(small)


def test_a_config_of_another_shape(small):
    checkpoints.edit_json(
        small / "config.json", lambda config: config["quantization_config"].update(quantized_layers=["x"])
    )
    assert ("config.json", None) in faults(small)


@pytest.mark.parametrize("text", ["[" * 100_000, json.dumps({"weight_map": {"x": "s" * 5000 + ".safetensors"}})])
def test_an_index_that_cannot_be_followed(small, text):
    next(small.rglob("*.index.json")).write_text(text)
    assert [fault.file for fault in verify(small).faults] == ["model.safetensors.index.json"]
    with pytest.raises(CheckpointError):
        load_layer_scales(small, 0, "down_proj")


def test_gate_and_up_that_do_not_stack(tmp_path):
    tensors = checkpoints.random_moe()
    for name in list(tensors):
        if name.endswith(("up_proj.weight_scale", "up_proj.weight")):
            tensors[name] = torch.cat([tensors[name], tensors[name]], 0)
    root = checkpoints.write_checkpoint(tmp_path / "source", tensors, checkpoints.MODELOPT_CONFIG)
    with pytest.raises(CheckpointError, match="gate and up are stacked only if they are alike"):
        load_layer_scales(root, 0, "gate_up_proj", order="gate_up")
