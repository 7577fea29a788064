"""Exact decoding of compressed NVFP4 scales, and kernels that use them."""

from __future__ import annotations

from .csf.decode import csf_workspace_size, decompress_nvfp4_csf_scales
from .csf.encode import compress_nvfp4_csf_scales
from .csf.scales import NVFP4CSFScales, prepare_nvfp4_csf_scales
from .csf.wire import NVFP4CSFWire, WireFault
from .gemm.api import matmul_2d, matmul_2d_scratch_size, matmul_batched, matmul_grouped
from .moe.experts import NVFP4Experts
from .moe.layer import expand_scales, moe_forward, uses_expanded_scales
from .moe.prefetch import ScalePrefetcher
from .moe.reduction import weighted_reduce
from .moe.routing import compute_grouped_scheduling
from .nvfp4.quantize import nvfp4_act_quant, nvfp4_quantize_two_level
from .swizzle import swizzle_mx_scales, unswizzle_mx_scales
from .warming import warm_up

__all__ = [
    "NVFP4CSFScales",
    "NVFP4CSFWire",
    "NVFP4Experts",
    "ScalePrefetcher",
    "WireFault",
    "compress_nvfp4_csf_scales",
    "compute_grouped_scheduling",
    "csf_workspace_size",
    "decompress_nvfp4_csf_scales",
    "expand_scales",
    "matmul_2d",
    "matmul_2d_scratch_size",
    "matmul_batched",
    "matmul_grouped",
    "moe_forward",
    "nvfp4_act_quant",
    "nvfp4_quantize_two_level",
    "prepare_nvfp4_csf_scales",
    "swizzle_mx_scales",
    "unswizzle_mx_scales",
    "uses_expanded_scales",
    "warm_up",
    "weighted_reduce",
]
