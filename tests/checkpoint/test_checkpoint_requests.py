"""The words of every message about a config, a name or a request: tables of messages with what causes them."""

from __future__ import annotations

import re
import shutil
import struct
import sys
from contextlib import nullcontext
from pathlib import Path
from threading import Event
from types import SimpleNamespace

import pytest
import torch
import typer
from typer.testing import CliRunner

import checkpoints
import finegrained_kernels
import published
from damage import (
    EXPERTS,
    FIXED,
    SHARD,
    WORDS,
    Change,
    cut,
    edit,
    layers,
    of_one_name,
    small_checkpoint,
    tensor,
    text,
)
from finegrained_kernels.checkpoint import (
    CheckpointError,
    compress,
    compression,
    inspect,
    load_layer_globals,
    load_layer_scales,
    quantization,
    quantize,
    restore,
    shards,
    verify,
)
from finegrained_kernels.checkpoint.contents import ContentCheck
from finegrained_kernels.checkpoint.headers import Header
from finegrained_kernels.checkpoint.paths import check_inside
from finegrained_kernels.checkpoint.plot import draw
from finegrained_kernels.checkpoint.quantization_config import read_quantization
from finegrained_kernels.checkpoint.slices import read_globals
from finegrained_kernels.checkpoint.stream import Fanout, opened
from finegrained_kernels.checkpoint.wire import geometry_problem
from finegrained_kernels.cli import app

pytestmark = pytest.mark.usefixtures("bundle")


@pytest.fixture(scope="module")
def made(bundle, tmp_path_factory) -> Path:
    return small_checkpoint(tmp_path_factory.mktemp("messages"))


def section(method: str, **keys: object) -> dict:
    return {"quantization_config": {"quant_method": method, **keys}}


def modelopt(**keys: object) -> dict:
    return section("modelopt", **{"quant_algo": "NVFP4", **keys})


def groups(**group: object) -> dict:
    return section("compressed-tensors", config_groups={"g": group})


CONFIGS: list[tuple[str, dict]] = [
    ("quantization_config: expected an object, got 3", {"quantization_config": 3}),
    (
        "differs from a_config.quantization_config: which of them is meant is not known",
        {"a_config": modelopt(), "b_config": modelopt(quant_algo="FP8")},
    ),
    ("quant_method: 'zip', expected one of modelopt, compressed-tensors, fp8, mxfp8", section("zip")),
    ("quantized_layers: missing: MIXED_PRECISION says nothing without it", modelopt(quant_algo="MIXED_PRECISION")),
    ("config_groups: missing: nothing says which layers are quantized, and how", section("modelopt")),
    ("quantized_layers: expected an object, got 3", modelopt(quantized_layers=3)),
    ("quantized_layers.x: expected an object, got 3", modelopt(quantized_layers={"x": 3})),
    ("quant_algo: 'NVFP5', expected one of NVFP4, ", modelopt(quant_algo="NVFP5")),
    ("pre_quant_scale: expected true or false, got 3", modelopt(pre_quant_scale=3)),
    ("group_size: 32: NVFP4 has a scale for 16 weights", modelopt(group_size=32)),
    ("config_groups: expected an object, got 3", section("compressed-tensors", config_groups=3)),
    ("config_groups.g: expected an object, got 3", section("compressed-tensors", config_groups={"g": 3})),
    ("config_groups.g.targets: expected a list of names, got 3", groups(targets=3)),
    ("config_groups.g.weights: expected an object, got 3", groups(weights=3)),
    ("format: expected a text, got 3", groups(weights={}, format=3)),
    ("config_groups.g.weights.num_bits: expected a number, got 'four'", groups(weights={"num_bits": "four"})),
    ("config_groups.g.weights.num_bits: missing: how weights are stored is not known", groups(weights={})),
    (
        "config_groups.g.input_activations.dynamic: expected true, false or 'local', got 'x'",
        groups(weights={"num_bits": 4}, input_activations={"dynamic": "x"}),
    ),
    ("weight_block_size: expected rows and columns of a block, got 'x'", section("fp8", weight_block_size="x")),
    ("activation_scheme: expected 'dynamic' or 'static', got 'x'", section("fp8", activation_scheme="x")),
    ("kv_cache_quant_algo: expected a text, got 3", modelopt(kv_cache_quant_algo=3)),
    ("kv_cache_scheme: expected an object, got 3", modelopt(kv_cache_scheme=3)),
    ("ignore: '(' is not a regular expression: ", modelopt(ignore=["re:("])),
]


