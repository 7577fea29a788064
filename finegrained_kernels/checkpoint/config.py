"""config.json of compressed and of quantized checkpoints: which layers it marks, and how it is rewritten.

A compressed layer is listed in `quantized_layers` of the quantization config, wherever that is, with
`"weight_scale_encoding": "csf"`: a layer's experts together (`<prefix>.experts`), any other module by itself. Layers
that are not listed are untouched. `quantization_config` reads what the config says about formats.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from finegrained_kernels.checkpoint.errors import CheckpointError, Fault
from finegrained_kernels.checkpoint.names import GROUP, Plane, split_expert
from finegrained_kernels.checkpoint.quantization_config import (
    ALGORITHMS,
    COMPRESSED_TENSORS,
    CONFIG,
    MIXED,
    MODELOPT,
    NVFP4,
    TABLE,
    QuantizationConfig,
    find_section,
)

ENCODING = "weight_scale_encoding"
CSF = "csf"
WEIGHTS = "transformers_weights"
UNMARKED = "has compressed scales, but is not marked as compressed"
MARKED_ONLY = "is marked as compressed, but has no compressed scale"
NOTICE = "compressed scales: pip install finegrained-kernels, import finegrained_kernels.integrations.transformers"
"""The value of `transformers_weights` in config.json, which is meant to be the name of a weights file. Without that
import, transformers looks for the file, and fails with this text in its message. The integration recognizes it."""

_PACKED = "nvfp4-pack-quantized"
_SCALING_KEYS = ("has_zero_point", "pre_quant_scale")  # for AWQ; ModelOpt writes them beside the algorithm


def marked_layers(config: Mapping[str, Any] | None) -> tuple[set[str], list[Fault]]:
    """The modules that config.json marks as compressed, and faults for entries that cannot be understood."""
    try:
        _, section = find_section(config)
    except CheckpointError as error:
        return set(), error.faults
    layers = (section or {}).get(TABLE) or {}
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


def layer_entries(
    quantization: QuantizationConfig | None, planes: Iterable[Plane], tensors: Collection[str]
) -> dict[str, dict[str, Any]]:
    """Entries of `quantized_layers` for NVFP4 layers, each with its own algorithm; the experts of a layer share one.

    A projection of an expert whose format is not that of the layer's first one has its own entry. ``tensors`` are the
    names of all tensors: if the config does not say otherwise, a layer without an input scale is weight-only.
    """
    section: Mapping[str, Any] = {} if quantization is None else quantization.section
    before = section.get(TABLE) or {}
    entries: dict[str, dict[str, Any]] = {}
    for plane in planes:
        layer, module = plane.layer_module, plane.module
        algorithm = _algorithm(quantization, plane, tensors)
        entry = before.get(module, before.get(layer))
        if entry is None or entry.get("quant_algo") != algorithm:
            entry = {"quant_algo": algorithm}
            if ALGORITHMS[algorithm].family == NVFP4:
                entry["group_size"] = GROUP
            entry |= {key: section[key] for key in _SCALING_KEYS if key in section and algorithm.endswith("_AWQ")}
        entry = {key: value for key, value in entry.items() if key != ENCODING}
        if entries.setdefault(layer, entry) != entry:
            entries[module] = entry
    return entries


def _algorithm(quantization: QuantizationConfig | None, plane: Plane, tensors: Collection[str]) -> str:
    said = None if quantization is None else quantization.layer_format(plane.module)
    if said is not None and said.algorithm in ALGORITHMS:  # of any format, because loading needs to know it
        return said.algorithm
    if plane.input_scale in tensors:
        return "NVFP4"
    return "NVFP4A16" if plane.global_scale_divides else "W4A16_NVFP4"


def mark_config(
    config: Mapping[str, Any],
    quantization: QuantizationConfig | None,
    entries: Mapping[str, Mapping[str, Any]],
    compressed: Collection[str],
    *,
    globals_divide: bool,
) -> dict[str, Any]:
    """config.json with exactly the modules ``compressed``, out of all NVFP4 ``entries``, marked where its config is.

    A config from ModelOpt becomes MIXED_PRECISION with every NVFP4 module listed. Others keep their method and all of
    their content, since their tensors stay as they are, and gain `quantized_layers`. If the config does not say which
    it is, the tensors do: ``globals_divide`` is true for those of compressed-tensors.
    """
    document = copy.deepcopy(dict(config))
    path = ("quantization_config",) if quantization is None or not quantization.path else quantization.path
    parent = document
    for key in path[:-1]:
        parent = parent[key]
    section = dict(parent.get(path[-1]) or {})
    if quantization is None:
        method = COMPRESSED_TENSORS if globals_divide else MODELOPT
    else:
        method = quantization.method
        section = dict(section or quantization.section)  # hf_quant_config.json's, if config.json has none
    section.setdefault("quant_method", method)
    if method == MODELOPT:
        _mark_modelopt(section, entries, compressed)
    else:
        if method == COMPRESSED_TENSORS:
            section.setdefault("format", _PACKED)
            if section.get("config_groups"):  # they already say what is NVFP4
                entries = {name: entry for name, entry in entries.items() if name in compressed}
        section[TABLE] = {**(section.get(TABLE) or {}), **_encoded(entries, compressed)}
    parent[path[-1]] = section
    if compressed:
        document.setdefault(WEIGHTS, NOTICE)
    return document


def mark_hf_quant_config(
    hf_quant_config: Mapping[str, Any], entries: Mapping[str, Mapping[str, Any]], compressed: Collection[str]
) -> dict[str, Any]:
    """ModelOpt's own hf_quant_config.json, changed to say the same as config.json."""
    document = copy.deepcopy(dict(hf_quant_config))
    document["quantization"] = document.get("quantization") or {}
    _mark_modelopt(document["quantization"], entries, compressed)
    return document


def dump_json(document: Mapping[str, Any]) -> bytes:
    return (json.dumps(document, indent=2, ensure_ascii=False) + "\n").encode()


def _mark_modelopt(
    section: dict[str, Any], entries: Mapping[str, Mapping[str, Any]], compressed: Collection[str]
) -> None:
    before = section.get(TABLE) or {}
    # The entry for a layer's experts replaces NVFP4 entries for single experts; all others stay.
    others = {
        module: entry
        for module, entry in before.items()
        if module not in entries
        and not ((expert := split_expert(module)) and expert[0] in entries and _is_nvfp4(entry))
    }
    section["quant_algo"] = MIXED
    section[TABLE] = {**others, **_encoded(entries, compressed)}


def _is_nvfp4(entry: Mapping[str, Any]) -> bool:
    form = ALGORITHMS.get(entry.get("quant_algo", "NVFP4"))
    return form is not None and form.family == NVFP4


def _encoded(entries: Mapping[str, Mapping[str, Any]], compressed: Collection[str]) -> dict[str, dict[str, Any]]:
    return {
        module: {**entry, ENCODING: CSF} if module in compressed else dict(entry) for module, entry in entries.items()
    }
