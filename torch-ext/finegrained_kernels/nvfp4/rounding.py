"""The law of quantize.py in elementwise Triton: the same bits for every float32.

The functions serve both dialects: mma.py compiles the same source as Gluon functions. They round by float32 addition,
so that no device's conversion instruction decides about ties, saturation or NaN.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def nearest_even(value, MIN_EXPONENT: tl.constexpr, MANTISSA: tl.constexpr):
    """(float32 `value` >= 0 rounded to MANTISSA bits, its code in that format as int32); NaN stays NaN.

    `value` is added to a power of two whose ulp is the format's step at `value`. That rounds it, and the low bits of
    the sum are its number of steps.
    """
    DROPPED: tl.constexpr = 23 - MANTISSA
    exponent = tl.maximum(value.to(tl.int32, bitcast=True) & 0x7F800000, (127 + MIN_EXPONENT) << 23)
    power = exponent + (DROPPED << 23)
    rounded = value + power.to(tl.float32, bitcast=True)
    steps = rounded.to(tl.int32, bitcast=True) - power
    code = steps + (exponent >> DROPPED) - ((127 + MIN_EXPONENT) << MANTISSA)
    return rounded - power.to(tl.float32, bitcast=True), code


@triton.jit
def scale_from_amax(amax, global_scale):
    """(scale, its E4M3 byte as int32) of 16-groups whose largest magnitude is `amax`."""
    ratio = tl.div_rn(amax, global_scale * 6.0)
    ratio = tl.where(ratio < 0.001953125, 0.001953125, ratio)  # comparisons instead of min and max, so that NaN stays
    ratio = tl.where(ratio > 448.0, 448.0, ratio)
    scale, byte = nearest_even(ratio, -6, 3)
    return scale, tl.where(ratio != ratio, 0x7F, byte)


@triton.jit
def e4m3_to_float(byte):
    """float32 of a scale byte (int32, any of the 256)."""
    bits = ((byte & 0x80) << 24) | ((byte & 0x7F) << 20)
    value = bits.to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2^120, exact, also for subnormal bits
    return tl.where((byte & 0x7F) == 0x7F, float("nan"), value)


@triton.jit
def e2m1_to_float(code):
    """float32 of the code in the low 4 bits of int32."""
    bits = ((code & 8) << 28) | ((code & 7) << 22)  # the value times 2^-126, also if that is subnormal
    return bits.to(tl.float32, bitcast=True) * 8.507059173023462e37


@triton.jit
def e2m1_from_value(value, sign, step):
    """(E2M1 number as float32, its code as int32) nearest to float32 `value` in units of its group's `step`; saturates.
    Bit 31 of `sign` (int32) is the sign of the value, even of a NaN, whose sign conversions to float32 may lose.

    `step` is NaN for a group that contains one. The correctly rounded reciprocal of a group's step and two fused
    operations give a value's correctly rounded quotient, provided that nothing on the way is subnormal or overflows,
    which `power` prevents. If the step is infinite, NaN or negative, every code is 0; if it is 0, every code is 7,
    except that of 0.
    """
    power = tl.where(step < 5.421010862427522e-20, 7.922816251426434e28, 1.0)  # below 2^-64: 2^96
    power = tl.where(step > 1.8446744073709552e19, 1.262177448353619e-29, power)  # above 2^64: 2^-96
    bits = step.to(tl.int32, bitcast=True)
    is_finite = (bits >= 0) & (bits < 0x7F800000)
    divisor = tl.where(is_finite & (bits > 0), step * power, 8.673617379884035e-19)  # 2^-60
    inverse = tl.div_rn(1.0, divisor)
    magnitude = tl.minimum(tl.abs(value) * power, tl.where(is_finite, divisor * 6.0, 0.0))
    quotient = magnitude * inverse
    quotient = tl.fma(tl.fma(quotient, -divisor, magnitude), inverse, quotient)
    rounded, code = nearest_even(quotient, 0, 1)
    sign = sign & -0x80000000
    return (rounded.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True), code | ((sign >> 28) & 8)


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
