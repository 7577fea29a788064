"""Loads a checkpoint's shards into modules that transformers has allocated: one layer at a time, and only this rank's
part."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, NamedTuple

import torch

from finegrained_kernels.checkpoint import CheckpointError, Fault
from finegrained_kernels.checkpoint.contents import TensorReader
from finegrained_kernels.checkpoint.names import Plane
from finegrained_kernels.checkpoint.slices import read_compressed_stack, read_dense_stack, read_globals
from finegrained_kernels.checkpoint.wire import geometry_problem
from finegrained_kernels.integrations.transformers.activations import CALIBRATED
from finegrained_kernels.integrations.transformers.experts import NVFP4ExpertsModule, local_part
from finegrained_kernels.integrations.transformers.experts_plan import ExpertsPlan
from finegrained_kernels.integrations.transformers.linear import FP8Linear, NVFP4Linear, StoredLinear
from finegrained_kernels.integrations.transformers.linear_plan import FP8Plan, LinearPlan

STAGING_BYTES = 32 << 20
"""How many bytes of packed weights are read at a time."""


class Part(NamedTuple):
    """This rank's part of a layer: some experts as a whole, or a slice of each."""

    experts: range
    tp_rank: int = 0
    tp_size: int = 1


def part_of(module: NVFP4ExpertsModule, plan: ExpertsPlan) -> Part:
    """The part that transformers' parallel plan gave to this rank, inferred from the parameter that it cut."""
    cut = _cut_of(module.gate_up_proj, plan.module)
    if cut is None:
        return Part(range(plan.num_experts))
    if cut.dim == 0:
        count = plan.num_experts // cut.size
        return Part(range(cut.rank * count, (cut.rank + 1) * count))
    return Part(range(plan.num_experts), cut.rank, cut.size)


class _Cut(NamedTuple):
    """This rank's slice of a parameter that is cut along ``dim``."""

    dim: int
    rank: int
    size: int


def _cut_of(parameter: torch.Tensor, module: str) -> _Cut | None:
    placements = getattr(parameter, "placements", ())
    split = [(i, placement) for i, placement in enumerate(placements) if not placement.is_replicate()]
    if not split:
        return None
    if len(split) > 1:
        raise CheckpointError(f"{module}: cut along several mesh dimensions, which is not supported: {placements}")
    (i_mesh, placement) = split[0]
    mesh: Any = getattr(parameter, "device_mesh", None)  # a parameter with placements is a DTensor, so it has a mesh
    return _Cut(placement.dim % parameter.dim(), mesh.get_local_rank(i_mesh), mesh.size(i_mesh))


def load_experts(
    reader: TensorReader, plan: ExpertsPlan, module: NVFP4ExpertsModule, *, strategy: str, input_scales: bool
) -> None:
    """Fill the module's weights in place, and set its scales and globals.

    Raises:
        CheckpointError: sizes cannot be cut, planes are malformed, or input scales differ. The message names shard and
            tensor.
    """
    part, device = part_of(module, plan), module.device
    halves = [[half[expert] for expert in part.experts] for half in plan.halves]
    down = [plan.down[expert] for expert in part.experts]
    rows = {"gate_up": plan.half_rows, "down": [range(plan.hidden_size)]}
    for name, stack, by_columns in (("gate_up", halves, False), ("down", [down], True)):
        weights = local_part(getattr(module, f"{name}_proj"))
        _read_weights(reader, stack, rows[name], weights.detach(), part, by_columns)
        cut = {"by_columns": by_columns, "tp_rank": part.tp_rank, "tp_size": part.tp_size, "device": device}
        cut["rows"] = rows[name]
        module.set_scales(name, _read_scales(module.schedule.bundle, reader, stack, strategy, cut))
    for name, stack in (("gate_up", halves), ("down", [down])):
        module.stored[name] = _read_stored(reader, stack, lambda plane: plane.global_scale)
        multipliers = _weight_globals(reader, stack, module.stored[name])
        module.register_buffer(f"{name}_global", multipliers.to(device), persistent=False)
        located = [[plane.input_scale in reader.checkpoint.located for plane in planes] for planes in stack]
        module.stored[f"{name}_has_input"] = torch.tensor(located).T
        module.stored[f"{name}_input"] = _read_stored(reader, stack, lambda plane: plane.input_scale)
        if input_scales:
            multipliers = _input_scales(reader, stack, module.stored[f"{name}_input"])
            module.register_buffer(f"{name}_input_global", multipliers.to(device), persistent=False)


