"""Every published kind of checkpoint is compressed, keeps each layer's algorithm, and is verified and restored."""

from __future__ import annotations

import copy
import json

import pytest
import torch

import checkpoints
import published
from finegrained_kernels.checkpoint import (
    CheckpointError,
    compress,
    inspect,
    load_layer_globals,
    load_layer_scales,
    open_checkpoint,
    plan_compression,
    restore,
    verify,
)

pytestmark = pytest.mark.usefixtures("bundle")

FUSED = "model.layers.0.mlp.experts"


def write(root, kind: published.Published):
    checkpoints.write_checkpoint(root, kind.tensors, kind.config)
    for name, content in kind.files.items():
        checkpoints.write_json(root / name, content)
    return root


@pytest.fixture(scope="module", params=published.KINDS)
def case(request, bundle, tmp_path_factory):
    """The kind, its directory, and the directory with its scales compressed."""
    root = tmp_path_factory.mktemp("kind")
    kind = published.KINDS[request.param]()
    source = write(root / "source", kind)
    compress(source, root / "small")
    return kind, source, root / "small"


def scale_names(tensors) -> set[str]:
    """Names of NVFP4 scales, which are E4M3 and have packed weights."""
    return {name for name, t in tensors.items() if name.endswith("weight_scale") and t.dtype == torch.float8_e4m3fn}


def test_all_of_it_is_compressed_verified_and_restored(case, tmp_path):
    kind, source, small = case
    left = scale_names(kind.tensors) & checkpoints.read_tensors(small).keys()
    assert scale_names(kind.tensors) and not left
    assert verify(small, against=source).faults == [] == verify(small).faults
    restore(small, tmp_path / "restored")
    assert checkpoints.tree(tmp_path / "restored") == checkpoints.tree(source)
    compress(source, tmp_path / "box", layout="container", family="tiny")
    assert verify(tmp_path / "box", against=source).faults == []
    restore(tmp_path / "box", tmp_path / "from the box")
    assert checkpoints.tree(tmp_path / "from the box") == checkpoints.tree(source)


def test_every_layer_keeps_its_algorithm(case):
    kind, source, small = case
    for root in (source, small):
        config = open_checkpoint(root).quantization
        found = {module: config.layer_format(module).algorithm for module in kind.algorithms}
        assert found == kind.algorithms
    before, after = (open_checkpoint(root).quantization for root in (source, small))
    for name in kind.tensors:  # what is not NVFP4 keeps what it is, too
        module = name.rpartition(".")[0]
        if module.endswith("_proj") and module not in kind.algorithms:
            assert after.layer_format(module) == before.layer_format(module)
    assert (after.method, after.kv_cache) == (before.method, before.kv_cache)


def test_inspect_tells_each_kind_of_layer_and_finds_no_fault(case):
    kind, source, small = case
    for root in (source, small):
        report = inspect(root)
        assert report.faults == []
        assert {stats.algorithm for stats in report.scales} == set(kind.algorithms.values())
        fp8 = {name for name, t in kind.tensors.items() if t.dtype == torch.float8_e4m3fn and name.endswith(".weight")}
        assert sum(other.weights for other in report.others) == len(fp8)
        assert all(stats.kind != "other" for stats in report.scales)


@pytest.mark.parametrize("name", ["a: llm-compressor W4A16", "e: multimodal"])
def test_a_config_that_is_missing_is_told_by_the_tensors(tmp_path, name):
    """Global scales that are divisors come from compressed-tensors; with a ModelOpt config they would be read as
    multipliers."""
    kind = published.KINDS[name]()
    source = write(tmp_path / "source", kind._replace(config=checkpoints.CONFIG))
    compress(source, tmp_path / "small")
    section = json.loads((tmp_path / "small" / "config.json").read_text())["quantization_config"]
    assert (section["quant_method"], section["format"]) == ("compressed-tensors", "nvfp4-pack-quantized")
    algorithms = {
        name: open_checkpoint(tmp_path / "small").quantization.layer_format(name).algorithm for name in kind.algorithms
    }
    assert algorithms == kind.algorithms  # by whether there are input scales
    assert verify(tmp_path / "small", against=source).faults == []


def test_a_nested_config_is_rewritten_where_it_is(tmp_path):
    source = write(tmp_path / "source", published.multimodal())
    compress(source, tmp_path / "small")
    before, after = (json.loads((root / "config.json").read_text()) for root in (source, tmp_path / "small"))
    table = after["text_config"]["compression_config"].pop("quantized_layers")
    assert after.pop("transformers_weights").endswith("import finegrained_kernels.integrations.transformers")
    assert after == before
    assert set(table) == {"model.language_model.layers.0.mlp.experts"}


