"""The module that replaces a model's experts."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from transformers.integrations.moe import ExpertsInterface, grouped_mm_experts_forward, use_experts_implementation

from finegrained_kernels.integrations.transformers.schedule import Schedule

if TYPE_CHECKING:
    from finegrained_kernels.integrations.transformers.experts_plan import ExpertsPlan

IMPLEMENTATIONS = {
    "finegrained_kernels": None,
    "finegrained_kernels_staged": "staged",
    "finegrained_kernels_fused": "fused",
}
"""The names for `experts_implementation` with their strategies. None means the strategy with which the model was
loaded."""

GLOBALS = ("gate_up_global", "down_global", "gate_up_input_global", "down_input_global")


class _Interface(ExpertsInterface):
    """Runs our kernels for every implementation that a model may be set to, by name or by transformers' own choice."""

    def get_interface(self, experts_implementation: str | None, default: Callable) -> Callable:
        strategy = IMPLEMENTATIONS.get(experts_implementation or "")
        return default if strategy is None else _FORWARDS[strategy]


def _run_staged(module: NVFP4ExpertsModule, *call: torch.Tensor) -> torch.Tensor:
    return module.run("staged", *call)


def _run_fused(module: NVFP4ExpertsModule, *call: torch.Tensor) -> torch.Tensor:
    return module.run("fused", *call)


_FORWARDS = {"staged": _run_staged, "fused": _run_fused}


def run_other_experts(module: torch.nn.Module, *call: torch.Tensor) -> torch.Tensor:
    """Runs experts that are not NVFP4 in a model that also has NVFP4 experts, when one of our names is set."""
    return grouped_mm_experts_forward(module, *call)


class PackedModule(torch.nn.Module):
    """A module with packed weights, which are filled after transformers has initialized what it did not load.

    If a model's own code initializes its `named_parameters`, marks on parameters prevent that, not marks on modules.
    And because parameters are replaced by new ones, each new one is marked.
    """

    def register_parameter(self, name: str, param: torch.nn.Parameter | None) -> None:
        super().register_parameter(name, param)
        if param is not None and not param.is_floating_point():
            vars(param)["_is_hf_initialized"] = True


