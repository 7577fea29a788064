"""What Triton's interpreter gets wrong before 3.9, put right: the pinned torch's build for GPUs brings 3.7."""

from __future__ import annotations

import numpy as np


class _Format(str):
    """The name of a number format, as a text and, as Triton 3.7 wants it, with a ``value``."""

    @property
    def value(self) -> str:
        return str(self)


def mend() -> None:
    """To be called in a process whose Triton interprets, which is decided when Triton is imported."""
    from triton.language.semantic import TritonSemantic
    from triton.runtime import interpreter

    def get_all_ones_value(self, type):
        ones = np.full(1, -1).astype(interpreter._get_np_dtype(type))  # NumPy 2 refuses -1 as an unsigned number
        return interpreter.TensorHandle(ones, type.scalar)

    def dot_scaled(self, lhs, lhs_scale, lhs_format, rhs, rhs_scale, rhs_format, *others):
        return original(self, lhs, lhs_scale, _Format(lhs_format), rhs, rhs_scale, _Format(rhs_format), *others)

    original = TritonSemantic.dot_scaled
    interpreter.InterpreterBuilder.get_all_ones_value = get_all_ones_value
    TritonSemantic.dot_scaled = dot_scaled
