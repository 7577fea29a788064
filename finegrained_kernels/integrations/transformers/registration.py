"""Tells transformers about the two kinds of checkpoints, once."""

from __future__ import annotations

from typing import Any

from transformers.integrations.moe import ExpertsInterface
from transformers.quantizers import auto
from transformers.utils.quantization_config import CompressedTensorsConfig

from finegrained_kernels.integrations.transformers.config import (
    COMPRESSED_TENSORS,
    METHOD,
    MODELOPT,
    NVFP4CSFConfig,
    is_nvfp4,
)
from finegrained_kernels.integrations.transformers.experts import IMPLEMENTATIONS, run_other_experts
from finegrained_kernels.integrations.transformers.quantizer import NVFP4CSFQuantizer


class _CompressedTensorsOrNVFP4(CompressedTensorsConfig):
    """Reads compressed-tensors configs: NVFP4 ones are ours, all others stay transformers'."""

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], return_unused_kwargs: bool = False, **kwargs: Any) -> Any:
        kind = NVFP4CSFConfig if is_nvfp4(config_dict) else CompressedTensorsConfig
        return kind.from_dict(config_dict, return_unused_kwargs=return_unused_kwargs, **kwargs)


def register() -> None:
    """Register configs, the quantizer and the experts implementations; again is harmless.

    Raises:
        RuntimeError: something else registered ModelOpt checkpoints.
    """
    configs, quantizers = auto.AUTO_QUANTIZATION_CONFIG_MAPPING, auto.AUTO_QUANTIZER_MAPPING
    if configs.get(MODELOPT, NVFP4CSFConfig) is not NVFP4CSFConfig:
        other = f"{configs[MODELOPT].__module__}.{configs[MODELOPT].__name__}"
        raise RuntimeError(f"quant_method {MODELOPT!r} is registered with transformers already, by {other}")
    configs[MODELOPT] = configs[METHOD] = NVFP4CSFConfig
    quantizers[METHOD] = NVFP4CSFQuantizer
    configs[COMPRESSED_TENSORS] = _CompressedTensorsOrNVFP4
    if NVFP4CSFConfig not in auto.LOADING_ATTRIBUTES_CONFIG_TYPES:
        auto.LOADING_ATTRIBUTES_CONFIG_TYPES += (NVFP4CSFConfig,)
    for name in IMPLEMENTATIONS:
        ExpertsInterface.register(name, run_other_experts)
