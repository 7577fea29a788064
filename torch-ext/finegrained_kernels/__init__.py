"""Exact decoding of compressed NVFP4 scales, and the kernels that consume them."""

from __future__ import annotations

from .csf.decode import csf_workspace_size, decompress_nvfp4_csf_scales
from .csf.encode import compress_nvfp4_csf_scales
from .csf.scales import NVFP4CSFScales, prepare_nvfp4_csf_scales
from .layouts import swizzle_mx_scales, unswizzle_mx_scales

__all__ = [
    "NVFP4CSFScales",
    "compress_nvfp4_csf_scales",
    "csf_workspace_size",
    "decompress_nvfp4_csf_scales",
    "prepare_nvfp4_csf_scales",
    "swizzle_mx_scales",
    "unswizzle_mx_scales",
]