def test_an_expert_of_another_format_keeps_its_entry(tmp_path):
    kind = published.per_layer()
    other = f"{FUSED}.3.down_proj"
    for suffix in ("weight_scale_2", "input_scale", "weight_scale", "weight"):
        del kind.tensors[f"{other}.{suffix}"]
    kind.tensors[f"{other}.weight"] = torch.zeros(128, 64).to(torch.float8_e4m3fn)
    kind.tensors[f"{other}.weight_scale"] = torch.ones(())
    kind.config["quantization_config"]["quantized_layers"][other] = {"quant_algo": "FP8"}
    source = write(tmp_path / "source", kind)
    compress(source, tmp_path / "small")
    quantization = open_checkpoint(tmp_path / "small").quantization
    assert quantization.layer_format(other).algorithm == "FP8"
    assert quantization.layer_format(f"{FUSED}.2.down_proj").algorithm == "NVFP4"
    assert verify(tmp_path / "small", against=source).faults == []


@pytest.mark.parametrize("kind", ["w1", "last", "fused", "fused, other names", "stacked"])
@pytest.mark.parametrize("form", ["dense", "compressed"])
def test_layers_load_from_every_layout(bundle, tmp_path, kind, form):
    make = {
        "w1": lambda: published.renamed_experts("{e}.{w}"),
        "last": lambda: published.renamed_experts("{projection}.{e}"),
        "fused": published.fused_experts,
        "fused, other names": lambda: published.fused_experts(suffixed=False),
        "stacked": lambda: published.fused_experts(stacked=True),
    }[kind]()
    root = write(tmp_path / "source", make)
    if form == "compressed":
        compress(root, tmp_path / "small")
        root = tmp_path / "small"
    gate_up, gate_up_globals = expected_stack(make.tensors, kind, "gate_up_proj")
    down, down_globals = expected_stack(make.tensors, kind, "down_proj")
    half = published.INTER

    def load(projection, **options):
        scales = load_layer_scales(root, 0, projection, **options)
        return bundle.decompress_nvfp4_csf_scales(scales).view(torch.uint8)

    assert torch.equal(load("gate_up_proj", order="gate_up"), gate_up)
    assert torch.equal(load("gate_up_proj", order="up_gate"), torch.cat([gate_up[:, half:], gate_up[:, :half]], dim=1))
    assert torch.equal(load("up_proj", experts=[3, 1]), gate_up[[3, 1], half:])
    assert torch.equal(load("down_proj"), down)
    part = torch.cat([gate_up[:, half // 2 : half], gate_up[:, half + half // 2 :]], dim=1)
    assert torch.equal(load("gate_up_proj", order="gate_up", tp_rank=1, tp_size=2), part)
    assert torch.equal(load_layer_globals(root, 0, "gate_up_proj", order="gate_up"), gate_up_globals)
    assert torch.equal(load_layer_globals(root, 0, "down_proj", experts=[2]), down_globals[[2]])


def expected_stack(tensors, kind, projection):
    """Scale bytes `[E, N, C]` and globals, `[E, 2]` for gate and up, directly from the tensors."""
    if kind.startswith(("fused", "stacked")):
        separator = "_" if "other" in kind else "."
        scales = tensors[f"{FUSED}.{projection}{separator}weight_scale"].view(torch.uint8)
        values = tensors[f"{FUSED}.{projection}{separator}weight_scale_2"]
        scales = scales.view(published.EXPERTS, -1, scales.shape[-1])
        return scales, values[:, None].expand(-1, 2) if projection == "gate_up_proj" else values
    names = {"w1": ("w1", "w3", "w2"), "last": published.MLP}[kind]
    wanted = names[:2] if projection == "gate_up_proj" else names[2:]
    modules = [
        [f"{FUSED}.{name}.{e}" if kind == "last" else f"{FUSED}.{e}.{name}" for name in wanted]
        for e in range(published.EXPERTS)
    ]
    scales = [torch.cat([tensors[f"{m}.weight_scale"].view(torch.uint8) for m in row]) for row in modules]
    values = torch.stack([torch.stack([tensors[f"{m}.weight_scale_2"] for m in row]) for row in modules])
    return torch.stack(scales), values if projection == "gate_up_proj" else values[:, 0]


def test_a_stack_stays_dense_as_a_whole(tmp_path):
    kind = published.fused_experts()
    name = f"{FUSED}.down_proj.weight_scale"
    noise = torch.randint(
        0, 256, kind.tensors[name].shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(1)
    )
    kind.tensors[name] = noise.view(torch.float8_e4m3fn)
    source = write(tmp_path / "source", kind)
    report = compress(source, tmp_path / "small")
    assert list(report.left_dense) == [name] and report.compressed == published.EXPERTS
    assert verify(tmp_path / "small", against=source).faults == []
    restore(tmp_path / "small", tmp_path / "restored")
    assert checkpoints.tree(tmp_path / "restored") == checkpoints.tree(source)


def test_a_damaged_part_of_a_stack_is_named(tmp_path):
    source = write(tmp_path / "source", published.fused_experts())
    compress(source, tmp_path / "small")
    path = tmp_path / "small" / "model.safetensors"
    tensors = checkpoints.read_tensors(tmp_path / "small")
    part = f"{FUSED}.gate_up_proj.weight_scale.2"
    tensors[f"{part}.nvfp4_csf_fixed"][1, 20] ^= 1
    checkpoints.save_file(tensors, path, {"format": "pt"})
    faults = verify(tmp_path / "small", against=source).faults
    assert {fault.tensor for fault in faults} >= {f"{part}.nvfp4_csf_fixed", part}
    del tensors[f"{part}.nvfp4_csf_fixed"]
    checkpoints.save_file(tensors, path, {"format": "pt"})
    with pytest.raises(CheckpointError, match=f"{part}.nvfp4_csf_exceptions: unpaired"):
        load_layer_scales(tmp_path / "small", 0, "down_proj")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight": torch.uint8, "shape": (4, 32, 64)}, r"weight_scale: expected F8_E4M3 \[4, 32, 8\] for "),
        ({"weight_scale_2": (3,)}, r"weight_scale_2: expected one F32 value, or 4, got F32 of 12 bytes"),
        ({"weight_scale_2": None}, r"weight_scale: no second-level scale beside it"),
    ],
)
def test_a_stack_of_another_layout_is_refused_by_name(tmp_path, change, message):
    kind = published.fused_experts()
    module = f"{FUSED}.gate_up_proj"
    if "weight" in change:
        kind.tensors[f"{module}.weight"] = torch.zeros(change["shape"], dtype=change["weight"])
    elif change["weight_scale_2"] is None:
        del kind.tensors[f"{module}.weight_scale_2"]
    else:
        kind.tensors[f"{module}.weight_scale_2"] = torch.ones(change["weight_scale_2"])
    with pytest.raises(CheckpointError, match=f"model.safetensors: {module}.{message}"):
        compress(write(tmp_path / "source", kind), tmp_path / "small")
    assert not (tmp_path / "small").exists()


def test_what_is_not_nvfp4_is_named_instead_of_counted(tmp_path):
    packed = {
        "model.layers.0.mlp.up_proj.weight": torch.zeros(64, 64, dtype=torch.uint8).view(torch.float8_e4m3fn),
        "model.layers.0.mlp.experts.gate_up_proj_blocks": torch.zeros(4, 64, 2, 16, dtype=torch.uint8),
    }
    source = checkpoints.write_checkpoint(tmp_path / "source", packed, checkpoints.CONFIG)
    with pytest.raises(CheckpointError, match=r"has no NVFP4 scales; .*gate_up_proj_blocks: U8 \[4, 64, 2, 16\]"):
        plan_compression(source)
    kind = write(tmp_path / "kind", published.modelopt_mixed())
    with pytest.raises(
        CheckpointError, match=r"no pattern matches any of its 7 NVFP4 scales, such as lm_head.weight_scale"
    ):
        plan_compression(kind, include=["*.experts.*"])


def test_inspect_finds_what_can_never_be_loaded(tmp_path):
    kind = published.modelopt_mixed()
    kind.tensors["model.layers.0.mlp.extra_proj.weight"] = torch.zeros(8, 8, dtype=torch.int8)
    config = copy.deepcopy(dict(kind.config))
    config["quantization_config"]["quantized_layers"]["model.layers.1.mlp.up_proj"] = {"quant_algo": "FP8"}
    kind.files.clear()
    source = write(tmp_path / "source", kind._replace(config=config))
    faults = inspect(source).faults
    assert [fault.split(": ")[1] for fault in faults] == [
        "model.layers.1.mlp.up_proj.weight",
        "model.layers.0.mlp.extra_proj.weight",
    ]
    checkpoints.edit_json(source / "config.json", lambda c: c["quantization_config"].update(quant_algo="NVFP9"))
    assert "config.json: quantization_config.quant_algo: 'NVFP9'" in inspect(source).faults[0]
