"""The GEMMs in torch, one expert at a time. They define what every device computes, and run without a GPU.

Weights and quantized activations become code * scale, which is exact in float32. Products are summed in float32, and
globals multiply the finished sums. Only one expert's weights are expanded at a time: N * K * 4 bytes.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ..csf.decode import decode_planes
from ..csf.scales import NVFP4CSFScales
from ..expert_start import rows_of_experts
from ..nvfp4.quantize import global_from_amax, quantize_groups
from ..nvfp4.reference import GROUP, e2m1_values, unpack_e2m1
from ..swizzle import unswizzle_mx_scales
from .problem import Gemm


@torch.no_grad()  # as on a GPU
@torch.autocast("cpu", enabled=False)  # kernels would not round products to bf16 either
def run_on_cpu(gemm: Gemm) -> list[torch.Tensor]:
    """[out [S, N]], or [packed [S, N/2], scales [S, N/16]] with `quantize_output`. Rows without an expert are 0."""
    out = torch.zeros(gemm.num_rows, gemm.num_cols, dtype=gemm.output_dtype, device="cpu")
    packed = torch.empty(gemm.num_rows, gemm.num_cols // 2, dtype=torch.uint8, device="cpu")
    scales = torch.empty(gemm.num_rows, gemm.num_cols // GROUP, dtype=torch.float8_e4m3fn, device="cpu")
    if gemm.quantize_output:
        packed[:], scales[:] = quantize_groups(out, ones(1))
    for expert, rows in routed_rows(gemm):
        if gemm.scatter_idx is None:
            targets = rows
        else:
            targets = gemm.scatter_idx[rows].long()
            exist = (targets >= 0) & (targets < gemm.num_rows)
            rows, targets = rows[exist], targets[exist]
        sources = rows if gemm.gather_idx is None else gemm.gather_idx[rows].long()
        result = expert_product(gemm, expert, sources).to(gemm.output_dtype)
        if gemm.output_global is not None:
            packed[targets], scales[targets] = quantize_groups(result, of_expert(gemm.output_global, expert))
        else:
            out[targets] = result
    return [packed, scales] if gemm.quantize_output else [out]


def routed_rows(gemm: Gemm) -> Iterator[tuple[int, torch.Tensor]]:
    """(expert, its routed rows) for every expert that has any. Rows whose gather index is outside `a` are dropped."""
    if gemm.expert_ids is not None:
        groups = ((e, (gemm.expert_ids == e).nonzero()[:, 0]) for e in gemm.expert_ids.unique().tolist())
    else:
        owned = [(0, range(gemm.num_rows))]
        if gemm.expert_start is not None:
            owned = rows_of_experts(gemm.expert_start, gemm.num_experts, gemm.num_rows)
        groups = ((e, torch.arange(rows.start, rows.stop, device="cpu")) for e, rows in owned)
    for expert, rows in groups:
        if gemm.gather_idx is not None:
            source = gemm.gather_idx[rows]
            rows = rows[(source >= 0) & (source < gemm.a.shape[0])]
        if len(rows) and 0 <= expert < gemm.num_experts:
            yield expert, rows


def expert_product(gemm: Gemm, expert: int, sources: torch.Tensor) -> torch.Tensor:
    """One expert's float32 [rows, N]: the scaled product, and with a gate its activation."""
    a, a_global = activations(gemm, expert, sources)
    product = a @ expand(gemm.b[expert], expert_scales(gemm, expert)).T
    halves = product.unflatten(-1, (gemm.b_global.shape[1], -1)) * gemm.b_global[expert].unsqueeze(-1)
    halves = halves * a_global.unsqueeze(-1)
    return gated(halves[:, 0], halves[:, 1], gemm.alpha, gemm.limit) if gemm.gate else halves[:, 0]


def gated(gate: torch.Tensor, up: torch.Tensor, alpha: float, limit: float | None) -> torch.Tensor:
    """silu(gate) * up with silu(x) = x * sigmoid(alpha * x). `limit` clamps gate from above, and up from both sides."""
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return gate * torch.sigmoid(alpha * gate) * up


def activations(gemm: Gemm, expert: int, sources: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows that an expert reads, float32 [rows, K], and the float32 global that multiplies their products."""
    a = gemm.a[sources]
    if gemm.weight_only:
        return a.float(), ones(1, 1)
    a_global = gemm.a_global
    if a_global is not None:
        a_global = a_global[sources] if a_global.ndim == 2 else of_expert(a_global, expert)
    if a_global is None:  # never for packed activations
        a_global = global_from_amax(a.abs().amax(-1, keepdim=True))
    packed, scales = (a, gemm.a_scales[sources]) if gemm.a_scales is not None else quantize_groups(a, a_global)
    return expand(packed, scales), a_global


def expert_scales(gemm: Gemm, expert: int) -> torch.Tensor:
    """One expert's scales as a dense plane [N, K/16]."""
    if isinstance(gemm.b_scales, NVFP4CSFScales):
        return decode_planes(gemm.b_scales, expert, expert + 1)[0]
    plane = gemm.b_scales[expert]
    if plane.ndim == 2:
        return plane
    return unswizzle_mx_scales(plane, num_rows=gemm.b.shape[1], num_cols=gemm.depth // GROUP)


def ones(*shape: int) -> torch.Tensor:
    """Float32 ones on the CPU, whatever torch's defaults are."""
    return torch.ones(shape, dtype=torch.float32, device="cpu")


def of_expert(scale: torch.Tensor, expert: int) -> torch.Tensor:
    """The expert's entry [1, 1] of a global that is per expert [E] or shared [1]."""
    return scale[expert if len(scale) > 1 else 0].reshape(1, 1)


def expand(packed: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """code * scale, exact in float32: [.., K] from packed [.., K/2] and scale bytes [.., K/16]."""
    values = e2m1_values().float()[unpack_e2m1(packed).int()]
    steps = scales.view(torch.float8_e4m3fn).float()
    return (values.unflatten(-1, (-1, GROUP)) * steps.unsqueeze(-1)).flatten(-2)
