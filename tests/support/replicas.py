"""Tiny replicas of the kinds of checkpoints that people publish, and the float32 values that they represent.

They are written in numpy, from docs/format.md and public descriptions, and share no code with what is tested.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import transformers
from safetensors.torch import save_file
from transformers import AutoConfig

from checkpoints import read_tensors, write_json
from moe_models import COMMON

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
_BYTES = np.arange(256)
E4M3 = np.where(
    _BYTES % 128 // 8 > 0, (8 + _BYTES % 8) * 2.0 ** (_BYTES % 128 // 8 - 10.0), _BYTES % 8 * 2.0**-9
) * np.where(_BYTES < 128, 1, -1)
POSITIVE_E4M3 = E4M3[:127]
INPUT_SCALE = 0.004
"""The input scale of all calibrated activations, which saturate at 448 * 6 times this, about 10.7."""


def nearest(values: np.ndarray, table: np.ndarray) -> np.ndarray:
    """Index of the nearest entry of an increasing table; of two that are equally near, the even index."""
    upper = np.clip(np.searchsorted(table, values), 1, len(table) - 1)
    lower = upper - 1
    below, above = values - table[lower], table[upper] - values
    take = (below < above) | ((below == above) & (lower % 2 == 0))
    return np.where(take, lower, upper)


def nvfp4(values: np.ndarray, global_scale: np.ndarray, *, smallest: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Codes uint8 `[.., K]` and scale bytes uint8 `[.., K / 16]` of float32 `[.., K]`.

    Args:
        global_scale: one, or one for each row.
        smallest: the smallest scale byte.
    """
    groups = values.reshape(*values.shape[:-1], -1, 16).astype(np.float32)
    global_scale = np.float32(global_scale)
    # In float32 and in ModelOpt's order of operations, because ties are not rare among bf16 values.
    ratios = np.abs(groups).max(-1) / (np.float32(6) * global_scale)
    scales = np.maximum(nearest(ratios, POSITIVE_E4M3), smallest).astype(np.uint8)
    steps = (E4M3[scales].astype(np.float32) * global_scale)[..., None]
    quotient = np.divide(np.abs(groups), steps, out=np.zeros_like(groups), where=steps > 0)
    codes = nearest(quotient, E2M1[:8]) + 8 * np.signbit(groups)
    return codes.astype(np.uint8).reshape(values.shape), scales


def dequantized(codes: np.ndarray, scales: np.ndarray, global_scale: float | np.ndarray) -> np.ndarray:
    steps = E4M3[scales] * np.float64(global_scale)
    return (E2M1[codes].reshape(*codes.shape[:-1], -1, 16) * steps[..., None]).reshape(codes.shape)


@dataclasses.dataclass
class Stored:
    """A layer's tensors by the last part of their names, and the float weight that they represent."""

    tensors: dict[str, torch.Tensor]
    weight: np.ndarray


def store_nvfp4(
    weight: np.ndarray,
    *,
    divides: bool = False,
    input_scale: bool = False,
    awq: bool = False,
    global_scale: float | None = None,
) -> Stored:
    """An NVFP4 layer as ModelOpt stores it or, if globals are divisors, as compressed-tensors does."""
    smooth = None
    if awq:
        smooth = torch.from_numpy(2.0 ** np.random.default_rng(5).integers(-1, 2, weight.shape[1])).bfloat16()
        weight = weight / smooth.double().numpy()
    global_scale = np.float32(global_scale or np.abs(weight).max() / (448 * 6))
    divisor = np.float32(1 / global_scale)
    global_scale = float(np.float32(1) / divisor) if divides else float(global_scale)
    codes, scales = nvfp4(weight, global_scale)
    packed = torch.from_numpy(codes[:, 0::2] + 16 * codes[:, 1::2])
    names = ("weight_packed", "weight_global_scale") if divides else ("weight", "weight_scale_2")
    stored_global = torch.tensor([divisor]) if divides else torch.tensor(global_scale)
    tensors = {
        names[0]: packed,
        "weight_scale": torch.from_numpy(scales).view(torch.float8_e4m3fn),
        names[1]: stored_global,
    }
    if input_scale:
        name = "input_global_scale" if divides else "input_scale"
        tensors[name] = torch.tensor([1 / INPUT_SCALE]) if divides else torch.tensor(INPUT_SCALE)
    value = dequantized(codes, scales, global_scale)
    if smooth is not None:
        tensors["pre_quant_scale"] = smooth
        value = value * smooth.double().numpy()
    return Stored(tensors, value)


