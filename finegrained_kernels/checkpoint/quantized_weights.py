"""Which weights `quantize` takes, which part of which tensor each of them is, and which of them share a global."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from finegrained_kernels.checkpoint.errors import CheckpointError, Fault, raise_faults
from finegrained_kernels.checkpoint.headers import DTYPE_BITS, TensorInfo
from finegrained_kernels.checkpoint.kinds import layer_kind
from finegrained_kernels.checkpoint.layouts import CONFIG, Checkpoint
from finegrained_kernels.checkpoint.names import GROUP, is_stack, split_expert
from finegrained_kernels.checkpoint.quantization_config import HF_QUANT_CONFIG, find_section

if TYPE_CHECKING:
    import torch

WEIGHT = ".weight"
DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
_ROWS, _COLS = 16, 32
"""The kernels can only run weights whose rows and columns are multiples of these. Others are quantized only on
request."""

_LEFT_OUT = ("embeddings", "lm_head", "routers", "vision")
_GATE_UP, _DOWN = "gate_up_proj", "down_proj"
_FUSED = (
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
    ("w1", "w3"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
    ("in_proj_qkv", "in_proj_z"),
)
"""Layers that read the same activations and that engines run as one layer, with one second-level scale."""


@dataclass(frozen=True)
class Weight:
    """One weight ``[rows, cols]`` to quantize, and where its values are stored.

    Attributes:
        module: the linear layer whose weight it becomes.
        tensor: the checkpoint's tensor that contains it, either alone or together with those of all experts.
        begin: the first byte of its block in that tensor; ``block``: the shape of what is stored there.
        rows_of_transpose: if the block is `[cols, rows, ...]`, which rows of its transpose the weight is.
    """

    module: str
    tensor: str
    rows: int
    cols: int
    begin: int
    block: tuple[int, int]
    rows_of_transpose: slice | None = None

    def of(self, block: torch.Tensor) -> torch.Tensor:
        """The weight, taken out of its block."""
        return block if self.rows_of_transpose is None else block.T[self.rows_of_transpose].contiguous()


def choose_weights(checkpoint: Checkpoint, include: Sequence[str], exclude: Sequence[str]) -> dict[str, list[Weight]]:
    """The weights that the patterns select, by tensor: one weight for each, or those of all experts.

    Raises:
        CheckpointError: nothing is selected, the checkpoint is already quantized, or a tensor cannot be quantized.
    """
    if checkpoint.config is None:
        raise CheckpointError([Fault(CONFIG, None, "does not exist: it is where quantized layers are named")])
    path, _ = find_section(checkpoint.config)
    if path or checkpoint.layout.hf_quant_config is not None:
        file, key = (CONFIG, ".".join(path)) if path else (HF_QUANT_CONFIG, "quantization")
        raise CheckpointError([Fault(file, None, f"has a {key}: the checkpoint is quantized already")])
    raise_faults(checkpoint.faults)

    def matches(name: str, patterns: Sequence[str]) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in patterns)

    chosen, faults = {}, []
    for name, (shard, info) in checkpoint.located.items():
        if not (matches(name, include) if include else _is_meant(name)) or matches(name, exclude):
            continue
        stacked = is_stack(name, info.shape)
        if not stacked and not (_is_linear(name, info) and (include or _can_run(name, info))):
            continue
        if info.dtype not in DTYPES:
            faults.append(Fault(shard, name, f"expected one of {', '.join(DTYPES)}, got {info.dtype}"))
        elif not stacked and (info.shape[1] % GROUP or 0 in info.shape):
            faults.append(Fault(shard, name, f"expected [N, K] with K a multiple of {GROUP}, got {list(info.shape)}"))
        else:
            chosen[name] = info
    weights: dict[str, list[Weight]] = {}
    for name, info in chosen.items():
        if len(info.shape) == 2:
            rows, cols = info.shape
            weights[name] = [Weight(name.removesuffix(WEIGHT), name, rows, cols, 0, (rows, cols))]
            continue
        found = _experts_of(name, checkpoint, chosen)
        if isinstance(found, str):
            faults.append(Fault(checkpoint.located[name][0], name, f"{list(info.shape)}: {found}"))
        else:
            weights[name] = found
    raise_faults(faults)
    if not weights:
        raise CheckpointError(f"{checkpoint.root}: no weight of a linear layer is asked for")
    return weights


def sharing_globals(weights: Iterable[Weight]) -> dict[str, list[Weight]]:
    """For each weight's module, the weights that share its second-level scale, including its own."""
    groups: dict[tuple[object, ...], list[Weight]] = {}
    for weight in weights:
        expert = split_expert(weight.module)
        parent, _, name = weight.module.rpartition(".")
        where, name = (expert[:2], expert[2]) if expert else (parent, name)
        fused = next((names for names in _FUSED if name in names), (name,))
        groups.setdefault((where, fused), []).append(weight)
    return {weight.module: group for group in groups.values() for weight in group}