@pytest.mark.parametrize(("message", "config"), CONFIGS, ids=[message[:50] for message, _ in CONFIGS])
def test_of_a_config(message, config):
    with pytest.raises(CheckpointError) as caught:
        read_quantization(config)
    assert message in str(caught.value) and str(caught.value).startswith("config.json: ")


def test_hf_quant_config_is_named():
    with pytest.raises(CheckpointError, match=r"^hf_quant_config\.json: quantization: expected an object, got 3$"):
        read_quantization(None, {"quantization": 3})


def test_a_format_without_a_name_is_described(made, tmp_path):
    """The tensors are NVFP4, and the config says otherwise."""
    source = Path(shutil.copytree(made / "source", tmp_path / "source"))
    groups = {"g": {"weights": {"num_bits": 3, "type": "int"}, "format": "pack-quantized"}}
    section = {"quant_method": "compressed-tensors", "config_groups": groups}
    edit("config.json", lambda config: config.update(quantization_config=section))(source)
    (fault, *_) = inspect(source).faults
    said = "but pack-quantized of 3-bit int, strategy tensor by the config: no loader can tell which is right"
    assert f"NVFP4 by its tensors, {said}" in fault


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        (3, "is not a text"),
        ("", "is empty"),
        ("\ud800", "is not valid Unicode"),
        ("a\nb", "has a control character"),
        ("/etc/passwd", "is not a path inside the checkpoint, with forward slashes"),
        ("a/../../b", "is not a path inside the checkpoint, in its plain form"),
        ("a" * 5000, "is too long"),
    ],
    ids=lambda value: str(value)[:12].encode("ascii", "replace").decode(),
)
def test_of_a_name(name, problem):
    with pytest.raises(CheckpointError) as caught:
        check_inside(name, "x.json")
    assert str(caught.value).startswith("x.json: names the file ") and str(caught.value).endswith(f", which {problem}")


def test_of_what_is_asked_for(made, tmp_path):
    source, out = made / "source", tmp_path / "out"
    for message, call in {
        "must be separate directories, none inside the other": lambda: compress(source, source / "inside"),
        "out cannot be made: Not a directory": lambda: compress(source, made / "hf" / "config.json" / "out"),
        "jobs must be at least 1, got 0": lambda: compress(source, out, jobs=0),
        "device 'meta' cannot be used: expected cpu or cuda": lambda: compress(source, out, device="meta"),
        "device 'x' cannot be used: ": lambda: compress(source, out, device="x"),
        "layout must be 'hf' or 'container', got 'x'": lambda: compress(source, out, layout="x"),
        "no pattern matches any of its 7 NVFP4 scales, such as ": lambda: compress(source, out, include=["x"]),
        "has no csf_digests/: it was not made by compress, so there is nothing to restore": lambda: restore(
            source, out
        ),
        "scales must be 'amax' or 'mse', got 'x'": lambda: quantize(source, out, scales="x"),
        "input_scale must be a finite number above 0, got 0": lambda: quantize(source, out, input_scale=0),
        "has a quantization_config: the checkpoint is quantized already": lambda: quantize(source, out),
        "is not a directory": lambda: compress(made / "absent", out),
        "absent: neither a directory nor a hub id (org/name)": lambda: inspect(made / "absent"),
    }.items():
        with pytest.raises(CheckpointError) as caught:
            call()
        assert message in str(caught.value)
        assert not out.exists()


def test_of_a_container(made, tmp_path):
    source = Path(shutil.copytree(made / "source", tmp_path / "source"))
    edit("config.json", lambda config: config.pop("model_type"))(source)
    with pytest.raises(CheckpointError, match="has no model_type: name the container's family"):
        compress(source, tmp_path / "out", layout="container")
    of_one_name(source)
    with pytest.raises(CheckpointError, match="a container needs shards of different names, got "):
        compress(source, tmp_path / "out", layout="container", family="x")


def test_of_a_model_that_is_quantized_otherwise(tmp_path):
    tensors = {}
    for i in range(5):
        tensors[f"model.layers.{i}.mlp.up_proj.weight"] = torch.zeros(32, 64).to(torch.float8_e4m3fn)
        tensors[f"model.layers.{i}.mlp.up_proj.weight_scale"] = torch.ones(())
    source = checkpoints.write_checkpoint(tmp_path / "source", tensors, checkpoints.CONFIG)
    said = r"has no NVFP4 scales; quantized otherwise are model\.layers\.0\.mlp\.up_proj\.weight: FP8, .* and \d more$"
    with pytest.raises(CheckpointError, match=said):
        compress(source, tmp_path / "out")


