"""The weighted sum over a token's experts, on a GPU. Bytes moved: top_k + 1 values for each token and column."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..device import cdiv
from ..launching import bind

BLOCK_N = 1024


@triton.jit
def weighted_reduce_kernel(
    rows_ptr, index_ptr, weights_ptr, out_ptr, num_experts, N, TOP_K: tl.constexpr, BLOCK: tl.constexpr
):
    """Each program sums BLOCK columns of one token, choice 0 first. Choices without an expert are not read."""
    token = tl.program_id(0).to(tl.int64)
    offs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for choice in range(TOP_K):
        expert = tl.load(index_ptr + token * TOP_K + choice)
        width = tl.where((expert >= 0) & (expert < num_experts), N, 0)
        weight = tl.load(weights_ptr + token * TOP_K + choice).to(tl.float32)
        row = tl.load(rows_ptr + (token * TOP_K + choice) * N + offs, mask=offs < width, other=0.0).to(tl.float32)
        total += tl.where(offs < width, row * weight, 0.0)
    tl.store(out_ptr + token * N + offs, total.to(out_ptr.dtype.element_ty), mask=offs < N)


def weighted_reduce_on_gpu(
    rows: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor, num_experts: int
) -> torch.Tensor:
    """[M, N]; the arguments are those of `reduction.weighted_reduce`, already checked."""
    num_tokens, top_k = top_k_index.shape
    num_cols = rows.shape[1]
    out = rows.new_empty(num_tokens, num_cols)
    if out.numel():
        bind(weighted_reduce_kernel, TOP_K=top_k, BLOCK=BLOCK_N)(
            (num_tokens, cdiv(num_cols, BLOCK_N)),
            rows.contiguous(), top_k_index.contiguous(), top_k_weights.contiguous(), out, num_experts, num_cols,
        )  # fmt: skip
    return out
