"""The config that `from_pretrained` gets: the checkpoint's own `quantization_config`, and how to run the layers."""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping
from typing import Any

from transformers.utils.quantization_config import QuantizationConfigMixin

from finegrained_kernels.checkpoint.names import layer_of

METHOD, CHECKPOINT = "finegrained-kernels", "checkpoint"
STRATEGIES = ("auto", "staged", "fused", "dense")
ACTIVATIONS = ("auto", "bf16", "nvfp4", "nvfp4_dynamic")
FP8 = ("stored", "dequantized")
_LOADING = ("scale_strategy", "activation_format", "prefetch", "fp8", "warm_up")


class NVFP4CSFConfig(QuantizationConfigMixin):
    """How to load and run NVFP4 layers: `from_pretrained(path, quantization_config=NVFP4CSFConfig(...))`.

    Attributes:
        scale_strategy: how scales are kept and read.
            "auto": compressed scales stay compressed, and the kernels choose how to read them; dense ones stay dense.
            "staged": scales are compressed, and decoded before each GEMM into one workspace that all layers share.
            "fused": scales are compressed, and the GEMM decodes what it reads.
            "dense": scales are decoded once, while loading.
            For "staged" and "fused", scales that are dense in the checkpoint are compressed while loading.
        activation_format: "bf16" uses activations as they are, "nvfp4" quantizes them with the checkpoint's input
            scales, "nvfp4_dynamic" with a scale computed for each row. "auto" is "nvfp4" if the checkpoint has input
            scales for all layers, and "bf16" if it has none. With "auto" and "nvfp4", layers that are weight-only
            according to the checkpoint's config, such as W4A16_NVFP4, stay so even if they have input scales.
        prefetch: decode the next layer's scales on a side stream while this layer's attention runs. Needs "staged".
        fp8: how FP8 weights beside NVFP4 ones are kept. "stored": they stay FP8 in memory, and each call dequantizes
            those that it uses. "dequantized": they are dequantized once, while loading; that takes twice the memory,
            and the model cannot be saved.
        warm_up: while weights are read, compile in parallel the kernels that calls of up to 16,384 tokens launch.
            False: compile each kernel when it is first launched.
    """

    def __init__(
        self,
        scale_strategy: str = "auto",
        activation_format: str = "auto",
        prefetch: bool = False,
        fp8: str = "stored",
        warm_up: bool = True,
    ) -> None:
        for name, value, allowed in (
            ("scale_strategy", scale_strategy, STRATEGIES),
            ("activation_format", activation_format, ACTIVATIONS),
            ("fp8", fp8, FP8),
        ):
            if value not in allowed:
                raise ValueError(f"{name} must be one of {', '.join(allowed)}, got {value!r}")
        if prefetch and scale_strategy != "staged":
            raise ValueError(f"prefetch needs scale_strategy 'staged', got {scale_strategy!r}")
        self.quant_method = METHOD
        self.scale_strategy = scale_strategy
        self.activation_format = activation_format
        self.prefetch = prefetch
        self.fp8 = fp8
        self.warm_up = warm_up
        self.checkpoint: dict[str, Any] | None = None

    @classmethod
    def from_dict(
        cls, config_dict: Mapping[str, Any], return_unused_kwargs: bool = False, **kwargs: Any
    ) -> NVFP4CSFConfig | tuple[NVFP4CSFConfig, dict[str, Any]]:
        """Make the config from ``config_dict``, which is a checkpoint's quantization config, or has it as its entry
        "checkpoint"."""
        config = cls(**{name: kwargs.pop(name) for name in _LOADING if name in kwargs})
        config.checkpoint = copy.deepcopy(dict(config_dict.get(CHECKPOINT, config_dict)))
        return (config, kwargs) if return_unused_kwargs else config

    def to_dict(self) -> dict[str, Any]:
        """The checkpoint's own `quantization_config`, which `save_pretrained` writes."""
        own = {"quant_method": METHOD, **self.get_loading_attributes()}
        return copy.deepcopy(own if self.checkpoint is None else self.checkpoint)

    def drop_layers(self, modules: Collection[str]) -> None:
        """Forget these layers: the model leaves them out, so `save_pretrained` does not write them."""
        if self.checkpoint is not None and (named := self.checkpoint.get("quantized_layers")):
            self.checkpoint["quantized_layers"] = {name: named[name] for name in named if layer_of(name) not in modules}

    def get_loading_attributes(self) -> dict[str, Any]:
        """The options that the caller of `from_pretrained` decides, and not the checkpoint."""
        return {name: getattr(self, name) for name in _LOADING}