def test_of_quantizing(tmp_path):
    weight = {"model.layers.0.mlp.up_proj.weight": torch.ones(32, 64)}
    source = checkpoints.write_checkpoint(tmp_path / "source", weight, checkpoints.CONFIG)
    with pytest.raises(CheckpointError, match="no weight of a linear layer is asked for"):
        quantize(source, tmp_path / "out", include=["x"])
    (source / "config.json").unlink()
    with pytest.raises(CheckpointError, match="does not exist: it is where quantized layers are named"):
        quantize(source, tmp_path / "out")


def test_of_restoring(made, tmp_path):
    small = Path(shutil.copytree(made / "hf", tmp_path / "small"))
    (small / "tokenizer.json").write_text("[]")
    with pytest.raises(CheckpointError, match="its copy is missing or has changed: SHA-256 is not "):
        restore(small, tmp_path / "out")
    tensor(WORDS, None)(small)
    with pytest.raises(CheckpointError, match="unpaired: the checkpoint has no "):
        restore(small, tmp_path / "out2")


def test_of_restoring_a_malformed_plane(made, tmp_path):
    small = Path(shutil.copytree(made / "hf", tmp_path / "small"))
    tensor(FIXED, torch.full((4, 48), 255, dtype=torch.uint8))(small)
    said = r"malformed, or one of the \d+ scales decoded with it: .*base 255 at row 0 is above 240"
    with pytest.raises(CheckpointError, match=said):
        restore(small, tmp_path / "out")


def test_of_a_part_that_no_stack_has(tmp_path):
    kind = published.fused_experts()
    compress(checkpoints.write_checkpoint(tmp_path / "source", kind.tensors, kind.config), tmp_path / "small")
    stream = f"{EXPERTS}.down_proj.weight_scale.{{}}.nvfp4_csf_fixed"
    tensors = checkpoints.read_tensors(tmp_path / "small")
    tensors[stream.format(9)] = tensors[stream.format(0)].clone()
    checkpoints.save_file(tensors, tmp_path / "small" / "model.safetensors", {"format": "pt"})
    said = f"{stream.format(9)}: no expert of the stack beside it has this number"
    assert said in "\n".join(map(str, verify(tmp_path / "small").faults))


def test_of_a_strangers_file_in_the_folder_of_unfinished_ones(made, tmp_path, monkeypatch):
    go_on = compression.publish

    def publish(*arguments: object) -> None:
        (tmp_path / "out" / ".incomplete" / "notes").write_text("not ours")
        go_on(*arguments)

    monkeypatch.setattr(compression, "publish", publish)
    with pytest.raises(CheckpointError, match=r"\.incomplete holds notes, which is not ours: move it, and run again$"):
        compress(made / "source", tmp_path / "out")
    assert (tmp_path / "out" / ".incomplete" / "notes").exists()


def test_of_sizes_that_planes_cannot_have():
    for rows, cols, said in (
        (24, 4, "24 rows are not a positive multiple of 16"),
        (16, 5, "5 columns are not a positive even number"),
        (4112, 4096, "4112 x 4096 is more than 2^24 bytes"),
        (4096, 4096, None),
    ):
        assert geometry_problem(rows, cols) == said


def test_of_commands(made, tmp_path):
    """What `inspect` and `compress` print about a source that has a fault, and about its KV cache."""
    source = Path(shutil.copytree(made / "source", tmp_path / "source"))
    said = {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}
    edit("config.json", lambda config: config["quantization_config"].update(said))(source)
    printed = CliRunner().invoke(app, ["inspect", str(source)]).stdout
    assert "\nKV cache: FP8\n" in printed
    assert "\nGPUs that hold it, with 90% of their memory: 1 x " in printed
    assert "\nfault: " in printed
    compressed = CliRunner().invoke(app, ["compress", str(source), str(tmp_path / "out")]).stdout
    assert "\nfault of the source: " in compressed