def load_linear(
    reader: TensorReader, plan: LinearPlan, module: NVFP4Linear, *, strategy: str, activations: str
) -> None:
    """The same for a linear layer. ``activations`` is one of the results of `choose_activations`."""
    cut, device, plane = _cut_of(module.weight, plan.module), module.device, plan.plane
    _refuse_packed_plans(module, plan.module)
    by_columns = cut is not None and cut.dim == 1
    part = {"tp_rank": cut.rank, "tp_size": cut.size} if cut else {}
    scales = _read_scales(
        module.schedule.bundle, reader, [[plane]], strategy, {"by_columns": by_columns, "device": device, **part}
    )
    module.set_scales(scales)
    weights = local_part(module.weight).unsqueeze(0)
    _read_weights(reader, [[plane]], [range(plane.rows)], weights, Part(range(1), **part), by_columns)
    read = {plane.global_scale: _read_stored(reader, [[plane]], lambda plane: plane.global_scale)}
    module.weight_global = _weight_globals(reader, [[plane]], read[plane.global_scale]).to(device)
    if activations == CALIBRATED:
        stored = _read_stored(reader, [[plane]], lambda plane: plane.input_scale)
        module.input_global = _input_scales(reader, [[plane]], stored).to(device)
    for name in (plane.global_scale, plane.input_scale, plan.pre_quant_scale):
        if name in reader.checkpoint.located:
            module.stored[name] = read_tensor(reader, name)
    if plan.pre_quant_scale in module.stored:
        scale = module.stored[plan.pre_quant_scale].view(-1)
        _check_finite(reader, plan.pre_quant_scale, scale, "which cannot multiply activations")
        if by_columns and cut is not None:
            scale = scale.view(cut.size, -1)[cut.rank]
        module.pre_quant_scale = scale.to(device)
    module.prepare()


