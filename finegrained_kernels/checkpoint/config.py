"""What config.json says about quantized layers, read, checked and rewritten.

A compressed layer is named in `quantization_config.quantized_layers`, with `"weight_scale_encoding": "csf"`: a layer's
experts together (`<prefix>.experts`), any other module by itself. Layers that are not named are untouched.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Collection, Mapping
from typing import Any

from finegrained_kernels.checkpoint.errors import CheckpointError, Fault
from finegrained_kernels.checkpoint.layouts import CONFIG
from finegrained_kernels.checkpoint.names import GROUP, split_expert

ENCODING = "weight_scale_encoding"
CSF = "csf"
MIXED = "MIXED_PRECISION"
_NVFP4 = {"quant_algo": "NVFP4", "group_size": GROUP}
_MODELOPT, _COMPRESSED_TENSORS = "modelopt", "compressed-tensors"


def marked_layers(config: Mapping[str, Any] | None) -> tuple[set[str], list[Fault]]:
    """Modules that config.json calls compressed, and entries that cannot be understood."""
    layers = ((config or {}).get("quantization_config") or {}).get("quantized_layers") or {}
    if not isinstance(layers, dict):
        return set(), [Fault(CONFIG, None, f"quantized_layers must be an object, got {layers!r}")]
    marked, faults = set(), []
    for module, entry in layers.items():
        if not isinstance(entry, dict):
            faults.append(Fault(CONFIG, module, f"expected an object in quantized_layers, got {entry!r}"))
        elif ENCODING in entry and entry[ENCODING] != CSF:
            faults.append(Fault(CONFIG, module, f"unknown {ENCODING} {entry[ENCODING]!r}, expected {CSF!r}"))
        elif ENCODING in entry:
            marked.add(module)
    return marked, faults


def mark_config(
    config: Mapping[str, Any],
    hf_quant_config: Mapping[str, Any] | None,
    compressed: Collection[str],
    nvfp4: Collection[str],
) -> dict[str, Any]:
    """config.json with exactly the modules ``compressed`` marked, of all ``nvfp4`` modules.

    ModelOpt's becomes MIXED_PRECISION with every NVFP4 module named. compressed-tensors' keeps its method and all it
    says, since its tensors, with globals that are divisors, stay as they are; it gains `quantized_layers`.
    """
    document = copy.deepcopy(dict(config))
    quantization = dict(document.get("quantization_config") or {})
    if not quantization and hf_quant_config:
        quantization = {"quant_method": _MODELOPT, **hf_quant_config.get("quantization", {})}
    method = quantization.setdefault("quant_method", _MODELOPT)
    if method == _MODELOPT:
        _mark_modelopt(quantization, compressed, nvfp4)
    elif method == _COMPRESSED_TENSORS:
        quantization["quantized_layers"] = {module: {**_NVFP4, ENCODING: CSF} for module in compressed}
    else:
        message = f"quant_method {method!r}, expected {_MODELOPT!r} or {_COMPRESSED_TENSORS!r}"
        raise CheckpointError([Fault(CONFIG, None, message)])
    document["quantization_config"] = quantization
    return document


def mark_hf_quant_config(
    hf_quant_config: Mapping[str, Any], compressed: Collection[str], nvfp4: Collection[str]
) -> dict[str, Any]:
    """ModelOpt's own hf_quant_config.json, saying the same as config.json."""
    document = copy.deepcopy(dict(hf_quant_config))
    _mark_modelopt(document.setdefault("quantization", {}), compressed, nvfp4)
    return document


def quantized_config(config: Mapping[str, Any], nvfp4: Collection[str]) -> dict[str, Any]:
    """config.json of a checkpoint whose modules ``nvfp4``, and no others, were quantized."""
    document = copy.deepcopy(dict(config))
    document["quantization_config"] = quantization = {"quant_method": _MODELOPT}
    _mark_modelopt(quantization, (), nvfp4)
    return document


def dump_json(document: Mapping[str, Any]) -> bytes:
    return (json.dumps(document, indent=2, ensure_ascii=False) + "\n").encode()


def _mark_modelopt(quantization: dict[str, Any], compressed: Collection[str], nvfp4: Collection[str]) -> None:
    before = quantization.get("quantized_layers") or {}
    named = {module: dict(before.get(module, _NVFP4)) for module in nvfp4}
    # Entries for single experts are now said by the entry of their layer's experts; all others stay.
    others = {
        module: entry
        for module, entry in before.items()
        if module not in named and not ((expert := split_expert(module)) and expert[0] in named)
    }
    for module in compressed:
        named[module][ENCODING] = CSF
    quantization["quant_algo"] = MIXED
    quantization["quantized_layers"] = {**others, **named}
