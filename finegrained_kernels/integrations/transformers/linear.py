"""The modules that replace quantized linear layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import torch

from finegrained_kernels.integrations.transformers.experts import PackedModule, local_part

if TYPE_CHECKING:
    from finegrained_kernels.integrations.transformers.schedule import Schedule


class StoredLinear(PackedModule):
    """A linear layer whose weight stays in memory as the checkpoint stores it.

    Attributes:
        weight: uint8 `[out_features, bytes of a row]`; under tensor parallelism a DTensor.
        bias: as in the layer that this one replaces, or None. It is loaded by transformers.
        stored: the layer's other tensors in the checkpoint, by name, on the CPU, for saving.
    """

    weight: torch.nn.Parameter
    bias: torch.nn.Parameter | None
    _is_hf_initialized: bool  # transformers does not initialize such a module's tensors
    _hf_quantized_needs_local_tp = True  # transformers' parallel plans then pass this rank's part as a plain tensor

    def __init__(self, replaced: torch.nn.Linear, row_bytes: int) -> None:
        super().__init__()
        self.in_features, self.out_features = replaced.in_features, replaced.out_features
        packed = torch.empty((self.out_features, row_bytes), dtype=torch.uint8)
        self.weight = torch.nn.Parameter(packed, requires_grad=False)
        self.register_parameter("bias", replaced.bias)
        self.stored: dict[str, torch.Tensor] = {}

    @property
    def device(self) -> torch.device:
        return self.weight.device

    def prepare(self) -> None:
        """Compute again what depends on the tensors, after they have changed."""

    def _apply(self, fn: Callable, recurse: bool = True) -> StoredLinear:
        """Move tensors, but never cast them, except for the bias."""

        def move(tensor: torch.Tensor) -> torch.Tensor:
            moved = fn(tensor)
            return moved if moved.dtype == tensor.dtype or tensor is self.bias else tensor.to(moved.device)

        super()._apply(move, recurse)
        self.prepare()
        return self

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: dict, strict: bool, *found: list[str]
    ) -> None:
        """Accept only this module's own weight, because another would be read with the wrong scales."""
        *_, errors = found
        given = state_dict.get(f"{prefix}weight")
        if given is not None and not torch.equal(given.to(self.device), self.weight):
            errors.append(f"{prefix}weight: other quantized weights, without their scales: use from_pretrained")
            return
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, *found)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


class NVFP4Linear(StoredLinear):
    """A linear layer with packed NVFP4 weights, and with scales that are compressed or dense.

    Attributes:
        weight: packed uint8 `[N, K / 2]`.
        activation_format: "bf16" for W4A16, None for W4A4, as `matmul_2d` takes it.
        weight_global: float32 `[1]`, multiplier of the weights. It is a buffer, like the three that follow.
        input_global: float32 `[1]`, multiplier of quantized activations; None computes one for each row.
        pre_quant_scale: `[K]`, multiplies the activations first; None in most checkpoints.
        dense_scales, or bases, codes, exceptions and exception_offsets: the scales, as dense bytes `[1, N, K / 16]` or
            compressed.

    Buffers are not in the state dict, and no cast to another dtype changes them.
    """

    weight_global: torch.Tensor
    input_global: torch.Tensor | None
    pre_quant_scale: torch.Tensor | None

    def __init__(self, replaced: torch.nn.Linear, schedule: Schedule) -> None:
        super().__init__(replaced, replaced.in_features // 2)
        self.schedule = schedule
        self.activation_format: str | None = None
        self._ready: tuple[torch.Tensor, Any] | None = None
        for name in ("weight_global", "input_global", "pre_quant_scale"):
            self.register_buffer(name, None, persistent=False)

    @property
    def scale_bytes(self) -> int:
        """Bytes of its scales in memory."""
        return sum(
            buffer.nbytes
            for name, buffer in self.named_buffers()
            if name not in ("weight_global", "input_global", "pre_quant_scale")
        )

    @property
    def is_compressed(self) -> bool:
        return "codes" in self._buffers

    def set_scales(self, scales: Any) -> None:
        """Keep ``scales``, `NVFP4CSFScales` or dense bytes `[1, N, K / 16]`, as buffers."""
        tensors = {"dense_scales": scales} if isinstance(scales, torch.Tensor) else scales.state_dict()
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor, persistent=False)

    def read_scales(self) -> Any:
        """The scales, as they were given to `set_scales`; dense ones as float8_e4m3fn."""
        if not self.is_compressed:
            return self.get_buffer("dense_scales").view(torch.float8_e4m3fn)
        kind = self.schedule.bundle.NVFP4CSFScales
        return kind(**{name: self._buffers[name] for name in kind.__dataclass_fields__})

    def as_pair(self) -> tuple[torch.Tensor, Any]:
        """(weight, scales), as the bundle's `matmul_2d` and `warm_up` take them."""
        scales = self.read_scales()
        return local_part(self.weight), scales[0] if isinstance(scales, torch.Tensor) else scales

    def prepare(self) -> None:
        """Prepare the current tensors for running, after loading and after each move."""
        if self.is_compressed or "dense_scales" in self._buffers:
            for tensor in (local_part(self.weight), *self.buffers()):
                torch._dynamo.mark_static_address(tensor, guard=False)  # or every replay of a CUDA graph would copy it
            self._ready = self._operands()

    def _operands(self) -> tuple[torch.Tensor, Any]:
        scales = self.read_scales()
        return local_part(self.weight), scales if self.is_compressed else scales[0]

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        weight, scales = self._ready or self._operands()
        bundle = self.schedule.bundle
        rows = hidden_states.reshape(-1, hidden_states.shape[-1])
        if self.pre_quant_scale is not None:
            rows = rows * self.pre_quant_scale.to(rows.dtype)
        if self.is_compressed and self.schedule.strategy == "staged":
            scales = bundle.decompress_nvfp4_csf_scales(scales)[0]
        out = bundle.matmul_2d(
            rows, weight, None, scales, activation_format=self.activation_format,
            a_global_scale=self.input_global, b_global_scale=self.weight_global,
        )  # fmt: skip
        out = out.view(*hidden_states.shape[:-1], out.shape[-1])
        return out if self.bias is None else out + self.bias

    def __getstate__(self) -> dict[str, Any]:
        """The state without tensors that a copy would otherwise have twice."""
        return {**self.__dict__, "_ready": None}

    def extra_repr(self) -> str:
        kind = "compressed" if self.is_compressed else "dense"
        return f"{super().extra_repr()}, scales={kind}, {'W4A16' if self.activation_format else 'W4A4'}"


