"""The public GEMMs on NVFP4 weights: check, then run on the tensors' device. `matmul_grouped` documents the arguments
that they share."""

from __future__ import annotations

import inspect
import typing
from typing import Any, Callable, List, Optional, Tuple, Union

import torch

from .._ops import add_op_namespace_prefix, ops
from ..csf.scales import NVFP4CSFScales
from ..nvfp4.reference import GROUP
from ..plans import planned
from .cpu import run_on_cpu
from .kernels import operands
from .problem import Arguments, Gemm, Global, Scales, check_gemm

Result = Union[torch.Tensor, Tuple[torch.Tensor, torch.Tensor]]


def matmul_2d(
    A: torch.Tensor, B: torch.Tensor, As: torch.Tensor | None = None, Bs: Scales | None = None, *,
    activation_format: str | None = None, gate: bool = False, act_fn: str = "silu",
    swiglu_alpha: float | None = None, swiglu_limit: float | None = None, quantize_output: bool = False,
    output_dtype: torch.dtype | None = None, a_global_scale: Global = None, b_global_scale: Global = None,
    output_global_scale: Global = None,
) -> Result:  # fmt: skip
    """One weight: A [M, K] times B [N, K/2] with Bs [N, K/16], or one plane compressed -> [M, N].

    `b_global_scale` is a scalar, or [2] with `gate`. Everything else is as in `matmul_grouped`.
    """
    return planned(_matmul_2d, (
        A, B, As, Bs, activation_format, gate, act_fn, swiglu_alpha, swiglu_limit,
        quantize_output, output_dtype, a_global_scale, b_global_scale, output_global_scale,
    ))  # fmt: skip


def matmul_2d_scratch_size(B: torch.Tensor, num_tokens: int) -> int:
    """Bytes of scratch that a `matmul_2d` of `num_tokens` rows with B [N, K/2] uses for the weights that it unpacks at
    a time, with many tokens on Hopper; 0 if it unpacks none. Torch allocates it for the call, so layers share it."""
    if B.device.type != "cuda":
        return 0
    from .ahead import scratch_size, unpacks_ahead  # Triton may be absent where only the CPU is used

    rows, depth = B.shape[0], 2 * B.shape[1]
    return scratch_size(rows, depth) if unpacks_ahead(B.device, rows, depth, num_tokens) else 0


def matmul_batched(
    A: torch.Tensor, B: torch.Tensor, As: torch.Tensor | None = None, Bs: Scales | None = None, *,
    expert_ids: torch.Tensor, gather_idx: torch.Tensor | None = None, scatter_idx: torch.Tensor | None = None,
    activation_format: str | None = None, gate: bool = False, act_fn: str = "silu",
    swiglu_alpha: float | None = None, swiglu_limit: float | None = None, quantize_output: bool = False,
    output_dtype: torch.dtype | None = None, a_global_scale: Global = None, b_global_scale: Global = None,
    output_global_scale: Global = None,
) -> Result:  # fmt: skip
    """An expert id for each routed row, int [S], in any order: B [E, N, K/2] -> [S, N]. For few rows, as in decoding.

    Rows whose id is negative or at least E (expert-parallel sentinels) read no weight and are 0. Everything else is as
    in `matmul_grouped`.
    """
    return planned(_matmul_batched, (
        expert_ids, gather_idx, scatter_idx,
        A, B, As, Bs, activation_format, gate, act_fn, swiglu_alpha, swiglu_limit,
        quantize_output, output_dtype, a_global_scale, b_global_scale, output_global_scale,
    ))  # fmt: skip


def matmul_grouped(
    A: torch.Tensor, B: torch.Tensor, As: torch.Tensor | None = None, Bs: Scales | None = None, *,
    expert_start: torch.Tensor, gather_idx: torch.Tensor | None = None, scatter_idx: torch.Tensor | None = None,
    activation_format: str | None = None, gate: bool = False, act_fn: str = "silu",
    swiglu_alpha: float | None = None, swiglu_limit: float | None = None, quantize_output: bool = False,
    output_dtype: torch.dtype | None = None, a_global_scale: Global = None, b_global_scale: Global = None,
    output_global_scale: Global = None,
) -> Result:  # fmt: skip
    """Routed rows sorted by expert: `A[gather_idx] @ B[e].T` for the rows of each expert e, summed in float32.

    Args:
        A: bf16 or fp16 `[M, K]`, or fp32 if it is quantized; or packed NVFP4, uint8 `[M, K/2]`, with `As`.
        B: packed uint8 or int8 `[E, N, K/2]`, or `[E, 2N, K/2]` with `gate`. K is a multiple of 32, and the number of
            rows a multiple of 16, or of 32 with `gate`.
        As: the scales of packed A, float8_e4m3fn or its bytes `[M, K/16]`.
        Bs: the scales of B, `[E, N, K/16]` or swizzled (swizzle.py); or `NVFP4CSFScales`, which the kernel decodes as
            it runs, with no dense copy and the same bits in the result.
        expert_start: int32, E + 1 entries or more, read on the device; expert e owns routed rows
            `[expert_start[e], expert_start[e + 1])`. Rows from `expert_start[E]` on belong to no expert and are 0. The
            first entry is 0 and entries do not decrease; otherwise rows that no expert or several experts own are
            undefined.
        gather_idx: int `[S]`: routed row s reads row `gather_idx[s]` of A. If there is no such row, the result row is
            0.
        scatter_idx: int `[S]`, a permutation: routed row s is written to row `scatter_idx[s]`, or nowhere if there is
            no such row. Result rows to which nothing is written are undefined.
        activation_format: None for W4A4 (activations are quantized to NVFP4 first), "bf16" for W4A16 (they are used as
            they are).
        gate: B has rows `[gate; up]`; the result is `silu(gate) * up`, with `silu(x) = x * sigmoid(alpha * x)`.
        act_fn: "silu".
        swiglu_alpha: alpha, 1 by default.
        swiglu_limit: clamps gate from above, and up from both sides.
        quantize_output: return the result in NVFP4, exactly as if it were rounded to `output_dtype` and then quantized.
        output_dtype: dtype of the result; by default that of A, or bf16 for packed A.
        a_global_scale: float32 multiplier of the activations: a scalar, one for each expert `[E]`, or one for each row
            `[M, 1]`. None: computed for each row, or 1 for packed A.
        b_global_scale: float32 multiplier of the weights: a scalar, `[E]`, or `[E, 2]` if gate and up differ.
        output_global_scale: multiplier of a quantized result, a scalar or `[E]`; 1 by default.

    Returns:
        `[S, N]`; with `quantize_output`, packed uint8 `[S, N/2]` and float8_e4m3fn `[S, N/16]`. Without indices, S is
        M.

    Raises:
        ValueError, TypeError: naming the argument.
    """
    return planned(_matmul_grouped, (
        expert_start, gather_idx, scatter_idx,
        A, B, As, Bs, activation_format, gate, act_fn, swiglu_alpha, swiglu_limit,
        quantize_output, output_dtype, a_global_scale, b_global_scale, output_global_scale,
    ))  # fmt: skip


