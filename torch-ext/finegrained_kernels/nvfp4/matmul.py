"""The public GEMMs on NVFP4 weights: check, then run on the tensors' device.

Shared arguments. A: bf16 or fp16 activations (fp32 too when they are quantized), or packed NVFP4 uint8 [M, K/2] beside
their scales `As` [M, K/16]. B, Bs: packed weights and their E4M3 scales, dense, swizzled (layouts.py) or compressed:
NVFP4CSFScales are decoded as the kernel goes, with no dense copy, and results have the same bits.

activation_format   None: W4A4, activations are quantized to NVFP4 first; "bf16": W4A16, they are used as they are.
gate                B stacks [gate; up] rows, 2N of them; the result is silu(gate) * up, silu(x) = x * sigmoid(alpha x)
                    with `swiglu_alpha` (1 by default); `swiglu_limit` caps gate above, and up on both sides.
a_global_scale      float32 multiplier of the activations: a scalar, one an expert [E], or one a row [M, 1]; with
                    unquantized A, None takes each row's own.
b_global_scale      float32 multiplier of the weights: a scalar, [E], or [E, 2] when gate and up differ.
quantize_output     return (packed [S, N/2], scales [S, N/16]): exactly what quantizing the result in `output_dtype`
                    under `output_global_scale` (scalar or [E], 1 by default) gives.
output_dtype        of the result; A's own by default, bf16 for packed A.
gather_idx          int [S]: routed row s reads row gather_idx[s] of A. One outside A makes the result row 0.
scatter_idx         int [S], a permutation: routed row s is written to row scatter_idx[s].

Sums are float32. Rows of no expert are 0. Wrong arguments raise ValueError or TypeError naming the argument.
"""

from __future__ import annotations

from typing import List, Optional

import torch

from .._ops import add_op_namespace_prefix, ops
from ..csf.scales import NVFP4CSFScales
from .arguments import FIELDS, Gemm, check_gemm
from .cpu import run_on_cpu
from .reference import GROUP


def matmul_2d(
    A, B, As=None, Bs=None, *,
    activation_format=None, gate=False, act_fn="silu", swiglu_alpha=None, swiglu_limit=None,
    quantize_output=False, output_dtype=None, a_global_scale=None, b_global_scale=None, output_global_scale=None,
):  # fmt: skip
    """One weight: A [M, K] times B [N, K/2], Bs [N, K/16] -> [M, N]. `b_global_scale`: a scalar, or [2] with gate."""
    if isinstance(b_global_scale, torch.Tensor):
        b_global_scale = b_global_scale.reshape(1, -1)
    return _run(check_gemm(
        A, B.unsqueeze(0), As, Bs if isinstance(Bs, NVFP4CSFScales) else Bs.unsqueeze(0),
        activation_format=activation_format, gate=gate, act_fn=act_fn,
        swiglu_alpha=swiglu_alpha, swiglu_limit=swiglu_limit,
        quantize_output=quantize_output, output_dtype=output_dtype,
        a_global_scale=a_global_scale, b_global_scale=b_global_scale, output_global_scale=output_global_scale,
    ))  # fmt: skip


def matmul_batched(
    A, B, As=None, Bs=None, *, expert_ids, gather_idx=None, scatter_idx=None,
    activation_format=None, gate=False, act_fn="silu", swiglu_alpha=None, swiglu_limit=None,
    quantize_output=False, output_dtype=None, a_global_scale=None, b_global_scale=None, output_global_scale=None,
):  # fmt: skip
    """One expert id a routed row, int [S], in any order: B [E, N, K/2] -> [S, N]. For few rows (decode).

    Rows whose id is negative or at least E (expert-parallel sentinels) read no weight and are 0.
    """
    return _run(check_gemm(
        A, B, As, Bs, expert_ids=expert_ids, gather_idx=gather_idx, scatter_idx=scatter_idx,
        activation_format=activation_format, gate=gate, act_fn=act_fn,
        swiglu_alpha=swiglu_alpha, swiglu_limit=swiglu_limit,
        quantize_output=quantize_output, output_dtype=output_dtype,
        a_global_scale=a_global_scale, b_global_scale=b_global_scale, output_global_scale=output_global_scale,
    ))  # fmt: skip