def _experts_of(name: str, checkpoint: Checkpoint, chosen: Mapping[str, TensorInfo]) -> list[Weight] | str:
    """The weights of each expert in a stack, with the names they have where each has its own tensor; or what is wrong.

    The shapes of a stack and its partner tell whether K is last, as in `[E, 2 * I, H]` and `[E, H, I]`, or N.
    """
    suffix = WEIGHT if name.endswith(WEIGHT) else ""
    experts, _, projection = name.removesuffix(suffix).rpartition(".")
    pair = [f"{experts}.{each}{suffix}" for each in (_GATE_UP, _DOWN)]
    if projection not in (_GATE_UP, _DOWN):
        return f"of stacks of experts only {_GATE_UP} and {_DOWN} are quantized"
    if missing := [other for other in pair if other not in chosen]:
        return f"is quantized together with {missing[0]}, or not at all"
    biases = [each.removesuffix(suffix) + end for each in pair for end in ("_bias", ".bias")]
    if biased := [each for each in biases if each in checkpoint.located]:
        return f"beside {biased[0]}: experts with biases may have gate and up alternate, which names do not tell"
    (count, *gate_up), (_, *down) = (chosen[each].shape for each in pair)
    transposed = gate_up[0] == down[1]
    (hidden, double), (inner, width) = (gate_up, down) if transposed else (gate_up[::-1], down[::-1])
    if double != 2 * inner or hidden != width or chosen[pair[1]].shape[0] != count:
        shapes = " and ".join(str(list(chosen[each].shape)) for each in pair)
        return f"expected stacks [E, 2 * I, H] and [E, H, I], or each expert's transposed, got {shapes}"
    if taken := [each for each in checkpoint.located if each.startswith(f"{experts}.0.")]:
        return f"the same experts have tensors of their own, such as {taken[0]}"
    info = chosen[name]
    block = (info.shape[1], info.shape[2])
    size = math.prod(block) * DTYPE_BITS[info.dtype] // 8
    found = []
    for expert in range(count):
        if projection == _DOWN:
            parts = [("down_proj", hidden, inner)]
        else:
            parts = [("gate_proj", inner, hidden), ("up_proj", inner, hidden)]
        for i_part, (part, rows, cols) in enumerate(parts):
            if cols % GROUP or 0 in (rows, cols):
                return f"expected experts with K a multiple of {GROUP}, got {[rows, cols]}"
            module = f"{experts}.{expert}.{part}"
            if transposed:
                own = slice(i_part * rows, (i_part + 1) * rows)
                found.append(Weight(module, name, rows, cols, expert * size, block, own))
            else:
                begin = expert * size + i_part * (size // len(parts))
                found.append(Weight(module, name, rows, cols, begin, (rows, cols)))
    return found


def _is_linear(name: str, info: TensorInfo) -> bool:
    return name.endswith(WEIGHT) and len(info.shape) == 2


def _is_meant(name: str) -> bool:
    """Whether a tensor is quantized by default."""
    return layer_kind(name) not in _LEFT_OUT


def _can_run(name: str, info: TensorInfo) -> bool:
    """Whether the kernels can run a linear layer of this size. Experts are all quantized, or refused."""
    return layer_kind(name) == "experts" or not (info.shape[0] % _ROWS or info.shape[1] % _COLS)
