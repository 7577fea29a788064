"""The MoE layer on prepared experts: routing, gated up projection, down projection, weighted sum.

There are two strategies for reading scales that are kept compressed:

    "staged"  they are decoded into the experts' scratch before the GEMMs read them: either by the call itself, which
              decodes only those of experts that have rows, or ahead of the call by `expand_scales`, which decodes all
              of them on the current stream. Layers, threads and streams may share a scratch (scratch.py).
    "fused"   the GEMMs read them compressed. No scratch is needed.

Dense scales and both strategies use the same GEMMs and the same order of sums, so outputs have the same bits.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Sequence
from typing import Any

import torch

from ..arguments import kind_of, no_dense_tensor
from ..constants import constant
from ..gemm.api import matmul_batched, matmul_grouped
from ..gemm.capability import reads_compressed_on
from ..nvfp4.reference import GROUP
from ..plans import planned
from ..recording import forgo_plan
from .experts import NVFP4Experts, Scales
from .reduction import weighted_reduce
from .routing import INDEX_DTYPES, compute_grouped_scheduling
from .scratch import decode_scales, decoded_scales, turn

STRATEGIES = ("staged", "fused")

FUSED_MAX_TOKENS = 32768
"""The most tokens for which GEMMs read compressed scales by default (`choose_strategy`). It is the largest number that
was measured, and even there staging was 1 % slower."""

BATCHED_MAX_ROWS = 32
"""The most routed rows, tokens x top-k, of a call that gives every row tiles of its own (`is_batched`)."""


def choose_strategy(num_tokens: int, is_read_by_kernels: bool) -> str:
    """The strategy of a call that names none: fused if its GEMMs can read compressed scales.

    Calls with more tokens than were measured are staged: they read every scale many times, and decoding once is less
    work.
    """
    return "fused" if is_read_by_kernels and num_tokens <= FUSED_MAX_TOKENS else "staged"


def is_batched(num_rows: int) -> bool:
    """Whether each row of a call gets tiles of its own, unsorted, instead of being grouped with others of its expert.

    This depends on the number of rows alone, because dense, staged and fused calls must run the same GEMMs.
    """
    return num_rows <= BATCHED_MAX_ROWS


def uses_expanded_scales(
    experts: NVFP4Experts, num_tokens: int, strategy: str | None = None, activation_format: str | None = None
) -> bool:
    """Whether `moe_forward` with this `strategy` and `activation_format`, on `num_tokens` tokens, would read what
    `expand_scales` wrote.

    Raises:
        ValueError: a strategy that does not exist.
    """
    staged = strategy_of(experts, num_tokens, strategy, activation_format) == "staged"
    return staged and num_tokens > 0 and experts.scratch is not None


def strategy_of(
    experts: NVFP4Experts, num_tokens: int, strategy: str | None, activation_format: str | None
) -> str | None:
    """The strategy that a call uses; None if no scales are compressed."""
    if strategy not in (None, *STRATEGIES):
        raise ValueError(f"strategy must be None or one of {', '.join(map(repr, STRATEGIES))}, got {strategy!r}")
    compressed = experts._compressed()
    if not compressed:
        return None
    weight_only = activation_format == "bf16"
    is_read = all(reads_compressed_on(scales.device, scales.num_cols * GROUP, weight_only) for scales in compressed)
    return strategy or choose_strategy(num_tokens, is_read)


def _turn(experts: NVFP4Experts, *, staged: bool) -> contextlib.AbstractContextManager:
    """A turn with the scratch, for calls that use it. Compiled code can use neither locks nor events, so it decodes
    into memory of its own."""
    return turn(experts) if staged and not torch.compiler.is_compiling() else contextlib.nullcontext()


def expand_scales(experts: NVFP4Experts) -> bool:
    """Decode all compressed scales into the experts' scratch, on the current stream, for `scales_expanded=True`.

    Run it after the previous use of the scratch and before the call that it is for. No other thread may use the scratch
    in between; `ScalePrefetcher` ensures that, and orders streams. If the scales are dense, does nothing and returns
    False.

    Raises:
        ValueError: scales are compressed, and there is no scratch.
    """
    if not experts.scratch_size:
        return False
    if experts.scratch is None:
        raise ValueError(f"experts.scratch must be a uint8 tensor of {experts.scratch_size} bytes, got None")
    with _turn(experts, staged=True):
        decode_scales(experts, experts.scratch)
    return True


def moe_forward(
    experts: NVFP4Experts,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
    *,
    activation_format: str | None = None,
    swiglu_alpha: float | None = None,
    swiglu_limit: float | None = None,
    strategy: str | None = None,
    scales_expanded: bool = False,
) -> torch.Tensor:
    """`sum over k of weight * down(silu(gate(x)) * up(x))` for each token, over its experts. Inference only: the result
    carries no gradient.

    Args:
        experts: the layer's weights.
        hidden_states: bf16 or fp16 `[M, H]`.
        top_k_index: int32 or int64 `[M, top_k]`. An id outside `0..E - 1`, as used by expert parallelism, adds nothing.
        top_k_weights: floating point `[M, top_k]`.
        activation_format: None for W4A4, "bf16" for W4A16.
        swiglu_alpha, swiglu_limit: as in `matmul_grouped`.
        strategy: how compressed scales are read, "staged" or "fused". None: fused up to 32,768 tokens, if the GPU's
            kernels can read them (docs/kernels.md). It is ignored for dense scales, so that layers of both kinds can be
            called alike.
        scales_expanded: the scratch already holds these experts' scales, decoded by `expand_scales`, so that a staged
            call does not decode them. Other calls ignore it; `uses_expanded_scales` tells which those are.

    Returns:
        `[M, H]` in the dtype of `hidden_states`.

    Raises:
        ValueError, TypeError: naming the argument.
    """
    arguments = (
        experts, hidden_states, top_k_index, top_k_weights,
        activation_format, swiglu_alpha, swiglu_limit, strategy, scales_expanded,
    )  # fmt: skip
    if torch.compiler.is_compiling():
        return _forward(*arguments)
    return planned(_forward, arguments, (*arguments[1:], *_read_when_not_staged(experts)))


_read_when_not_staged = operator.attrgetter(
    *("gate_up", "gate_up_scales", "gate_up_global", "gate_up_input_global"),
    *("down", "down_scales", "down_global", "down_input_global"),
)


def _forward(
    experts: NVFP4Experts,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
    activation_format: str | None,
    swiglu_alpha: float | None,
    swiglu_limit: float | None,
    strategy: str | None,
    scales_expanded: bool,
) -> torch.Tensor:
    _check_call(experts, hidden_states, top_k_index, top_k_weights, activation_format)
    num_tokens, top_k = top_k_index.shape
    strategy = strategy_of(experts, num_tokens, strategy, activation_format)
    staged = strategy == "staged"
    if scales_expanded and staged and experts.scratch is None:
        raise ValueError("scales_expanded needs experts.scratch, got None")
    if not num_tokens:
        return torch.empty_like(hidden_states)
    if staged:
        forgo_plan()  # it takes turns with other calls
    expand = staged and not scales_expanded
    batched = is_batched(top_k_index.numel())
    expert_start = gather_idx = scatter_idx = None
    if expand or not batched:
        expert_start, gather_idx, scatter_idx = compute_grouped_scheduling(top_k_index, experts.num_experts, top_k)
    matmul: Any = matmul_batched if batched else matmul_grouped  # they differ only in the routing
    routing: dict[str, torch.Tensor | None]
    if batched:
        # One row for each choice, in the order of the output. Which token a row reads depends on the shape alone.
        gather_idx = constant(_token_of_choice, num_tokens, top_k, device=hidden_states.device)
        routing, scatter = {"expert_ids": top_k_index.reshape(-1)}, {}
    else:
        routing, scatter = {"expert_start": expert_start}, {"scatter_idx": scatter_idx}
    with _turn(experts, staged=staged) as memory:
        scales: Sequence[Scales] = (experts.gate_up_scales, experts.down_scales)
        if expand:
            max_active = min(experts.num_experts, top_k_index.numel())
            scales = decode_scales(experts, memory, expert_start, max_active)
        elif staged and experts.scratch is not None:
            scales = decoded_scales(experts, experts.scratch)
        quantize = activation_format is None and experts.down_input_global is not None
        inner = matmul(
            hidden_states, experts.gate_up, None, scales[0], **routing, gather_idx=gather_idx,
            activation_format=activation_format, gate=True, swiglu_alpha=swiglu_alpha, swiglu_limit=swiglu_limit,
            quantize_output=quantize, output_global_scale=experts.down_input_global if quantize else None,
            a_global_scale=None if activation_format else experts.gate_up_input_global,
            b_global_scale=experts.gate_up_global,
        )  # fmt: skip
        inner, inner_scales = inner if quantize else (inner, None)
        rows = matmul(
            inner, experts.down, inner_scales, scales[1], **routing, **scatter,
            activation_format=activation_format, output_dtype=hidden_states.dtype,
            a_global_scale=experts.down_input_global if quantize else None, b_global_scale=experts.down_global,
        )  # fmt: skip
    return weighted_reduce(rows, top_k_index, top_k_weights, experts.num_experts)


def _token_of_choice(num_tokens: int, top_k: int, *, device: torch.device) -> torch.Tensor:
    tokens = torch.arange(num_tokens, dtype=torch.int32, device=device)
    return tokens.unsqueeze(1).repeat(1, top_k).view(-1)


def _check_call(
    experts: NVFP4Experts,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
    activation_format: str | None,
) -> None:
    """Check everything that the kernels would reject, before the first of them runs."""
    if other := no_dense_tensor(experts.gate_up):
        raise ValueError(f"experts must be on a CPU or GPU, got {other}")
    device = experts.gate_up.device
    named = {"hidden_states": hidden_states, "top_k_index": top_k_index, "top_k_weights": top_k_weights}
    for name, tensor in named.items():
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name} must be a tensor, got {kind_of(tensor)}")
    if hidden_states.dim() != 2 or hidden_states.shape[1] != experts.hidden_size:
        raise ValueError(f"hidden_states must be [M, {experts.hidden_size}], got shape {tuple(hidden_states.shape)}")
    num_tokens = hidden_states.shape[0]
    if top_k_index.dim() != 2 or top_k_index.shape[0] != num_tokens or top_k_index.shape[1] < 1:
        raise ValueError(f"top_k_index must be [{num_tokens}, top_k], got shape {tuple(top_k_index.shape)}")
    if top_k_weights.shape != top_k_index.shape:
        expected, got = tuple(top_k_index.shape), tuple(top_k_weights.shape)
        raise ValueError(f"top_k_weights must have shape {expected}, as top_k_index has, got {got}")
    if hidden_states.dtype not in (torch.bfloat16, torch.float16):
        raise TypeError(f"hidden_states must be torch.bfloat16 or torch.float16, got {hidden_states.dtype}")
    if top_k_index.dtype not in INDEX_DTYPES:
        raise TypeError(f"top_k_index must be torch.int32 or torch.int64, got {top_k_index.dtype}")
    if not top_k_weights.is_floating_point():
        raise TypeError(f"top_k_weights must be floating point, got {top_k_weights.dtype}")
    for name, tensor in named.items():
        if tensor.device != device:
            raise ValueError(f"{name} must be on {device} like the experts, got {tensor.device}")
    if activation_format not in (None, "bf16"):
        raise ValueError(f"activation_format must be None or 'bf16', got {activation_format!r}")
