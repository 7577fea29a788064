"""Which of a model's modules a checkpoint's NVFP4 planes belong to, and everything that can be checked before loading.

The model's structure says it, not its name: transformers' own conversions tell where the weight of an expert's
projection goes, so the scales go there too; and the module it goes to must be one that these kernels can stand in for.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from transformers.activations import SiLUActivation
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
from transformers.integrations.moe import _default_apply_gate

from finegrained_kernels.checkpoint import Checkpoint, CheckpointError, Fault
from finegrained_kernels.checkpoint.config import MIXED, marked_layers
from finegrained_kernels.checkpoint.errors import raise_faults
from finegrained_kernels.checkpoint.layouts import CONFIG
from finegrained_kernels.checkpoint.names import GROUP, Plane, layer_of, split_expert

if TYPE_CHECKING:
    from transformers import PreTrainedModel

GATE_UP, DOWN = "gate_up_proj", "down_proj"
_INPUT_SCALES = {False: ".input_scale", True: ".input_global_scale"}  # by whether globals divide
_FLOATS = ("BF16", "F16", "F32", "F64")
_UNIT = 32  # of weights along K, in the GEMMs
_STRUCTURE = {"has_gate": True, "has_bias": False, "is_transposed": False, "is_concatenated": True}


@dataclass(frozen=True)
class ExpertsPlan:
    """One layer's experts: the model's module, the checkpoint's name for it, and the planes by expert.

    ``halves`` has gate's and up's planes, in this order, and ``down`` those of the down projection.
    """

    module: str
    source: str
    halves: tuple[tuple[Plane, ...], tuple[Plane, ...]]
    down: tuple[Plane, ...]

    @property
    def planes(self) -> list[Plane]:
        return [*self.halves[0], *self.halves[1], *self.down]

    @property
    def num_experts(self) -> int:
        return len(self.down)

    @property
    def hidden_size(self) -> int:
        return self.down[0].rows

    @property
    def intermediate_size(self) -> int:
        return self.halves[0][0].rows


def input_scale_name(plane: Plane) -> str:
    return plane.module + _INPUT_SCALES[plane.global_scale_divides]


def has_input_scales(checkpoint: Checkpoint, plan: ExpertsPlan, wanted: str) -> bool:
    """Whether activations are quantized with calibrated scales. ``wanted`` is an `activation_format`.

    Raises:
        CheckpointError: one is not a single F32 value, which saving needs too; or they are used, and some are missing.
    """
    names = [input_scale_name(plane) for plane in plan.planes]
    missing = [name for name in names if name not in checkpoint.located]
    faults = []
    for name in sorted(set(names) - set(missing)):
        shard, info = checkpoint.located[name]
        if info.dtype != "F32" or info.nbytes != 4:
            faults.append(Fault(shard, name, f"expected one F32 value, got {info.dtype} {list(info.shape)}"))
    used = wanted == "nvfp4" or (wanted == "auto" and len(missing) < len(names))
    if used:
        message = "missing: quantized activations (W4A4) need one for every expert"
        faults += [Fault(_shard(checkpoint, plan), name, message) for name in missing]
    raise_faults(faults)
    return used


def plan_experts(model: PreTrainedModel, checkpoint: Checkpoint, config_dict: Mapping[str, Any]) -> list[ExpertsPlan]:
    """A plan for each layer of NVFP4 experts, in the model's order. ``model`` is on the meta device, unchanged.

    Layers that the model's class leaves out have none: Qwen3-Next's `mtp.`, and GLM-4-MoE's after the last.

    Raises:
        CheckpointError: anything in checkpoint or config that does not fit the model, by layer, expert and projection.
    """
    raise_faults(checkpoint.faults)
    _check_config(checkpoint, config_dict)
    rename = _Renaming(model)
    left_out = _layers_left_out(checkpoint, rename)
    planes = [plane for plane in checkpoint.planes.values() if plane.layer_module not in left_out]
    others = [plane for plane in planes if split_expert(plane.module) is None]
    if others:
        message = f"NVFP4, but no expert: only experts can be; {len(others)} such layers"
        raise CheckpointError([Fault(checkpoint.located[others[0].weight][0], others[0].weight, message)])
    sources = set(checkpoint.experts) - left_out
    if not sources:
        raise CheckpointError(f"{checkpoint.root}: no NVFP4 experts in it, so nothing that these kernels can run")
    plans = [_plan_layer(model, checkpoint, source, rename) for source in checkpoint.experts if source in sources]
    order = {name: i for i, (name, _) in enumerate(model.named_modules())}
    plans.sort(key=lambda plan: order[plan.module])
    _check_nothing_ignored(checkpoint, plans, sources)
    stood_in = {f"{plan.module}.{name}" for plan in plans for name in (GATE_UP, DOWN)}
    _check_nothing_missing(model, checkpoint, rename, sources, stood_in)
    return plans


class _Renaming:
    """Where transformers puts a checkpoint's tensors."""

    def __init__(self, model: PreTrainedModel) -> None:
        mapping = get_model_conversion_mapping(model)
        self._renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
        self._converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
        self._prefix = model.base_model_prefix
        self._unwanted = [re.compile(pattern) for pattern in model._keys_to_ignore_on_load_unexpected or ()]
        self.state = model.state_dict()

    def __call__(self, name: str) -> tuple[str, str | None]:
        return rename_source_key(name, self._renamings, self._converters, self._prefix, self.state)

    def is_floating(self, target: str) -> bool:
        return target in self.state and self.state[target].is_floating_point()

    def converter(self, pattern: str) -> WeightConverter:
        return next(entry for entry in self._converters if pattern in entry.source_patterns)

    def leaves_out(self, name: str) -> bool:
        """Whether the model has no such tensor, and its class says that checkpoints may have it all the same."""
        target, _ = self(name)
        return target not in self.state and any(p.search(key) for p in self._unwanted for key in (name, target))

    def targets(self, name: str) -> list[str]:
        """All parameters that a tensor becomes part of."""
        target, pattern = self(name)
        if target not in self.state and name in self.state:
            return [name]
        first, *others = self.converter(pattern).target_patterns if pattern else [""]
        return [target, *(target.replace(first, other) for other in others)]