def _matmul_2d(A: Any, B: Any, As: Any, Bs: Any, *options: Any) -> Result:
    B, Bs = (each.unsqueeze(0) if isinstance(each, torch.Tensor) else each for each in (B, Bs))
    call = Arguments(A, B, As, Bs, *options)
    if isinstance(call.b_global_scale, torch.Tensor):
        call = call._replace(b_global_scale=call.b_global_scale.reshape(1, -1))
    return _run(check_gemm(call))


def _matmul_batched(expert_ids: Any, gather_idx: Any, scatter_idx: Any, *given: Any) -> Result:
    if expert_ids is None:
        raise TypeError("expert_ids: expected a tensor, got None")
    indices = {"expert_ids": expert_ids, "gather_idx": gather_idx, "scatter_idx": scatter_idx}
    return _run(check_gemm(Arguments(*given, **indices)))


def _matmul_grouped(expert_start: Any, gather_idx: Any, scatter_idx: Any, *given: Any) -> Result:
    if expert_start is None:
        raise TypeError("expert_start: expected a tensor, got None")
    indices = {"expert_start": expert_start, "gather_idx": gather_idx, "scatter_idx": scatter_idx}
    return _run(check_gemm(Arguments(*given, **indices)))


def _run(gemm: Gemm) -> Result:
    outputs = ops.nvfp4_gemm(*_to_flat(gemm)) if torch.compiler.is_compiling() else _run_on_device(gemm)
    return tuple(outputs) if gemm.quantize_output else outputs[0]


def _run_on_device(gemm: Gemm) -> List[torch.Tensor]:
    if gemm.a.device.type == "cpu":
        return run_on_cpu(gemm)
    from .dispatch import run_on_gpu  # Triton may be absent where only the CPU is used

    return run_on_gpu(gemm)


_SCALES = operands.Scales._fields
_GEMM_FIELDS = {name: kind for name, kind in typing.get_type_hints(Gemm).items() if name != "b_scales"}
_FLAT_FIELDS = {**_GEMM_FIELDS, **dict.fromkeys(_SCALES, Optional[torch.Tensor])}
"""Names and types of the registered op's arguments, which are tensors and scalars only: the fields of a `Gemm`, with
its scales as single tensors."""


def _to_flat(gemm: Gemm) -> tuple:
    scales = gemm.b_scales
    tensors = scales.state_dict() if isinstance(scales, NVFP4CSFScales) else {"dense": scales}
    fields = [getattr(gemm, name) for name in _GEMM_FIELDS]
    return (*fields, *[tensors.get(name) for name in _SCALES])


def _from_flat(flat: tuple) -> Gemm:
    fields = dict(zip(_FLAT_FIELDS, flat))
    tensors = {name: fields.pop(name) for name in _SCALES}
    dense = tensors.pop("dense")
    return Gemm(**fields, b_scales=NVFP4CSFScales(**tensors) if dense is None else dense)


def _with_parameters(function: Callable[..., List[torch.Tensor]]) -> Callable[..., List[torch.Tensor]]:
    """`function(*flat)` with a signature that names every argument; torch makes the op's schema from it."""
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    parameters = [inspect.Parameter(name, kind, annotation=hint) for name, hint in _FLAT_FIELDS.items()]
    signature = inspect.Signature(parameters, return_annotation=List[torch.Tensor])
    function.__signature__ = signature  # type: ignore[attr-defined]
    return function


@torch.library.custom_op(add_op_namespace_prefix("nvfp4_gemm"), mutates_args=())
@_with_parameters
def _nvfp4_gemm(*flat: Any) -> List[torch.Tensor]:
    return _run_on_device(_from_flat(flat))


@torch.library.register_fake(add_op_namespace_prefix("nvfp4_gemm"))
def _nvfp4_gemm_fake(*flat: Any) -> List[torch.Tensor]:
    gemm = _from_flat(flat)
    rows, cols = gemm.num_rows, gemm.num_cols
    if not gemm.quantize_output:
        return [gemm.a.new_empty(rows, cols, dtype=gemm.output_dtype)]
    packed = gemm.a.new_empty(rows, cols // 2, dtype=torch.uint8)
    return [packed, gemm.a.new_empty(rows, cols // GROUP, dtype=torch.float8_e4m3fn)]