def store_fp8(weight: np.ndarray, kind: str, *, name: str = "weight_scale", input_scale: bool = False) -> Stored:
    """A layer in FP8 (E4M3), with one scale for the "tensor", or for each "channel", "block" of 128 x 128, or "mx"
    group."""
    rows, cols = weight.shape
    block = {"tensor": (rows, cols), "channel": (1, cols), "block": (128, 128), "block4d": (128, 128), "mx": (1, 32)}[
        kind
    ]
    padded = np.zeros([-(-n // b) * b for n, b in zip(weight.shape, block, strict=True)])
    padded[:rows, :cols] = weight
    tiles = padded.reshape(padded.shape[0] // block[0], block[0], padded.shape[1] // block[1], block[1])
    scale = (np.abs(tiles).max((1, 3), keepdims=True) / 448).astype(np.float32)
    if kind == "mx":
        exponent = np.ceil(np.log2(scale)).astype(np.int32) + 127
        scale = 2.0 ** (exponent - 127)
    codes = nearest(np.abs(tiles / scale), POSITIVE_E4M3) + 128 * np.signbit(tiles)
    value = (E4M3[codes] * scale).reshape(padded.shape)[:rows, :cols]
    codes = codes.reshape(padded.shape)[:rows, :cols].astype(np.uint8)
    stored = torch.from_numpy(exponent.astype(np.uint8) if kind == "mx" else scale)
    shape = {"tensor": (), "channel": (rows, 1), "block4d": tuple(stored.shape)}.get(kind, stored.shape[0::2])
    if kind == "block4d":
        shape = (stored.shape[0], 1, stored.shape[2], 1)
    tensors = {"weight": torch.from_numpy(codes.copy()).view(torch.float8_e4m3fn), name: stored.reshape(shape)}
    if input_scale:
        tensors["input_scale"] = torch.tensor(INPUT_SCALE)
    return Stored(tensors, value)


def write_replica(
    root: Path,
    config: transformers.PreTrainedConfig,
    store: Callable[[str, np.ndarray], Stored | None],
    documents: dict[str, dict],
    *,
    rename: Callable[[str], str] = lambda name: name,
    arrange: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]] = lambda tensors: tensors,
    extra: dict[str, torch.Tensor] | None = None,
    model_class: type = transformers.AutoModelForCausalLM,
) -> dict[str, Path]:
    """Write a random model: quantized as "dense", and as "float" the float32 values that this represents.

    Args:
        store: how a module's weight is stored; None for a module that is not quantized.
        documents: JSON files that are merged into those of the model.
        rename: from transformers' names to those in the checkpoint.
        arrange: changes the layout of the quantized tensors.
        extra: tensors that are added to the quantized checkpoint.
    """
    torch.manual_seed(0)
    model = model_class.from_config(config, dtype=torch.bfloat16)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.copy_(
                    torch.randn(parameter.shape) * (1.0 if "embed" in name else 1.0 / parameter.shape[-1] ** 0.5)
                )
            elif name.endswith("bias"):
                parameter.copy_(torch.randn(parameter.shape) * 0.1)
    model.save_pretrained(root / "bf16")
    quantized, floats = {}, {}
    for name, tensor in read_tensors(root / "bf16").items():
        module, _, last = name.rpartition(".")
        stored = store(module, tensor.double().numpy()) if last == "weight" and tensor.dim() == 2 else None
        floats[name] = tensor.float() if stored is None else torch.from_numpy(stored.weight).float()
        new = {name: tensor} if stored is None else {f"{module}.{key}": t for key, t in stored.tensors.items()}
        quantized |= {rename(key): t.contiguous() for key, t in new.items()}
    paths = {kind: root / kind for kind in ("dense", "float")}
    document = json.loads((root / "bf16" / "config.json").read_text())
    for kind, tensors in (("dense", arrange(quantized) | (extra or {})), ("float", floats)):
        paths[kind].mkdir()
        save_file(tensors, paths[kind] / "model.safetensors", {"format": "pt"})
        write_json(paths[kind] / "config.json", document)
    for name, other in documents.items():
        write_json(paths["dense"] / name, _merged(document, other) if name == "config.json" else other)
    return paths


def _merged(document: dict, other: dict) -> dict:
    """``document`` with the entries of ``other`` merged in, also inside nested objects."""
    both = {key: _merged(document.get(key) or {}, value) for key, value in other.items() if isinstance(value, dict)}
    return document | other | both


_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(\w+)\.(.+)")


def stack_experts(tensors: dict[str, torch.Tensor], layout: str) -> dict[str, torch.Tensor]:
    """Experts as "fused" `[E, 2 I, H / 2]` and `[E, H, I / 2]`, as "rows" `[E * N, K / 2]`, or "numbered", with the
    number last."""
    arranged, stacks = {}, {}
    for name, tensor in tensors.items():
        match = _EXPERT.fullmatch(name)
        if match is None:
            arranged[name] = tensor
        elif layout == "numbered":
            arranged[f"{match[1]}.{match[3]}.{match[2]}.{match[4]}"] = tensor
        else:
            stacks.setdefault((match[1], match[3], match[4]), []).append(tensor)
    for (experts, projection, last), parts in stacks.items():
        if layout == "rows":
            arranged[f"{experts}.{projection}.{last}"] = torch.cat(parts) if parts[0].dim() else torch.stack(parts)
        elif projection != "up_proj":
            bytes_of = [part.view(torch.uint8) if part.dim() else part for part in parts]
            if projection == "gate_proj" and parts[0].dim():
                ups = [part.view(torch.uint8) for part in stacks[experts, "up_proj", last]]
                bytes_of = [torch.cat(pair) for pair in zip(bytes_of, ups, strict=True)]
            stacked = torch.stack(bytes_of).view(parts[0].dtype)
            name = f"{experts}.{'gate_up_proj' if projection == 'gate_proj' else projection}"
            arranged[name if last == "weight" else f"{name}_{last}"] = stacked
    return arranged


def small_config(architecture: str, **changes) -> transformers.PreTrainedConfig:
    return AutoConfig.for_model(architecture, **{**COMMON, "intermediate_size": 192, **changes})


def cosine(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float(torch.nn.functional.cosine_similarity(actual.double().flatten(), expected.double().flatten(), dim=0))


def quantize_activations(values: torch.Tensor, global_scale: float | None = INPUT_SCALE) -> np.ndarray:
    """The values after quantization to NVFP4, float64 `[M, K]`, with a calibrated global scale or, if it is None, each
    row's own.

    The scale of 16 activations is never 0.
    """
    rows = values.float().numpy()
    amax = np.abs(rows).max(-1, keepdims=True)
    own = np.float32(global_scale) if global_scale else np.where(amax, amax / np.float32(2688), np.float32(1))
    return dequantized(*nvfp4(rows, own, smallest=1), own)


def assert_is_product(
    out: torch.Tensor, activations: np.ndarray, weight: np.ndarray, bias: torch.Tensor | None
) -> None:
    """Check that ``out [M, N]`` is `activations @ weight.T + bias`, in float32, rounded to the dtype of ``out``.

    A sum of K float32 products has an error of at most K / 2^24 of the sum of their magnitudes. Scales and float32
    weights of a replica add a few roundings. Then the result is rounded to the dtype, and with a bias once more.
    """
    expected, size = activations @ weight.T, np.abs(activations) @ np.abs(weight).T
    half_step = torch.finfo(out.dtype).eps / 2
    bound = (activations.shape[1] + 8) * 2.0**-24 * size + half_step * np.abs(expected)
    if bias is not None:
        expected = expected + bias.double().numpy()
        bound = bound + half_step * (np.abs(expected) + bound)
    excess = np.abs(out.double().numpy() - expected) - bound * 1.01
    assert excess.max() <= 1e-30, f"{(excess > 0).mean():.2%} are off, by {excess.max():.3g}"


def product(
    values: torch.Tensor, weight: torch.Tensor, quantize: bool = True, global_scale: float | None = INPUT_SCALE
) -> torch.Tensor:
    """The product `[M, N]` in the values' dtype; activations are quantized first if ``quantize``."""
    rows = values.reshape(-1, values.shape[-1])
    flat = quantize_activations(rows, global_scale) if quantize else rows.double().numpy()
    return torch.from_numpy(flat @ weight.double().numpy().T).to(values.dtype).view(*values.shape[:-1], -1)


def quantizing_model(paths: dict[str, Path], is_quantized: Callable[[str], bool]) -> torch.nn.Module:
    """The model in bfloat16 with float weights, in which some layers quantize their inputs (W4A4)."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        paths["float"], dtype=torch.bfloat16, experts_implementation="eager"
    )
    floats = read_tensors(paths["float"])
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            weight, quantize = floats[f"{name}.weight"], is_quantized(name)
            module.forward = lambda x, weight=weight, quantize=quantize: product(x, weight, quantize)
        elif hasattr(module, "gate_up_proj") and is_quantized(name):
            names = ("gate_proj", "up_proj", "down_proj")
            weights = [[floats[f"{name}.{e}.{n}.weight"] for n in names] for e in range(len(module.gate_up_proj))]
            module.forward = lambda x, index, top, weights=weights: experts_product(x, index, top, weights)
    return model


def experts_product(
    x: torch.Tensor, index: torch.Tensor, top: torch.Tensor, weights: list, global_scale: float | None = INPUT_SCALE
) -> torch.Tensor:
    """The W4A4 output of experts for ``x [M, K]``, from the float weights of gate, up and down of each."""
    out = torch.zeros(x.shape, dtype=torch.float64)
    for token, choice in np.ndindex(*index.shape):
        gate, up, down = weights[index[token, choice]]
        inner = quantize_activations(x[token : token + 1], global_scale)
        gate, up = (inner @ w.double().numpy().T for w in (gate, up))
        inner = torch.from_numpy(gate / (1 + np.exp(-gate)) * up).to(x.dtype)
        out[token] += float(top[token, choice]) * product(inner, down, True, global_scale)[0].double()
    return out.to(x.dtype)
