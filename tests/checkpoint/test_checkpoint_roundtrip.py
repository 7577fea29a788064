"""compress, verify, restore: nothing is lost, nothing else changes, in every layout and distribution over shards."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

import checkpoints
from finegrained_kernels.checkpoint import (
    CheckpointError,
    compress,
    load_layer_scales,
    plan_compression,
    quantize,
    restore,
    verify,
)
from finegrained_kernels.checkpoint.headers import build_header, read_header

pytestmark = pytest.mark.usefixtures("bundle")

LAYOUTS = ("hf", "container")
SHARDINGS = {
    "single": None,
    "by_layer": checkpoints.by_layer,
    "by_component": checkpoints.by_component,
    "subfolder": lambda name: f"weights/{checkpoints.by_layer(name)}",
}

MARKED = {f"model.layers.{layer}.mlp.{name}" for layer in range(2) for name in ("experts", "shared_expert.up_proj")}


def marked(root: Path) -> dict:
    config = json.loads((root / "config.json").read_text())["quantization_config"]
    return {name: entry for name, entry in config["quantized_layers"].items() if "weight_scale_encoding" in entry}


def decode(bundle, tensors: checkpoints.Tensors, name: str, rows: int, cols: int) -> torch.Tensor:
    fixed, words = tensors[f"{name}.nvfp4_csf_fixed"], tensors[f"{name}.nvfp4_csf_exceptions"]
    scales = bundle.prepare_nvfp4_csf_scales(fixed, words, num_rows=rows, num_cols=cols)
    return bundle.decompress_nvfp4_csf_scales(scales)[0]


def assert_same_model(bundle, source: checkpoints.Tensors, compressed: checkpoints.Tensors) -> set[str]:
    """Every tensor is there, bit for bit, dense or compressed; returns the compressed scales' names."""
    found, names = set(), set(compressed)
    for name, tensor in source.items():
        if name in compressed:
            other = compressed[name]
        else:
            other = decode(bundle, compressed, name, *tensor.shape)
            found.add(name)
            names -= {f"{name}.nvfp4_csf_fixed", f"{name}.nvfp4_csf_exceptions"}
        assert (other.dtype, other.shape) == (tensor.dtype, tensor.shape), name
        assert torch.equal(other.reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8)), name
    assert names <= source.keys()
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("sharding", SHARDINGS)
def test_round_trip(bundle, tmp_path, layout, sharding):
    tensors = checkpoints.random_moe()
    source = checkpoints.write_checkpoint(
        tmp_path / "source", tensors, checkpoints.MODELOPT_CONFIG, shard_of=SHARDINGS[sharding]
    )
    checkpoints.write_json(source / "hf_quant_config.json", checkpoints.HF_QUANT_CONFIG)
    before = checkpoints.tree(source)

    report = compress(source, tmp_path / "small", layout=layout)
    assert (report.compressed, report.left_dense) == (26, {})
    assert report.compressed_bytes < report.dense_bytes
    compressed = assert_same_model(bundle, tensors, checkpoints.read_tensors(tmp_path / "small"))
    assert compressed == {name for name in tensors if name.endswith(".weight_scale")}

    assert verify(tmp_path / "small", against=source).faults == []
    restore(tmp_path / "small", tmp_path / "restored")
    assert checkpoints.tree(tmp_path / "restored") == before == checkpoints.tree(source)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_result_depends_on_the_source_alone(tmp_path, layout):
    source = checkpoints.write_checkpoint(
        tmp_path / "source", checkpoints.random_moe(), checkpoints.MODELOPT_CONFIG, shard_of=checkpoints.by_layer
    )
    compress(source, tmp_path / "one", layout=layout)
    compress(source, tmp_path / "three", layout=layout, jobs=3)
    assert checkpoints.tree(tmp_path / "one") == checkpoints.tree(tmp_path / "three")


def test_what_passes_through_keeps_its_place(tmp_path):
    source = checkpoints.write_checkpoint(
        tmp_path / "source", checkpoints.random_moe(), checkpoints.MODELOPT_CONFIG, shard_of=checkpoints.by_layer
    )
    compress(source, tmp_path / "small")
    for path in source.glob("*.safetensors"):
        before, after = (read_header(root / path.name, path.name) for root in (source, tmp_path / "small"))
        assert after.metadata == before.metadata
        orders = [
            [name for name in names if name in before.tensors]
            for names in (after.tensors, [name for name, _ in after.in_data_order()])
        ]
        kept = [name for name in before.tensors if name in after.tensors]
        assert orders[0] == kept
        assert orders[1] == [name for name, _ in before.in_data_order() if name in after.tensors]
    unchanged = "model-00001-of-00003.safetensors"  # has no experts
    assert (tmp_path / "small" / unchanged).read_bytes() == (source / unchanged).read_bytes()


