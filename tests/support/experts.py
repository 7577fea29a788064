"""Random experts, calls for them, and the MoE layer's result in float64, written from the definition of NVFP4."""

from __future__ import annotations

import dataclasses
from types import ModuleType

import torch

NUM_EXPERTS, HIDDEN, INTERMEDIATE = 7, 256, 192
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.float64)
MIDPOINTS = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
# A code begins just above the midpoint below it or, if it is even, at the midpoint, which is the float32 after the one
# below.
MIDPOINTS[1::2] = torch.nextafter(MIDPOINTS[1::2], torch.tensor(0.0))


@dataclasses.dataclass(frozen=True)
class Shape:
    num_experts: int = NUM_EXPERTS
    hidden: int = HIDDEN
    intermediate: int = INTERMEDIATE


def dequantize(packed: torch.Tensor, scales: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """float64 `[.., N, K]`; `factor` broadcasts over `[.., N]`."""
    codes = torch.stack([packed & 15, packed >> 4], dim=-1).flatten(-2)
    table = E2M1.to(packed.device)
    return table[codes.long()] * scales.double().repeat_interleave(16, -1) * factor.double()[..., None]


def round_trip(values: torch.Tensor, factor: torch.Tensor | None) -> torch.Tensor:
    """float64 rows `[S, K]` quantized to NVFP4 and back, with the scalar `factor`, or each row's own if it is None.

    It is done in float32, one operation at a time, like the law, because ties are not rare in bf16 rows.
    """
    values = values.float()
    six, limit = (torch.tensor(number, device=values.device) for number in (6.0, 2688.0))
    if factor is None:
        factor = values.abs().amax(-1, keepdim=True) / limit
        factor = torch.where(factor == 0, 1.0, factor)
    groups = values.unflatten(-1, (-1, 16))
    ratio = groups.abs().amax(-1) / (six * factor)
    step = ratio.clamp(2**-9, 448).to(torch.float8_e4m3fn).float()
    code = torch.bucketize((groups.abs() / (step * factor)[..., None]).contiguous(), MIDPOINTS.to(values.device))
    exact = E2M1.to(values.device)[code] * groups.sign() * step[..., None]
    return exact.flatten(-2) * factor.double()


def make_experts(bundle: ModuleType, device: str, seed: int = 0, shape: Shape = Shape(), **replaced):
    """Random experts whose gate and up have different global scales."""
    generator = torch.Generator(device).manual_seed(seed)

    def quantized(rows: int, cols: int):
        packed, scales, factors = [], [], []
        for _ in range(shape.num_experts):  # one at a time, because real stacks in float32 would not fit
            weight = torch.randn(rows, cols, generator=generator, device=device) * 0.05
            weight *= torch.rand(rows, 1, generator=generator, device=device) + 0.5
            for results, result in zip((packed, scales, factors), bundle.nvfp4_quantize_two_level(weight), strict=True):
                results.append(result)
        return torch.stack(packed), torch.stack([s.view(torch.uint8) for s in scales]), torch.stack(factors)

    gate, gate_scales, gate_global = quantized(shape.intermediate, shape.hidden)
    up, up_scales, up_global = quantized(shape.intermediate, shape.hidden)
    down, down_scales, down_global = quantized(shape.hidden, shape.intermediate)
    fields = {
        "gate_up": torch.cat([gate, up], 1),
        "down": down,
        "gate_up_scales": torch.cat([gate_scales, up_scales], 1).view(torch.float8_e4m3fn),
        "down_scales": down_scales.view(torch.float8_e4m3fn),
        "gate_up_global": torch.stack([gate_global, 1.75 * up_global], 1),
        "down_global": down_global,
    }
    return bundle.NVFP4Experts(**fields | replaced)


def compressed(bundle: ModuleType, experts, **replaced):
    """The same experts with both scales compressed and a scratch, poisoned with NaN."""
    fields = {}
    for name in ("gate_up_scales", "down_scales"):
        scales = getattr(experts, name)
        fields[name] = bundle.prepare_nvfp4_csf_scales(
            *bundle.compress_nvfp4_csf_scales(scales), num_rows=scales.shape[1], num_cols=scales.shape[2]
        )
    return dataclasses.replace(experts, **fields | {"scratch": make_scratch(experts)} | replaced)


def make_scratch(experts) -> torch.Tensor:
    size = experts.gate_up_scales.numel() + experts.down_scales.numel()
    return torch.full((size,), 0x7F, dtype=torch.uint8, device=experts.gate_up.device)


def make_call(device: str, num_tokens: int, top_k: int, seed: int = 0, low: int = 0, high: int = NUM_EXPERTS,
              hidden: int = HIDDEN, dtype: torch.dtype = torch.bfloat16):  # fmt: skip
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num_tokens, hidden, generator=generator).to(dtype)
    index = torch.randint(low, high, (num_tokens, top_k), generator=generator)
    weights = torch.rand(num_tokens, top_k, generator=generator)
    return x.to(device), index.to(device), weights.to(device)


def reference(experts, hidden, index, top_k_weights, *, quantized: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """float64 output, and the sum of magnitudes that bounds its rounding. `experts` have dense scales.

    `quantized`: with the roundings of W4A4: activations to NVFP4, and inner rows to bf16 before that; otherwise
    without.
    """
    out = torch.zeros(hidden.shape, dtype=torch.float64, device=hidden.device)
    magnitude = torch.zeros_like(out)
    for expert in range(experts.num_experts):
        token, choice = (index == expert).nonzero(as_tuple=True)
        if not len(token):
            continue
        factors = experts.gate_up_global[expert].repeat_interleave(experts.intermediate_size)
        gate_up = dequantize(experts.gate_up[expert], experts.gate_up_scales[expert], factors)
        down = dequantize(experts.down[expert], experts.down_scales[expert], experts.down_global[expert, None])
        x = hidden[token].double()
        if quantized:
            x = round_trip(x, factor_of(experts.gate_up_input_global, expert))
        gate, up = (x @ gate_up.T).chunk(2, -1)
        inner = gate * torch.sigmoid(gate) * up
        if quantized:
            inner = round_trip(inner.to(hidden.dtype).double(), factor_of(experts.down_input_global, expert))
        weight = top_k_weights[token, choice].double()[:, None]
        out.index_add_(0, token, weight * (inner @ down.T))
        magnitude.index_add_(0, token, weight * (inner.abs() @ down.abs().T))
    return out, magnitude


def factor_of(scale: torch.Tensor | None, expert: int) -> torch.Tensor | None:
    return None if scale is None else scale.reshape(-1)[expert if scale.numel() > 1 else 0]
