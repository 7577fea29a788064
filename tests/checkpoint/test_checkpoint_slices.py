"""load_layer_scales: any slice of any layer, cut from compressed data, equals the same slice of the dense scales."""

from __future__ import annotations

import json

import pytest
import torch

import checkpoints
from finegrained_kernels.checkpoint import (
    CheckpointError,
    compress,
    load_layer_globals,
    load_layer_scales,
    open_checkpoint,
)
from finegrained_kernels.checkpoint.headers import read_header
from finegrained_kernels.checkpoint.layouts import container_faults

pytestmark = pytest.mark.usefixtures("bundle")

EXPERTS, HIDDEN, INTER = 5, 256, 128
FORMS = ("dense", "compressed_tensors", "hf", "resharded", "container", "mixed")


@pytest.fixture(scope="module")
def model():
    return checkpoints.random_moe(experts=EXPERTS, hidden=HIDDEN, inter=INTER)


@pytest.fixture(scope="module")
def roots(bundle, model, tmp_path_factory):
    """The same model in every form from which scales can be read."""
    root = tmp_path_factory.mktemp("slices")
    by_layer = checkpoints.by_layer
    roots = {
        "dense": checkpoints.write_checkpoint(root / "dense", model, checkpoints.MODELOPT_CONFIG, shard_of=by_layer)
    }
    roots["compressed_tensors"] = checkpoints.write_checkpoint(
        root / "ct", checkpoints.as_compressed_tensors(model), checkpoints.COMPRESSED_TENSORS_CONFIG
    )
    for form, options in {
        "hf": {},
        "resharded": {},
        "container": {"layout": "container"},
        "mixed": {"exclude": ["*.experts.[13].*", "*.experts.0.up_proj.*"]},
    }.items():
        roots[form] = root / form
        compress(roots["dense"], roots[form], **options)
    checkpoints.reshard(roots["resharded"], checkpoints.by_component)
    return roots


def dense(model: checkpoints.Tensors, layer: int, projection: str, experts) -> torch.Tensor:
    names = [f"model.layers.{layer}.mlp.experts.{expert}.{projection}.weight_scale" for expert in experts]
    return torch.stack([model[name].view(torch.uint8) for name in names])


def decoded(bundle, scales) -> torch.Tensor:
    return bundle.decompress_nvfp4_csf_scales(scales).view(torch.uint8)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("projection", ["gate_proj", "up_proj", "down_proj"])
def test_whole_layers(bundle, model, roots, form, projection):
    for layer in range(2):
        scales = load_layer_scales(roots[form], layer, projection)
        assert torch.equal(decoded(bundle, scales), dense(model, layer, projection, range(EXPERTS)))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("tp_size", [1, 2, 4, 8])
