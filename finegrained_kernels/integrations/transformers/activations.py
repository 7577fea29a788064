"""Whether each NVFP4 layer quantizes its activations (W4A4) or not (W4A16), as config, checkpoint and caller say."""

from __future__ import annotations

from collections.abc import Sequence

from finegrained_kernels.checkpoint import Checkpoint, CheckpointError, Fault
from finegrained_kernels.checkpoint.errors import raise_faults
from finegrained_kernels.checkpoint.layouts import CONFIG
from finegrained_kernels.checkpoint.quantization_config import NVFP4
from finegrained_kernels.integrations.transformers.experts_plan import ExpertsPlan
from finegrained_kernels.integrations.transformers.linear_plan import LinearPlan

BF16, CALIBRATED, DYNAMIC = "bf16", "nvfp4", "nvfp4_dynamic"
"""Activations are used as they are, quantized with the checkpoint's input scales, or quantized with a scale for each
row."""


def choose_activations(
    checkpoint: Checkpoint, plans: Sequence[ExpertsPlan | LinearPlan], wanted: str
) -> dict[str, str]:
    """How each layer treats its activations, by the layer's module in the checkpoint.

    Args:
        wanted: an `activation_format`. "auto" quantizes if there are input scales, which all layers must have, or none.
            Layers that are weight-only according to the config stay so, with "auto" and with "nvfp4".

    Raises:
        CheckpointError: an input scale is not a single F32 value, as saving requires too; or input scales are used, and
            some are missing.
    """
    faults: list[Fault] = []
    quantized, chosen = [], {}
    for plan in plans:
        faults += _malformed(checkpoint, plan)
        said = {_is_weight_only(checkpoint, plane.module) for plane in plan.planes}
        if len(said) > 1:
            faults.append(Fault(CONFIG, plan.source, "weight-only for some of its experts, and not for others"))
        if wanted in (BF16, DYNAMIC):
            chosen[plan.source] = wanted
        elif said == {True}:
            chosen[plan.source] = BF16
        else:
            quantized.append(plan)
    raise_faults(faults)
    missing = {plan.source: _missing(checkpoint, plan) for plan in quantized}
    used = wanted == CALIBRATED or any(len(missing[plan.source]) < len(_names(plan)) for plan in quantized)
    if wanted == CALIBRATED and not quantized:
        raise CheckpointError(f"{checkpoint.root}: weight-only by its config: activation_format can be auto or bf16")
    without = [plan.source for plan in quantized if len(missing[plan.source]) == len(_names(plan))]
    if used and wanted != CALIBRATED and without:
        message = f"has no input scales, like {len(without)} of {len(quantized)} layers that quantize what they read"
        faults.append(Fault(CONFIG, without[0], f"{message}: choose an activation_format"))
    for plan in quantized:
        chosen[plan.source] = CALIBRATED if used else BF16
        absent = missing[plan.source]
        if used and (wanted == CALIBRATED or plan.source not in without):
            what = "expert" if isinstance(plan, ExpertsPlan) else "layer"
            message = f"missing: quantized activations (W4A4) need one for every {what}"
            faults += [Fault(checkpoint.located[plan.planes[-1].weight][0], name, message) for name in absent]
    raise_faults(faults)
    return chosen


def _is_weight_only(checkpoint: Checkpoint, module: str) -> bool:
    """Whether the config says that the layer is weight-only. If it says nothing, input scales decide."""
    form = checkpoint.quantization.layer_format(module) if checkpoint.quantization else None
    return form is not None and form.family == NVFP4 and form.weight_only


def _names(plan: ExpertsPlan | LinearPlan) -> list[str]:
    """Names of the input scales that the layer may have."""
    return list(dict.fromkeys(plane.input_scale for plane in plan.planes))


def _missing(checkpoint: Checkpoint, plan: ExpertsPlan | LinearPlan) -> list[str]:
    return [name for name in _names(plan) if name not in checkpoint.located]


def _malformed(checkpoint: Checkpoint, plan: ExpertsPlan | LinearPlan) -> list[Fault]:
    faults = []
    stacked = isinstance(plan, ExpertsPlan) and any(plane.part is not None for plane in plan.planes)
    counts = (4, 4 * plan.num_experts) if isinstance(plan, ExpertsPlan) and stacked else (4,)
    for name in _names(plan):
        if name in checkpoint.located:
            shard, info = checkpoint.located[name]
            if info.dtype != "F32" or info.nbytes not in counts:
                faults.append(Fault(shard, name, f"expected one F32 value, got {info.dtype} {list(info.shape)}"))
    return faults
