"""Turns loaded modules back into the tensors of their checkpoint, under its names."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any

import torch
from transformers.core_model_loading import WeightRenaming

from finegrained_kernels.checkpoint import Checkpoint
from finegrained_kernels.checkpoint.names import Plane
from finegrained_kernels.checkpoint.wire import SLAB_ROWS, slab_bytes
from finegrained_kernels.integrations.transformers.experts import NVFP4ExpertsModule
from finegrained_kernels.integrations.transformers.experts_plan import ExpertsPlan
from finegrained_kernels.integrations.transformers.linear import FP8Linear, NVFP4Linear
from finegrained_kernels.integrations.transformers.linear_plan import FP8Plan, LinearPlan
from finegrained_kernels.integrations.transformers.loading import DTYPES

HIDDEN = "__quantized__"

Form = tuple[str, tuple[int, ...]]
"""Dtype and shape, as safetensors have them."""


class HideQuantized(WeightRenaming):
    """Hides quantized tensors from transformers' conversions, under names that mean nothing to it.

    When loading, they are then unexpected, and left to us. When saving, the names that `state_of` gives survive every
    other renaming, whatever it adds around them, and then become the checkpoint's names again.
    """

    def __init__(self, hidden: set[str]) -> None:
        super().__init__(HIDDEN, HIDDEN)
        self.hidden = hidden

    def rename_source_key(self, source_key: str) -> tuple[str, str | None]:
        if source_key not in self.hidden:
            return source_key, None
        self._was_used = True
        return hide(source_key), None

    def reverse_transform(self) -> WeightRenaming:
        return _ShowQuantized(HIDDEN, HIDDEN)


class _ShowQuantized(WeightRenaming):
    def rename_source_key(self, source_key: str) -> tuple[str, str | None]:
        match = re.search(HIDDEN + r"\.([0-9a-f]+)", source_key)
        return (bytes.fromhex(match[1]).decode() if match else source_key), None


def hide(name: str) -> str:
    return f"{HIDDEN}.{name.encode().hex()}"


def unusual_forms(checkpoint: Checkpoint, plan: ExpertsPlan | LinearPlan) -> dict[str, Form]:
    """Dtype and shape of those of the layer's tensors whose form is unusual: signed weights, flat streams, [1] instead
    of []."""
    forms = {}
    for plane in plan.planes:
        for name, form in _usual_forms(plane).items():
            if name in checkpoint.located:
                info = checkpoint.located[name][1]
                if (info.dtype, info.shape) != form:
                    forms[name] = (info.dtype, info.shape)
    return forms


def state_of(
    plan: ExpertsPlan, module: NVFP4ExpertsModule, forms: Mapping[str, Form]
) -> Iterator[tuple[str, torch.Tensor]]:
    """The layer's tensors by hidden name. Weights are views, except those of stacks; the others are small, or created
    now."""
    stacks = [("gate_up", plan.halves[0], 0, 0), ("down", plan.down, 0, 0)]
    if not plan.is_fused:
        stacks.insert(1, ("gate_up", plan.halves[1], plan.intermediate_size, 1))
    weights = {"gate_up": module.gate_up_proj, "down": module.down_proj}
    pieces: dict[str, list[torch.Tensor]] = {}
    usual: dict[str, Form] = {}
    for name, planes, first_row, column in stacks:
        scales = _scales(planes, module.scales(name), module.schedule.bundle, first_row)
        for expert, (plane, own_scales) in enumerate(zip(planes, scales, strict=True)):
            usual |= _usual_forms(plane)
            packed = weights[name][expert, first_row : first_row + plane.rows]
            tensors = {plane.weight: packed.detach(), plane.global_scale: module.stored[name][expert, column]}
            if module.stored[f"{name}_has_input"][expert, column]:
                tensors[plane.input_scale] = module.stored[f"{name}_input"][expert, column]
            tensors |= zip(plane.tensors, own_scales, strict=True)
            for tensor_name, tensor in tensors.items():
                pieces.setdefault(tensor_name, []).append(tensor)
    for name, parts in pieces.items():
        form = forms.get(name, usual.get(name))
        stacked = len(parts) > 1 and (form is None or math.prod(form[1]) > parts[0].numel())
        tensor = torch.stack(parts) if stacked else parts[0]
        yield hide(name), _as(tensor, *form) if form else tensor


def state_of_linear(
    plan: LinearPlan, module: NVFP4Linear, forms: Mapping[str, Form]
) -> Iterator[tuple[str, torch.Tensor]]:
    """The same for a linear layer, without its bias, which transformers saves."""
    plane = plan.plane
    form = forms.get(plane.weight, _usual_forms(plane)[plane.weight])
    yield hide(plane.weight), _as(module.weight.detach(), *form)
    yield from ((hide(name), tensor) for name, tensor in module.stored.items())
    (scales,) = _scales([plane], module.read_scales(), module.schedule.bundle, 0)
    for name, tensor in zip(plane.tensors, scales, strict=True):
        wanted = forms.get(name, _usual_forms(plane).get(name))
        yield hide(name), _as(tensor, *wanted) if wanted else tensor


def state_of_fp8(plan: FP8Plan, module: FP8Linear) -> Iterator[tuple[str, torch.Tensor]]:
    """The same for a linear layer in FP8.

    Raises:
        ValueError: it was dequantized.
    """
    if module.is_dequantized:
        raise ValueError(f"save_pretrained: {plan.module} was dequantized from FP8: load with fp8='stored' to save it")
    yield hide(plan.weight), module.weight.detach().view(torch.float8_e4m3fn)
    yield from ((hide(name), tensor) for name, tensor in module.stored.items())


def _usual_forms(plane: Plane) -> dict[str, Form]:
    single: tuple[int, ...] = (1,) if plane.global_scale_divides else ()
    forms: dict[str, Form] = {
        plane.weight: ("U8", (plane.rows, plane.cols * 8)),
        plane.global_scale: ("F32", single),
        plane.input_scale: ("F32", single),
    }
    if plane.compressed:  # the other tensor of the pair is always U32 [X]
        return forms | {plane.tensors[0]: ("U8", (plane.rows // SLAB_ROWS, slab_bytes(plane.cols)))}
    return forms | {plane.scale: ("F8_E4M3", (plane.rows, plane.cols))}


def _as(tensor: torch.Tensor, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    return tensor.view(DTYPES[dtype]).view(shape)


def _scales(
    planes: Sequence[Plane], scales: Any, bundle: ModuleType, first_row: int
) -> Iterator[tuple[torch.Tensor, ...]]:
    """Each plane's tensors, from the rows after ``first_row`` of a stack of scales."""
    rows, cols = planes[0].rows, planes[0].cols
    kept = not isinstance(scales, torch.Tensor)
    if not kept or not all(plane.compressed for plane in planes):
        dense = (bundle.decompress_nvfp4_csf_scales(scales) if kept else scales)[:, first_row : first_row + rows]
        dense = dense.view(torch.uint8).contiguous()
    if any(plane.compressed for plane in planes):
        if kept:
            wire = bundle.NVFP4CSFWire.of(*scales.to_wire(), num_rows=scales.num_rows, num_cols=cols)
            wire = wire.cut(rows=range(first_row, first_row + rows))
            fixed, exceptions = wire.fixed, wire.exceptions
        else:
            fixed, exceptions = bundle.compress_nvfp4_csf_scales(dense)
    for expert, plane in enumerate(planes):
        yield (fixed[expert].clone(), exceptions[expert].clone()) if plane.compressed else (dense[expert],)
