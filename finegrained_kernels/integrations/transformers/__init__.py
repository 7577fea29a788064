"""NVFP4 checkpoints in transformers: import this module, then call `from_pretrained` as usual.

The import tells transformers how to load checkpoints of ModelOpt and compressed-tensors whose experts or other weights
are NVFP4, with dense or with compressed scales. See docs/transformers.md.
"""

try:
    from finegrained_kernels.integrations.transformers.config import NVFP4CSFConfig
    from finegrained_kernels.integrations.transformers.experts import (
        NVFP4ExpertsModule,
        nvfp4_experts,
        set_scale_strategy,
    )
    from finegrained_kernels.integrations.transformers.linear import FP8Linear, NVFP4Linear, nvfp4_linears
    from finegrained_kernels.integrations.transformers.registration import register
except ImportError as error:
    advice = "needs transformers 5.17 or newer, and accelerate: pip install transformers accelerate"
    raise ImportError(f"{__name__} {advice} ({error})", name=error.name) from error

register()

__all__ = [
    "FP8Linear",
    "NVFP4CSFConfig",
    "NVFP4ExpertsModule",
    "NVFP4Linear",
    "nvfp4_experts",
    "nvfp4_linears",
    "set_scale_strategy",
]
