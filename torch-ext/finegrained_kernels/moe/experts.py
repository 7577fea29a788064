"""The weights of a layer's experts, with a check that they fit together."""

from __future__ import annotations

import dataclasses
from typing import Union

import torch

from ..arguments import kind_of
from ..csf.decode import check_apart, csf_workspace_size
from ..csf.scales import NVFP4CSFScales
from ..first_launch import prepare_launches

Scales = Union[torch.Tensor, NVFP4CSFScales]

PACKED, GLOBAL = (torch.uint8, torch.int8), (torch.float32,)
FIELD_DTYPES = {
    **{"gate_up": PACKED, "down": PACKED},
    **{"gate_up_scales": (torch.float8_e4m3fn, torch.uint8), "down_scales": (torch.float8_e4m3fn, torch.uint8)},
    **{"gate_up_global": GLOBAL, "down_global": GLOBAL, "gate_up_input_global": GLOBAL, "down_input_global": GLOBAL},
}
"""The dtypes that the tensors of `NVFP4Experts` may have."""


@dataclasses.dataclass(frozen=True, eq=False)
class NVFP4Experts:
    """Weights of `E` experts with hidden size `H` and intermediate size `I`, ready for `moe_forward`.

    Attributes:
        gate_up: packed uint8 `[E, 2 * I, H / 2]`, rows `[gate; up]`.
        down: packed uint8 `[E, H, I / 2]`.
        gate_up_scales: float8_e4m3fn `[E, 2 * I, H / 16]`, or the same compressed.
        down_scales: float8_e4m3fn `[E, H, I / 16]`, or the same compressed.
        gate_up_global: float32 multiplier `[E]`, or `[E, 2]` if gate and up differ.
        down_global: float32 multiplier `[E]`.
        gate_up_input_global, down_input_global: for W4A4, the calibrated float32 multipliers of the activations, a
            scalar, `[1]` or `[E]`; None computes one for each row.
        scratch: contiguous uint8 of at least `scratch_size` bytes, into which compressed scales are decoded. Layers may
            share one. None allocates memory in every call.

    Raises:
        ValueError, TypeError: a shape, dtype or device does not fit the others, or the scratch is too small. The
            message names the tensor.
    """

    gate_up: torch.Tensor
    down: torch.Tensor
    gate_up_scales: Scales
    down_scales: Scales
    gate_up_global: torch.Tensor
    down_global: torch.Tensor
    gate_up_input_global: torch.Tensor | None = None
    down_input_global: torch.Tensor | None = None
    scratch: torch.Tensor | None = None

    def __post_init__(self) -> None:
        for name, dtypes in FIELD_DTYPES.items():
            self._check_tensor(name, dtypes)
        num_experts, hidden_size, intermediate_size = self.num_experts, self.hidden_size, self.intermediate_size
        expected = {
            "gate_up": (num_experts, 2 * intermediate_size, hidden_size // 2),
            "down": (num_experts, hidden_size, intermediate_size // 2),
            "gate_up_scales": (num_experts, 2 * intermediate_size, hidden_size // 16),
            "down_scales": (num_experts, hidden_size, intermediate_size // 16),
        }
        for name, shape in expected.items():
            if tuple(getattr(self, name).shape) != shape:
                raise ValueError(f"{name} must have shape {shape}, got {tuple(getattr(self, name).shape)}")
        if hidden_size % 32 or intermediate_size % 32:
            sizes = f"hidden size {hidden_size}, intermediate size {intermediate_size}"
            raise ValueError(f"gate_up and down must have sizes that are multiples of 32, got {sizes}")
        for name, shapes in {
            "gate_up_global": ((num_experts,), (num_experts, 2)),
            "down_global": ((num_experts,),),
            "gate_up_input_global": ((), (1,), (num_experts,)),
            "down_input_global": ((), (1,), (num_experts,)),
        }.items():
            value = getattr(self, name)
            if value is not None and tuple(value.shape) not in shapes:
                raise ValueError(f"{name} must have one of the shapes {shapes}, got {tuple(value.shape)}")
        scratch = self.scratch
        if scratch is not None and not isinstance(scratch, torch.Tensor):
            raise TypeError(f"scratch must be a tensor, got {kind_of(scratch)}")
        if scratch is not None and (scratch.dtype != torch.uint8 or scratch.device != self.gate_up.device):
            device = self.gate_up.device
            raise ValueError(f"scratch must be torch.uint8 on {device}, got {scratch.dtype} on {scratch.device}")
        if scratch is not None and (not scratch.is_contiguous() or scratch.numel() < self.scratch_size):
            raise ValueError(
                f"scratch must be contiguous and hold {self.scratch_size} bytes, got shape {tuple(scratch.shape)}"
            )
        if scratch is not None:
            check_apart("scratch", scratch, self.scratch_size, self._tensors())
        is_real = not torch.compiler.is_compiling() and type(self.gate_up) in (torch.Tensor, torch.nn.Parameter)
        if is_real and self.gate_up.is_cuda:
            prepare_launches()

    def __getstate__(self) -> dict[str, object]:
        """Only the fields: a copy has nothing to do with whose turn it is to use the scratch."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    def _check_tensor(self, name: str, dtypes: tuple[torch.dtype, ...]) -> None:
        value = getattr(self, name)
        if value is None and name.endswith("input_global"):
            return
        is_compressed = name.endswith("_scales") and isinstance(value, NVFP4CSFScales)
        if not is_compressed and (not isinstance(value, torch.Tensor) or value.dtype not in dtypes):
            raise TypeError(f"{name} must be {' or '.join(map(str, dtypes))}, got {kind_of(value)}")
        if value.device != self.gate_up.device:
            raise ValueError(f"{name} must be on {self.gate_up.device} like gate_up, got {value.device}")

    @property
    def num_experts(self) -> int:
        return self.gate_up.shape[0]

    @property
    def hidden_size(self) -> int:
        return self.gate_up.shape[2] * 2

    @property
    def intermediate_size(self) -> int:
        return self.gate_up.shape[1] // 2

    @property
    def scratch_size(self) -> int:
        """Bytes of scratch needed to decode all compressed scales of these experts; 0 if they are dense."""
        return sum(csf_workspace_size(scales) for scales in self._compressed())

    def _tensors(self) -> dict[str, torch.Tensor | None]:
        """All tensors but the scratch. Those of compressed scales have their names from `NVFP4CSFScales`."""
        tensors: dict[str, torch.Tensor | None] = {}
        for name in FIELD_DTYPES:
            value = getattr(self, name)
            if isinstance(value, NVFP4CSFScales):
                tensors.update({f"{name}.{part}": tensor for part, tensor in value.state_dict().items()})
            else:
                tensors[name] = value
        return tensors

    def _compressed(self) -> list[NVFP4CSFScales]:
        return [scales for scales in (self.gate_up_scales, self.down_scales) if isinstance(scales, NVFP4CSFScales)]
