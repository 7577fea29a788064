"""Exact decoding of compressed NVFP4 scales, and the kernels that consume them."""

from __future__ import annotations

from .csf.decode import csf_workspace_size, decompress_nvfp4_csf_scales
from .csf.encode import compress_nvfp4_csf_scales
from .csf.scales import NVFP4CSFScales, prepare_nvfp4_csf_scales
from .layouts import swizzle_mx_scales, unswizzle_mx_scales
from .nvfp4.matmul import matmul_2d, matmul_batched, matmul_grouped
from .nvfp4.quantize import nvfp4_act_quant, nvfp4_quantize_two_level
from .routing import compute_grouped_scheduling, weighted_reduce

__all__ = [
    "NVFP4CSFScales",
    "compress_nvfp4_csf_scales",
    "compute_grouped_scheduling",
    "csf_workspace_size",
    "decompress_nvfp4_csf_scales",
    "matmul_2d",
    "matmul_batched",
    "matmul_grouped",
    "nvfp4_act_quant",
    "nvfp4_quantize_two_level",
    "prepare_nvfp4_csf_scales",
    "swizzle_mx_scales",
    "unswizzle_mx_scales",
    "weighted_reduce",
]