@use_experts_implementation(experts_interface=_Interface())
class NVFP4ExpertsModule(PackedModule):
    """Experts with packed NVFP4 weights, and with scales that are compressed or dense.

    Attributes:
        gate_up_proj: packed uint8 `[E, 2 * I, H / 2]`, rows `[gate; up]`; under tensor or expert parallelism a DTensor.
        down_proj: packed uint8 `[E, H, I / 2]`.
        num_experts: `E`, the number of experts on this rank.
        activation_format: as in `moe_forward`.
        experts: the bundle's `NVFP4Experts` for this module's tensors; None until loaded or, in a copy, until called.
        stored: globals and input scales as in the checkpoint, and which of them it has, by projection, on the CPU, for
            saving.

    Scales and globals are buffers that are not in the state dict; no cast to another dtype changes them.
    """

    gate_up_proj: torch.nn.Parameter
    down_proj: torch.nn.Parameter
    _is_hf_initialized: bool  # transformers does not initialize such a module's tensors

    def __init__(self, config: Any, plan: ExpertsPlan, schedule: Schedule, act_fn: torch.nn.Module) -> None:
        super().__init__()
        self.num_experts = plan.num_experts
        self.hidden_dim, self.intermediate_dim = plan.hidden_size, plan.intermediate_size
        self.act_fn = act_fn
        self.schedule = schedule
        self.activation_format: str | None = None
        self.experts: Any = None
        self.stored: dict[str, torch.Tensor] = {}
        for name, shape in (
            ("gate_up_proj", (self.num_experts, 2 * self.intermediate_dim, self.hidden_dim // 2)),
            ("down_proj", (self.num_experts, self.hidden_dim, self.intermediate_dim // 2)),
        ):
            packed = torch.empty(shape, dtype=torch.uint8)
            self.register_parameter(name, torch.nn.Parameter(packed, requires_grad=False))

    @property
    def device(self) -> torch.device:
        return self.gate_up_proj.device

    @property
    def is_compressed(self) -> bool:
        """Whether any of its scales are compressed."""
        return bool(self._compressed())

    @property
    def scratch_bytes(self) -> int:
        """Bytes of workspace needed to decode these scales."""
        return sum(scales.plane_bytes * scales.num_planes for scales in self._compressed().values())

    @property
    def scale_bytes(self) -> int:
        """Bytes of its scales in memory, without the shared workspace."""
        return sum(buffer.nbytes for name, buffer in self.named_buffers() if name not in GLOBALS)

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        return self.run(self.schedule.strategy, hidden_states, top_k_index, top_k_weights)

    def run(self, strategy: str, *call: torch.Tensor) -> torch.Tensor:
        if self.experts is None:
            self.schedule.prepare_copy()
        return self.schedule.run(self, strategy, *call)

    def set_scales(self, name: str, scales: Any) -> None:
        """Keep ``scales``, `NVFP4CSFScales` or dense bytes, as the buffers of ``name``, "gate_up" or "down"."""
        tensors = {"scales": scales} if isinstance(scales, torch.Tensor) else scales.state_dict()
        for field, tensor in tensors.items():
            self.register_buffer(f"{name}_{field}", tensor, persistent=False)

    def scales(self, name: str) -> Any:
        """The scales called ``name``, as they were given to `set_scales`."""
        dense = self._buffers.get(f"{name}_scales")
        return dense.view(torch.float8_e4m3fn) if dense is not None else self._compressed()[name]

    def _compressed(self) -> dict[str, Any]:
        kind = self.schedule.bundle.NVFP4CSFScales
        fields = kind.__dataclass_fields__
        return {
            name: kind(**{field: self._buffers[f"{name}_{field}"] for field in fields})
            for name in ("gate_up", "down")
            if f"{name}_codes" in self._buffers
        }

    def as_described(self, strategy: str) -> Any:
        """`NVFP4Experts` on the meta device, with the shapes and dtypes that kernels read with ``strategy``."""

        tensors: dict[str, Any] = {"gate_up": local_part(self.gate_up_proj), "down": local_part(self.down_proj)}
        tensors |= {name: self._buffers[name] for name in GLOBALS if self._buffers.get(name) is not None}
        for name in ("gate_up", "down"):
            scales = self.scales(name)
            if strategy == "staged":
                scales = torch.empty(tuple(scales.shape), dtype=torch.float8_e4m3fn, device="meta")
            tensors[f"{name}_scales"] = scales
        return self.schedule.bundle.NVFP4Experts(**{name: tensor.to("meta") for name, tensor in tensors.items()})

    def prepare(self) -> None:
        """Make `experts` from the current tensors."""
        self.schedule.changed()
        self.experts = self.schedule.bundle.NVFP4Experts(
            gate_up=local_part(self.gate_up_proj),
            down=local_part(self.down_proj),
            gate_up_scales=self.scales("gate_up"),
            down_scales=self.scales("down"),
            **{name: self._buffers[name] for name in GLOBALS if name in self._buffers},
            scratch=self.schedule.scratch(self.device) if self.scratch_bytes else None,
        )

    def __getstate__(self) -> dict[str, Any]:
        """The state without `experts`, so that a copy does not have its tensors twice. The first call makes it
        again."""
        return {**self.__dict__, "experts": None}

    def _apply(self, fn: Callable, recurse: bool = True) -> NVFP4ExpertsModule:
        """Move tensors, but never cast them: packed weights, scale bytes and float32 globals have no other dtype."""

        def move(tensor: torch.Tensor) -> torch.Tensor:
            moved = fn(tensor)
            return moved if moved.dtype == tensor.dtype else tensor.to(moved.device)

        super()._apply(move, recurse)
        if self.experts is not None:
            self.prepare()
        return self

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: dict, strict: bool, *found: list[str]
    ) -> None:
        """Accept only this module's own weights, because others would be read with the wrong scales."""
        *_, errors = found
        for name, parameter in self.named_parameters(recurse=False):
            given = state_dict.get(prefix + name)
            if given is not None and not torch.equal(given.to(parameter.device), parameter):
                errors.append(f"{prefix}{name}: other NVFP4 weights, without their scales: use from_pretrained")
                return
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, *found)

    def extra_repr(self) -> str:
        sizes = f"{self.num_experts} experts, {self.hidden_dim} x {self.intermediate_dim}"
        return f"{sizes}, scales={'compressed' if self._compressed() else 'dense'}"


def nvfp4_experts(model: torch.nn.Module) -> list[NVFP4ExpertsModule]:
    """The model's NVFP4 expert modules, in its order."""
    return [module for module in model.modules() if isinstance(module, NVFP4ExpertsModule)]


def set_scale_strategy(model: torch.nn.Module, strategy: str, *, prefetch: bool = False) -> None:
    """From now on, read compressed scales with another strategy: "auto", "staged" or "fused". Nothing is loaded again.

    Raises:
        ValueError: the strategy is none of these, `prefetch` is set without "staged", or no scales are compressed.
    """
    from finegrained_kernels.integrations.transformers.linear import nvfp4_linears

    if strategy not in ("auto", "staged", "fused"):
        raise ValueError(f"strategy must be auto, staged or fused, got {strategy!r}; load again for dense scales")
    if prefetch and strategy != "staged":
        raise ValueError(f"prefetch needs strategy 'staged', got {strategy!r}")
    layers: list[Any] = [*nvfp4_experts(model), *nvfp4_linears(model)]
    if not any(layer.is_compressed for layer in layers):
        raise ValueError("the model has no compressed scales: load it with scale_strategy='staged' or 'fused'")
    schedules: dict[int, Schedule] = {id(layer.schedule): layer.schedule for layer in layers}
    for schedule in schedules.values():
        schedule.switch(strategy, prefetch)


def local_part(parameter: torch.Tensor) -> torch.Tensor:
    """This rank's part of a parameter, which transformers may have turned into a DTensor."""
    return parameter.to_local() if hasattr(parameter, "to_local") else parameter.detach()
