"""Which tensors of a checkpoint are NVFP4 scale planes, from names, dtypes and shapes in the headers alone."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import NamedTuple

from finegrained_kernels.checkpoint.errors import Fault
from finegrained_kernels.checkpoint.headers import TensorInfo
from finegrained_kernels.checkpoint.wire import SLAB_ROWS, geometry_problem, slab_bytes

SCALE = ".weight_scale"
FIXED = ".nvfp4_csf_fixed"
EXCEPTIONS = ".nvfp4_csf_exceptions"
GROUP = 16
"""Weights a scale covers, along K."""

_WEIGHTS = (".weight", ".weight_packed")  # ModelOpt, compressed-tensors
_GLOBALS = {".weight": ".weight_scale_2", ".weight_packed": ".weight_global_scale"}
_EXPERT = re.compile(r"(?P<experts>.*\bexperts)\.(?P<expert>\d+)\.(?P<projection>[^.]+)")
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)(?:\.|$)")

Located = Mapping[str, tuple[str, TensorInfo]]
"""Every tensor of a checkpoint: its shard and its entry."""


class Plane(NamedTuple):
    """One NVFP4 scale plane of ``rows`` by ``cols`` bytes, dense or compressed; ``module`` has the weight."""

    module: str
    weight: str
    rows: int
    cols: int
    compressed: bool

    @property
    def name(self) -> str:
        return self.module + SCALE

    @property
    def nbytes(self) -> int:
        """Bytes when dense."""
        return self.rows * self.cols

    @property
    def tensors(self) -> tuple[str, ...]:
        """Names of the tensors that hold it."""
        return (self.name + FIXED, self.name + EXCEPTIONS) if self.compressed else (self.name,)

    @property
    def global_scale_divides(self) -> bool:
        """Whether the second-level scale is a divisor, as compressed-tensors' is, and not a multiplier."""
        return self.weight.endswith(".weight_packed")

    @property
    def global_scale(self) -> str:
        """Name of the second-level scale."""
        return self.module + _GLOBALS[self.weight.removeprefix(self.module)]

    def as_compressed(self) -> Plane:
        return self._replace(compressed=True)

    @property
    def layer_module(self) -> str:
        """What config.json names: the experts of a layer together, any other module by itself."""
        return layer_of(self.module)


def split_expert(module: str) -> tuple[str, int, str] | None:
    """``("<prefix>.experts", expert, projection)`` of an expert's module, None for any other."""
    match = _EXPERT.fullmatch(module)
    return (match["experts"], int(match["expert"]), match["projection"]) if match else None


def layer_of(module: str) -> str:
    """The experts of a layer, for the module of one of them; any other module is itself a layer."""
    expert = split_expert(module)
    return expert[0] if expert else module


def layer_number(module: str) -> int | None:
    """The layer that a module is in; with nested lists of layers, the innermost."""
    numbers = _LAYER.findall(module)
    return int(numbers[-1]) if numbers else None


def find_planes(located: Located) -> tuple[dict[str, Plane], list[Fault]]:
    """Every NVFP4 scale plane by scale name, and what is wrong with others that claim to be one.

    A `weight_scale` belongs to NVFP4 if its weight is U8 or I8 `[N, K/2]`; it must then be F8_E4M3 `[N, K/16]`, or a
    compressed pair for that geometry, and have a second-level scale. Geometry is never inferred from the scales.
    """
    planes: dict[str, Plane] = {}
    faults: list[Fault] = []
    for name in located:
        if not name.endswith((SCALE, FIXED, EXCEPTIONS)):
            continue
        if name.endswith(EXCEPTIONS):
            scale = name.removesuffix(EXCEPTIONS)
            if scale + FIXED not in located:
                faults.append(Fault(located[name][0], name, f"unpaired: the checkpoint has no {scale}{FIXED}"))
            continue
        scale = name.removesuffix(FIXED)
        plane = _describe(scale, located, scale != name, faults)
        if plane is not None:
            planes[scale] = plane
    return planes, faults


def select(planes: Mapping[str, Plane], include: Sequence[str], exclude: Sequence[str]) -> list[str]:
    """Names of the scales that match a pattern of ``include`` (none: all expert scales) and none of ``exclude``."""

    def matches(name: str, patterns: Sequence[str]) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in patterns)

    return [
        name
        for name, plane in planes.items()
        if (matches(name, include) if include else split_expert(plane.module) is not None)
        and not matches(name, exclude)
    ]


def _describe(scale: str, located: Located, compressed: bool, faults: list[Fault]) -> Plane | None:
    first = scale + FIXED if compressed else scale
    shard, info = located[first]

    def fault(message: str, tensor: str = first) -> None:
        faults.append(Fault(located[tensor][0], tensor, message))

    module = scale.removesuffix(SCALE)
    weight = module + _WEIGHTS[0]
    if weight not in located:
        weight = module + _WEIGHTS[1]
    if not scale.endswith(SCALE) or weight not in located:
        return fault(f"no weight beside it: expected {module}{' or '.join(_WEIGHTS)}")
    _, (dtype, shape, _, _) = located[weight]
    if dtype not in ("U8", "I8"):
        return fault(f"{weight} must be U8 or I8, got {dtype}") if compressed else None
    if len(shape) != 2 or shape[1] % (GROUP // 2):
        return fault(f"expected [N, K/2] with K a multiple of {GROUP}, got {list(shape)}", weight)
    rows, cols = shape[0], shape[1] // (GROUP // 2)
    plane = Plane(module, weight, rows, cols, compressed)
    if plane.global_scale not in located:
        return fault(f"no second-level scale beside it: expected {plane.global_scale}")
    _, (dtype, _, begin, end) = located[plane.global_scale]
    if dtype != "F32" or end - begin != 4:
        return fault(f"expected one F32 value, got {dtype} of {end - begin} bytes", plane.global_scale)
    if not compressed:
        if (info.dtype, info.shape) != ("F8_E4M3", (rows, cols)):
            return fault(f"expected F8_E4M3 {[rows, cols]} for {weight}, got {info.dtype} {list(info.shape)}")
        return plane
    if scale in located:
        return fault(f"compressed, and dense as {scale} too")
    if scale + EXCEPTIONS not in located:
        return fault(f"unpaired: the checkpoint has no {scale}{EXCEPTIONS}")
    if problem := geometry_problem(rows, cols):
        return fault(problem)
    stream = (rows // SLAB_ROWS, slab_bytes(cols))
    if info.dtype != "U8" or info.shape not in (stream, (stream[0] * stream[1],)):
        expected = f"U8 {list(stream)} for scales {[rows, cols]}"
        return fault(f"expected {expected}, got {info.dtype} {list(info.shape)}")
    _, words = located[scale + EXCEPTIONS]
    if words.dtype != "U32" or len(words.shape) != 1:
        return fault(f"expected 1-D U32, got {words.dtype} {list(words.shape)}", scale + EXCEPTIONS)
    return plane
