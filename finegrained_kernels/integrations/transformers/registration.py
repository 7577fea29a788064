"""Tells transformers about NVFP4 checkpoints, once."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

from huggingface_hub import try_to_load_from_cache
from transformers import PreTrainedConfig, modeling_utils
from transformers.integrations.moe import ExpertsInterface
from transformers.quantizers import auto

from finegrained_kernels.checkpoint.config import NOTICE, WEIGHTS
from finegrained_kernels.checkpoint.layouts import HF_QUANT_CONFIG, read_json
from finegrained_kernels.checkpoint.quantization_config import MODELOPT, find_section, read_quantization
from finegrained_kernels.integrations.transformers.config import CHECKPOINT, METHOD, NVFP4CSFConfig
from finegrained_kernels.integrations.transformers.experts import IMPLEMENTATIONS, run_other_experts
from finegrained_kernels.integrations.transformers.quantizer import NVFP4CSFQuantizer


def register() -> None:
    """Register the config, the quantizer and the experts implementations. Doing so again is harmless.

    transformers chooses a quantizer by the `quant_method` of `quantization_config` in config.json. NVFP4 checkpoints
    have several such methods, which other checkpoints also use, and some have their config elsewhere. So the function
    of transformers that chooses is wrapped, and first finds out what the checkpoint is.

    Raises:
        RuntimeError: something else has registered ModelOpt checkpoints.
    """
    configs, quantizers = auto.AUTO_QUANTIZATION_CONFIG_MAPPING, auto.AUTO_QUANTIZER_MAPPING
    if configs.get(MODELOPT, NVFP4CSFConfig) is not NVFP4CSFConfig:
        other = f"{configs[MODELOPT].__module__}.{configs[MODELOPT].__name__}"
        raise RuntimeError(f"quant_method {MODELOPT!r} is registered with transformers already, by {other}")
    configs[MODELOPT] = configs[METHOD] = NVFP4CSFConfig
    quantizers[METHOD] = NVFP4CSFQuantizer
    if NVFP4CSFConfig not in auto.LOADING_ATTRIBUTES_CONFIG_TYPES:
        auto.LOADING_ATTRIBUTES_CONFIG_TYPES += (NVFP4CSFConfig,)
    for name in IMPLEMENTATIONS:
        ExpertsInterface.register(name, run_other_experts)
    if not hasattr(modeling_utils.get_hf_quantizer, "__wrapped__"):
        modeling_utils.get_hf_quantizer = _claiming(modeling_utils.get_hf_quantizer)


def _claiming(choose: Callable) -> Callable:
    @functools.wraps(choose)
    def get_hf_quantizer(config: PreTrainedConfig, quantization_config: Any, *args: Any, **kwargs: Any) -> Any:
        claim(config, asked=isinstance(quantization_config, NVFP4CSFConfig))
        return choose(config, quantization_config, *args, **kwargs)

    return get_hf_quantizer


def claim(config: PreTrainedConfig, *, asked: bool) -> None:
    """Mark an NVFP4 checkpoint's config as ours. ``asked``: the caller has requested it.

    Raises:
        CheckpointError: the caller has requested it, and the quantization config cannot be understood.
    """
    if getattr(config, WEIGHTS, None) == NOTICE:  # a message for those without this import, not a file's name
        delattr(config, WEIGHTS)
    document = config.to_dict()
    _, section = find_section(document)
    own = None if section else _hf_quant_config(config)
    if section is None and own is None:
        return
    if section is not None and section.get("quant_method") == METHOD:
        return
    if not asked:
        try:
            quantization = read_quantization(document, own)
        except ValueError:  # other checkpoints are not ours to refuse
            return
        if quantization is None or not quantization.has_nvfp4:
            return
    said = {"quant_method": MODELOPT, **own["quantization"]} if section is None and own is not None else section
    config.quantization_config = {"quant_method": METHOD, CHECKPOINT: said}


def _hf_quant_config(config: PreTrainedConfig) -> dict[str, Any] | None:
    """ModelOpt's hf_quant_config.json beside config.json, if it is on this machine."""
    name = getattr(config, "_name_or_path", None) or getattr(config, "name_or_path", None)
    if not name:
        return None
    path = Path(name) / HF_QUANT_CONFIG
    if not path.parent.is_dir():
        try:
            cached = try_to_load_from_cache(str(name), HF_QUANT_CONFIG)
        except ValueError:  # not the name of a repository
            return None
        if not isinstance(cached, str):
            return None
        path = Path(cached)
    return read_json(path, HF_QUANT_CONFIG) if path.is_file() else None