def test_index_and_config_describe_the_result(tmp_path):
    source = checkpoints.write_checkpoint(
        tmp_path / "source", checkpoints.random_moe(), checkpoints.MODELOPT_CONFIG, shard_of=checkpoints.by_layer
    )
    checkpoints.write_json(source / "hf_quant_config.json", checkpoints.HF_QUANT_CONFIG)
    small = tmp_path / "small"
    compress(source, small, exclude=["*.layers.1.*"])
    index = json.loads((small / "model.safetensors.index.json").read_text())
    found = {}
    for path in small.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            found |= dict.fromkeys(file.keys(), path.name)
    assert index["weight_map"] == found
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in checkpoints.read_tensors(small).values())
    entry = {"quant_algo": "NVFP4", "group_size": 16}
    expected = {
        "model.layers.0.mlp.experts": entry | {"weight_scale_encoding": "csf"},
        "model.layers.0.mlp.shared_expert.up_proj": entry | {"weight_scale_encoding": "csf"},
        "model.layers.1.mlp.experts": entry,
        "model.layers.1.mlp.shared_expert.up_proj": entry,
    }
    quantization = json.loads((small / "config.json").read_text())["quantization_config"]
    assert quantization["quantized_layers"] == expected
    assert (quantization["quant_method"], quantization["quant_algo"]) == ("modelopt", "MIXED_PRECISION")
    assert quantization["ignore"] == ["lm_head"]
    quantization = json.loads((small / "hf_quant_config.json").read_text())["quantization"]
    assert (quantization["quant_algo"], quantization["quantized_layers"]) == ("MIXED_PRECISION", expected)


def test_entries_of_a_mixed_precision_config_stay(tmp_path):
    config = json.loads(json.dumps(checkpoints.MODELOPT_CONFIG))
    per_expert = {
        f"model.layers.{layer}.mlp.experts.{expert}.{projection}": {"quant_algo": "NVFP4", "group_size": 16}
        for layer in range(2)
        for expert in range(4)
        for projection in checkpoints.PROJECTIONS
    }
    other = {"model.layers.0.self_attn.q_proj": {"quant_algo": "FP8"}}
    config["quantization_config"] |= {"quant_algo": "MIXED_PRECISION", "quantized_layers": per_expert | other}
    source = checkpoints.write_checkpoint(tmp_path / "source", checkpoints.random_moe(), config)
    compress(source, tmp_path / "small")
    layers = json.loads((tmp_path / "small" / "config.json").read_text())["quantization_config"]["quantized_layers"]
    assert layers.items() >= other.items()
    assert not layers.keys() & per_expert.keys()
    assert marked(tmp_path / "small").keys() == MARKED


def test_compressed_tensors_keep_their_names_and_divisors(bundle, tmp_path):
    tensors = checkpoints.as_compressed_tensors(checkpoints.random_moe())
    source = checkpoints.write_checkpoint(tmp_path / "source", tensors, checkpoints.COMPRESSED_TENSORS_CONFIG)
    compress(source, tmp_path / "small")
    assert len(assert_same_model(bundle, tensors, checkpoints.read_tensors(tmp_path / "small"))) == 26
    quantization = json.loads((tmp_path / "small" / "config.json").read_text())["quantization_config"]
    assert quantization["quant_method"] == "compressed-tensors"
    assert marked(tmp_path / "small").keys() == MARKED
    assert verify(tmp_path / "small", against=source).faults == []
    restore(tmp_path / "small", tmp_path / "restored")
    assert checkpoints.tree(tmp_path / "restored") == checkpoints.tree(source)


def test_patterns_choose_scales(bundle, tmp_path):
    tensors = checkpoints.random_moe(prefix="model.language_model.layers")
    source = checkpoints.write_checkpoint(tmp_path / "source", tensors, checkpoints.MODELOPT_CONFIG)
    compress(source, tmp_path / "small", include=["*.shared_expert.*", "*.down_proj.*"], exclude=["*.layers.0.*"])
    compressed = assert_same_model(bundle, tensors, checkpoints.read_tensors(tmp_path / "small"))
    experts = {f"model.language_model.layers.1.mlp.experts.{e}.down_proj.weight_scale" for e in range(4)}
    assert compressed == experts | {"model.layers.1.mlp.shared_expert.up_proj.weight_scale"}
    assert marked(tmp_path / "small").keys() == {
        "model.language_model.layers.1.mlp.experts",
        "model.layers.1.mlp.shared_expert.up_proj",
    }
    assert verify(tmp_path / "small", against=source).faults == []