def load_fp8(reader: TensorReader, plan: FP8Plan, module: FP8Linear) -> None:
    """The same for a linear layer in FP8."""
    cut, (rows, cols) = _cut_of(module.weight, plan.module), reader.checkpoint.located[plan.weight][1].shape
    _refuse_packed_plans(module, plan.module)
    module.stored = {name: read_tensor(reader, name) for name in plan.tensors if name != plan.weight}
    scale, block = module.stored[plan.scale], plan.block
    scale = torch.exp2(scale.view(torch.uint8).float() - 127) if scale.element_size() == 1 else scale.float()
    _check_finite(reader, plan.scale, scale, "which is not a scale")
    scale = scale.view(-(-rows // block[0]), -(-cols // block[1]))
    weight = read_tensor(reader, plan.weight).view(torch.uint8)
    if cut is not None:
        extent = weight.shape[cut.dim]
        if extent % cut.size:
            message = f"{extent} {('rows', 'columns')[cut.dim]} cannot be cut into {cut.size} equal parts"
            raise CheckpointError([Fault(reader.checkpoint.located[plan.weight][0], plan.weight, message)])
        part, first = extent // cut.size, extent // cut.size * cut.rank
        weight = weight.narrow(cut.dim, first, part)
        if scale.shape[cut.dim] > 1:
            scale = scale.repeat_interleave(block[cut.dim], cut.dim).narrow(cut.dim, first, part)
            block = (1, block[1]) if cut.dim == 0 else (block[0], 1)
    local_part(module.weight).copy_(weight)
    module.scale, module.block = scale.to(module.device), block


def _check_finite(reader: TensorReader, name: str, values: torch.Tensor, why: str) -> None:
    bad = values[~values.isfinite()]
    if len(bad):
        raise CheckpointError([Fault(reader.checkpoint.located[name][0], name, f"has {float(bad[0])}, {why}")])


def read_tensor(reader: TensorReader, name: str) -> torch.Tensor:
    """A tensor as it is stored, on the CPU."""
    info = reader.checkpoint.located[name][1]
    data = torch.frombuffer(bytearray(reader.read(name)) or bytearray(1), dtype=torch.uint8)[: info.nbytes]
    return data.view(DTYPES[info.dtype]).view(info.shape)


DTYPES = {
    **{"U8": torch.uint8, "I8": torch.int8, "F8_E4M3": torch.float8_e4m3fn, "F8_E8M0": torch.float8_e8m0fnu},
    **{"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64},
}
"""The dtypes of tensors of quantized layers, by their names in safetensors."""


def _refuse_packed_plans(module: StoredLinear, name: str) -> None:
    for placement in getattr(module.weight, "placements", ()):
        if type(placement).__name__ == "_StridedShard":
            raise CheckpointError(f"{name}: quantized, and cut by a plan for fused weights, which is not supported")


def _read_scales(
    bundle: ModuleType, reader: TensorReader, stack: list[list[Plane]], strategy: str, cut: dict[str, Any]
) -> Any:
    """`NVFP4CSFScales`, or dense bytes uint8 `[E, N, C]`, depending on the strategy.

    Planes that the format does not support, such as those of more than 2^24 bytes, stay dense.
    """
    dense = not any(plane.compressed for planes in stack for plane in planes)
    first = stack[0][0]
    if dense and (strategy in ("auto", "dense") or geometry_problem(first.rows, first.cols)):
        return read_dense_stack(reader, stack, **cut)
    compressed = read_compressed_stack(reader, stack, **cut)
    if strategy != "dense":
        return compressed
    return bundle.decompress_nvfp4_csf_scales(compressed).view(torch.uint8)


def _read_weights(
    reader: TensorReader,
    stack: list[list[Plane]],
    half_rows: Sequence[range],
    weights: torch.Tensor,
    part: Part,
    by_columns: bool,
) -> None:
    """Fill `weights [E, N, K / 2]`, in which halves are stacked by rows, a few experts at a time."""
    num_experts, num_rows, num_bytes = weights.shape
    rows = num_rows // len(stack)
    columns = slice(part.tp_rank * num_bytes, (part.tp_rank + 1) * num_bytes) if by_columns else slice(None)
    width = num_bytes * part.tp_size if by_columns else num_bytes
    batch = max(1, STAGING_BYTES // (rows * width))
    staging = bytearray(min(batch, num_experts) * rows * width)
    view = memoryview(staging)
    for i_half, planes in enumerate(stack):
        first = half_rows[i_half].start + (0 if by_columns else part.tp_rank * rows)
        for begin in range(0, num_experts, batch):
            some = planes[begin : begin + batch]
            for i, plane in enumerate(some):
                own = view[i * rows * width : (i + 1) * rows * width]
                reader.read_into(plane.weight, own, plane.weight_begin + first * width)
            read = torch.frombuffer(staging, dtype=torch.uint8)[: len(some) * rows * width].view(len(some), rows, width)
            weights[begin : begin + len(some), i_half * rows : (i_half + 1) * rows].copy_(read[:, :, columns])


def _read_stored(
    reader: TensorReader, stack: Sequence[Sequence[Plane]], name_of: Callable[[Plane], str]
) -> torch.Tensor:
    """Single float32 values as they are in the checkpoint, `[E, halves]`, for saving; zero if it has none."""

    def read(plane: Plane) -> bytes | memoryview:
        name = name_of(plane)
        return reader.read_value(name, plane.part) if name in reader.checkpoint.located else bytes(4)

    columns = [b"".join(map(read, planes)) for planes in stack]
    return torch.stack([torch.frombuffer(bytearray(data), dtype=torch.float32) for data in columns], dim=1)


def _weight_globals(reader: TensorReader, stack: Sequence[Sequence[Plane]], stored: torch.Tensor) -> torch.Tensor:
    """Second-level scales as multipliers, float32 `[E]` or `[E, 2]`. They may be zero, if all weights of an expert
    are."""
    multipliers = read_globals(reader, stack)
    values = multipliers.view(stored.shape)
    for expert, half in (~(values.isfinite() & (values >= 0))).nonzero().tolist():
        name = stack[half][expert].global_scale
        message = f"is {float(stored[expert, half])}, which is not a scale"
        raise CheckpointError([Fault(reader.checkpoint.located[name][0], name, message)])
    return multipliers


def _input_scales(reader: TensorReader, stack: Sequence[Sequence[Plane]], stored: torch.Tensor) -> torch.Tensor:
    """Multipliers of the activations, float32 `[E]`. Gate and up read the same activations, so theirs must be equal."""

    def fault(expert: int, half: int, message: str) -> CheckpointError:
        name = stack[half][expert].input_scale
        return CheckpointError([Fault(reader.checkpoint.located[name][0], name, message)])

    without = "load with activation_format='bf16' or 'nvfp4_dynamic', which need none"
    divides = torch.tensor([[plane.global_scale_divides for plane in planes] for planes in stack]).T
    multipliers = torch.where(divides, 1 / stored, stored)
    bad = (~((multipliers > 0) & multipliers.isfinite())).nonzero()
    if len(bad):  # for example, of an expert that got no tokens during calibration
        expert, half = bad[0].tolist()
        raise fault(expert, half, f"is {float(stored[expert, half])}, which is not a scale; {without}")
    unlike = (stored != stored[:, :1]).nonzero()
    if len(unlike):
        expert, half = unlike[0].tolist()
        raise fault(expert, half, f"differs from gate's; {without}")
    return multipliers[:, 0]
