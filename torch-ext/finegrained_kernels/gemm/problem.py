"""The one boundary of the GEMMs: checks every argument, and normalizes them into a `Gemm`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Optional, Union

import torch

from ..arguments import as_float32, kind_of, no_dense_tensor
from ..constants import constant
from ..csf.scales import NVFP4CSFScales
from ..expert_start import check_expert_start
from ..nvfp4.quantize import as_global
from ..nvfp4.reference import GROUP
from ..swizzle import swizzled_shape

FLOAT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
INDEX_DTYPES = (torch.int32, torch.int64)
Scales = Union[torch.Tensor, NVFP4CSFScales]
Global = Union[torch.Tensor, float, None]


class Arguments(NamedTuple):
    """A public GEMM's arguments by name, as the caller passed them (api.py). B and its scales are for a stack of
    experts, [E, ..]."""

    A: torch.Tensor
    B: torch.Tensor
    As: Optional[torch.Tensor] = None
    Bs: Optional[Scales] = None
    activation_format: Optional[str] = None
    gate: bool = False
    act_fn: str = "silu"
    swiglu_alpha: Optional[float] = None
    swiglu_limit: Optional[float] = None
    quantize_output: bool = False
    output_dtype: Optional[torch.dtype] = None
    a_global_scale: Global = None
    b_global_scale: Global = None
    output_global_scale: Global = None
    expert_ids: Optional[torch.Tensor] = None
    expert_start: Optional[torch.Tensor] = None
    gather_idx: Optional[torch.Tensor] = None
    scatter_idx: Optional[torch.Tensor] = None


@dataclass(frozen=True)
class Gemm:
    """Validated arguments. E experts, N output columns, K inputs, M rows of `a`, S routed rows.

    With `gate`, there are 2N weight rows, [gate; up], and `b_global` has two columns. At most one of `expert_ids` and
    `expert_start` is set. If neither is, there is one expert, which owns every row.
    """

    a: torch.Tensor  # bf16/fp16/fp32 [M, K], or packed uint8 [M, K/2] with a_scales
    a_scales: Optional[torch.Tensor]  # float8_e4m3fn [M, K/16]
    a_global: Optional[torch.Tensor]  # float32 [1], one per expert [E], or one per row [M, 1]
    b: torch.Tensor  # packed uint8 [E, N or 2N, K/2]
    b_scales: Scales  # float8_e4m3fn [E, N or 2N, K/16], or swizzled, or compressed
    b_global: torch.Tensor  # float32 [E, 1], or [E, 2] for gate and up
    expert_ids: Optional[torch.Tensor]  # int [S]
    expert_start: Optional[torch.Tensor]  # int32 [>= E + 1]
    gather_idx: Optional[torch.Tensor]  # int [S]: the row of `a` that routed row s reads
    scatter_idx: Optional[torch.Tensor]  # int [S]: the row of the output that routed row s writes
    gate: bool
    alpha: float
    limit: Optional[float]
    quantize_output: bool
    output_global: Optional[torch.Tensor]  # float32 [1] or [E]
    output_dtype: torch.dtype
    weight_only: bool

    @property
    def num_experts(self) -> int:
        return self.b.shape[0]

    @property
    def num_rows(self) -> int:
        """S, the number of rows of the output."""
        index = self.expert_ids if self.expert_ids is not None else self.gather_idx
        return self.a.shape[0] if index is None else index.shape[0]

    @property
    def num_cols(self) -> int:
        """N, the number of columns of the output."""
        return self.b.shape[1] // (2 if self.gate else 1)

    @property
    def depth(self) -> int:
        """K."""
        return self.b.shape[2] * 2


def fault(name: str, expected: str, got: object) -> ValueError:
    """The error to raise. It is made only if a check fails, because its text takes more time than all checks of a
    call."""
    return ValueError(f"{name}: expected {expected}, got {got}")


def check_weights(B: torch.Tensor, Bs: Scales | None, gate: bool) -> Scales:
    """`Bs`, if B is packed weights [E, N, K/2], and Bs their scales: dense [E, N, K/16], swizzled or compressed."""
    if not isinstance(B, torch.Tensor) or B.dtype not in (torch.uint8, torch.int8):
        raise TypeError(f"B: expected packed uint8 or int8, got {kind_of(B)}")
    shape = tuple(B.shape)
    if len(shape) != 3:
        raise fault("B", "shape (E, N, K/2)", shape)
    num_experts, rows, depth = shape[0], shape[1], shape[2] * 2
    if num_experts == 0:
        raise fault("B", "one expert or more", shape)
    multiple = 32 if gate else 16
    if rows % multiple:
        raise fault("B", f"N rows a multiple of {multiple}", f"shape {shape}")
    if depth % 32 or depth == 0:
        raise fault("B", "K a positive multiple of 32", f"K = {depth}")
    dense = (num_experts, rows, depth // GROUP)
    if isinstance(Bs, NVFP4CSFScales):
        if Bs.shape != dense:
            raise fault("Bs", f"compressed scales of shape {dense}", Bs.shape)
        return Bs
    if not isinstance(Bs, torch.Tensor):
        raise TypeError(f"Bs: expected a tensor of scale bytes or NVFP4CSFScales, got {kind_of(Bs)}")
    if Bs.dtype not in (torch.float8_e4m3fn, torch.uint8):
        raise TypeError(f"Bs: expected float8_e4m3fn or its uint8 bytes, got {Bs.dtype}")
    if tuple(Bs.shape) != dense:
        swizzled = (num_experts, *swizzled_shape(rows, depth // GROUP))
        if tuple(Bs.shape) != swizzled:
            raise fault("Bs", f"shape {dense} or swizzled {swizzled}", tuple(Bs.shape))
    return Bs


def check_activations(A: torch.Tensor, As: torch.Tensor | None, depth: int, weight_only: bool) -> None:
    if not isinstance(A, torch.Tensor):
        raise TypeError(f"A: expected a tensor, got {kind_of(A)}")
    if got := no_dense_tensor(A):
        raise fault("A", "a tensor on a CPU or GPU", got)
    if A.ndim != 2:
        raise fault("A", "shape (M, K)", tuple(A.shape))
    if As is None:
        allowed = FLOAT_DTYPES[:2] if weight_only else FLOAT_DTYPES
        if A.dtype not in allowed:
            hint = " (packed activations need As)" if A.dtype in (torch.uint8, torch.int8) else ""
            raise TypeError(f"A: expected one of {', '.join(map(str, allowed))}, got {A.dtype}{hint}")
        if A.shape[1] != depth:
            raise fault("A", f"K = {depth} columns, as B has", f"shape {tuple(A.shape)}")
        return
    if weight_only:
        raise fault("As", "None with activation_format='bf16'", "a tensor")
    if A.dtype not in (torch.uint8, torch.int8):
        raise TypeError(f"A: expected packed uint8 or int8 beside As, got {A.dtype}")
    if not isinstance(As, torch.Tensor) or As.dtype not in (torch.float8_e4m3fn, torch.uint8):
        raise TypeError(f"As: expected float8_e4m3fn or its uint8 bytes, got {kind_of(As)}")
    if A.shape[1] != depth // 2:
        raise fault("A", f"K/2 = {depth // 2} columns", f"shape {tuple(A.shape)}")
    shape = (A.shape[0], depth // GROUP)
    if tuple(As.shape) != shape:
        raise fault("As", f"shape {shape}", tuple(As.shape))


def _filled(value: float, *, device: torch.device) -> torch.Tensor:
    return torch.full((), value, dtype=torch.float32, device=device)  # a fill, which may be captured in a graph


def normalize_global(
    name: str, scale: torch.Tensor | float | None, device: torch.device, shapes: tuple[tuple[int, ...], ...]
) -> torch.Tensor:
    """`scale` as float32 of shape [1] or one of `shapes`; None is 1."""
    if isinstance(scale, torch.Tensor):
        scale = as_global(name, scale, device)
    else:
        scale = constant(_filled, 1.0 if scale is None else as_float32(name, scale), device=device)
    if scale.numel() == 1:
        return scale.reshape(1)
    if tuple(scale.shape) not in shapes:
        raise fault(name, f"a scalar or a shape of {list(shapes)}", tuple(scale.shape))
    return scale.contiguous()


def check_index(name: str, index: torch.Tensor | None, device: torch.device, length: int | None = None) -> None:
    if index is None:
        return
    if not isinstance(index, torch.Tensor) or index.dtype not in INDEX_DTYPES:
        raise TypeError(f"{name}: expected int32 or int64, got {kind_of(index)}")
    if index.ndim != 1:
        raise fault(name, "one dimension", tuple(index.shape))
    if index.device != device:
        raise fault(name, f"device {device}", index.device)
    if length is not None and index.shape[0] != length:
        raise fault(name, f"{length} entries, one for each routed row", index.shape[0])


def contiguous(index: torch.Tensor | None) -> torch.Tensor | None:
    return None if index is None else index.contiguous()


def check_gemm(call: Arguments) -> Gemm:
    """Check every argument of the public GEMMs; raise TypeError or ValueError naming the first that is wrong."""
    if call.activation_format not in (None, "bf16"):
        raise fault("activation_format", "None or 'bf16'", repr(call.activation_format))
    if call.act_fn != "silu":
        raise fault("act_fn", "'silu'", repr(call.act_fn))
    if not call.gate and (call.swiglu_alpha is not None or call.swiglu_limit is not None):
        raise fault("swiglu_alpha and swiglu_limit", "None without gate", "a value")
    weight_only = call.activation_format == "bf16"
    scales = check_weights(call.B, call.Bs, call.gate)
    num_experts, depth = call.B.shape[0], call.B.shape[2] * 2
    check_activations(call.A, call.As, depth, weight_only)
    device = call.A.device
    for name, tensor in (("B", call.B), ("Bs", scales), ("As", call.As)):
        if tensor is not None and tensor.device != device:
            raise fault(name, f"device {device}, as A has", tensor.device)

    check_index("gather_idx", call.gather_idx, device)
    rows = (call.A if call.gather_idx is None else call.gather_idx).shape[0]
    check_index("expert_ids", call.expert_ids, device, rows)
    check_index("scatter_idx", call.scatter_idx, device, rows)
    expert_start = call.expert_start
    if expert_start is not None:
        if isinstance(expert_start, torch.Tensor):
            expert_start = expert_start.contiguous()
        check_expert_start(expert_start, num_experts, device)

    if weight_only and call.a_global_scale is not None:
        raise fault("a_global_scale", "None with activation_format='bf16'", "a value")
    a_global = None
    if call.a_global_scale is not None or call.As is not None:
        a_shapes = ((num_experts,), (call.A.shape[0], 1))
        a_global = normalize_global("a_global_scale", call.a_global_scale, device, a_shapes)
    if not call.quantize_output and call.output_global_scale is not None:
        raise fault("output_global_scale", "None without quantize_output", "a value")
    b_columns = 2 if call.gate else 1
    b_shapes = ((num_experts,), (num_experts, b_columns))
    b_global = normalize_global("b_global_scale", call.b_global_scale, device, b_shapes)
    output_dtype = call.output_dtype or (call.A.dtype if call.As is None else torch.bfloat16)
    if output_dtype not in FLOAT_DTYPES:
        raise TypeError(f"output_dtype: expected one of {', '.join(map(str, FLOAT_DTYPES))}, got {output_dtype}")
    output_global = None
    if call.quantize_output:
        output_global = normalize_global("output_global_scale", call.output_global_scale, device, ((num_experts,),))
    return Gemm(
        a=call.A,
        a_scales=call.As,
        a_global=a_global,
        b=call.B,
        b_scales=scales,
        b_global=b_global.reshape(len(b_global), -1).expand(num_experts, b_columns),
        expert_ids=contiguous(call.expert_ids),
        expert_start=expert_start,
        gather_idx=contiguous(call.gather_idx),
        scatter_idx=contiguous(call.scatter_idx),
        gate=call.gate,
        alpha=1.0 if call.swiglu_alpha is None else as_float32("swiglu_alpha", call.swiglu_alpha),
        limit=None if call.swiglu_limit is None else as_float32("swiglu_limit", call.swiglu_limit),
        quantize_output=call.quantize_output,
        output_global=output_global,
        output_dtype=output_dtype,
        weight_only=weight_only,
    )