def _layers_left_out(checkpoint: Checkpoint, rename: _Renaming) -> set[str]:
    """NVFP4 layers that transformers leaves unread by its own rule, such as those that predict further tokens."""
    weights = {plane.layer_module: plane.weight for plane in checkpoint.planes.values()}
    return {module for module, weight in weights.items() if rename.leaves_out(weight)}


def _plan_layer(model: PreTrainedModel, checkpoint: Checkpoint, source: str, rename: _Renaming) -> ExpertsPlan:
    found = checkpoint.experts[source]
    places: dict[tuple[str, int], tuple[str, str]] = {}
    for projection in dict.fromkeys(projection for _, projection in found):
        target, pattern = rename(f"{source}.0.{projection}.weight")
        module, _, parameter = target.rpartition(".")
        if pattern is None or parameter not in (GATE_UP, DOWN) or target not in rename.state:
            shard = checkpoint.located[next(p for (_, name), p in found.items() if name == projection).weight][0]
            message = f"{type(model).__name__} has no fused experts that {projection} would become part of"
            raise CheckpointError([Fault(shard, f"{source}.0.{projection}", message)])
        patterns = rename.converter(pattern).source_patterns
        if len(patterns) != {GATE_UP: 2, DOWN: 1}[parameter]:
            raise CheckpointError(f"{source}: {parameter} of {type(model).__name__} is made of {patterns}")
        places[parameter, patterns.index(pattern)] = module, projection
    modules = {module for module, _ in places.values()}
    roles = [(GATE_UP, 0), (GATE_UP, 1), (DOWN, 0)]
    if len(modules) != 1 or any(role not in places for role in roles):
        names = ", ".join(projection for _, projection in places.values())
        raise CheckpointError(f"{source}: expected gate, up and down projections of one module, got {names}")
    (module,) = modules
    num_experts = rename.state[f"{module}.{DOWN}"].shape[0]
    stacks = [_stack(checkpoint, source, places[role][1], num_experts) for role in roles]
    plan = ExpertsPlan(module, source, (stacks[0], stacks[1]), stacks[2])
    _check_shapes(checkpoint, plan, rename.state)
    _check_structure(model.get_submodule(module), plan)
    return plan


def _stack(checkpoint: Checkpoint, source: str, projection: str, num_experts: int) -> tuple[Plane, ...]:
    found = checkpoint.experts[source]
    experts = {expert for expert, name in found if name == projection}
    if missing := sorted(set(range(num_experts)) - experts):
        message = f"no NVFP4 scales for experts {missing} of {num_experts}"
        raise CheckpointError(f"{source}: {projection}: {message}")
    if extra := sorted(experts - set(range(num_experts))):
        raise CheckpointError(f"{source}: {projection}: experts {extra}, but the model has {num_experts}")
    return tuple(found[expert, projection] for expert in range(num_experts))


