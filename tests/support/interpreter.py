"""Corrects faults of Triton's interpreter before 3.9 (the pinned torch's build for GPUs comes with 3.7), and checks
what the interpreter does not: in whose memory a kernel reads and writes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch


class _Format(str):
    """The name of a number format: a text that also has a ``value``, as Triton 3.7 requires."""

    @property
    def value(self) -> str:
        return str(self)


class _Patched:
    def restore(self) -> None:
        """Do nothing: the process interprets until it ends."""


def mend() -> None:
    """Correct the interpreter. Call it only in a process that interprets, which is decided when Triton is imported."""
    import triton.language as tl
    from triton.language.semantic import TritonSemantic
    from triton.runtime import interpreter

    def get_all_ones_value(self, type):
        ones = np.full(1, -1).astype(interpreter._get_np_dtype(type))  # NumPy 2 refuses -1 as an unsigned number
        return interpreter.TensorHandle(ones, type.scalar)

    def dot_scaled(self, lhs, lhs_scale, lhs_format, rhs, rhs_scale, rhs_format, *others):
        return original(self, lhs, lhs_scale, _Format(lhs_format), rhs, rhs_scale, _Format(rhs_format), *others)

    def patch_once(function):
        """Every call of a function replaces all of the language, which takes most of the interpreter's time."""
        languages = frozenset(id(value) for value in function.__globals__.values() if value is tl or value is tl.core)
        if languages not in patched:
            patched.add(languages)
            patch(function)
        return _Patched()

    original, patch, patched = TritonSemantic.dot_scaled, interpreter._patch_lang, set()
    interpreter.InterpreterBuilder.get_all_ones_value = get_all_ones_value
    interpreter._patch_lang = patch_once
    TritonSemantic.dot_scaled = dot_scaled


def tensors_of(arguments: Any) -> Iterator[torch.Tensor]:
    """The tensors among a kernel's arguments, including those inside tuples."""
    for argument in arguments:
        if isinstance(argument, tuple):
            yield from tensors_of(argument)
        elif isinstance(argument, torch.Tensor) and argument.numel():
            yield argument


class Memory:
    """The memory of a kernel's arguments, and which program has stored to each byte of it."""

    def __init__(self, arguments: Any) -> None:
        spans: list[list[int]] = []
        for begin, end in sorted(map(span, tensors_of(arguments))):
            if spans and begin < spans[-1][1]:
                spans[-1][1] = max(end, spans[-1][1])
            else:
                spans.append([begin, end])
        self.begins, self.ends = np.array(spans, np.int64).reshape(-1, 2).T
        self.places = np.cumsum(self.ends - self.begins) - self.ends  # of an address, added to it
        self.programs = np.full(int((self.ends - self.begins).sum()), -1, np.int32)

    def accessed(self, pointers: Any, mask: Any) -> np.ndarray:
        """The places of all bytes that a load or store accesses. Raises if one of them is not in the arguments'
        memory."""
        size = max(pointers.get_element_ty().primitive_bitwidth // 8, 1)
        addresses, mask = np.broadcast_arrays(pointers.data, mask.data)
        addresses = addresses[mask.astype(bool)].astype(np.int64)
        which = np.searchsorted(self.begins, addresses, side="right") - 1
        inside = (which >= 0) & (addresses + size <= self.ends[which])
        assert inside.all(), f"{(~inside).sum()} of {inside.size} accesses are outside of the kernel's arguments"
        return (self.places[which] + addresses)[:, None] + np.arange(size)

    def stored(self, places: np.ndarray, program: int) -> None:
        before = self.programs[places]
        assert ((before == -1) | (before == program)).all(), f"program {program} stores to another one's bytes"
        self.programs[places] = program


def span(tensor: torch.Tensor) -> tuple[int, int]:
    elements = 1 + sum((extent - 1) * stride for extent, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + elements * tensor.element_size()


def watch_memory(*, programs_apart: bool) -> None:
    """From now on it is an error if an interpreted kernel accesses memory other than its arguments', and, with
    `programs_apart`, if two of its programs store to one byte."""
    from triton.runtime import interpreter

    builder, executor = interpreter.InterpreterBuilder, interpreter.GridExecutor
    load, store, launch = builder.create_masked_load, builder.create_masked_store, executor.__call__
    memory = Memory(())

    def watched_load(self, pointers, mask, *others):
        memory.accessed(pointers, mask)
        return load(self, pointers, mask, *others)

    def watched_store(self, pointers, value, mask, *others):
        places = memory.accessed(pointers, mask)
        if programs_apart:
            memory.stored(places, self.grid_idx[0])
        return store(self, pointers, value, mask, *others)

    def watched_launch(self, *arguments, **options):
        nonlocal memory
        memory = Memory((*arguments, *options.values()))
        return launch(self, *arguments, **options)

    builder.create_masked_load, builder.create_masked_store = watched_load, watched_store
    executor.__call__ = watched_launch