SLICES: list[tuple[str, Change | None, dict]] = [
    ("projection must be gate_proj, up_proj, down_proj or gate_up_proj, got 'x'", None, {"projection": "x"}),
    ("gate_up_proj needs an order, one of gate_up, up_gate; got None", None, {"projection": "gate_up_proj"}),
    ("order is for gate_up_proj, got 'gate_up' with up_proj", None, {"order": "gate_up"}),
    ("layer 7 of ", None, {"layer": 7}),
    ("means no layer of NVFP4 experts: name one module", None, {"layer": 7}),
    ("experts must name at least one", None, {"experts": []}),
    ("no NVFP4 scales for up_proj of experts [5]; it has down_proj, gate_proj, up_proj", None, {"experts": [5]}),
    ("tp_rank must be from 0 to tp_size - 1, got 2 of 2", None, {"tp_rank": 2, "tp_size": 2}),
    ("64 rows cannot be cut into 3 parts of a multiple of 16; tp_size can be 1, 2, 4", None, {"tp_size": 3}),
    ("has compressed scales, but is not marked as compressed", layers(lambda table: table.pop(EXPERTS)), {}),
    ("a base is above 240", tensor(FIXED, torch.full((4, 48), 255, dtype=torch.uint8)), {}),
    (
        "exceptions are out of order, or beyond a plane of 64 x 4",
        tensor(WORDS, torch.tensor([9, 3]).to(torch.uint32)),
        {},
    ),
]


@pytest.mark.parametrize(("message", "change", "options"), SLICES, ids=[row[0][:50] for row in SLICES])
def test_of_slices(made, tmp_path, message, change, options):
    small = Path(shutil.copytree(made / "hf", tmp_path / "small"))
    if change is not None:
        change(small)
    with pytest.raises(CheckpointError) as caught:
        load_layer_scales(small, **{"layer": 0, "projection": "up_proj", **options})
    assert message in str(caught.value)


def test_of_rows_that_are_not_two_halves(tmp_path):
    kind = published.fused_experts()
    prefix = f"{EXPERTS}.gate_up_proj"
    weight, scale = kind.tensors[f"{prefix}.weight"], kind.tensors[f"{prefix}.weight_scale"]
    kind.tensors.update({f"{prefix}.weight": weight[:, 1:].clone(), f"{prefix}.weight_scale": scale[:, 1:].clone()})
    source = checkpoints.write_checkpoint(tmp_path / "source", kind.tensors, kind.config)
    with pytest.raises(CheckpointError, match=rf"{weight.shape[1] - 1} rows are not those of gate and up"):
        load_layer_scales(source, 0, "up_proj")


def test_of_slices_of_unlike_experts(tmp_path):
    generator = torch.Generator().manual_seed(0)

    def model(name: str, shapes: dict[str, tuple[int, int]]) -> Path:
        tensors: checkpoints.Tensors = {}
        for module, shape in shapes.items():
            tensors |= checkpoints.nvfp4_module(f"{EXPERTS}.{module}", *shape, generator)
        return checkpoints.write_checkpoint(tmp_path / name, tensors, checkpoints.MODELOPT_CONFIG)

    missing = model("missing", {"0.up_proj": (64, 64), "2.up_proj": (64, 64)})
    with pytest.raises(CheckpointError, match=f"{EXPERTS}: expert 1 of 0 to 2 is missing"):
        load_layer_scales(missing, 0, "up_proj")
    unlike = model("unlike", {"0.up_proj": (64, 64), "1.up_proj": (32, 64)})
    with pytest.raises(CheckpointError, match=r"1\.up_proj.*: 32 x 4, but .*0\.up_proj.*: 64 x 4"):
        load_layer_scales(unlike, 0, "up_proj")
    halves = model("halves", {"0.up_proj": (64, 64), "0.gate_proj": (32, 64)})
    with pytest.raises(
        CheckpointError, match=r"64 x 4, but .*: 32 x 4; gate and up are stacked only if they are alike"
    ):
        load_layer_scales(halves, 0, "gate_up_proj", order="gate_up")
    tensor(f"{EXPERTS}.0.up_proj.weight_scale_2", torch.tensor(-1.0), "model.safetensors")(unlike)
    with pytest.raises(
        CheckpointError, match=r"is -1\.0, which is not a scale: expected a finite number, not negative"
    ):
        load_layer_globals(unlike, 0, "up_proj")


def read_divisor(divisor: float) -> torch.Tensor:
    plane = SimpleNamespace(global_scale="x.weight_global_scale", part=None, global_scale_divides=True)
    located = {plane.global_scale: ("a.safetensors", None)}
    reader = SimpleNamespace(
        checkpoint=SimpleNamespace(located=located), read_value=lambda name, part: struct.pack("<f", divisor)
    )
    return read_globals(reader, [[plane]])


@pytest.mark.parametrize("divisor", [0.0, float("nan"), -1.0, -float("inf"), 2.0**-149])
def test_a_divisor_that_is_no_scale(divisor):
    stored = torch.tensor(divisor).item()
    message = f"a.safetensors: x.weight_global_scale: is {stored}, which is not a scale: expected a divisor above 0 "
    with pytest.raises(CheckpointError, match=f"^{re.escape(message)}with a finite reciprocal"):
        read_divisor(divisor)