class FP8Linear(StoredLinear):
    """A linear layer with FP8 (E4M3) weights, which are dequantized by each call, or once.

    Activations stay as they are. A dequantized weight is its code times its scale, in float32, rounded once to the
    dtype of the activations.

    Attributes:
        weight: uint8 `[N, K]`, the bytes of E4M3 codes; once dequantized, the weight in the model's dtype.
        scale: float32 buffer with one scale for each `block`: `[1, 1]`, `[N, 1]`, or `[N, K]` divided by `block`.
        block: the number of rows and of columns that share a scale.
    """

    scale: torch.Tensor | None

    def __init__(self, replaced: torch.nn.Linear) -> None:
        super().__init__(replaced, replaced.in_features)
        self.register_buffer("scale", None, persistent=False)
        self.block = (1, 1)

    @property
    def is_dequantized(self) -> bool:
        return self.weight.dtype != torch.uint8

    def dequantized(self, dtype: torch.dtype) -> torch.Tensor:
        """This rank's weight `[N, K]` in ``dtype``."""
        weight = local_part(self.weight)
        if self.scale is None:
            return weight
        codes = weight.view(torch.float8_e4m3fn).float()
        scale, (rows, cols) = self.scale, codes.shape
        for dim, (extent, block) in enumerate(zip((rows, cols), self.block, strict=True)):
            if scale.shape[dim] > 1 and block > 1:
                scale = scale.repeat_interleave(block, dim).narrow(dim, 0, extent)
        return (codes * scale).to(dtype)

    def dequantize(self, dtype: torch.dtype) -> None:
        """From now on keep the weight in ``dtype``, and no longer in FP8."""
        weight = self.dequantized(dtype)
        if hasattr(self.weight, "to_local"):
            from torch.distributed.tensor import DTensor

            whole = cast(DTensor, self.weight)
            weight = DTensor.from_local(weight, whole.device_mesh, whole.placements, run_check=False)
        self.weight = torch.nn.Parameter(weight, requires_grad=False)
        self.scale = None

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        if not hidden_states.is_floating_point():  # some models cast to `weight.dtype`, and bytes can be multiplied
            message = "the model casts them to the dtype of the weight, so this layer must not be quantized"
            raise TypeError(f"activations of {self}: expected floating point, got {hidden_states.dtype}: {message}")
        weight = self.dequantized(hidden_states.dtype)
        return torch.nn.functional.linear(hidden_states, weight, self.bias)


def nvfp4_linears(model: torch.nn.Module) -> list[NVFP4Linear]:
    """The model's NVFP4 linear layers, in its order."""
    return [module for module in model.modules() if isinstance(module, NVFP4Linear)]
