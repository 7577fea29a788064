"""Finds a model's linear layers that a checkpoint has in NVFP4 or FP8, and checks whether these kernels can replace
them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from finegrained_kernels.checkpoint import Checkpoint, Fault
from finegrained_kernels.checkpoint.headers import TensorInfo
from finegrained_kernels.checkpoint.names import Plane
from finegrained_kernels.integrations.transformers.renaming import Renaming

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PRE_QUANT_SCALE = ".pre_quant_scale"
_ROWS, _COLS = 16, 32
"""In the GEMMs, rows and columns of an NVFP4 weight have to be multiples of these."""

FLOATS = ("BF16", "F16", "F32", "F64")
FP8 = "F8_E4M3"
FP8_SCALES = (".weight_scale", ".weight_scale_inv")
FP8_INPUT_SCALES = (".input_scale", ".activation_scale")
_E8M0 = ("U8", "F8_E8M0")
_MX_GROUP = 32


@dataclass(frozen=True)
class LinearPlan:
    """One NVFP4 layer: the model's module, and its plane in the checkpoint."""

    module: str
    plane: Plane

    @property
    def source(self) -> str:
        return self.plane.module

    @property
    def planes(self) -> list[Plane]:
        return [self.plane]

    @property
    def pre_quant_scale(self) -> str:
        """The name of the tensor that multiplies the activations, if the layer has one."""
        return self.source + PRE_QUANT_SCALE

    @property
    def stands_in_for(self) -> list[str]:
        return [f"{self.module}.weight"]


@dataclass(frozen=True)
class FP8Plan:
    """One FP8 layer: the model's module, and the checkpoint's names for its tensors.

    ``block`` is the number of rows and columns of weights that share a scale. ``others`` are scales of its activations,
    which nothing here uses, but saving writes again.
    """

    module: str
    weight: str
    scale: str
    block: tuple[int, int]
    others: tuple[str, ...]

    @property
    def source(self) -> str:
        return self.weight.removesuffix(".weight")

    @property
    def tensors(self) -> list[str]:
        return [self.weight, self.scale, *self.others]

    @property
    def stands_in_for(self) -> list[str]:
        return [f"{self.module}.weight"]


def plan_linear(
    model: PreTrainedModel, checkpoint: Checkpoint, plane: Plane, rename: Renaming, faults: list[Fault]
) -> LinearPlan | None:
    """The plan of an NVFP4 layer that is not a fused expert; None, and a fault, if it cannot be run."""
    shard, info = checkpoint.located[plane.weight]
    rows, cols = plane.rows, plane.cols * 16
    module = _linear_of(model, plane.weight, plane.module, (rows, cols), "NVFP4", (shard, info), rename, faults)
    if module is None:
        return None
    if rows % _ROWS or cols % _COLS:
        message = f"NVFP4 of {plane.module} is [{rows}, {cols}]: these kernels need multiples of [{_ROWS}, {_COLS}]"
        faults.append(Fault(shard, plane.weight, message))
        return None
    plan = LinearPlan(module, plane)
    if plan.pre_quant_scale in checkpoint.located:
        shard, info = checkpoint.located[plan.pre_quant_scale]
        if info.dtype not in FLOATS or info.shape not in ((cols,), (1, cols)):
            message = (
                f"expected floats [{cols}], one for each input of {plane.module}, got {info.dtype} {list(info.shape)}"
            )
            faults.append(Fault(shard, plan.pre_quant_scale, message))
    return plan


def plan_fp8(
    model: PreTrainedModel,
    checkpoint: Checkpoint,
    weight: str,
    block: Sequence[int],
    rename: Renaming,
    faults: list[Fault],
) -> FP8Plan | None:
    """The plan of the FP8 layer with this ``weight``; None, and a fault, if it cannot be run.

    Args:
        block: rows and columns of a weight that share a scale, if a row has several scales.
    """
    source = weight.removesuffix(".weight")
    shard, info = checkpoint.located[weight]
    scales = [source + suffix for suffix in FP8_SCALES if source + suffix in checkpoint.located]
    if not weight.endswith(".weight") or len(info.shape) != 2 or len(scales) != 1:
        names = " or ".join(source + suffix for suffix in FP8_SCALES)
        message = f"FP8 {list(info.shape)} in layer {source}: expected [N, K] called weight, and {names} beside it"
        faults.append(Fault(shard, weight, message))
        return None
    (scale,) = scales
    found = _block_of(info.shape, checkpoint.located[scale][1], block)
    if found is None:
        shard, scales_info = checkpoint.located[scale]
        message = (
            f"{scales_info.dtype} {list(scales_info.shape)} for FP8 {list(info.shape)} in layer {source}: expected one "
            f"float, one a row, one for each {block[0]} x {block[1]}, or E8M0 for each {_MX_GROUP} along a row"
        )
        faults.append(Fault(shard, scale, message))
        return None
    module = _linear_of(model, weight, source, info.shape, "FP8", (shard, info), rename, faults)
    if module is None:
        return None
    others = tuple(source + suffix for suffix in FP8_INPUT_SCALES if source + suffix in checkpoint.located)
    return FP8Plan(module, weight, scale, found, others)


def _block_of(shape: Sequence[int], scale: TensorInfo, block: Sequence[int]) -> tuple[int, int] | None:
    """Rows and columns of FP8 weights ``[N, K]`` that share a scale; None if the scale does not fit. ModelOpt's blocks
    are 4-D."""
    rows, cols = shape
    extents = (
        tuple(extent for i, extent in enumerate(scale.shape) if i % 2 == 0) if len(scale.shape) == 4 else scale.shape
    )
    if scale.dtype in _E8M0:
        return (1, _MX_GROUP) if extents == (rows, -(-cols // _MX_GROUP)) else None
    if scale.dtype not in FLOATS:
        return None
    if extents in ((), (1,), (1, 1)):
        return rows, cols
    if extents in ((rows,), (rows, 1)):
        return 1, cols
    if extents == (-(-rows // block[0]), -(-cols // block[1])):
        return block[0], block[1]
    return None


def _linear_of(
    model: PreTrainedModel,
    weight: str,
    source: str,
    shape: Sequence[int],
    kind: str,
    located: tuple[str, TensorInfo],
    rename: Renaming,
    faults: list[Fault],
) -> str | None:
    """The model's linear layer to which a weight ``[N, K]`` belongs; None, and a fault, if there is none."""
    shard, info = located
    target, pattern = rename(f"{source}.weight")
    module, _, parameter = target.rpartition(".")

    def fault(message: str) -> None:
        faults.append(Fault(shard, weight, f"{kind} {list(info.shape)} in layer {source}: {message}"))

    if pattern is not None:
        return fault(f"it would become part of {target}, and only experts in NVFP4 can be fused")
    if target not in rename.state:
        return fault(f"{type(model).__name__} has no {target}")
    found = model.get_submodule(module)
    if type(found).forward is not torch.nn.Linear.forward or parameter != "weight":
        return fault(f"{module} is {type(found).__name__}, and only linear layers can be quantized")
    if (found.out_features, found.in_features) != tuple(shape):
        expected = [found.out_features, found.in_features]
        return fault(f"expected weights {expected} for {module} of the model, got {list(shape)}")
    return module