def test_weights_that_are_all_zero_may_have_an_infinite_divisor():
    assert read_divisor(float("inf")).tolist() == [0.0]


@pytest.mark.parametrize(
    ("step", "change", "message"),
    [
        ("for_each_shard", cut(1), f"{SHARD}: has changed since it was checked"),
        ("publish", edit("config.json", dict.clear), "config.json: changed while the checkpoint was compressed"),
        ("publish", text("tokenizer.json", "[]"), "tokenizer.json: changed while the checkpoint was compressed"),
    ],
)
def test_of_a_source_that_changes(made, tmp_path, monkeypatch, step, change, message):
    source = Path(shutil.copytree(made / "source", tmp_path / "source"))
    go_on = getattr(compression, step)
    monkeypatch.setattr(compression, step, lambda *arguments: (change(source), go_on(*arguments)))
    with pytest.raises(CheckpointError) as caught:
        compress(source, tmp_path / "out")
    assert message in str(caught.value)


def test_of_two_processes_that_quantize(tmp_path, monkeypatch):
    weight = {"model.layers.0.mlp.up_proj.weight": torch.ones(32, 64)}
    source = checkpoints.write_checkpoint(tmp_path / "source", weight, checkpoints.CONFIG)
    monkeypatch.setattr(quantization, "finishing", lambda *_, **__: nullcontext(False))
    with pytest.raises(CheckpointError, match="another process is writing to "):
        quantize(source, tmp_path / "out")


def test_of_an_encoder_that_is_wrong(bundle, made, tmp_path, monkeypatch):
    """What it wrote is decoded before it is kept."""

    def decompress(*arguments, **options):
        decoded = bundle.decompress_nvfp4_csf_scales(*arguments, **options).view(torch.uint8)
        decoded.view(-1)[0] ^= 1
        return decoded

    broken = SimpleNamespace(**vars(bundle) | {"decompress_nvfp4_csf_scales": decompress})
    monkeypatch.setattr(finegrained_kernels, "load", lambda: broken)
    with pytest.raises(CheckpointError, match="does not decode to the bytes it was encoded from"):
        compress(made / "source", tmp_path / "out")
    assert "does not decode to the source's bytes" in str(verify(made / "hf").faults)


def test_of_bytes_that_do_not_make_the_source(made, monkeypatch):
    """If nothing else is wrong."""
    monkeypatch.setattr(ContentCheck, "prove", lambda *_: False)
    (fault, *_) = verify(made / "hf").faults
    assert fault.message.startswith("the tensors here do not make up its source, SHA-256 ")


def test_of_shards_that_do_not_read_back(made, tmp_path, monkeypatch):
    weight = {"model.layers.0.mlp.up_proj.weight": torch.ones(32, 64)}
    plain = checkpoints.write_checkpoint(tmp_path / "plain", weight, checkpoints.CONFIG)
    for module, call in (
        (quantization, lambda: quantize(plain, tmp_path / "nvfp4")),
        (shards, lambda: compress(made / "source", tmp_path / "out")),
    ):
        monkeypatch.setattr(module, "read_header", lambda *_: Header(b"", None, {}))
        with pytest.raises(CheckpointError, match="does not read back as written"):
            call()


def test_of_a_shard_that_is_cut_while_it_is_read(tmp_path):
    (tmp_path / "shard").write_bytes(b"abc")
    with (
        opened(tmp_path / "shard", "shard") as fd,
        Fanout([], Event(), lambda _: None) as stream,
        pytest.raises(CheckpointError, match="shard: ends at byte 3, expected 8 or more"),
    ):
        stream.read(fd, 0, 8, "shard")


def test_of_a_picture_without_matplotlib(made, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(CheckpointError, match="--plot needs matplotlib: pip install matplotlib"):
        draw(inspect(made / "hf"), tmp_path / "picture.svg")


@pytest.mark.parametrize(
    ("name", "said"), [("none/a.svg", "No such file or directory"), ("a.text", "Format 'text' is not supported .*")]
)
def test_of_a_picture_that_cannot_be_written(made, tmp_path, name, said):
    path = tmp_path / name
    with pytest.raises(CheckpointError, match=f"^{re.escape(str(path))} cannot be written: {said}$"):
        draw(inspect(made / "hf"), path)


def test_of_help():
    """Every argument and every option says what it is."""
    for name, command in typer.main.get_command(app).commands.items():
        assert command.help, name
        for parameter in command.params:
            assert parameter.help, f"{name} {parameter.name}"
