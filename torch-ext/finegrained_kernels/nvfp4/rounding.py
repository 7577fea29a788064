"""The law of quantize.py as elementwise Triton: the same float32 operations, in the same order, to the bit.

Written once for both dialects: mma_gemm.py compiles the same source as Gluon functions. Rounding is done on the bits,
so that no device's conversion instruction decides a tie, a saturation or a NaN.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def e4m3_from_amax(amax, global_scale):
    """Scale byte (int32) of a 16-group whose largest magnitude is `amax`."""
    ratio = tl.div_rn(amax, global_scale * 6.0)
    ratio = tl.where(ratio < 0.001953125, 0.001953125, ratio)  # comparisons, not min and max: NaN must stay
    ratio = tl.where(ratio > 448.0, 448.0, ratio)
    bits = ratio.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    subnormal = (ratio + 16384.0).to(tl.int32, bitcast=True) & 15  # an ulp of 2^14 is 2^-9, the subnormal step
    byte = tl.where(ratio < 0.015625, subnormal, normal)
    return tl.where(ratio != ratio, 0x7F, byte)


@triton.jit
def e4m3_to_float(byte):
    """float32 of a scale byte (int32, any of the 256)."""
    bits = ((byte & 0x80) << 24) | ((byte & 0x7F) << 20)
    value = bits.to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2^120, exact, also for subnormal bits
    return tl.where((byte & 0x7F) == 0x7F, float("nan"), value)


@triton.jit
def e2m1_code(value, step):
    """4-bit code (int32) of float32 `value` in units of `step`, nearest even, saturating."""
    bits = value.to(tl.int32, bitcast=True)
    q = tl.div_rn((bits & 0x7FFFFFFF).to(tl.float32, bitcast=True), step)
    code = (q > 0.25).to(tl.int32) + (q >= 0.75).to(tl.int32) + (q > 1.25).to(tl.int32) + (q >= 1.75).to(tl.int32)
    code += (q > 2.5).to(tl.int32) + (q >= 3.5).to(tl.int32) + (q > 5.0).to(tl.int32)
    return code | ((bits >> 28) & 8)


@triton.jit
def global_from_row_amax(amax):
    """A row's dynamic second-level scale."""
    scale = tl.div_rn(amax, 2688.0)
    scale = tl.where(scale < 6.018531076210112e-36, 6.018531076210112e-36, scale)  # 2^-117
    return tl.where(amax == 0, 1.0, scale)


@triton.jit
def gated_product(gate, up, alpha, limit, HAS_LIMIT: tl.constexpr):
    """silu(gate) * up, silu(x) = x * sigmoid(alpha x), in float32."""
    if HAS_LIMIT:
        gate = tl.where(gate > limit, limit, gate)
        up = tl.where(up > limit, limit, up)
        up = tl.where(up < -limit, -limit, up)
    return gate / (1.0 + tl.exp(-alpha * gate)) * up
