"""Finds the module of a model to which a checkpoint's NVFP4 experts belong.

This depends on the model's structure, not on its name: transformers' own conversions tell where the weight of an
expert's projection goes, so its scales go there too. That module has to be one that these kernels can replace.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from transformers.activations import SiLUActivation
from transformers.integrations.moe import _default_apply_gate

from finegrained_kernels.checkpoint import Checkpoint, CheckpointError, Fault
from finegrained_kernels.checkpoint.errors import raise_faults
from finegrained_kernels.checkpoint.names import Plane
from finegrained_kernels.checkpoint.slices import GATE, NAMES, UP
from finegrained_kernels.integrations.transformers.renaming import Renaming

if TYPE_CHECKING:
    from transformers import PreTrainedModel

GATE_UP, DOWN = "gate_up_proj", "down_proj"
_ROLES = {name: (GATE_UP, i) for i, role in enumerate((GATE, UP)) for name in NAMES[role]}
_ROLES |= dict.fromkeys(NAMES[DOWN], (DOWN, 0))
"""By the name of an expert's own tensor, the parameter to which it belongs, and which half of it."""

_UNIT = 32  # in the GEMMs, K is a multiple of it
_STRUCTURE = {"has_gate": True, "has_bias": False, "is_transposed": False, "is_concatenated": True}


