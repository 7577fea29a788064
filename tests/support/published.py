"""Tiny replicas of the kinds of NVFP4 checkpoint that people publish: names, dtypes, shapes and configs of each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from checkpoints import CONFIG, Tensors, as_compressed_tensors, nvfp4_module

HIDDEN, INTER, VOCAB, EXPERTS = 128, 64, 96, 4
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
LINEAR_ATTENTION = ("in_proj_qkv", "in_proj_z", "out_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
_WEIGHTS = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "dynamic": False}


class Published(NamedTuple):
    """A checkpoint's tensors and config.json, other JSON files, and the algorithm of each NVFP4 layer by module."""

    tensors: Tensors
    config: Mapping[str, Any]
    algorithms: Mapping[str, str]
    files: Mapping[str, Any]


class _Maker:
    def __init__(self, prefix: str = "model.layers") -> None:
        self.generator = torch.Generator().manual_seed(19)
        self.prefix = prefix
        self.tensors: Tensors = {}

    def plain(self, name: str, n: int, k: int, *, bias: bool = False) -> None:
        self.tensors[f"{name}.weight"] = torch.randn(n, k, generator=self.generator).bfloat16()
        if bias:
            self.bias(name, n)

    def bias(self, name: str, n: int) -> None:
        self.tensors[f"{name}.bias"] = torch.randn(n, generator=self.generator).bfloat16()

    def nvfp4(self, name: str, n: int, k: int, *, weight_only: bool = False, awq: bool = False) -> None:
        self.tensors |= nvfp4_module(name, n, k, self.generator)
        if weight_only:
            del self.tensors[f"{name}.input_scale"]
        if awq:
            self.tensors[f"{name}.pre_quant_scale"] = torch.rand(k, generator=self.generator).bfloat16()

    def fp8(self, name: str, n: int, k: int, *, size: int = 0) -> None:
        bits = torch.randint(0, 120, (n, k), generator=self.generator, dtype=torch.uint8)
        self.tensors[f"{name}.weight"] = bits.view(torch.float8_e4m3fn)
        if size:
            self.tensors[f"{name}.weight_scale_inv"] = torch.rand(-(-n // size), -(-k // size))
        else:
            self.tensors[f"{name}.weight_scale"] = torch.rand((), generator=self.generator)
            self.tensors[f"{name}.input_scale"] = torch.rand((), generator=self.generator)

    def each(self, layer: int, block: str, names: tuple[str, ...], make: Callable, **options: Any) -> list[str]:
        made = []
        for name in names:
            n, k = (HIDDEN, INTER) if name == "down_proj" else (INTER, HIDDEN) if name in MLP else (HIDDEN, HIDDEN)
            made.append(f"{self.prefix}.{layer}.{block}.{name}")
            make(made[-1], n, k, **options)
        return made

    def experts(self, layer: int, **options: Any) -> list[str]:
        self.plain(f"{self.prefix}.{layer}.mlp.gate", EXPERTS, HIDDEN)
        return [
            name for e in range(EXPERTS) for name in self.each(layer, f"mlp.experts.{e}", MLP, self.nvfp4, **options)
        ]

    def ends(self, *, head: Callable | None = None) -> None:
        self.plain("model.embed_tokens", VOCAB, HIDDEN)
        if head is not None:
            head("lm_head", VOCAB, HIDDEN)


def compressed_tensors_config(ignore: list[str], *, activations: bool = False) -> dict[str, Any]:
    inputs = _WEIGHTS | {"dynamic": "local"} if activations else None
    group = {"targets": ["Linear"], "weights": _WEIGHTS, "input_activations": inputs, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": "nvfp4-pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ignore,
        "kv_cache_scheme": None,
    }


def llm_compressor_w4a16() -> Published:
    """(a) Experts, a shared expert and full attention; routers, linear attention and lm_head are bf16."""
    make = _Maker()
    make.ends(head=make.plain)
    names = make.experts(0, weight_only=True) + make.experts(1, weight_only=True)
    names += make.each(0, "mlp.shared_expert", MLP, make.nvfp4, weight_only=True)
    names += make.each(1, "self_attn", ATTENTION, make.nvfp4, weight_only=True)
    make.each(0, "linear_attn", LINEAR_ATTENTION, make.plain)
    section = compressed_tensors_config(["lm_head", r"re:.*mlp\.gate$", "re:.*linear_attn.*"])
    config = CONFIG | {"quantization_config": section}
    return Published(as_compressed_tensors(make.tensors), config, dict.fromkeys(names, "NVFP4A16"), {})


def modelopt_mixed() -> Published:
    """(b) MIXED_PRECISION: MLP and lm_head NVFP4, attention FP8, scales of an FP8 KV cache."""
    make = _Maker()
    make.ends(head=make.nvfp4)
    names, table = ["lm_head"], {}
    for layer in range(2):
        names += make.each(layer, "mlp", MLP, make.nvfp4)
        for name in make.each(layer, "self_attn", ATTENTION, make.fp8):
            table[name] = {"quant_algo": "FP8"}
        for kind in "kv":
            make.tensors[f"model.layers.{layer}.self_attn.{kind}_proj.{kind}_scale"] = torch.rand(())
    table |= {name: {"quant_algo": "NVFP4", "group_size": 16} for name in names}
    section = {"quant_algo": "MIXED_PRECISION", "kv_cache_quant_algo": "FP8", "quantized_layers": table}
    files = {"hf_quant_config.json": {"producer": {"name": "modelopt"}, "quantization": section}}
    config = CONFIG | {"quantization_config": {"quant_method": "modelopt"} | section}
    return Published(make.tensors, config, dict.fromkeys(names, "NVFP4"), files)


def modelopt_dense(algorithm: str = "NVFP4", *, nested: bool = False) -> Published:
    """(c), (f) A dense model, with all linear layers except lm_head; its config is only in hf_quant_config.json, or
    nested."""
    make = _Maker()
    make.ends(head=make.plain)
    options = {"weight_only": algorithm == "NVFP4A16", "awq": algorithm == "NVFP4_AWQ"}
    names = [
        name
        for layer in range(2)
        for block, own in (("mlp", MLP), ("self_attn", ATTENTION))
        for name in make.each(layer, block, own, make.nvfp4, **options)
    ]
    section = {"quant_algo": algorithm, "group_size": 16, "exclude_modules": ["lm_head"]}
    if algorithm == "NVFP4_AWQ":
        section |= {"has_zero_point": False, "pre_quant_scale": True}
    config, files = dict(CONFIG), {}
    if nested:
        config["text_config"] = {"quantization_config": {"quant_method": "modelopt"} | section}
    else:
        files["hf_quant_config.json"] = {"producer": {"name": "modelopt"}, "quantization": section}
    return Published(make.tensors, config, dict.fromkeys(names, algorithm), files)


def fp8_attention() -> Published:
    """(d) NVFP4 experts with a `quant_method` of FP8 in blocks, which attention has."""
    make = _Maker()
    make.ends(head=make.plain)
    names = make.experts(0)
    make.each(0, "self_attn", ATTENTION, make.fp8, size=128)
    groups = compressed_tensors_config([], activations=True)["config_groups"]
    groups["group_0"]["targets"] = ["re:.*mlp.experts.*"]
    section = {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": ["lm_head", "mlp.gate"],
        "config_groups": groups,
    }
    return Published(make.tensors, CONFIG | {"quantization_config": section}, dict.fromkeys(names, "NVFP4"), {})


def multimodal() -> Published:
    """(e) NVFP4 experts and bf16 attention under a multimodal wrapper, the config in `text_config`; a vision tower."""
    make = _Maker("model.language_model.layers")
    make.plain("model.language_model.embed_tokens", VOCAB, HIDDEN)
    make.plain("model.visual.blocks.0.attn.qkv", 3 * HIDDEN, HIDDEN)
    make.plain("lm_head", VOCAB, HIDDEN)
    names = make.experts(0)
    make.each(0, "self_attn", ATTENTION, make.plain)
    ignore = ["lm_head", "re:.*self_attn.*", r"re:.*mlp\.gate$", "re:.*visual.*"]
    section = compressed_tensors_config(ignore, activations=True)
    config = CONFIG | {"text_config": {"compression_config": section}}
    return Published(as_compressed_tensors(make.tensors), config, dict.fromkeys(names, "NVFP4"), {})


def per_layer() -> Published:
    """(f) Algorithms layer by layer: weight-only ones beside AWQ, and experts that differ."""
    make = _Maker()
    make.ends(head=make.plain)
    by_algorithm = {
        "W4A16_NVFP4": make.each(0, "self_attn", ATTENTION, make.nvfp4),
        "NVFP4_AWQ": make.each(0, "mlp.shared_expert", MLP, make.nvfp4, awq=True),
        "NVFP4": make.experts(0),
    }
    special = by_algorithm["NVFP4"].pop()
    by_algorithm["W4A16_NVFP4"].append(special)
    algorithms = {name: algorithm for algorithm, names in by_algorithm.items() for name in names}
    table = {name: {"quant_algo": algorithm, "group_size": 16} for name, algorithm in algorithms.items()}
    section = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": table}
    return Published(make.tensors, CONFIG | {"quantization_config": section}, algorithms, {})


def fused_experts(*, suffixed: bool = True, stacked: bool = False) -> Published:
    """(g) One tensor for all experts of a layer: `[E, N, K/2]`, or `[E * N, K/2]` if ``stacked``."""
    make = _Maker()
    make.ends(head=make.plain)
    block = "model.layers.0.mlp.experts"
    for name, n, k in (("gate_up_proj", 2 * INTER, HIDDEN), ("down_proj", HIDDEN, INTER)):
        parts = [nvfp4_module(name, n, k, make.generator) for _ in range(EXPERTS)]
        for suffix in ("weight", "weight_scale", "weight_scale_2", "input_scale"):
            values = [part[f"{name}.{suffix}"] for part in parts]
            joined = torch.stack([value.view(torch.uint8) if value.ndim else value for value in values])
            joined = joined.flatten(0, 1) if stacked and joined.ndim == 3 else joined
            joined = joined.view(torch.float8_e4m3fn) if suffix == "weight_scale" else joined
            own = f"{name}.{suffix}" if suffixed else name if suffix == "weight" else f"{name}_{suffix}"
            make.tensors[f"{block}.{own}"] = joined
    make.plain("model.layers.0.mlp.gate", EXPERTS, HIDDEN)
    section = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head", "*.mlp.gate"]}
    algorithms = {f"{block}.{name}": "NVFP4" for name in ("gate_up_proj", "down_proj")}
    return Published(make.tensors, CONFIG | {"quantization_config": section}, algorithms, {})


def dense_with_biases() -> Published:
    """(h) Grouped-query attention with biases, and embeddings that are shared with lm_head."""
    make = _Maker()
    make.ends()
    names = []
    for layer in range(2):
        for name, n in (("q_proj", HIDDEN), ("k_proj", HIDDEN // 2), ("v_proj", HIDDEN // 2), ("o_proj", HIDDEN)):
            names.append(f"model.layers.{layer}.self_attn.{name}")
            make.nvfp4(names[-1], n, HIDDEN)
            make.bias(names[-1], n)
        names += make.each(layer, "mlp", MLP, make.nvfp4)
    section = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]}
    config = CONFIG | {"tie_word_embeddings": True, "quantization_config": section}
    return Published(make.tensors, config, dict.fromkeys(names, "NVFP4"), {})


def renamed_experts(pattern: str) -> Published:
    """Experts with other names, made by ``pattern`` from expert and projection: `{e}.w1`, or `gate_proj.{e}`."""
    make = _Maker()
    make.ends(head=make.plain)
    make.experts(0)
    names = dict(zip(MLP, ("w1", "w3", "w2"), strict=True))
    tensors, modules = {}, []
    for name, tensor in make.tensors.items():
        if ".experts." in name:
            head, _, tail = name.partition(".experts.")
            expert, projection, suffix = tail.split(".")
            own = pattern.format(e=expert, projection=projection, w=names[projection])
            modules.append(f"{head}.experts.{own}")
            name = f"{modules[-1]}.{suffix}"
        tensors[name] = tensor
    section = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]}
    return Published(tensors, CONFIG | {"quantization_config": section}, dict.fromkeys(modules, "NVFP4"), {})


KINDS: dict[str, Callable[[], Published]] = {
    "a: llm-compressor W4A16": llm_compressor_w4a16,
    "b: ModelOpt mixed": modelopt_mixed,
    "c: ModelOpt dense": modelopt_dense,
    "d: experts over FP8 blocks": fp8_attention,
    "e: multimodal": multimodal,
    "f: W4A16_NVFP4": lambda: modelopt_dense("W4A16_NVFP4"),
    "f: NVFP4_AWQ": lambda: modelopt_dense("NVFP4_AWQ", nested=True),
    "f: per layer": per_layer,
    "g: fused experts": fused_experts,
    "g: fused experts, other names": lambda: fused_experts(suffixed=False),
    "g: stacked experts": lambda: fused_experts(stacked=True),
    "h: biases, tied": dense_with_biases,
    "Mixtral's names": lambda: renamed_experts("{e}.{w}"),
    "experts last": lambda: renamed_experts("{projection}.{e}"),
}