def test_planes_that_would_grow_or_cannot_be_compressed_stay_dense(bundle, tmp_path):
    generator = torch.Generator().manual_seed(3)
    tensors = checkpoints.random_moe()
    grows, narrow, odd = (f"model.layers.0.mlp.experts.{e}.up_proj" for e in range(3))
    tensors |= checkpoints.nvfp4_module(grows, 64, 64, generator, wild=True)
    tensors |= checkpoints.nvfp4_module(narrow, 40, 64, generator)
    tensors |= checkpoints.nvfp4_module(odd, 64, 48, generator)
    source = checkpoints.write_checkpoint(tmp_path / "source", tensors, checkpoints.MODELOPT_CONFIG)
    report = compress(source, tmp_path / "small")
    assert {name: why.split()[0] for name, why in report.left_dense.items()} == {
        f"{grows}.weight_scale": "would",
        f"{narrow}.weight_scale": "40",
        f"{odd}.weight_scale": "3",
    }
    assert len(assert_same_model(bundle, tensors, checkpoints.read_tensors(tmp_path / "small"))) == 23
    assert verify(tmp_path / "small", against=source).faults == []
    restore(tmp_path / "small", tmp_path / "restored")
    assert checkpoints.tree(tmp_path / "restored") == checkpoints.tree(source)


def test_every_scale_byte_survives(bundle, tmp_path):
    """All 256 values, including NaN, zeros, subnormals and negative ones; most of them are exceptions."""
    plane = torch.full((16, 256), 0x70, dtype=torch.uint8)
    plane[:, :16] = torch.arange(256, dtype=torch.uint8).view(16, 16)
    name = "model.layers.0.mlp.experts.0.up_proj"
    tensors = checkpoints.nvfp4_module(name, 16, 4096, torch.Generator().manual_seed(4))
    tensors[f"{name}.weight_scale"] = plane.view(torch.float8_e4m3fn)
    source = checkpoints.write_checkpoint(tmp_path / "source", tensors, checkpoints.MODELOPT_CONFIG)
    compress(source, tmp_path / "small")
    assert assert_same_model(bundle, tensors, checkpoints.read_tensors(tmp_path / "small")) == {f"{name}.weight_scale"}


def test_exceptions_are_aligned_wherever_scales_begin(tmp_path):
    """A shard of another writer: data in another order than the header, and scales at odd bytes."""
    generator = torch.Generator().manual_seed(5)
    tensors = {"mask": torch.tensor([True, False, True])}
    for expert in range(2):
        tensors |= checkpoints.nvfp4_module(f"model.layers.0.mlp.experts.{expert}.up_proj", 32, 64, generator)
    tensors["step"] = torch.tensor([7])
    dtypes = {torch.bool: "BOOL", torch.uint8: "U8", torch.float8_e4m3fn: "F8_E4M3", torch.float32: "F32"}
    entries = [(name, dtypes.get(t.dtype, "I64"), tuple(t.shape)) for name, t in tensors.items()]
    source = checkpoints.write_checkpoint(tmp_path / "source", tensors, checkpoints.MODELOPT_CONFIG)
    order = sorted(tensors, key=lambda name: (name != "mask", name[::-1]))
    header = build_header(entries, order, {"note": "é"})
    data = b"".join(bytes(tensors[name].reshape(-1).view(torch.uint8).tolist()) for name in order)
    (source / "model.safetensors").write_bytes(header.raw + data)
    compress(source, tmp_path / "small")
    after = read_header(tmp_path / "small" / "model.safetensors", "model.safetensors")
    words = [info for name, info in after.tensors.items() if name.endswith("exceptions")]
    assert words and all(info.begin % 4 == 0 for info in words)
    assert verify(tmp_path / "small", against=source).faults == []
    restore(tmp_path / "small", tmp_path / "restored")
    assert checkpoints.tree(tmp_path / "restored") == checkpoints.tree(source)


@pytest.mark.parametrize("shard_of", [checkpoints.by_component, lambda name: f"part-{len(name) % 3}.safetensors"])
def test_resharded_since_it_was_compressed(tmp_path, shard_of):
    source = checkpoints.write_checkpoint(
        tmp_path / "source", checkpoints.random_moe(), checkpoints.MODELOPT_CONFIG, shard_of=checkpoints.by_layer
    )
    compress(source, tmp_path / "small")
    checkpoints.reshard(tmp_path / "small", shard_of)
    assert verify(tmp_path / "small", against=source).faults == []
    restore(tmp_path / "small", tmp_path / "restored")
    assert checkpoints.tree(tmp_path / "restored") == checkpoints.tree(source)


