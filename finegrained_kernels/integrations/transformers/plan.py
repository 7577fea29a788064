"""Plans how a checkpoint is loaded into a model, layer by layer, and checks everything that can be checked before
that."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from finegrained_kernels.checkpoint import Checkpoint, CheckpointError, Fault
from finegrained_kernels.checkpoint.config import marked_layers
from finegrained_kernels.checkpoint.errors import raise_faults
from finegrained_kernels.checkpoint.layouts import CONFIG
from finegrained_kernels.checkpoint.module_patterns import is_name
from finegrained_kernels.checkpoint.names import layer_of, split_expert
from finegrained_kernels.checkpoint.quantization_config import ALGORITHMS, MIXED, NVFP4, OTHER, TABLE
from finegrained_kernels.integrations.transformers.experts_plan import ExpertsPlan, plan_experts
from finegrained_kernels.integrations.transformers.linear_plan import (
    FLOATS,
    FP8,
    FP8Plan,
    LinearPlan,
    plan_fp8,
    plan_linear,
)
from finegrained_kernels.integrations.transformers.renaming import Renaming

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_PARTS = "packed weights, scales, globals and perhaps input scales"
_NOT_SUPPORTED = "no format that is supported: NVFP4 in experts and linear layers, FP8 (E4M3) in linear layers"
_KV_SCALE = re.compile(r"(.*\.)?\w*(attn|attention)\.(.*\.)?((k|v|q|kv|prob)_scale|(k|v)_proj\.output_scale)")
_QUANTIZATION = re.compile(
    r"scale|zero_point|zeros|quant|amax|absmax|g_idx|packed|nvfp4|mxfp|weight_shape|codebook|lora_|hadamard|rotation|SCB"
)
"""Words that do not occur in the last part of a plain parameter's name. They show that a quantized tensor is left
unread."""


@dataclass
class ModelPlan:
    """A model's quantized layers, each list in the model's order.

    Attributes:
        kept: names of tensors that nothing uses, but saving writes again: the scales of a quantized KV cache.
        hidden: names of the checkpoint's tensors that transformers does not load: quantized layers' own, and `kept`.
        left_out: modules that the model's class leaves out, such as layers that predict further tokens.
    """

    experts: list[ExpertsPlan] = field(default_factory=list)
    linears: list[LinearPlan] = field(default_factory=list)
    fp8: list[FP8Plan] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)
    hidden: set[str] = field(default_factory=set)
    left_out: set[str] = field(default_factory=set)

    @property
    def nvfp4(self) -> list[ExpertsPlan | LinearPlan]:
        return [*self.experts, *self.linears]

    @property
    def stood_in(self) -> set[str]:
        """The model's parameters that transformers does not fill."""
        return {name for plan in (*self.nvfp4, *self.fp8) for name in plan.stands_in_for}


def plan_model(model: PreTrainedModel, checkpoint: Checkpoint) -> ModelPlan:
    """A plan for each quantized layer. ``model`` is on the meta device, unchanged.

    Raises:
        CheckpointError: something in the checkpoint or config does not fit the model. The message names shard, tensor
            and layer.
    """
    raise_faults(checkpoint.faults)
    rename = Renaming(model)
    plan = ModelPlan()
    faults: list[Fault] = []
    plan.left_out = {plane.layer_module for plane in checkpoint.planes.values() if rename.leaves_out(plane.weight)}
    seen: set[str] = set()
    for plane in checkpoint.planes.values():
        source = plane.layer_module
        if source in plan.left_out or source in seen:
            continue
        if plane.expert is None or rename.is_plain(f"{plane.module}.weight"):
            found = plan_linear(model, checkpoint, plane, rename, faults)
            plan.linears += [found] if found else []
        else:
            seen.add(source)
            plan.experts.append(plan_experts(model, checkpoint, source, rename))
    scales = {plane.scale for plane in checkpoint.planes.values()}
    for name, (_, info) in checkpoint.located.items():
        if info.dtype == FP8 and name not in scales and not rename.leaves_out(name) and not name.endswith("_scale"):
            found_fp8 = plan_fp8(model, checkpoint, name, _block_size(checkpoint, name), rename, faults)
            plan.fp8 += [found_fp8] if found_fp8 else []
    raise_faults(faults)
    if not plan.nvfp4:
        raise CheckpointError(f"{checkpoint.root}: no NVFP4 layers in it, so nothing that these kernels can run")
    order = {name: i for i, (name, _) in enumerate(model.named_modules())}
    for plans in (plan.experts, plan.linears, plan.fp8):
        plans.sort(key=lambda one: order[one.module])
    _check_config(checkpoint)
    plan.kept = [
        name
        for name, (_, info) in checkpoint.located.items()
        if _KV_SCALE.fullmatch(name) and info.dtype in FLOATS and rename.is_unknown(name)
    ]
    plan.hidden = _hidden(checkpoint, plan)
    _check_nothing_ignored(checkpoint, plan, rename)
    _check_nothing_missing(model, checkpoint, plan, rename)
    return plan


def _hidden(checkpoint: Checkpoint, plan: ModelPlan) -> set[str]:
    names = {*plan.kept, *(name for one in plan.fp8 for name in one.tensors)}
    for one in plan.nvfp4:
        for plane in one.planes:
            names.update((plane.weight, plane.global_scale, plane.input_scale, *plane.tensors))
    names.update(one.pre_quant_scale for one in plan.linears)
    return names & checkpoint.located.keys()


def _block_size(checkpoint: Checkpoint, weight: str) -> tuple[int, int]:
    said = checkpoint.quantization
    form = said.layer_format(weight.removesuffix(".weight")) if said else None
    return form.block_size if form and form.block_size else (128, 128)


