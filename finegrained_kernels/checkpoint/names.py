"""Finds out which tensors of a checkpoint are NVFP4 scale planes, from names, dtypes and shapes in the headers
alone."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import NamedTuple

from finegrained_kernels.checkpoint.errors import Fault
from finegrained_kernels.checkpoint.headers import TensorInfo
from finegrained_kernels.checkpoint.wire import SLAB_ROWS, geometry_problem, slab_bytes

FIXED = ".nvfp4_csf_fixed"
EXCEPTIONS = ".nvfp4_csf_exceptions"
GROUP = 16
"""How many weights along K share a scale."""

_SCALE = "weight_scale"
# How the names of a layer's tensors end, after the module and "." (for a layer's own tensors) or "_" (for a stack of
# experts, whose weight itself has the projection's name): weights and second-level scales, of ModelOpt and of
# compressed-tensors.
_KINDS = {
    ".": ((".weight", "weight_scale_2"), (".weight_packed", "weight_global_scale")),
    "_": (("", "weight_scale_2"), ("_weight_packed", "weight_global_scale"), ("_packed", "weight_global_scale")),
}
_INPUTS = {"weight_scale_2": "input_scale", "weight_global_scale": "input_global_scale"}
_EXPERT = re.compile(
    r"(?P<experts>.*\bexperts)\.(?:(?P<e1>\d{1,9})\.(?P<p1>[^.]+)|(?P<p2>[^.\d][^.]*)\.(?P<e2>\d{1,9}))"
)
_STACKED = re.compile(r".*\bexperts\.[^.]+")
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)(?:\.|$)")

Located = Mapping[str, tuple[str, TensorInfo]]
"""The shard and the header entry of every tensor of a checkpoint, by name."""


class Plane(NamedTuple):
    """One NVFP4 scale plane of ``rows`` by ``cols`` bytes, dense or compressed. Its weight belongs to ``module``.

    Attributes:
        weight, scale, global_scale: names of the packed weight, of the dense scales, and of the second-level scale.
        part: the number of the expert in a stack, if one tensor, `[E, N, ...]` or `[E * N, ...]`, has all of them; None
            if the plane has tensors of its own.
    """

    module: str
    weight: str
    scale: str
    global_scale: str
    rows: int
    cols: int
    compressed: bool
    part: int | None = None

    @property
    def name(self) -> str:
        """The name of the dense scales, with the expert's number if they are part of a stack."""
        return self.scale if self.part is None else f"{self.scale}.{self.part}"

    @property
    def nbytes(self) -> int:
        """Size in bytes when dense."""
        return self.rows * self.cols

    @property
    def tensors(self) -> tuple[str, ...]:
        """Names of the tensors that store it."""
        return (self.name + FIXED, self.name + EXCEPTIONS) if self.compressed else (self.scale,)

    @property
    def scale_begin(self) -> int:
        """Offset of its first byte in the tensor of dense scales."""
        return (self.part or 0) * self.nbytes

    @property
    def weight_begin(self) -> int:
        """Offset of the first byte of its packed weight in the tensor of weights."""
        return (self.part or 0) * self.nbytes * (GROUP // 2)

    @property
    def global_scale_divides(self) -> bool:
        """Whether the second-level scale is a divisor, as in compressed-tensors, and not a multiplier."""
        return self.global_scale.endswith("weight_global_scale")

    @property
    def input_scale(self) -> str:
        """The name that the scale of its activations has, if there is one."""
        kind = "weight_global_scale" if self.global_scale_divides else "weight_scale_2"
        return self.global_scale.removesuffix(kind) + _INPUTS[kind]

    def as_compressed(self) -> Plane:
        return self._replace(compressed=True)

    @property
    def expert(self) -> tuple[str, int, str] | None:
        """``("<prefix>.experts", expert, projection)``; None if it does not belong to an expert."""
        if self.part is None:
            return split_expert(self.module)
        experts, _, projection = self.module.rpartition(".")
        return experts, self.part, projection

    @property
    def layer_module(self) -> str:
        """The module that config.json lists: the experts of a layer together, any other module by itself."""
        expert = self.expert
        return expert[0] if expert else self.module


def split_expert(module: str) -> tuple[str, int, str] | None:
    """``("<prefix>.experts", expert, projection)`` for an expert's module; None for any other."""
    match = _EXPERT.fullmatch(module)
    return (match["experts"], int(match["e1"] or match["e2"]), match["p1"] or match["p2"]) if match else None


def is_stack(name: str, shape: Sequence[int]) -> bool:
    """Whether a tensor has the weights of several experts, stacked."""
    return len(shape) == 3 and _STACKED.fullmatch(name.removesuffix(".weight")) is not None


def layer_of(module: str) -> str:
    """For the module of an expert, the experts of its layer; any other module is returned as it is."""
    expert = split_expert(module)
    return expert[0] if expert else module


def layer_number(module: str) -> int | None:
    """The number of the layer that contains a module; if lists of layers are nested, of the innermost."""
    numbers = _LAYER.findall(module)
    return int(numbers[-1]) if numbers else None


def find_planes(located: Located) -> tuple[dict[str, Plane], list[Fault]]:
    """Every NVFP4 scale plane by name, and the faults of others that claim to be one.

    A `weight_scale` belongs to NVFP4 if its weight is U8 or I8 `[N, K/2]`; it must then be F8_E4M3 `[N, K/16]`, or a
    compressed pair for that geometry, and have a second-level scale. If it is not F8_E4M3 and has no second-level
    scale, it belongs to another format. Geometry is never inferred from the scales. A stack of experts, `[E, N, K/2]`
    or, with `E` second-level scales, `[E * N, K/2]`, has a plane for each expert.
    """
    planes: dict[str, Plane] = {}
    faults: list[Fault] = []
    stacks: dict[str, list[str]] = {}
    for name in located:
        if not name.endswith((_SCALE, FIXED, EXCEPTIONS)):
            continue
        if name.endswith(EXCEPTIONS):
            scale = name.removesuffix(EXCEPTIONS)
            if scale + FIXED not in located:
                faults.append(Fault(located[name][0], name, f"unpaired: the checkpoint has no {scale}{FIXED}"))
            continue
        scale = name.removesuffix(FIXED)
        if scale != name and not scale.endswith(_SCALE):  # for a stack: the scale's name, and the expert's number
            stacks.setdefault(scale.rpartition(".")[0], []).append(name)
            continue
        for plane in _describe(scale, name, located, faults):
            planes[plane.name] = plane
    for scale, names in stacks.items():
        described = _describe(scale, names[0], located, faults)
        planes |= {plane.name: plane for plane in described}
        extra = set(names) - {plane.tensors[0] for plane in described} if described else ()
        faults += [Fault(located[name][0], name, "no expert of the stack beside it has this number") for name in extra]
    return planes, faults


def group_by_scale(planes: Iterable[Plane]) -> dict[str, list[Plane]]:
    """Planes grouped by their tensor of dense scales: a single plane, or all planes of a stack in order."""
    groups: dict[str, list[Plane]] = {}
    for plane in planes:
        groups.setdefault(plane.scale, []).append(plane)
    return groups


def replaced_by(fixed: str, tensors: Collection[str]) -> str:
    """The one of the source's ``tensors`` that a fixed stream has replaced: its scales, or a stack that contains
    them."""
    scale = fixed.removesuffix(FIXED)
    return scale if scale in tensors else scale.rpartition(".")[0]


def select(planes: Mapping[str, Plane], include: Sequence[str], exclude: Sequence[str]) -> list[str]:
    """Names of the planes whose scales match a pattern of ``include`` (all, if it is empty) and none of ``exclude``."""

    def matches(name: str, patterns: Sequence[str]) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in patterns)

    return [
        name
        for name, plane in planes.items()
        if (not include or matches(plane.scale, include)) and not matches(plane.scale, exclude)
    ]


