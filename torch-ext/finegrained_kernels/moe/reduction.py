"""From routed rows back to one row for each token: the weighted sum over its experts."""

from __future__ import annotations

import torch

from .._ops import add_op_namespace_prefix, ops
from ..arguments import kind_of, no_dense_tensor
from ..plans import planned
from .routing import INDEX_DTYPES


def weighted_reduce(
    rows: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor, num_experts: int
) -> torch.Tensor:
    """Each token's weighted sum over its choices: [M, N] in the dtype of `rows`, summed in float32, choice 0 first.

    rows: bf16, fp16 or fp32 [M * top_k, N], token-major; top_k_index: int [M, top_k]; top_k_weights: float [M, top_k].
    A choice whose index is outside 0..num_experts-1 adds nothing; its row is never read into the sum.
    Raises ValueError or TypeError naming the argument.
    """
    return planned(_weighted_reduce, (rows, top_k_index, top_k_weights, num_experts))


def _weighted_reduce(
    rows: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor, num_experts: int
) -> torch.Tensor:
    named = {"rows": rows, "top_k_index": top_k_index, "top_k_weights": top_k_weights}
    for name, tensor in named.items():
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name}: expected a tensor, got {kind_of(tensor)}")
    if got := no_dense_tensor(rows):
        raise ValueError(f"rows: expected a tensor on a CPU or GPU, got {got}")
    for name, tensor in named.items():
        if tensor.device != rows.device:
            raise ValueError(f"{name}: expected device {rows.device}, as rows has, got {tensor.device}")
    if top_k_index.dtype not in INDEX_DTYPES:
        raise TypeError(f"top_k_index: expected int32 or int64, got {top_k_index.dtype}")
    if not (rows.is_floating_point() and top_k_weights.is_floating_point()):
        raise TypeError(f"rows, top_k_weights: expected floating point, got {rows.dtype}, {top_k_weights.dtype}")
    if top_k_index.ndim != 2 or top_k_weights.shape != top_k_index.shape:
        shapes = f"{tuple(top_k_index.shape)} and {tuple(top_k_weights.shape)}"
        raise ValueError(f"top_k_index, top_k_weights: expected one shape (M, top_k), got {shapes}")
    if rows.ndim != 2 or rows.shape[0] != top_k_index.numel():
        raise ValueError(f"rows: expected ({top_k_index.numel()}, N), got {tuple(rows.shape)}")
    if torch.compiler.is_compiling():
        return ops.weighted_reduce(rows, top_k_index, top_k_weights, num_experts)
    return _reduce_on_device(rows, top_k_index, top_k_weights, num_experts)


@torch.no_grad()  # as on a GPU
def _reduce_on_device(rows, top_k_index, top_k_weights, num_experts: int) -> torch.Tensor:
    if rows.device.type != "cpu":
        from .reduction_triton import weighted_reduce_on_gpu  # Triton may be absent where only the CPU is used

        return weighted_reduce_on_gpu(rows, top_k_index, top_k_weights, num_experts)
    total = torch.zeros(top_k_index.shape[0], rows.shape[1], dtype=torch.float32, device=rows.device)
    for choice in range(top_k_index.shape[1]):
        valid = (top_k_index[:, choice] >= 0) & (top_k_index[:, choice] < num_experts)
        terms = rows[choice :: top_k_index.shape[1]].float() * top_k_weights[:, choice, None].float()
        total += torch.where(valid[:, None], terms, 0.0)
    return total.to(rows.dtype)


@torch.library.custom_op(add_op_namespace_prefix("weighted_reduce"), mutates_args=())
def _weighted_reduce_op(
    rows: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor, num_experts: int
) -> torch.Tensor:
    return _reduce_on_device(rows, top_k_index, top_k_weights, num_experts)


@torch.library.register_fake(add_op_namespace_prefix("weighted_reduce"))
def _weighted_reduce_fake(rows, top_k_index, top_k_weights, num_experts):
    return rows.new_empty(top_k_index.shape[0], rows.shape[1])