def test_container_describes_itself(tmp_path):
    source = checkpoints.write_checkpoint(
        tmp_path / "source", checkpoints.random_moe(), checkpoints.MODELOPT_CONFIG, shard_of=SHARDINGS["subfolder"]
    )
    box = tmp_path / "box"
    compress(source, box, layout="container", family="qwen")
    manifest, contract = (json.loads((box / name).read_text()) for name in ("manifest.json", "build-contract.json"))
    common = {
        "schema": "lil-nvfp4-csf-checkpoint/1",
        "codec": "byte-window4-fixed-stream-u24-exceptions/1",
        "family": "qwen",
    }
    assert manifest.items() >= common.items() and contract.items() >= common.items()
    shards = {shard["file"] for shard in manifest["shards"]}
    assert shards == {path.name for path in (box / "tensors").iterdir()} == set(contract["source_names"].values())
    assert contract["source_names"].keys() == checkpoints.read_tensors(box).keys()
    assert not list(box.glob("*.index.json"))
    assert (box / "metadata" / "extra" / "chat_template.jinja").read_text() == "{{ messages }}"
    listed = {line.split("  ")[1] for line in (box / "SHA256SUMS").read_text().splitlines()}
    assert listed == checkpoints.tree(box).keys() - {"SHA256SUMS"}
    subprocess.run(["sha256sum", "--check", "--quiet", "SHA256SUMS"], cwd=box, check=True)


def test_a_container_needs_a_family(tmp_path):
    config = {"quantization_config": checkpoints.MODELOPT_CONFIG["quantization_config"]}
    source = checkpoints.write_checkpoint(tmp_path / "source", checkpoints.random_moe(layers=1), config)
    with pytest.raises(CheckpointError, match="family"):
        compress(source, tmp_path / "box", layout="container")
    assert not (tmp_path / "box").exists()


def test_dry_run_bounds_the_result(tmp_path):
    source = checkpoints.write_checkpoint(
        tmp_path / "source", checkpoints.random_moe(), checkpoints.MODELOPT_CONFIG, shard_of=checkpoints.by_layer
    )
    report = compress(source, tmp_path / "small")
    for path in source.glob("*.safetensors"):  # headers are enough
        path.write_bytes(read_header(path, path.name).raw)
    plan = plan_compression(source, data_present=False)
    assert plan.dense_bytes == report.dense_bytes
    assert plan.least_bytes <= report.compressed_bytes <= plan.dense_bytes


def test_the_source_is_only_read(tmp_path):
    source = checkpoints.write_checkpoint(
        tmp_path / "source", checkpoints.random_moe(), checkpoints.MODELOPT_CONFIG, shard_of=checkpoints.by_layer
    )
    stamps = {path: path.stat().st_mtime_ns for path in source.rglob("*")}
    before = checkpoints.tree(source)
    compress(source, tmp_path / "small")
    verify(tmp_path / "small", against=source)
    assert checkpoints.tree(source) == before
    assert {path: path.stat().st_mtime_ns for path in source.rglob("*")} == stamps
    assert json.loads((source / "config.json").read_text()) == checkpoints.MODELOPT_CONFIG


@pytest.mark.gpu
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_gpu_gives_the_same_files(bundle, tmp_path, layout):
    tensors = checkpoints.random_moe()
    source = checkpoints.write_checkpoint(
        tmp_path / "source", tensors, checkpoints.MODELOPT_CONFIG, shard_of=checkpoints.by_layer
    )
    compress(source, tmp_path / "cpu", layout=layout)
    compress(source, tmp_path / "gpu", layout=layout, device="cuda", jobs=3)
    assert checkpoints.tree(tmp_path / "gpu") == checkpoints.tree(tmp_path / "cpu")
    assert verify(tmp_path / "gpu", against=source, device="cuda").faults == []
    restore(tmp_path / "gpu", tmp_path / "restored", device="cuda")
    assert checkpoints.tree(tmp_path / "restored") == checkpoints.tree(source)
    for root in (source, tmp_path / "gpu"):
        scales = load_layer_scales(root, 1, "gate_up_proj", order="up_gate", tp_rank=1, tp_size=2, device="cuda")
        assert scales.device.type == "cuda"
        names = [f"model.layers.1.mlp.experts.{{}}.{half}.weight_scale" for half in ("up_proj", "gate_proj")]
        expected = [torch.cat([tensors[name.format(e)].view(torch.uint8)[32:] for name in names]) for e in range(4)]
        decoded = bundle.decompress_nvfp4_csf_scales(scales).view(torch.uint8)
        assert torch.equal(decoded.cpu(), torch.stack(expected))
    plain = checkpoints.write_checkpoint(
        tmp_path / "plain", checkpoints.random_qwen(torch.bfloat16), checkpoints.CONFIG
    )
    quantize(plain, tmp_path / "nvfp4-cpu")
    quantize(plain, tmp_path / "nvfp4-gpu", device="cuda")
    assert checkpoints.tree(tmp_path / "nvfp4-gpu") == checkpoints.tree(tmp_path / "nvfp4-cpu")