def _describe(scale: str, first: str, located: Located, faults: list[Fault]) -> Sequence[Plane]:
    """The planes of the scales called ``scale``, one of whose tensors is ``first``; if something is wrong, none, and a
    fault."""
    compressed = first != scale

    def fault(message: str, tensor: str = first) -> Sequence[Plane]:
        faults.append(Fault(located[tensor][0], tensor, message))
        return ()

    base = scale.removesuffix(_SCALE)
    module, kinds = base[:-1], _KINDS.get(base[-1:], ())
    kind = next(((weight, second) for weight, second in kinds if module + weight in located), None)
    if kind is None or not scale.endswith(_SCALE):
        expected = " or ".join(module + weight for weight, _ in kinds) or f"{scale}.weight"
        return fault(f"no weight beside it: expected {expected}")
    weight, global_scale = module + kind[0], base + kind[1]
    _, (dtype, shape, _, _) = located[weight]
    if dtype not in ("U8", "I8"):
        return fault(f"{weight} must be U8 or I8, got {dtype}") if compressed else ()
    if len(shape) not in (2, 3) or shape[-1] % (GROUP // 2):
        expected = f"[N, K/2], or [E, N, K/2] of a stack of experts, with K a multiple of {GROUP}"
        return fault(f"expected {expected}, got {list(shape)}", weight)
    if global_scale not in located:
        if not compressed and located[scale][1].dtype != "F8_E4M3":
            return ()  # another format, such as INT8 or MXFP4
        return fault(f"no second-level scale beside it: expected {global_scale}")
    _, (dtype, _, begin, end) = located[global_scale]
    parts = shape[0] if len(shape) == 3 else None
    count = (end - begin) // 4
    if parts is None and count > 1 and _STACKED.fullmatch(module) and shape[0] % count == 0:
        parts = count
    if dtype != "F32" or count not in (1, parts):
        what = "one F32 value" if parts is None else f"one F32 value, or {parts}"
        return fault(f"expected {what}, got {dtype} of {end - begin} bytes", global_scale)
    cols = shape[-1] // (GROUP // 2)
    rows = shape[-2] if len(shape) == 3 or parts is None else shape[0] // parts
    if not compressed and located[scale][1][:2] != ("F8_E4M3", (*shape[:-1], cols)):
        info = located[scale][1]
        expected = f"F8_E4M3 {[*shape[:-1], cols]} for {weight} {list(shape)}"
        return fault(f"expected {expected}, got {info.dtype} {list(info.shape)}")
    if parts is None:
        planes = [Plane(module, weight, scale, global_scale, rows, cols, compressed)]
    else:
        planes = [Plane(module, weight, scale, global_scale, rows, cols, compressed, i) for i in range(parts)]
    if not compressed:
        return planes
    if scale in located:
        return fault(f"compressed, and dense as {scale} too")
    problems = [problem for plane in planes if (problem := _wire_problem(plane, located))]
    faults += problems
    return () if problems else planes


def _wire_problem(plane: Plane, located: Located) -> Fault | None:
    """What is wrong with a compressed plane's two tensors, or None."""
    fixed, exceptions = plane.tensors
    for name, other in ((fixed, exceptions), (exceptions, fixed)):
        if name not in located:
            found = next(located[tensor][0] for tensor in (other, plane.weight) if tensor in located)
            return Fault(found, other if other in located else plane.weight, f"unpaired: the checkpoint has no {name}")
    shard, info = located[fixed]
    if problem := geometry_problem(plane.rows, plane.cols):
        return Fault(shard, fixed, problem)
    stream = (plane.rows // SLAB_ROWS, slab_bytes(plane.cols))
    if info.dtype != "U8" or info.shape not in (stream, (stream[0] * stream[1],)):
        expected = f"U8 {list(stream)} for scales {[plane.rows, plane.cols]}"
        return Fault(shard, fixed, f"expected {expected}, got {info.dtype} {list(info.shape)}")
    shard, words = located[exceptions]
    if words.dtype != "U32" or len(words.shape) != 1 or words.shape[0] > plane.rows * plane.cols:
        expected = f"1-D U32 of at most {plane.rows * plane.cols} words"
        return Fault(shard, exceptions, f"expected {expected}, got {words.dtype} {list(words.shape)}")
    return None
