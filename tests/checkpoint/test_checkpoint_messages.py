"""The words of every message about a checkpoint: tables of messages with the damage that causes them.

Other tests check that faults are found, and where they are reported.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from damage import (
    EXPERTS,
    FIRST,
    FIXED,
    INDEX,
    SCALE,
    SHARD,
    UP,
    WORDS,
    Change,
    all_of,
    as_before,
    contract,
    cut,
    edit,
    entry,
    gone,
    header,
    layers,
    listed,
    manifest,
    of_index,
    pipe,
    small_checkpoint,
    sums,
    tensor,
    text,
    twice,
    without_digest,
)
from finegrained_kernels.checkpoint import CheckpointError, compress, verify

pytestmark = pytest.mark.usefixtures("bundle")


@pytest.fixture(scope="module")
def made(bundle, tmp_path_factory) -> Path:
    return small_checkpoint(tmp_path_factory.mktemp("messages"))


BYTES = torch.zeros(64, 4, dtype=torch.uint8)
SOURCES: list[tuple[str, Change]] = [
    # headers
    ("bytes do not hold the header they announce", text(SHARD, "short")),
    ("0.5 is not an integer", entry(data_offsets=[0.5, 1])),
    (
        "not a safetensors header: expected a JSON object, got list",
        lambda root: (root / SHARD).write_bytes((2).to_bytes(8, "little") + b"[]"),
    ),
    ("__metadata__ must map texts to texts, got", header(lambda entries: entries.update(__metadata__={"format": 3}))),
    ("expected a dtype, a list of sizes for shape and two integers for data_offsets, got", entry(shape=64)),
    ("unknown dtype 'F9'", entry(dtype="F9")),
    ("shape [-64, 4] is not made of sizes", entry(shape=[-64, 4])),
    ("is more than any file holds", entry(shape=[1 << 62, 1 << 62])),
    ("F4 [3] does not fill whole bytes", entry(dtype="F4", shape=[3])),
    ("F8_E4M3 [32, 4] does not fill bytes", entry(shape=[32, 4])),
    ("begins at byte", header(lambda entries: entries.pop(SCALE))),
    ("cut short: the file holds", cut(-1)),
    ("bytes left over: the file holds", cut(1)),
    # which files there are, and what they say
    (
        "has several indices: a.safetensors.index.json, model.safetensors.index.json",
        text("a.safetensors.index.json", "{}"),
    ),
    ("and not a single shard but model-00001", gone(INDEX)),
    (f"{INDEX}: cannot be read: ", text(INDEX, "{")),
    (f"{INDEX}: expected a JSON object, got list", text(INDEX, "[]")),
    (f"{INDEX}: metadata must be an object, got 3", of_index(lambda index: index.update(metadata=3))),
    (f"{INDEX}: weight_map must be an object that is not empty", of_index(lambda index: index.update(weight_map={}))),
    (f"{INDEX}: shard absent.safetensors does not exist", listed(x="absent.safetensors")),
    ("shard 'model.bin' is not a safetensors file", listed(x="model.bin")),
    ("said to be in " + FIRST + ", which does not have it", listed(x=FIRST)),
    (f"missing here, but {SHARD} has it", of_index(lambda index: index["weight_map"].pop(SCALE))),
    (f"said to be in {FIRST}, but is in {SHARD}", listed(**{SCALE: FIRST})),
    (f"also in {SHARD}", twice),
    ("config.json: does not exist: it is where compressed layers are marked", gone("config.json")),
    (
        "config.json: cannot be read: it is not a file",
        all_of(gone("config.json"), lambda root: (root / "config.json").mkdir()),
    ),
    ("pipe: is neither a file nor a directory", pipe),
    ("more.json: is a link that leads nowhere", lambda root: (root / "more.json").symlink_to("absent.json")),
    # the rules for NVFP4 scales
    (f"no weight beside it: expected {UP}.weight or {UP}.weight_packed", tensor(f"{UP}.weight", None)),
    (
        "expected [N, K/2], or [E, N, K/2] of a stack of experts, with K a multiple of 16, got [64, 4]",
        tensor(f"{UP}.weight", BYTES),
    ),
    (f"no second-level scale beside it: expected {UP}.weight_scale_2", tensor(f"{UP}.weight_scale_2", None)),
    (
        "expected one F32 value, got BF16 of 2 bytes",
        tensor(f"{UP}.weight_scale_2", torch.ones((), dtype=torch.bfloat16)),
    ),
    (f"expected F8_E4M3 [64, 4] for {UP}.weight [64, 32], got U8 [64, 4]", tensor(SCALE, BYTES)),
    (f"unpaired: the checkpoint has no {FIXED}", tensor(WORDS, BYTES)),
    (
        f"{UP}.weight must be U8 or I8, got I32",
        all_of(tensor(f"{UP}.weight", torch.zeros(64, 8, dtype=torch.int32)), tensor(FIXED, BYTES)),
    ),
]


@pytest.mark.parametrize(("message", "change"), SOURCES, ids=[message[:50] for message, _ in SOURCES])
def test_of_a_source(made, tmp_path, message, change):
    source = Path(shutil.copytree(made / "source", tmp_path / "source"))
    change(source)
    with pytest.raises(CheckpointError) as caught:
        compress(source, tmp_path / "out")
    assert message in str(caught.value)
    assert not (tmp_path / "out").exists()


def faults_of(root: Path, **options: object) -> str:
    return "\n".join(map(str, verify(root, **options).faults))


JOB = "csf_digests/job.json"
RECORD = f"csf_digests/shards/{SHARD}.json"
COMPRESSED: list[tuple[str, str, Change]] = [
    ("hf", "has changed: SHA-256 is not ", text("tokenizer.json", "[]")),
    ("hf", "tokenizer.json: does not exist", gone("tokenizer.json")),
    (
        "hf",
        "'hidden_size' is not what it was in the source",
        edit("config.json", lambda config: config.update(hidden_size=1)),
    ),
    ("hf", "is not what compress makes of the source's index", of_index(lambda index: index.update(more=1))),
    ("hf", "does not exist: compress has not finished this shard", gone(RECORD)),
    ("hf", "written.json: does not exist: compress has not finished", gone("written.json")),
    ("hf", "has changed: it is not what its own digest says", edit(RECORD, lambda record: record.update(nbytes=1))),
    ("hf", "schema 'other', expected", edit(RECORD, lambda record: record.update(schema="other"))),
    ("hf", "expected the keys [", edit(RECORD, lambda record: record.update(more=1))),
    ("hf", "names a file twice", edit(JOB, as_before)),
    ("hf", f"{JOB}: copied has an invalid value: 3", edit(JOB, without_digest(copied=3))),
    ("hf", f"{JOB}: 'short' is not a SHA-256", edit(JOB, without_digest(copied={"tokenizer.json": "short"}))),
    ("hf", f"{SHARD}: {WORDS}: missing: csf_digests records it", tensor(WORDS, None)),
    ("hf", f"{SHARD}: more: unexpected: csf_digests does not record it", tensor("more", BYTES)),
    ("hf", "BF16 [2, 64], recorded as", tensor("model.embed_tokens.weight", torch.zeros(2, 64).bfloat16(), FIRST)),
    ("hf", "its metadata is not the source's", header(lambda entries: entries.update(__metadata__={"format": "np"}))),
    ("hf", "its bytes have changed: CRC-32 ", tensor(f"{UP}.input_scale", torch.tensor(9.0))),
    ("hf", "expected U8 [4, 48] for scales [64, 4], got U8 [64, 4]", tensor(FIXED, BYTES)),
    ("hf", "expected 1-D U32 of at most 256 words, got U8 [64, 4]", tensor(WORDS, BYTES)),
    ("hf", f"compressed, and dense as {SCALE} too", tensor(SCALE, BYTES.view(torch.float8_e4m3fn))),
    (
        "hf",
        "quantized_layers must be an object, got 3",
        edit("config.json", lambda config: config["quantization_config"].update(quantized_layers=3)),
    ),
    ("hf", "expected an object in quantized_layers, got 3", layers(lambda table: table.update(x=3))),
    (
        "hf",
        "unknown weight_scale_encoding 'zip', expected 'csf'",
        layers(lambda table: table[EXPERTS].update(weight_scale_encoding="zip")),
    ),
    (
        "hf",
        "is not finished (.incomplete/ is there): run what began it again, or remove it",
        lambda root: (root / ".incomplete").mkdir(),
    ),
    (
        "container",
        f"tensors/{SHARD}: SHA-256 of the file is not {'0' * 64}",
        sums(lambda text: re.sub(rf"[0-9a-f]{{64}}(?=  tensors/{SHARD})", "0" * 64, text)),
    ),
    ("container", f"does not list tensors/{SHARD}", sums(lambda text: re.sub(rf".*tensors/{SHARD}\n", "", text))),
    ("container", "is not made of lines of a digest and a name", sums(str.rstrip)),
    ("container", "SHA256SUMS: cannot be read: ", gone("SHA256SUMS")),
    (
        "container",
        "schema 'x' differs from 'lil-nvfp4-csf-checkpoint/1' in manifest.json",
        contract(lambda document: document.update(schema="x")),
    ),
    (
        "container",
        "family is 3, expected 'a string'",
        all_of(*(change(lambda document: document.update(family=3)) for change in (manifest, contract))),
    ),
    (
        "container",
        "shards must be a list of objects with a file each",
        manifest(lambda document: document.update(shards=3)),
    ),
    ("container", "source_names must map texts to texts", contract(lambda document: document.update(source_names=3))),
    (
        "container",
        "shard 'a/b' is not a bare file name",
        manifest(lambda document: document["shards"][0].update(file="a/b")),
    ),
    (
        "container",
        "source_names and manifest.json name different shards: ['x.safetensors']",
        contract(lambda document: document["source_names"].update(x="x.safetensors")),
    ),
]


@pytest.mark.parametrize(("layout", "message", "change"), COMPRESSED, ids=[row[1][:50] for row in COMPRESSED])
def test_of_a_compressed_checkpoint(made, tmp_path, layout, message, change):
    small = Path(shutil.copytree(made / layout, tmp_path / "small"))
    change(small)
    assert message in faults_of(small)


AGAINST: list[tuple[str, Change]] = [
    ("differs from the source", tensor(f"{UP}.input_scale", torch.tensor(9.0))),
    ("is in the source, and missing here", tensor("more", BYTES)),
    (
        f"{UP}.weight_scale_2: is not in the source",
        all_of(*(tensor(f"{UP}.{name}", None) for name in ("weight", "weight_scale", "weight_scale_2"))),
    ),
    ("F32 [], in the source F32 [1]", tensor(f"{UP}.input_scale", torch.zeros(1))),
    ("its metadata differs from the source's", header(lambda entries: entries.update(__metadata__={"format": "np"}))),
    (f"{SCALE}: decoded, it differs from the source", tensor(SCALE, BYTES.view(torch.float8_e4m3fn))),
]


@pytest.mark.parametrize(("message", "change"), AGAINST, ids=[message[:50] for message, _ in AGAINST])
def test_of_a_comparison(made, tmp_path, message, change):
    source = Path(shutil.copytree(made / "source", tmp_path / "source"))
    change(source)
    assert message in faults_of(made / "hf", against=source)


def test_a_fault_in_many_tensors_is_counted(made, tmp_path):
    source = Path(shutil.copytree(made / "source", tmp_path / "source"))
    for name in load_file(source / SHARD):
        if name.endswith(".weight_scale_2"):
            tensor(name, None)(source)
    with pytest.raises(CheckpointError, match=r"; and 1 more$"):
        compress(source, tmp_path / "out")