def test_tensor_parallel_slices(bundle, model, roots, form, tp_size):
    checkpoint = open_checkpoint(roots[form])
    gate, up, down = (dense(model, 1, projection, range(EXPERTS)) for projection in checkpoints.PROJECTIONS)
    for rank in range(tp_size):
        part = {"tp_rank": rank, "tp_size": tp_size}
        rows = slice(rank * INTER // tp_size, (rank + 1) * INTER // tp_size)
        halves = {"gate_up": [gate[:, rows], up[:, rows]], "up_gate": [up[:, rows], gate[:, rows]]}
        for order, stacked in halves.items():
            scales = load_layer_scales(checkpoint, 1, "gate_up_proj", order=order, **part)
            assert torch.equal(decoded(bundle, scales), torch.cat(stacked, dim=1))
        if tp_size <= 4:
            cols = slice(rank * INTER // 16 // tp_size, (rank + 1) * INTER // 16 // tp_size)
            scales = load_layer_scales(checkpoint, 1, "down_proj", **part)
            assert torch.equal(decoded(bundle, scales), down[:, :, cols])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("experts", [[0], [4, 1, 2], range(1, 4)], ids=str)
def test_expert_parallel_subsets(bundle, model, roots, form, experts):
    scales = load_layer_scales(roots[form], 0, "gate_up_proj", experts=experts, order="up_gate", tp_rank=1, tp_size=2)
    expected = torch.cat([dense(model, 0, name, experts)[:, INTER // 2 :] for name in ("up_proj", "gate_proj")], dim=1)
    assert torch.equal(decoded(bundle, scales), expected)


def test_slices_are_what_compressing_the_slice_gives(bundle, model, roots):
    """Even the bytes are equal, not only their meaning, if a cut keeps whole rows: a row's base depends on that row
    alone."""
    scales = load_layer_scales(roots["hf"], 0, "up_proj", tp_rank=1, tp_size=2)
    fixed, exceptions = scales.to_wire()
    expected = bundle.compress_nvfp4_csf_scales(dense(model, 0, "up_proj", range(EXPERTS))[:, INTER // 2 :])
    assert torch.equal(fixed, expected[0])
    assert all(
        torch.equal(a.view(torch.int32), b.view(torch.int32)) for a, b in zip(exceptions, expected[1], strict=True)
    )


@pytest.mark.parametrize("form", FORMS)
def test_globals_are_multipliers_one_for_each_half(model, roots, form):
    def expected(projection: str) -> torch.Tensor:
        names = [f"model.layers.1.mlp.experts.{e}.{projection}.weight_scale_2" for e in range(EXPERTS)]
        values = torch.stack([model[name] for name in names])
        return 1 / (1 / values) if form == "compressed_tensors" else values

    assert torch.equal(load_layer_globals(roots[form], 1, "down_proj"), expected("down_proj"))
    both = load_layer_globals(roots[form], 1, "gate_up_proj", order="up_gate")
    assert both.dtype == torch.float32
    assert torch.equal(both, torch.stack([expected("up_proj"), expected("gate_proj")], dim=1))
    assert not torch.equal(both[:, 0], both[:, 1])
    assert torch.equal(load_layer_globals(roots[form], 1, "up_proj", experts=[3]), expected("up_proj")[3:4])


@pytest.mark.parametrize("form", ["dense", "hf"])
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("gate_proj", {"tp_size": 3}), "128 rows cannot be cut into 3 .* multiple of 16; tp_size can be 1, 2, 4, 8$"),
        (("down_proj", {"tp_size": 8}), "8 columns cannot be cut into 8 .* multiple of 2; tp_size can be 1, 2, 4$"),
        (("gate_up_proj", {"tp_size": 16, "order": "gate_up"}), "tp_size can be 1, 2, 4, 8$"),
        (("gate_up_proj", {}), "needs an order, one of gate_up, up_gate"),
        (("gate_proj", {"order": "gate_up"}), "order is for gate_up_proj"),
        (("w1", {}), "projection must be"),
        (("gate_proj", {"experts": [1, 5, -1]}), r"gate_proj of experts \[5, -1\]"),
        (("gate_proj", {"experts": []}), "at least one"),
        (("gate_proj", {"tp_rank": 2, "tp_size": 2}), "tp_rank must be from 0"),
    ],
)
def test_what_cannot_be_loaded_says_why(roots, form, arguments, message):
    projection, options = arguments
    with pytest.raises(CheckpointError, match=message):
        load_layer_scales(roots[form], 0, projection, **options)


def test_a_layer_is_named_by_number_or_module(bundle, model, tmp_path):
    generator = torch.Generator().manual_seed(7)
    tensors = model | checkpoints.moe_layer(0, generator, prefix="mtp.layers")
    root = checkpoints.write_checkpoint(tmp_path / "two", tensors, checkpoints.MODELOPT_CONFIG)
    with pytest.raises(
        CheckpointError, match=r"layer 0 .* means .*model.layers.0.mlp.experts.*mtp.layers.0.mlp.experts"
    ):
        load_layer_scales(root, 0, "up_proj")
    with pytest.raises(CheckpointError, match=r"layer 9 .* means no layer"):
        load_layer_scales(root, 9, "up_proj")
    scales = load_layer_scales(root, "model.layers.0.mlp.experts", "up_proj")
    assert torch.equal(decoded(bundle, scales), dense(model, 0, "up_proj", range(EXPERTS)))


def test_a_stack_beyond_the_format_is_refused(tmp_path):
    """Each half fits in 2^24 bytes, but both together do not: positions would overlap the values."""
    module = "model.layers.0.mlp.experts.0"
    tensors = {}
    for projection in ("gate_proj", "up_proj"):
        tensors[f"{module}.{projection}.weight"] = torch.zeros(8208, 8192, dtype=torch.uint8)
        tensors[f"{module}.{projection}.weight_scale"] = torch.zeros(8208, 1024, dtype=torch.uint8).view(
            torch.float8_e4m3fn
        )
        tensors[f"{module}.{projection}.weight_scale_2"] = torch.ones(())
    root = checkpoints.write_checkpoint(tmp_path / "wide", tensors, checkpoints.MODELOPT_CONFIG)
    with pytest.raises(CheckpointError, match="load the halves apart"):
        load_layer_scales(root, 0, "gate_up_proj", order="gate_up")
    assert load_layer_scales(root, 0, "gate_up_proj", order="gate_up", tp_size=27, tp_rank=2).shape == (1, 608, 1024)


def test_unmarked_layers_are_not_taken_for_compressed(roots, tmp_path):
    compress(roots["dense"], tmp_path / "small")
    checkpoints.edit_json(
        tmp_path / "small" / "config.json",
        lambda config: config["quantization_config"]["quantized_layers"].pop("model.layers.0.mlp.experts"),
    )
    with pytest.raises(CheckpointError, match=r"config.json: model.layers.0.mlp.experts: .* not marked"):
        load_layer_scales(tmp_path / "small", 0, "up_proj")
    load_layer_scales(tmp_path / "small", 1, "up_proj")


@pytest.mark.parametrize(("component", "value"), [("fixed", 241), ("exceptions", 0xFF)])
def test_malformed_scales_are_named(roots, tmp_path, component, value):
    """Even if the fault is in a part that the slice leaves out."""
    compress(roots["dense"], tmp_path / "small")
    shard = "model-00002-of-00003.safetensors"
    header = read_header(tmp_path / "small" / shard, shard)
    name = f"model.layers.0.mlp.experts.2.up_proj.weight_scale.nvfp4_csf_{component}"
    info = header.tensors[name]
    offset = header.data_start + (info.begin if component == "fixed" else info.end - 2)
    with open(tmp_path / "small" / shard, "r+b") as file:
        file.seek(offset)
        file.write(bytes([value]))
    with pytest.raises(CheckpointError, match=f"{shard}: {name}"):
        load_layer_scales(tmp_path / "small", 0, "up_proj", tp_size=2)


def test_the_container_enforces_its_rules(roots, tmp_path):
    source = roots["container"]
    manifest, contract = (json.loads((source / name).read_text()) for name in ("manifest.json", "build-contract.json"))
    shard = manifest["shards"][0]["file"]

    def opens(changed: dict, name: str, message: str | None) -> None:
        root = tmp_path / str(len(list(tmp_path.iterdir())))
        root.mkdir()
        for path in source.iterdir():
            (root / path.name).symlink_to(path)
        (root / name).unlink()
        checkpoints.write_json(root / name, changed)
        if message is None:
            open_checkpoint(root)
        else:
            with pytest.raises(CheckpointError, match=message):
                open_checkpoint(root)

    for key in ("schema", "codec", "family"):
        opens(contract | {key: "other"}, "build-contract.json", f"{key} 'other' differs from")
    opens(manifest | {"shards": []}, "manifest.json", "different shards")
    opens(manifest | {"shards": [shard]}, "manifest.json", "list of objects")
    names = contract["source_names"]
    opens(contract | {"source_names": dict.fromkeys(names, shard)}, "build-contract.json", "different shards")
    for other in ([], {name: [shard] for name in names}):
        opens(contract | {"source_names": other}, "build-contract.json", "source_names must map texts to texts")
    opens(manifest | {"shards": manifest["shards"][1:]}, "manifest.json", "different shards")
    opens(manifest | {"shards": [{"file": f"../{shard}"}]}, "manifest.json", "not a bare file name")
    # Both agree, but on something other than this format.
    for key in ("schema", "codec"):
        faults = container_faults(manifest | {key: "other"}, contract | {key: "other"})
        assert [str(fault).startswith(f"manifest.json: {key} is 'other', expected") for fault in faults] == [True]
    # Names of source tensors describe the shards as well.
    scales = {name.partition(".nvfp4_csf_")[0]: file for name, file in names.items()}
    opens(contract | {"source_names": scales}, "build-contract.json", None)
