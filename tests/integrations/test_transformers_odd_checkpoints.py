"""Checkpoints of known kinds in which one thing is odd: each is refused by name, whatever layer it is in."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers", reason="needs transformers, the extra [transformers]")

from checkpoints import edit_json, read_tensors, write_checkpoint
from finegrained_kernels.checkpoint import CheckpointError, compress, inspect
from moe_models import load
from replica_kinds import KINDS, write_kind

pytestmark = pytest.mark.usefixtures("one_thread")

DENSE, MIXED, PACKED, AWQ, STACKED = (
    *("c_modelopt_dense", "b_modelopt_mixed", "a_llm_compressor_w4a16", "f_per_layer", "g_fused_experts"),
)
Q = "model.layers.0.self_attn.q_proj"
SHARED = "model.layers.0.mlp.shared_expert.up_proj"
FP8 = "model.language_model.layers.1.self_attn.q_proj"
STACK = "model.layers.0.mlp.experts.down_proj"
Edit = Callable[[dict], object]


@pytest.fixture(scope="module")
def replicas(bundle, tmp_path_factory):
    made: dict[str, Path] = {}

    def get(kind: str) -> Path:
        if kind not in made:
            made[kind] = write_kind(KINDS[kind], tmp_path_factory.mktemp(kind))["dense"]
        return made[kind]

    return get


def add(name: str, tensor: torch.Tensor) -> Edit:
    return lambda content: content.update({name: tensor})


def group(**weights: object) -> Edit:
    more = {"targets": ["re:.*q_proj"], "weights": weights}
    return lambda config: config["quantization_config"]["config_groups"].update(group_1=more)


def as_fp8(name: str) -> Edit:
    return lambda content: content.update({name: content[name].view(torch.float8_e4m3fn)})


NO_FORMAT = "no format that is supported"
ODD: dict[str, tuple[str, Edit | None, Edit | None, str]] = {
    "some input scales": (
        DENSE,
        add(f"{Q}.input_scale", torch.tensor(0.01)),
        None,
        "config.json: model.layers.0.self_attn.k_proj: has no input scales, like 13 of 14 layers that quantize what "
        "they read: choose an activation_format",
    ),
    "a scale of no cache": (
        DENSE,
        add("model.norm.k_scale", torch.tensor(1.0)),
        None,
        f"model.safetensors: model.norm.k_scale: unknown, F32 [] in layer model.norm: {NO_FORMAT}",
    ),
    "bytes in no layer": (
        DENSE,
        add("quant_state", torch.zeros(5, dtype=torch.uint8)),
        None,
        f"model.safetensors: quant_state: unknown, U8 [5] in no layer: {NO_FORMAT}",
    ),
    "an empty weight": (
        DENSE,
        lambda content: content.update({key: content[key][:0] for key in (f"{Q}.weight", f"{Q}.weight_scale")}),
        None,
        f"model.safetensors: {Q}.weight: NVFP4 [0, 64] in layer {Q}: expected weights [128, 128] for {Q} of the model",
    ),
    "INT8 embeddings": (
        DENSE,
        lambda content: content.update(
            {
                "model.embed_tokens.weight": torch.zeros(128, 128, dtype=torch.int8),
                "model.embed_tokens.weight_scale": torch.ones(128, 1),
            }
        ),
        None,
        f"model.safetensors: model.embed_tokens.weight: is I8, in layer model.embed_tokens: {NO_FORMAT}",
    ),
    "NVFP4 embeddings": (
        DENSE,
        lambda content: content.update(
            {
                f"model.embed_tokens.{key}": content[f"{Q}.{key}"].clone()
                for key in ("weight", "weight_scale", "weight_scale_2")
            }
        ),
        None,
        "model.embed_tokens.weight: NVFP4 [128, 64] in layer model.embed_tokens: model.embed_tokens is Embedding",
    ),
    "low-rank factors": (
        DENSE,
        add(f"{Q}.svdquant_lora_b", torch.zeros(4, 128)),
        None,
        f"model.safetensors: {Q}.svdquant_lora_b: unknown, F32 [4, 128] in layer {Q}: {NO_FORMAT}",
    ),
    "AWQ that is no number": (
        AWQ,
        add(f"{Q}.pre_quant_scale", torch.full((128,), float("nan"))),
        None,
        f"model.safetensors: {Q}.pre_quant_scale: has nan, which cannot multiply activations",
    ),
    "AWQ of another size": (
        AWQ,
        add(f"{Q}.pre_quant_scale", torch.ones(64)),
        None,
        f"model.safetensors: {Q}.pre_quant_scale: expected floats [128], one for each input of {Q}, got F32 [64]",
    ),
    "an unknown algorithm": (
        AWQ,
        None,
        lambda config: config["quantization_config"]["quantized_layers"][Q].update(quant_algo="NVFP8"),
        f"config.json: quantization_config.quantized_layers.{Q}.quant_algo: 'NVFP8', expected one of NVFP4, ",
    ),
    "another algorithm": (
        AWQ,
        None,
        lambda config: config["quantization_config"]["quantized_layers"][Q].update(quant_algo="INT4_AWQ"),
        f"model.safetensors: {Q}.weight: NVFP4 by its tensors, but INT4_AWQ by the config",
    ),
    "an FP8 group": (
        PACKED,
        None,
        group(num_bits=8, type="float", strategy="channel"),
        "model.layers.1.self_attn.q_proj.weight_packed: NVFP4 by its tensors, but FP8 by the config",
    ),
    "an INT4 group": (
        PACKED,
        None,
        group(num_bits=4, type="int", strategy="group", group_size=128),
        "model.layers.1.self_attn.q_proj.weight_packed: NVFP4 by its tensors, but nvfp4-pack-quantized of 4-bit int",
    ),
    "8-bit activations": (
        PACKED,
        None,
        lambda config: config["quantization_config"]["config_groups"]["group_0"].update(
            input_activations={"num_bits": 8, "type": "float", "dynamic": True}
        ),
        "NVFP4 by its tensors, but NVFP4 weights with 8-bit activations by the config",
    ),
    "rotated activations": (
        PACKED,
        None,
        lambda config: config["quantization_config"].update(
            transform_config={"config_groups": {"R4": {"type": "hadamard", "apply": [{"location": "input"}]}}}
        ),
        "config.json: quantization_config.transform_config.config_groups.R4: hadamard at input: transforms of "
        "activations are not supported",
    ),
    "zero points": (
        PACKED,
        add(f"{SHARED}.weight_zero_point", torch.zeros(64, 8, dtype=torch.int8)),
        None,
        f"model.safetensors: {SHARED}.weight_zero_point: unknown, I8 [64, 8] in layer {SHARED}: {NO_FORMAT}",
    ),
    "two weights": (
        PACKED,
        add(f"{SHARED}.weight", torch.zeros(64, 128).bfloat16()),
        None,
        f"model.safetensors: {SHARED}.weight_packed: unknown, U8 [64, 64] in layer {SHARED}: {NO_FORMAT}",
    ),
    "an FP8 scale that is no number": (
        MIXED,
        add(f"{FP8}.weight_scale", torch.tensor(float("inf"))),
        None,
        f"model.safetensors: {FP8}.weight_scale: has inf, which is not a scale",
    ),
    "an FP8 stack": (
        STACKED,
        as_fp8(STACK),
        None,
        f"model.safetensors: {STACK}: F8_E4M3 [4, 128, 32] in model.layers.0.mlp.experts: expected gate, up and down "
        "projections of one module in NVFP4, got gate_up_proj",
    ),
}


@pytest.mark.parametrize("what", ODD)
def test_refused_in_one_line(replicas, tmp_path, what):
    kind, edit_tensors, edit_config, message = ODD[what]
    source = replicas(kind)
    content = read_tensors(source)
    if edit_tensors is not None:
        edit_tensors(content)
    root = write_checkpoint(tmp_path / "odd", content, json.loads((source / "config.json").read_text()))
    if edit_config is not None:
        edit_json(root / "config.json", edit_config)
    with pytest.raises(CheckpointError, match=re.escape(message)) as error:
        load(root)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("what", ["another algorithm", "an FP8 group", "an INT4 group", "8-bit activations"])
def test_compressing_settles_no_contradiction(replicas, tmp_path, what):
    """If config and tensors contradict each other, they still do so afterwards: loading refuses it, and `inspect`
    reports it."""
    kind, _, edit_config, message = ODD[what]
    config = json.loads((replicas(kind) / "config.json").read_text())
    edit_config(config)
    root = write_checkpoint(tmp_path / "odd", read_tensors(replicas(kind)), config)
    compress(root, tmp_path / "csf")
    with pytest.raises(CheckpointError, match=re.escape(message)):
        load(tmp_path / "csf")
    assert any(message in fault for fault in inspect(tmp_path / "csf").faults)


def test_layers_of_other_formats_are_left_as_they_are(replicas, tmp_path):
    """INT8 beside NVFP4 does not affect the compression of scales, and inspect says what cannot be loaded."""
    content = read_tensors(replicas(DENSE))
    content |= {"lm_head.weight": torch.ones(128, 128, dtype=torch.int8), "lm_head.weight_scale": torch.ones(128, 1)}
    config = json.loads((replicas(DENSE) / "config.json").read_text())
    root = write_checkpoint(tmp_path / "int8", content, config)
    assert compress(root, tmp_path / "csf").compressed == 14
    (fault,) = inspect(root).faults
    assert "lm_head.weight: I8 [128, 128]: quantized to a format that nothing here reads" in fault
