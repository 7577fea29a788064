"""The layouts that `quantize` writes: the names of tensors, whether globals are divisors, and the content of
config.json."""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from finegrained_kernels.checkpoint.config import mark_config
from finegrained_kernels.checkpoint.errors import CheckpointError
from finegrained_kernels.checkpoint.headers import NewTensor
from finegrained_kernels.checkpoint.names import GROUP
from finegrained_kernels.checkpoint.quantization_config import COMPRESSED_TENSORS, MODELOPT

PACKED_FORMAT = "nvfp4-pack-quantized"


@dataclass(frozen=True)
class QuantizedLayout:
    """How one library stores NVFP4 layers.

    Attributes:
        method: `quant_method` in config.json.
        weight, global_scale, input_scale: the last parts of the tensors' names.
        globals_divide: whether `global_scale` and `input_scale` are divisors, of shape [1], instead of multipliers.
    """

    method: str
    weight: str
    global_scale: str
    input_scale: str
    globals_divide: bool

    def tensors(self, module: str, rows: int, cols: int, *, has_input: bool) -> list[NewTensor]:
        """What a weight ``[rows, cols]`` of ``module`` becomes: codes, scales, a global, and an input scale if there is
        one."""
        shape = (1,) if self.globals_divide else ()
        new: list[NewTensor] = [
            (f"{module}.{self.weight}", "U8", (rows, cols // 2)),
            (f"{module}.weight_scale", "F8_E4M3", (rows, cols // GROUP)),
            (f"{module}.{self.global_scale}", "F32", shape),
        ]
        return [*new, (f"{module}.{self.input_scale}", "F32", shape)] if has_input else new

    def config(
        self, config: Mapping[str, Any], quantized: Collection[str], others: Collection[str], *, has_input: bool
    ) -> dict[str, Any]:
        """config.json of a checkpoint in which the modules ``quantized`` are NVFP4, and ``others``, the other linear
        layers, are not. Without input scales, NVFP4 layers are weight-only."""
        if self.globals_divide:
            document = copy.deepcopy(dict(config))
            document["quantization_config"] = _groups(others, has_input)
            return document
        entry = {"quant_algo": "NVFP4" if has_input else "W4A16_NVFP4", "group_size": GROUP}
        return mark_config(config, None, dict.fromkeys(quantized, entry), (), globals_divide=False)


LAYOUTS = {
    layout.method: layout
    for layout in (
        QuantizedLayout(MODELOPT, "weight", "weight_scale_2", "input_scale", globals_divide=False),
        QuantizedLayout(
            COMPRESSED_TENSORS, "weight_packed", "weight_global_scale", "input_global_scale", globals_divide=True
        ),
    )
}


def layout_of(method: str) -> QuantizedLayout:
    """The layout called ``method``.

    Raises:
        CheckpointError: there is none.
    """
    if method not in LAYOUTS:
        raise CheckpointError(f"format must be one of {', '.join(map(repr, LAYOUTS))}, got {method!r}")
    return LAYOUTS[method]


def _groups(others: Collection[str], has_input: bool) -> dict[str, Any]:
    """`config_groups` as llm-compressor writes it for its schemes "NVFP4" and "NVFP4A16"."""
    scheme = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": GROUP, "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": {**scheme, "dynamic": False},
        "input_activations": {**scheme, "dynamic": "local"} if has_input else None,
        "output_activations": None,
        "format": PACKED_FORMAT,
    }
    return {
        "quant_method": COMPRESSED_TENSORS,
        "format": PACKED_FORMAT,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": list(others),
        "kv_cache_scheme": None,
    }