def _check_config(checkpoint: Checkpoint) -> None:
    """Raise unless the quantized layers in config.json are those in the checkpoint."""
    said = checkpoint.quantization
    raise_faults(said.unsupported if said else ())
    marked, faults = marked_layers({"quantization_config": said.section if said else {}})
    raise_faults(faults)
    compressed = {plane.layer_module for plane in checkpoint.planes.values() if plane.compressed}
    present = {plane.layer_module for plane in checkpoint.planes.values()}
    faults = [
        Fault(CONFIG, module, "has compressed scales, but is not marked as compressed")
        for module in sorted(compressed - marked)
    ]
    faults += [
        Fault(CONFIG, module, "marked as compressed, but the checkpoint has no compressed scales for it")
        for module in sorted(marked - compressed)
    ]
    whole = said.section.get("quant_algo") if said else None
    if said and whole is not None and whole != MIXED and ALGORITHMS[whole].family != NVFP4:
        faults.append(Fault(CONFIG, "quantization_config", f"quant_algo is {whole!r}, but there are NVFP4 layers"))
    modules = {plane.module for plane in checkpoint.planes.values()}
    fp8 = {name.removesuffix(".weight") for name, (_, info) in checkpoint.located.items() if info.dtype == FP8}
    for module in filter(is_name, (said.section.get(TABLE) or {}) if said else ()):
        form = said.layer_format(module) if said else None
        if form is None or module in marked:
            continue
        named = f"named as {form.algorithm}, but the checkpoint has no such"
        if module in modules and form.family != NVFP4:
            continue  # reported below
        if module in fp8 and form.family == NVFP4:
            faults.append(Fault(CONFIG, module, f"named as {form.algorithm}, but the checkpoint has it in FP8"))
        elif form.family == OTHER:
            faults.append(Fault(CONFIG, module, f"quant_algo is {form.algorithm!r}: {_NOT_SUPPORTED}"))
        elif form.family != NVFP4:
            if not any(name == module or name.startswith(f"{module}.") for name in fp8):
                faults.append(Fault(CONFIG, module, f"{named} layer"))
        elif split_expert(module) is not None and layer_of(module) in present:
            if module not in modules:
                faults.append(Fault(CONFIG, module, f"{named} expert or projection"))
        elif not any(name == module or name.startswith(f"{module}.") for name in modules):
            faults.append(Fault(CONFIG, module, f"{named} layer"))
    for plane in checkpoint.planes.values():
        form = said.layer_format(plane.module) if said else None
        if form is not None and form.family != NVFP4:
            shard = checkpoint.located[plane.weight][0]
            faults.append(Fault(shard, plane.weight, f"NVFP4 by its tensors, but {form.algorithm} by the config"))
    raise_faults(faults)


def _check_nothing_ignored(checkpoint: Checkpoint, plan: ModelPlan, rename: Renaming) -> None:
    """Raise if nothing reads a tensor that is quantized or belongs to a quantized layer."""
    sources = {one.source for one in plan.experts}
    linears = {one.source for one in plan.linears} | {one.source for one in plan.fp8}
    faults = []
    for name, (shard, info) in checkpoint.located.items():
        if name in plan.hidden:
            continue
        if belongs_to(name, sources) and not rename.is_plain(name):
            message = f"unknown, {info.dtype} {list(info.shape)}: NVFP4 experts have {_PARTS}"
            faults.append(Fault(shard, name, message))
            continue
        module, _, last = name.rpartition(".")
        targets = rename.targets(name)
        if info.dtype not in FLOATS and any(rename.is_floating(target) for target in targets):
            faults.append(Fault(shard, name, f"is {info.dtype}, in layer {module}: {_NOT_SUPPORTED}"))
        elif rename.is_unknown(name) and (module in linears or info.dtype not in FLOATS or _QUANTIZATION.search(last)):
            kind = f"{info.dtype} {list(info.shape)}"
            where = f"in layer {module}" if module else "in no layer"
            faults.append(Fault(shard, name, f"unknown, {kind} {where}: {_NOT_SUPPORTED}"))
    raise_faults(faults)


def _check_nothing_missing(model: PreTrainedModel, checkpoint: Checkpoint, plan: ModelPlan, rename: Renaming) -> None:
    """Raise if transformers would initialize a parameter at random, because its tensor is missing or has another
    shape."""
    loaded: set[str] = set()
    faults = []
    for name, (shard, info) in checkpoint.located.items():
        if name in plan.hidden:
            continue
        loaded.update(rename.targets(name))
        target, pattern = rename(name)
        if pattern is None and target in rename.state and rename.state[target].shape != info.shape:
            expected = f"expected shape {list(rename.state[target].shape)}, as the config says"
            faults.append(Fault(shard, name, f"{expected}, got {list(info.shape)}"))
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    ignored = [re.compile(pattern) for pattern in getattr(model, "_keys_to_ignore_on_load_missing", None) or ()]
    faults += [
        Fault(checkpoint.root.name, name, "the model needs it, and no shard has it")
        for name in rename.state
        if name not in loaded
        and name not in plan.stood_in
        and name not in tied
        and not any(pattern.search(name) for pattern in ignored)
    ]
    raise_faults(faults)


def belongs_to(name: str, sources: Iterable[str]) -> bool:
    """Whether a tensor of the checkpoint belongs to experts in one of the layers ``sources``."""
    head, separator, _ = name.rpartition(".experts.")
    return bool(separator) and f"{head}.experts" in sources