@dataclass(frozen=True)
class ExpertsPlan:
    """One layer's experts: the model's module, the checkpoint's name for it, and the planes by expert.

    ``halves`` has the planes of gate and up, ``down`` those of the down projection. If one tensor has both gate and up,
    their planes are the same.
    """

    module: str
    source: str
    halves: tuple[tuple[Plane, ...], tuple[Plane, ...]]
    down: tuple[Plane, ...]

    @property
    def is_fused(self) -> bool:
        """Whether gate and up are rows of one plane, in this order."""
        return self.halves[0] is self.halves[1]

    @property
    def half_rows(self) -> list[range]:
        """Which rows of their planes are gate, and which are up."""
        rows = self.halves[0][0].rows
        return [range(rows // 2), range(rows // 2, rows)] if self.is_fused else [range(rows)] * 2

    @property
    def planes(self) -> list[Plane]:
        return [*self.halves[0], *(() if self.is_fused else self.halves[1]), *self.down]

    @property
    def stands_in_for(self) -> list[str]:
        """The model's parameters into which these planes' weights go."""
        return [f"{self.module}.{name}" for name in (GATE_UP, DOWN)]

    @property
    def num_experts(self) -> int:
        return len(self.down)

    @property
    def hidden_size(self) -> int:
        return self.down[0].rows

    @property
    def intermediate_size(self) -> int:
        return len(self.half_rows[0])


def plan_experts(model: PreTrainedModel, checkpoint: Checkpoint, source: str, rename: Renaming) -> ExpertsPlan:
    """The plan of the layer ``source``. ``model`` is on the meta device, unchanged.

    Raises:
        CheckpointError: experts do not fit the model. The message names layer, expert and projection.
    """
    places = _places(model, checkpoint, source, rename)
    modules = {module for module, _ in places.values()}
    for module in modules:
        _check_structure(model.get_submodule(module), module)
    roles = [(GATE_UP, 0), (GATE_UP, 1), (DOWN, 0)]
    if len(modules) != 1 or any(role not in places for role in roles):
        names = ", ".join(dict.fromkeys(projection for _, projection in places.values()))
        message = f"expected gate, up and down projections of one module in NVFP4, got {names}"
        planes = checkpoint.experts[source].values()
        read = {name for p in planes for name in (*p.tensors, p.weight, p.global_scale, p.input_scale)}
        for name, (shard, info) in checkpoint.located.items():
            if name.startswith(f"{source}.") and name not in read and info.dtype != "F32":
                raise CheckpointError([Fault(shard, name, f"{info.dtype} {list(info.shape)} in {source}: {message}")])
        raise CheckpointError(f"{source}: {message}")
    (module,) = modules
    num_experts = rename.state[f"{module}.{DOWN}"].shape[0]
    stacks = {name: _stack(checkpoint, source, name, num_experts) for _, name in places.values()}
    gate, up, down = (stacks[places[role][1]] for role in roles)
    plan = ExpertsPlan(module, source, (gate, up), down)
    _check_shapes(checkpoint, plan, rename.state)
    return plan


def _places(
    model: PreTrainedModel, checkpoint: Checkpoint, source: str, rename: Renaming
) -> dict[tuple[str, int], tuple[str, str]]:
    """For each parameter of the model and half of it: its module, and the checkpoint's projection that goes there.

    transformers' conversions tell. Some architectures have no conversions, because their unquantized checkpoints have
    one tensor for all experts. ModelOpt and llm-compressor write one for each expert; then the names of projections
    tell.
    """
    found = checkpoint.experts[source]
    places: dict[tuple[str, int], tuple[str, str]] = {}
    for projection in dict.fromkeys(projection for _, projection in found):
        plane = next(plane for (_, name), plane in found.items() if name == projection)
        target, pattern = rename(f"{source}.0.{projection}.weight")
        module, _, parameter = target.rpartition(".")
        if pattern is not None and parameter in (GATE_UP, DOWN) and target in rename.state:
            patterns = rename.converter(pattern).source_patterns
            if len(patterns) != (count := {GATE_UP: 2, DOWN: 1}[parameter]):
                made = f"expected {parameter} of {type(model).__name__} to be made of {count} weights of an expert"
                raise CheckpointError(f"{source}: {made}, got {', '.join(patterns)}")
            places[parameter, patterns.index(pattern)] = module, projection
            continue
        role = _ROLES.get(projection) if plane.part is None else None
        target, _ = rename(f"{source}.{role[0] if role else projection}")  # where a tensor of all experts goes
        module, _, parameter = target.rpartition(".")
        if parameter not in (GATE_UP, DOWN) or target not in rename.state:
            shard = checkpoint.located[plane.weight][0]
            message = f"{type(model).__name__} has no {target}: only experts of gate, up and down are supported"
            raise CheckpointError([Fault(shard, f"{source}.0.{projection}", message)])
        for i_half in [role[1]] if role else range({GATE_UP: 2, DOWN: 1}[parameter]):
            places[parameter, i_half] = module, projection
    return places


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
    inner = rows // 2
    half = (2 * inner if plan.is_fused else inner, hidden)
    faults = []
    for n, k, stack in ((*half, plan.halves[0]), (*half, plan.halves[1]), (hidden, inner, plan.down)):
        for plane in dict.fromkeys(stack):
            if (plane.rows, plane.cols * 16) != (n, k):
                shard, info = checkpoint.located[plane.weight]
                stacked = "" if plane.part is None else f"{len(stack)}, "
                message = (
                    f"expected [{stacked}{n}, {k // 2}] for the {plan.module} of the model, got {list(info.shape)}"
                )
                faults.append(Fault(shard, plane.weight, message))
    raise_faults(faults)
    if hidden % _UNIT or inner % _UNIT:
        sizes = f"they are {hidden} x {inner}, which must be multiples of {_UNIT}"
        raise CheckpointError(f"{plan.module}: these experts cannot run on these kernels: {sizes}")


def _check_structure(module: torch.nn.Module, where: str) -> None:
    """Raise unless the kernels compute what this module does: down(silu(gate(x)) * up(x)), with rows [gate; up]."""
    wrong = [
        f"{name} is {getattr(module, name)}"
        for name, want in _STRUCTURE.items()
        if getattr(module, name, want) is not want
    ]
    if getattr(module, "has_post_expert_norm", False):
        wrong.append("it has a norm after each expert")
    activation = getattr(module, "act_fn", None)
    if activation is not torch.nn.functional.silu and not isinstance(activation, (torch.nn.SiLU, SiLUActivation)):
        wrong.append(f"its activation is {getattr(activation, '__name__', type(activation).__name__)}, not SiLU")
    if not all(hasattr(module, name) for name in _STRUCTURE):
        wrong = ["it is not of transformers' common kind"]
    elif getattr(type(module), "_apply_gate", None) is not _default_apply_gate:
        wrong.append("it has a gate of its own")
    if wrong:
        raise CheckpointError(f"{where}: {type(module).__name__} cannot run on these kernels: {'; '.join(wrong)}")
