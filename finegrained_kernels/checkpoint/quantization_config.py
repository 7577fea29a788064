"""What a checkpoint's config says about its quantization, and which format that gives each layer.

This is the only place that reads ModelOpt's `quant_algo`, `quantized_layers` and lists of excluded modules, from
config.json or hf_quant_config.json; compressed-tensors' `config_groups`, targets and `ignore`; and `quant_method`
"fp8", alone or together with NVFP4 layers. The config may be in `quantization_config` or `compression_config`, also of
a nested config.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from finegrained_kernels.checkpoint.errors import CheckpointError, Fault
from finegrained_kernels.checkpoint.module_patterns import Match, ModulePatterns, is_name

CONFIG = "config.json"
HF_QUANT_CONFIG = "hf_quant_config.json"
MODELOPT, COMPRESSED_TENSORS, FP8_METHOD, MXFP8_METHOD = "modelopt", "compressed-tensors", "fp8", "mxfp8"
METHODS = (MODELOPT, COMPRESSED_TENSORS, FP8_METHOD, MXFP8_METHOD)
MIXED = "MIXED_PRECISION"
NVFP4, FP8, MXFP8, OTHER = "nvfp4", "fp8", "mxfp8", "other"
"""Families of formats. Formats of family "other" have names, but nothing here reads them."""

TABLE = "quantized_layers"
_SECTIONS = ("quantization_config", "compression_config")
_EXCLUDED = ("ignore", "exclude_modules")
_NOT_CONVERTED = ("modules_to_not_convert", "ignored_layers")


@dataclass(frozen=True)
class LayerFormat:
    """How a linear layer's weights are stored, and how its inputs are treated.

    Attributes:
        algorithm: its name in the checkpoint: "NVFP4", "W4A16_NVFP4", "FP8_PB_WO" and so on. If the config has no
            name, as in compressed-tensors, the name of the scheme that writes it: "NVFP4" or "NVFP4A16".
        family: "nvfp4", "fp8", "mxfp8" or "other".
        activations: "static" if they are quantized with a scale from the checkpoint, "dynamic" if with a measured one,
            None if they are not quantized: then the layer is weight-only, whatever tensors it has.
        group_size: how many weights along K share a scale: 16 in NVFP4, 32 in MXFP8; None for other formats.
        block_size: rows and columns of weights that share a scale, such as (128, 128); None if there are no blocks.
        per_channel: whether each row has a scale.
        globals_divide: whether second-level scales are divisors, as in compressed-tensors.
        pre_quant_scale: whether a vector `[K]` multiplies the activations first (AWQ).
    """

    algorithm: str
    family: str
    activations: str | None = None
    group_size: int | None = None
    block_size: tuple[int, int] | None = None
    per_channel: bool = False
    globals_divide: bool = False
    pre_quant_scale: bool = False

    @property
    def weight_only(self) -> bool:
        return self.activations is None


_BLOCKS = (128, 128)
ALGORITHMS: Mapping[str, LayerFormat] = {
    kind.algorithm: kind
    for kind in (
        LayerFormat("NVFP4", NVFP4, "static", group_size=16),
        LayerFormat("W4A16_NVFP4", NVFP4, group_size=16),
        LayerFormat("NVFP4A16", NVFP4, group_size=16),
        LayerFormat("NVFP4_AWQ", NVFP4, "static", group_size=16, pre_quant_scale=True),
        LayerFormat("FP8", FP8, "static"),
        LayerFormat("FP8_PER_CHANNEL_PER_TOKEN", FP8, "dynamic", per_channel=True),
        LayerFormat("FP8_PB_WO", FP8, block_size=_BLOCKS),
        LayerFormat("FP8_BLOCK_SCALES", FP8, "dynamic", block_size=_BLOCKS),
        LayerFormat("MXFP8", MXFP8, "dynamic", group_size=32),
        *(
            LayerFormat(name, OTHER)
            for name in (
                "INT4_AWQ", "INT8_SQ", "MXFP4", "NVFP4_SVDQUANT", "W4A16", "W4A16_AWQ", "W4A16_GPTQ", "W4A8_AWQ",
                "W4A8_MXFP4_FP8", "W4A8_NVFP4_FP8", "W4A8_QSERVE_PER_CHANNEL", "W4A8_QSERVE_PER_GROUP", "W8A16",
                "W8A16_GPTQ", "W8A8_SQ_PER_CHANNEL", "W8A8_SQ_PER_CHANNEL_PER_TENSOR_PLUGIN",
            )
        ),
    )
}  # fmt: skip
"""The meaning of each algorithm that a config can name."""


@dataclass(frozen=True)
class _Group:
    targets: ModulePatterns
    format: LayerFormat


@dataclass(frozen=True, eq=False)
class QuantizationConfig:
    """A checkpoint's quantization config, checked. Its purpose is `layer_format`.

    Attributes:
        method: "modelopt", "compressed-tensors", "fp8" or "mxfp8".
        section: its contents, merged if they come from two files.
        path: where it is in config.json, such as ("text_config", "quantization_config"); empty if only
            hf_quant_config.json has it.
        kv_cache: the algorithm of a quantized KV cache, such as "FP8"; None if it is not quantized.
        unsupported: features that it asks for and that nothing here implements; without them, results would be wrong.
    """

    method: str
    section: Mapping[str, Any]
    path: tuple[str, ...]
    kv_cache: str | None
    unsupported: tuple[Fault, ...]
    _table: Mapping[str, LayerFormat]
    _table_names: ModulePatterns
    _excluded: ModulePatterns
    _groups: tuple[_Group, ...]
    _whole: LayerFormat | None
    _base: LayerFormat | None
    _not_converted: ModulePatterns

    @property
    def has_nvfp4(self) -> bool:
        """Whether it says that any layer has NVFP4 weights, even if nothing here can run it."""
        formats = [*self._table.values(), *(group.format for group in self._groups), self._whole]
        return any(form is not None and "NVFP4" in form.algorithm for form in formats)

    def layer_format(self, module: str, module_class: str = "Linear") -> LayerFormat | None:
        """The format of a linear layer by its name in the checkpoint; None if it is not quantized.

        A module's own entry in `quantized_layers` takes precedence, followed by lists of excluded modules, entries of
        modules that contain it, targets of groups, and the algorithm of the whole model. Last comes the FP8 that "fp8"
        checkpoints use wherever nothing else is specified. This is what the config says; tensors may say otherwise.
        """
        named = self._table_names.closest_name(module)
        own = None if named is None else self._table[named[1]]
        if self.method == COMPRESSED_TENSORS and self._groups:
            own = None  # there, groups say what is quantized; the table, written by compress, says what is compressed
        elif own is not None and named is not None and named[0] is Match.EXACT:
            return own
        if self._excluded.match(module, module_class) is Match.NONE:
            if own is not None:
                return own
            matches = [(group.targets.match(module, module_class), group.format) for group in self._groups]
            best = max((match for match, _ in matches), default=Match.NONE)
            if best is not Match.NONE:
                return next(form for match, form in matches if match is best)
            if self._whole is not None:
                return self._whole
        if self._base is not None and self._not_converted.match(module, module_class) is Match.NONE:
            return self._base
        return None


def read_quantization(
    config: Mapping[str, Any] | None, hf_quant_config: Mapping[str, Any] | None = None
) -> QuantizationConfig | None:
    """What config.json and ModelOpt's hf_quant_config.json say about quantization; None if neither says anything.

    Raises:
        CheckpointError: a value has the wrong type, or a method, algorithm or scheme is unknown. The message names file
            and key.
    """
    path, section = find_section(config)
    own = None if hf_quant_config is None else hf_quant_config.get("quantization")
    if own is not None and not isinstance(own, dict):
        raise _fault(HF_QUANT_CONFIG, "quantization", f"expected an object, got {own!r}")
    if section is None and not own:
        return None
    if own and section and own.get(TABLE) is not None:  # that of config.json counts; compress rewrites both
        _Reader((), {}, own).read_table()
    return _Reader(path, section or {}, own or {}).read()


def find_section(config: Mapping[str, Any] | None) -> tuple[tuple[str, ...], Mapping[str, Any] | None]:
    """Where config.json has its quantization config, and its content; ``((), None)`` if it has none.

    Its own takes precedence over that of a nested config such as `text_config`; an empty one does not count.

    Raises:
        CheckpointError: a quantization config is not an object, or two nested ones differ.
    """
    found = []
    for path, section in _sections(config or {}, ()):
        if not isinstance(section, dict):
            raise _fault(CONFIG, ".".join(path), f"expected an object, got {section!r}")
        found.append((path, section))
    if not found:
        return (), None
    depth = min(len(path) for path, _ in found)
    outermost = [(path, section) for path, section in found if len(path) == depth]
    for path, section in outermost[1:]:
        if section != outermost[0][1]:
            message = f"differs from {'.'.join(outermost[0][0])}: which of them is meant is not known"
            raise _fault(CONFIG, ".".join(path), message)
    return outermost[0]


def _sections(config: Mapping[str, Any], path: tuple[str, ...]) -> list[tuple[tuple[str, ...], Any]]:
    found = [((*path, key), config[key]) for key in _SECTIONS if config.get(key) not in (None, {})]
    for key, value in config.items():
        if key.endswith("_config") and key not in _SECTIONS and isinstance(value, dict):
            found += _sections(value, (*path, key))
    return found


def _fault(file: str, key: str, message: str) -> CheckpointError:
    return CheckpointError([Fault(file, key, message)])


class _Reader:
    """Reads a section of config.json and that of hf_quant_config.json; errors name the file and key."""

    def __init__(self, path: tuple[str, ...], section: Mapping[str, Any], own: Mapping[str, Any]) -> None:
        self.path, self.own_keys = path, own.keys() - section.keys()
        method = section.get("quant_method", self._guess(section, own))
        if method not in METHODS and not (isinstance(method, str) and method.startswith(MODELOPT + "_")):
            raise self.fault("quant_method", f"{method!r}, expected one of {', '.join(METHODS)}")
        self.method = MODELOPT if method.startswith(MODELOPT) else method
        self.base_section = section if self.method in (FP8_METHOD, MXFP8_METHOD) else None
        # compressed-tensors needs nothing else; for all others, ModelOpt's file adds to it
        self.section = dict(section) if self.method == COMPRESSED_TENSORS else {**own, **section}
        self.nested = len(path) > 1

    @staticmethod
    def _guess(section: Mapping[str, Any], own: Mapping[str, Any]) -> str:
        """Old exports name no method. Those of compressed-tensors have groups, those of ModelOpt an algorithm."""
        grouped = "config_groups" in section and "quant_algo" not in {**own, **section}
        return COMPRESSED_TENSORS if grouped or "format" in section else MODELOPT

    def fault(self, key: str, message: str) -> CheckpointError:
        if key.partition(".")[0] in self.own_keys:
            return _fault(HF_QUANT_CONFIG, f"quantization.{key}", message)
        return _fault(CONFIG, ".".join((*self.path, key)), message)

    def read(self) -> QuantizationConfig:
        table, keys = self.read_table(), self.section.keys()
        algorithm = self.section.get("quant_algo")
        groups = self.read_groups() if algorithm is None or algorithm == MIXED else ()
        whole = None
        if algorithm is not None and algorithm != MIXED:
            whole = self.algorithm(self.section, "")
        elif algorithm == MIXED and not table and not groups:
            raise self.fault(TABLE, f"missing: {MIXED} says nothing without it")
        elif not (table or groups or self.base_section is not None or {"quant_algo", "config_groups"} & keys):
            raise self.fault("config_groups", "missing: nothing says which layers are quantized, and how")
        patterned = [_Group(self.patterns([p], TABLE), form) for p, form in table.items() if not is_name(p)]
        return QuantizationConfig(
            method=self.method,
            section=self.section,
            path=self.path,
            kv_cache=self.kv_cache(),
            unsupported=self.transforms(),
            _table=table,
            _table_names=self.patterns(table, TABLE),
            _excluded=self.patterns([name for key in _EXCLUDED for name in self.names(key)], _EXCLUDED[0]),
            _groups=(*patterned, *groups),
            _whole=whole,
            _base=self.base(),
            _not_converted=self.patterns(
                [name for key in _NOT_CONVERTED for name in self.names(key)], _NOT_CONVERTED[0], inside=True
            ),
        )

    def read_table(self) -> dict[str, LayerFormat]:
        table = self.section.get(TABLE)
        table = {} if table is None else table
        if not isinstance(table, dict):
            raise self.fault(TABLE, f"expected an object, got {table!r}")
        whole = self.section.get("quant_algo")
        default = "NVFP4" if whole in (None, MIXED) else whole
        formats = {}
        for module, entry in table.items():
            if not isinstance(entry, dict):
                raise self.fault(f"{TABLE}.{module}", f"expected an object, got {entry!r}")
            formats[module] = self.algorithm({"quant_algo": default, **entry}, f"{TABLE}.{module}.")
        return formats

    def algorithm(self, entry: Mapping[str, Any], key: str) -> LayerFormat:
        name, group, pre_scaled = entry["quant_algo"], entry.get("group_size"), entry.get("pre_quant_scale")
        if not isinstance(name, str) or name not in ALGORITHMS:
            raise self.fault(f"{key}quant_algo", f"{name!r}, expected one of {', '.join(ALGORITHMS)} or {MIXED}")
        form = ALGORITHMS[name]
        if pre_scaled is not None and type(pre_scaled) is not bool:
            raise self.fault(f"{key}pre_quant_scale", f"expected true or false, got {pre_scaled!r}")
        if form.group_size is not None and group is not None and (type(group) is not int or group != form.group_size):
            raise self.fault(f"{key}group_size", f"{group!r}: {name} has a scale for {form.group_size} weights")
        scaled = form.pre_quant_scale if pre_scaled is None else pre_scaled
        return replace(form, globals_divide=self.method == COMPRESSED_TENSORS, pre_quant_scale=scaled)

    def read_groups(self) -> tuple[_Group, ...]:
        groups = self.section.get("config_groups")
        groups = {} if groups is None else groups
        if not isinstance(groups, dict):
            raise self.fault("config_groups", f"expected an object, got {groups!r}")
        read = []
        for name, group in groups.items():
            key = f"config_groups.{name}"
            if not isinstance(group, dict):
                raise self.fault(key, f"expected an object, got {group!r}")
            targets = self.names(f"{key}.targets", group.get("targets", ["Linear"]))
            form = self.scheme(group, key)
            if form is not None:
                read.append(_Group(self.patterns(targets, f"{key}.targets"), form))
        return tuple(read)

    def scheme(self, group: Mapping[str, Any], key: str) -> LayerFormat | None:
        """The format of a group's `weights` and `input_activations`."""
        weights, inputs = (self.optional_object(group, name, key) for name in ("weights", "input_activations"))
        if weights is None:
            return None  # only activations, as for a KV cache
        stored = group.get("format") or self.section.get("format")
        if stored is not None and not isinstance(stored, str):
            raise self.fault("format", f"expected a text, got {stored!r}")
        bits, size = (self.number(weights, name, f"{key}.weights") for name in ("num_bits", "group_size"))
        floating = weights.get("type", "float" if stored == "nvfp4-pack-quantized" else "int") == "float"
        activations = self.activations(inputs, key)
        divide = self.method == COMPRESSED_TENSORS
        if floating and bits == 4 and size in (None, 16):
            input_bits = None if inputs is None else self.number(inputs, "num_bits", f"{key}.input_activations")
            if input_bits not in (None, 4):
                return LayerFormat(f"NVFP4 weights with {input_bits}-bit activations", OTHER, activations)
            form = ALGORITHMS["NVFP4" if activations else "NVFP4A16" if divide else "W4A16_NVFP4"]
            return replace(form, activations=activations, globals_divide=divide)
        if floating and bits == 8 and size == 32:
            return replace(ALGORITHMS["MXFP8"], activations=activations)
        strategy = weights.get("strategy") or ("block" if weights.get("block_structure") else "tensor")
        if floating and bits == 8 and strategy in ("tensor", "channel", "block"):
            block = self.block(weights.get("block_structure"), f"{key}.weights.block_structure", strategy == "block")
            return LayerFormat("FP8", FP8, activations, block_size=block, per_channel=strategy == "channel")
        if bits is None:
            raise self.fault(f"{key}.weights.num_bits", "missing: how weights are stored is not known")
        kind = "float" if floating else "int"
        return LayerFormat(f"{stored or 'weights'} of {bits}-bit {kind}, strategy {strategy}", OTHER, activations)

    def activations(self, inputs: Mapping[str, Any] | None, key: str) -> str | None:
        if inputs is None:
            return None
        dynamic = inputs.get("dynamic", False)
        if dynamic not in (True, False, "local", None):
            raise self.fault(f"{key}.input_activations.dynamic", f"expected true, false or 'local', got {dynamic!r}")
        return "dynamic" if dynamic is True else "static"

    def base(self) -> LayerFormat | None:
        """The format that "fp8" checkpoints use wherever nothing else is specified."""
        if self.base_section is None:
            return None
        scheme = self.base_section.get("activation_scheme", "dynamic")
        if scheme not in ("dynamic", "static", None):
            raise self.fault("activation_scheme", f"expected 'dynamic' or 'static', got {scheme!r}")
        if self.method == MXFP8_METHOD:
            return replace(ALGORITHMS["MXFP8"], activations=scheme)
        block = self.block(self.base_section.get("weight_block_size"), "weight_block_size", False)
        return LayerFormat("FP8", FP8, scheme, block_size=block)

    def block(self, value: object, key: str, needed: bool) -> tuple[int, int] | None:
        """Rows and columns of a block, given as [128, 128] or "128x128"."""
        if value is None and not needed:
            return None
        parts = [int(part) for part in re.findall(r"\d+", value)] if isinstance(value, str) else value
        if not (isinstance(parts, list) and len(parts) == 2 and all(type(p) is int and p > 0 for p in parts)):
            raise self.fault(key, f"expected rows and columns of a block, got {value!r}")
        return parts[0], parts[1]

    def kv_cache(self) -> str | None:
        named = self.section.get("kv_cache_quant_algo")
        if named is not None and not isinstance(named, str):
            raise self.fault("kv_cache_quant_algo", f"expected a text, got {named!r}")
        scheme = self.optional_object(self.section, "kv_cache_scheme", "")
        if named is not None or scheme is None:
            return named
        return f"{'FP' if scheme.get('type') == 'float' else 'INT'}{scheme.get('num_bits')}"

    def transforms(self) -> tuple[Fault, ...]:
        """Rotations of what layers read or write, which are not supported. Those of weights are already in the
        weights."""
        key = "transform_config"
        config = self.optional_object(self.section, key, "") or {}
        faults = []
        for name, scheme in (self.optional_object(config, "config_groups", key) or {}).items():
            applied = scheme.get("apply") if isinstance(scheme, dict) else None
            if not isinstance(applied, list) or not all(isinstance(each, dict) for each in applied):
                raise self.fault(f"{key}.config_groups.{name}.apply", f"expected a list of objects, got {scheme!r}")
            places = [str(each.get("location")) for each in applied]
            if moved := [place for place in places if not place.startswith("weight_")]:
                message = f"{scheme.get('type')} at {', '.join(moved)}: transforms of activations are not supported"
                faults += self.fault(f"{key}.config_groups.{name}", message).faults
        return tuple(faults)

    def names(self, key: str, value: object = None) -> list[str]:
        """A list of texts, such as names and patterns of modules; null counts as an empty list."""
        value = self.section.get(key) if value is None else value
        if value is None:
            return []
        if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
            raise self.fault(key, f"expected a list of names, got {value!r}")
        return value

    def patterns(self, names: Any, key: str, *, inside: bool = False) -> ModulePatterns:
        try:
            return ModulePatterns(list(names), nested=self.nested, inside=inside)
        except re.error as error:
            raise self.fault(key, f"{error.pattern!r} is not a regular expression: {error}") from error

    def optional_object(self, parent: Mapping[str, Any], name: str, key: str) -> Mapping[str, Any] | None:
        value = parent.get(name)
        if value is not None and not isinstance(value, dict):
            raise self.fault(f"{key}.{name}".lstrip("."), f"expected an object, got {value!r}")
        return value

    def number(self, parent: Mapping[str, Any], name: str, key: str) -> int | None:
        value = parent.get(name)
        if value is not None and type(value) is not int:
            raise self.fault(f"{key}.{name}", f"expected a number, got {value!r}")
        return value