def _check_shapes(checkpoint: Checkpoint, plan: ExpertsPlan, state: Mapping[str, torch.Tensor]) -> None:
    _, rows, hidden = state[f"{plan.module}.{GATE_UP}"].shape
    expected = {id(plan.down): (hidden, rows // 2), **{id(half): (rows // 2, hidden) for half in plan.halves}}
    faults = []
    for stack in (*plan.halves, plan.down):
        for plane in stack:
            n, k = expected[id(stack)]
            if (plane.rows, plane.cols * 16) != (n, k):
                shard, info = checkpoint.located[plane.weight]
                message = f"expected [{n}, {k // 2}] for the {plan.module} of the model, got {list(info.shape)}"
                faults.append(Fault(shard, plane.weight, message))
    raise_faults(faults)


def _check_structure(module: torch.nn.Module, plan: ExpertsPlan) -> None:
    """Raise unless the kernels compute what this module does: down(silu(gate(x)) * up(x)), rows [gate; up]."""
    wrong = [
        f"{name} is {getattr(module, name, None)}"
        for name, want in _STRUCTURE.items()
        if getattr(module, name, None) is not want
    ]
    if getattr(module, "has_post_expert_norm", False):
        wrong.append("it has a norm after each expert")
    if not isinstance(getattr(module, "act_fn", None), (torch.nn.SiLU, SiLUActivation)):
        wrong.append(f"its activation is {type(getattr(module, 'act_fn', None)).__name__}, not SiLU")
    if getattr(type(module), "_apply_gate", None) is not _default_apply_gate:
        wrong.append("it has a gate of its own")
    if plan.hidden_size % _UNIT or plan.intermediate_size % _UNIT:
        wrong.append(f"it is {plan.hidden_size} x {plan.intermediate_size}, which must be multiples of {_UNIT}")
    if wrong:
        raise CheckpointError(f"{plan.module}: {type(module).__name__} cannot run on these kernels: {'; '.join(wrong)}")


_ALGORITHMS = {"NVFP4", "NVFP4_AWQ", "W4A16_NVFP4", MIXED}
"""ModelOpt's names of whole checkpoints whose experts may be NVFP4."""


def _check_config(checkpoint: Checkpoint, config_dict: Mapping[str, Any]) -> None:
    """Raise unless the layers that config.json names are those that the checkpoint has."""
    marked, faults = marked_layers({"quantization_config": config_dict})
    raise_faults(faults)
    compressed = {plane.layer_module for plane in checkpoint.planes.values() if plane.compressed}
    present = {plane.layer_module for plane in checkpoint.planes.values()}
    named = config_dict.get("quantized_layers") or {}
    faults = [
        Fault(CONFIG, module, "has compressed scales, but is not marked as compressed")
        for module in sorted(compressed - marked)
    ]
    faults += [
        Fault(CONFIG, module, "marked as compressed, but the checkpoint has no compressed scales for it")
        for module in sorted(marked - compressed)
    ]
    whole = config_dict.get("quant_algo") or "NVFP4"
    if whole not in _ALGORITHMS:
        faults.append(
            Fault(CONFIG, "quantization_config", f"quant_algo is {whole!r}: only NVFP4 experts are supported")
        )
    modules = {plane.module for plane in checkpoint.planes.values()}
    for module, entry in named.items():
        algorithm, group = entry.get("quant_algo", "NVFP4"), entry.get("group_size", GROUP)
        if algorithm != "NVFP4":
            faults.append(Fault(CONFIG, module, f"quant_algo is {algorithm!r}: only NVFP4 experts are supported"))
        elif group != GROUP:
            faults.append(Fault(CONFIG, module, f"group_size is {group!r}: a scale of NVFP4 is of {GROUP} weights"))
        elif layer_of(module) not in present and module not in marked:
            faults.append(Fault(CONFIG, module, "named as NVFP4, but the checkpoint has no such layer"))
        elif split_expert(module) is not None and module not in modules:
            faults.append(Fault(CONFIG, module, "named as NVFP4, but the checkpoint has no such expert or projection"))
    raise_faults(faults)


def _check_nothing_ignored(checkpoint: Checkpoint, plans: Sequence[ExpertsPlan], sources: set[str]) -> None:
    """Raise for an expert's tensors that would change its result, and that nobody reads."""
    known: set[str] = set()
    for plan in plans:
        for plane in plan.planes:
            known.update((plane.weight, plane.global_scale, input_scale_name(plane), *plane.tensors))
    raise_faults(
        Fault(shard, name, "unknown: an expert has a packed weight, scales, a global and perhaps an input scale")
        for name, (shard, _) in checkpoint.located.items()
        if belongs_to(name, sources) and name not in known
    )


def _check_nothing_missing(
    model: PreTrainedModel, checkpoint: Checkpoint, rename: _Renaming, sources: set[str], stood_in: set[str]
) -> None:
    """Raise if transformers would initialize anything at random, for want of a tensor, or cast what is quantized."""
    loaded: set[str] = set()
    faults = []
    for name, (shard, info) in checkpoint.located.items():
        if belongs_to(name, sources):
            continue
        targets = rename.targets(name)
        loaded.update(targets)
        if info.dtype not in _FLOATS and any(rename.is_floating(target) for target in targets):
            faults.append(
                Fault(shard, name, f"is {info.dtype}: nothing but experts can be quantized, and only to NVFP4")
            )
    raise_faults(faults)
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    ignored = [re.compile(pattern) for pattern in getattr(model, "_keys_to_ignore_on_load_missing", None) or ()]
    missing = [
        name
        for name in rename.state
        if name not in loaded
        and name not in stood_in
        and name not in tied
        and not any(pattern.search(name) for pattern in ignored)
    ]
    raise_faults(Fault(checkpoint.root.name, name, "the model needs it, and no shard has it") for name in missing)


def belongs_to(name: str, sources: set[str]) -> bool:
    """Whether a tensor of the checkpoint is part of an expert in one of the layers ``sources``."""
    head, _, tail = name.rpartition(".experts.")
    return bool(tail[:1].isdigit()) and f"{head}.experts" in sources


def _shard(checkpoint: Checkpoint, plan: ExpertsPlan) -> str:
    return checkpoint.located[plan.down[0].weight][0]