def matmul_grouped(
    A, B, As=None, Bs=None, *, expert_start, gather_idx=None, scatter_idx=None,
    activation_format=None, gate=False, act_fn="silu", swiglu_alpha=None, swiglu_limit=None,
    quantize_output=False, output_dtype=None, a_global_scale=None, b_global_scale=None, output_global_scale=None,
):  # fmt: skip
    """Routed rows sorted by expert: B [E, N, K/2] -> [S, N].

    expert_start: int32, E + 1 entries or more; expert e owns routed rows [expert_start[e], expert_start[e + 1]). It is
    read on the device. Rows from expert_start[E] on belong to no expert and are 0.
    """
    return _run(check_gemm(
        A, B, As, Bs, expert_start=expert_start, gather_idx=gather_idx, scatter_idx=scatter_idx,
        activation_format=activation_format, gate=gate, act_fn=act_fn,
        swiglu_alpha=swiglu_alpha, swiglu_limit=swiglu_limit,
        quantize_output=quantize_output, output_dtype=output_dtype,
        a_global_scale=a_global_scale, b_global_scale=b_global_scale, output_global_scale=output_global_scale,
    ))  # fmt: skip


def _run(gemm: Gemm) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    outputs = ops.nvfp4_gemm(*_to_flat(gemm)) if torch.compiler.is_compiling() else _run_on_device(gemm)
    return tuple(outputs) if gemm.quantize_output else outputs[0]


def _run_on_device(gemm: Gemm) -> List[torch.Tensor]:
    if gemm.a.device.type == "cpu":
        return run_on_cpu(gemm)
    from .launch import run_on_gpu  # Triton may be absent where only the CPU is used

    return run_on_gpu(gemm)


def _to_flat(gemm: Gemm) -> tuple:
    """The fields of `gemm` in order, as the registered op takes them: tensors, lists of tensors and scalars only."""
    flat = {name: getattr(gemm, name) for name in FIELDS}
    scales = gemm.b_scales
    flat["b_scales"] = list(scales.state_dict().values()) if isinstance(scales, NVFP4CSFScales) else [scales]
    return tuple(flat.values())


def _from_flat(flat: tuple) -> Gemm:
    fields = dict(zip(FIELDS, flat))
    scales = fields["b_scales"]
    return Gemm(**{**fields, "b_scales": scales[0] if len(scales) == 1 else NVFP4CSFScales(*scales)})


@torch.library.custom_op(add_op_namespace_prefix("nvfp4_gemm"), mutates_args=())
def _nvfp4_gemm(
    a: torch.Tensor,
    a_scales: Optional[torch.Tensor],
    a_global: Optional[torch.Tensor],
    b: torch.Tensor,
    b_scales: List[torch.Tensor],
    b_global: torch.Tensor,
    expert_ids: Optional[torch.Tensor],
    expert_start: Optional[torch.Tensor],
    gather_idx: Optional[torch.Tensor],
    scatter_idx: Optional[torch.Tensor],
    gate: bool,
    alpha: float,
    limit: Optional[float],
    quantize_output: bool,
    output_global: Optional[torch.Tensor],
    output_dtype: torch.dtype,
    weight_only: bool,
) -> List[torch.Tensor]:
    return _run_on_device(_from_flat(tuple(locals().values())))


@torch.library.register_fake(add_op_namespace_prefix("nvfp4_gemm"))
def _nvfp4_gemm_fake(*flat) -> List[torch.Tensor]:
    gemm = _from_flat(flat)
    rows, cols = gemm.num_rows, gemm.num_cols
    if not gemm.quantize_output:
        return [gemm.a.new_empty(rows, cols, dtype=gemm.output_dtype)]
    packed = gemm.a.new_empty(rows, cols // 2, dtype=torch.uint8)
    return [packed, gemm.a.new_empty(rows, cols // GROUP, dtype=torch.float8_e4m3fn)]
