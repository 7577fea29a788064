"""One weight and many tokens: the weight is unpacked to bf16, a bounded part at a time, and multiplied by cuBLAS.

Torch allocates the scratch for the duration of the call, so layers share it, and each graph has its own.
"""

from __future__ import annotations

import torch

from ..csf.scales import TILE_BYTES, NVFP4CSFScales
from ..device import cdiv
from ..launching import bind
from ..nvfp4.reference import GROUP
from ..recording import forgo_plan
from . import cublas
from .kernels.operands import Scales, Weight
from .problem import Gemm
from .split import has_clusters

SCRATCH_BYTES = 128 << 20
"""The most bytes of unpacked weights that exist at a time."""

FEWEST_TOKENS, FEWEST_TOKENS_SMALL, SMALL_WEIGHT = 1536, 512, 1 << 23
"""The numbers of tokens from which unpacking ahead was measured to be faster. For weights of at most SMALL_WEIGHT
values, which have too few tiles for other kernels, it is the smaller number."""

ROWS_UNIT = 128
"""The number of rows in a part is a multiple of this. As K is a multiple of 128, every part begins at an offset
tile."""


def unpacks_ahead(device: torch.device, weight_rows: int, depth: int, num_tokens: int) -> bool:
    """Whether a plain W4A16 product in bf16 runs this way; a pure function of shape and device."""
    if not has_clusters(device) or depth % 128 or cublas.library() is None:
        return False
    return num_tokens >= (FEWEST_TOKENS_SMALL if weight_rows * depth <= SMALL_WEIGHT else FEWEST_TOKENS)


def part_rows(weight_rows: int, depth: int) -> int:
    """The number of weight rows unpacked at a time: all, or parts of about equal size."""
    parts = cdiv(weight_rows * depth * 2, SCRATCH_BYTES)
    return min(weight_rows, cdiv(cdiv(weight_rows, parts), ROWS_UNIT) * ROWS_UNIT)


def scratch_size(weight_rows: int, depth: int) -> int:
    """Bytes of scratch for a part of a weight [weight_rows, depth], and for the multipliers of its sums."""
    return part_rows(weight_rows, depth) * depth * 2 + 16


def is_plain(gemm: Gemm) -> bool:
    """Whether cuBLAS can do it: one weight, rows that are not routed, bf16 in and out, scales in the checkpoint's
    order."""
    whole = gemm.num_experts == 1 and gemm.expert_ids is None and gemm.gather_idx is None and gemm.scatter_idx is None
    simple = gemm.weight_only and not gemm.gate and not gemm.quantize_output and gemm.expert_start is None
    is_bf16 = gemm.a.dtype == gemm.output_dtype == torch.bfloat16
    return whole and simple and is_bf16 and (isinstance(gemm.b_scales, NVFP4CSFScales) or gemm.b_scales.ndim == 3)


def byte_weight(gemm: Gemm) -> Weight:
    scales = gemm.b_scales
    if isinstance(scales, NVFP4CSFScales):
        operands = Scales(None, scales.bases, scales.codes, scales.exceptions, scales.exception_offsets)
    else:
        operands = Scales(scales.view(torch.uint8))
    return Weight(gemm.b.view(torch.int32), operands)


def launch_ahead(gemm: Gemm, x: torch.Tensor, out: torch.Tensor) -> None:
    """out [M, N] = x [M, K] times the weight and its global; `is_plain(gemm)` is true. Launches two kernels for each
    part."""
    from .kernels.unpack_ahead import unpack_kernel  # Gluon exists for NVIDIA builds of Triton

    forgo_plan()  # cuBLAS does not launch through launching.py
    num_rows, depth, cols = gemm.num_cols, gemm.depth, gemm.depth // GROUP
    step = part_rows(num_rows, depth)
    scratch = torch.empty(scratch_size(num_rows, depth), dtype=torch.uint8, device=x.device)
    factors = scratch[step * depth * 2 :].view(torch.float32)
    kernel = bind(unpack_kernel, C=cols, PLANE=num_rows * cols, num_warps=4)
    weight, stream = byte_weight(gemm), torch.cuda.current_stream(x.device).cuda_stream
    for first in range(0, num_rows, step):
        rows = min(step, num_rows - first)
        grid = (cdiv(rows * cols, TILE_BYTES),)
        kernel(grid, scratch.view(torch.int32), weight, gemm.b_global, factors, first * cols // TILE_BYTES)
        plan = cublas.plan(x.device.index, x.shape[0], rows, depth, num_rows)
        workspace = torch.empty(plan.workspace_bytes, dtype=torch.uint8, device=x.device)
        addresses = (x.data_ptr(), scratch.data_ptr(), out.data_ptr() + 2 * first, factors.data_ptr())
        plan(*addresses, workspace.data_ptr(), stream)
