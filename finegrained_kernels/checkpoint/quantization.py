"""`quantize`: converts the linear layers of an unquantized checkpoint to NVFP4, stored like those of ModelOpt or
llm-compressor."""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from threading import Event
from types import ModuleType
from typing import TYPE_CHECKING

from finegrained_kernels.checkpoint.claims import Claim, claimed, finishing
from finegrained_kernels.checkpoint.config import dump_json
from finegrained_kernels.checkpoint.errors import CheckpointError, Fault
from finegrained_kernels.checkpoint.headers import Header, NewTensor, read_header, replace_tensors
from finegrained_kernels.checkpoint.kinds import layer_kind
from finegrained_kernels.checkpoint.layouts import CONFIG, Checkpoint, open_checkpoint, read_json
from finegrained_kernels.checkpoint.names import GROUP, layer_of
from finegrained_kernels.checkpoint.output import (
    DEFAULT_JOBS,
    check_request,
    check_space,
    one_torch_thread,
    run_shards,
)
from finegrained_kernels.checkpoint.publishing import other_files
from finegrained_kernels.checkpoint.quantization_config import MODELOPT
from finegrained_kernels.checkpoint.quantized_layouts import QuantizedLayout, layout_of
from finegrained_kernels.checkpoint.quantized_weights import DTYPES, WEIGHT, Weight, choose_weights, sharing_globals
from finegrained_kernels.checkpoint.stream import (
    CHUNK_BYTES,
    AtomicFile,
    Progress,
    Stopped,
    copy_file,
    opened,
    read_exact,
    watch,
    write_file,
)

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class QuantizeReport:
    """What `quantize` did: the number of shards, of weights that were quantized, and the bytes of all shards before and
    after."""

    shards: int
    quantized: int
    bytes_before: int
    bytes_after: int


def quantize(
    source: str | Path,
    destination: str | Path,
    *,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    scales: str = "amax",
    input_scale: float | None = None,
    format: str = MODELOPT,
    jobs: int = DEFAULT_JOBS,
    device: str = "cpu",
    progress: Progress | None = None,
) -> QuantizeReport:
    """Quantize the linear layers of a checkpoint to NVFP4: two-level scales, round to nearest, no calibration.

    Each weight `[N, K]` becomes `weight` U8 `[N, K/2]`, `weight_scale` F8_E4M3 `[N, K/16]` and `weight_scale_2` F32,
    the global, or the same under compressed-tensors' names; everything else is copied. Layers that engines run as one,
    q, k and v, or gate and up, get the same global: that of the layer with the largest value. The arithmetic is that of
    the bundle's `nvfp4_quantize_two_level`. After an interruption, run it again; it starts over.

    Args:
        source: directory with a BF16, F16 or F32 checkpoint; only read. Each expert has its own tensors, or all are
            stacked in `gate_up_proj` and `down_proj`, with either K or N last; the result has separate tensors for each
            expert.
        destination: a new or empty directory, or one that an earlier run has begun to fill.
        include, exclude: shell patterns for names of weights. Without ``include``, all two-dimensional weights are
            quantized except those of embeddings, lm_head, routers and vision towers, as in ModelOpt and llm-compressor,
            and those that the kernels cannot run, because their rows are not a multiple of 16 or their columns not of
            32.
        scales: "amax", so that the largest of 16 values becomes the largest code; or "mse", which takes longer: of that
            scale and its neighbours, the one with the least squared error.
        input_scale: multiplier that is written beside every weight, so that activations are quantized too ("NVFP4").
            None writes none, because nothing was calibrated, and marks the layers as weight-only ("W4A16_NVFP4",
            "NVFP4A16").
        format: "modelopt"; or "compressed-tensors", as llm-compressor writes it: `weight_packed`, `weight_scale`, and
            the divisors `weight_global_scale` and `input_global_scale`.
        jobs, device, progress: as in `compress`.

    Raises:
        CheckpointError: there are no such weights, experts are stacked in another way, K is not a multiple of 16,
            values are not finite, or the checkpoint is already quantized. The message names shard and tensor.
    """
    from finegrained_kernels import load

    source, destination = Path(source), Path(destination)
    check_request(jobs, device)
    if scales not in ("amax", "mse"):
        raise CheckpointError(f"scales must be 'amax' or 'mse', got {scales!r}")
    if input_scale is not None and not 0 < input_scale < math.inf:
        raise CheckpointError(f"input_scale must be a finite number above 0, got {input_scale}")
    layout = layout_of(format)
    checkpoint = open_checkpoint(source)
    weights = choose_weights(checkpoint, include, exclude)
    every = [weight for some in weights.values() for weight in some]
    modules = list(dict.fromkeys(layer_of(weight.module) for weight in every))
    config = layout.config(
        checkpoint.config or {}, modules, _other_linears(checkpoint, weights), has_input=input_scale is not None
    )
    rewritten = (CONFIG, checkpoint.layout.index)
    others = [name for name in other_files(checkpoint) if name not in rewritten]

    def is_ours() -> bool:
        raise CheckpointError(f"{destination} holds files: give a new directory, or the one that was begun")

    quantizing = _Quantizing(
        load(),
        checkpoint,
        weights,
        sharing_globals(every),
        layout,
        scales,
        input_scale,
        destination,
        device,
        progress or (lambda _: None),
    )
    after = sum(len(header.raw) + header.data_bytes for header, _ in quantizing.outputs.values())
    claim = Claim.of(
        "quantize", source, checkpoint.headers, [list(include), list(exclude), scales, input_scale, format]
    )
    with (
        claimed(destination, source, claim, is_ours) as work,
        one_torch_thread(),
        finishing(work, wait=False) as alone,
    ):
        if not alone:
            raise CheckpointError(f"another process is writing to {destination}")
        check_space(destination, after)

        def handle(shard: str, stop: Event) -> None:
            quantizing.quantize_shard(shard, work, stop)

        run_shards(list(checkpoint.headers), jobs, handle)
        for name in others:
            copy_file(source / name, destination / name, work, name)
        write_file(destination / CONFIG, dump_json(config), work, CONFIG, like=source / CONFIG)
        if checkpoint.layout.index is not None:
            name = checkpoint.layout.index
            index = dump_json(quantizing.new_index())
            write_file(destination / name, index, work, name, like=source / name)
    before = sum(len(header.raw) + header.data_bytes for header in checkpoint.headers.values())
    return QuantizeReport(len(checkpoint.headers), len(every), before, after)


@dataclass(frozen=True)
class _Quantizing:
    """What is needed to quantize any shard.

    Attributes:
        weights: for each tensor, the weights that it holds.
        sharing: for each module, the weights that share its global.
        largest: for each module, the largest magnitude in its weight, once it is known.
    """

    bundle: ModuleType
    checkpoint: Checkpoint
    weights: dict[str, list[Weight]]
    sharing: dict[str, list[Weight]]
    layout: QuantizedLayout
    scales: str
    input_scale: float | None
    destination: Path
    device: str
    progress: Progress
    largest: dict[str, torch.Tensor] = field(default_factory=dict)

    @cached_property
    def outputs(self) -> dict[str, tuple[Header, list[tuple[int, int] | str]]]:
        """Every shard's new header, and the order of its data. Sizes do not depend on values."""
        return {
            shard: replace_tensors(
                header, {name: self._new_tensors(name) for name in header.tensors if name in self.weights}
            )
            for shard, header in self.checkpoint.headers.items()
        }

    def _new_tensors(self, tensor: str) -> list[NewTensor]:
        return [new for weight in self.weights[tensor] for new in self._parts(weight)]

    def _parts(self, weight: Weight) -> list[NewTensor]:
        has_input = self.input_scale is not None
        return self.layout.tensors(weight.module, weight.rows, weight.cols, has_input=has_input)

    def new_index(self) -> dict:
        """The source's index, rewritten for the new tensors."""
        name_of_index = self.checkpoint.layout.index
        assert name_of_index is not None, "a checkpoint of one file has no index"
        index = read_json(self.checkpoint.root / name_of_index, name_of_index)
        weight_map = {}
        for name, shard in index["weight_map"].items():
            names = [new[0] for new in self._new_tensors(name)] if name in self.weights else [name]
            weight_map.update(dict.fromkeys(names, shard))
        total = sum(header.data_bytes for header, _ in self.outputs.values())
        return {**index, "metadata": {**(index.get("metadata") or {}), "total_size": total}, "weight_map": weight_map}

    def quantize_shard(self, shard: str, work: Path, stop: Event) -> None:
        """Write one shard. New tensors, including globals, are written to their places as they are computed."""
        header = self.checkpoint.headers[shard]
        output, parts = self.outputs[shard]
        source = self.checkpoint.root / shard
        with (
            opened(source, shard) as fd,
            AtomicFile(self.destination / shard, work, shard, like=source) as file,
        ):
            check_unchanged = watch(fd, header, shard)
            file.write(output.raw)
            position = output.data_start
            for part in parts:
                if isinstance(part, tuple):
                    self._copy(shard, fd, header.data_start + part[0], part[1] - part[0], file, position, stop)
                    position += part[1] - part[0]
                else:
                    position += output.tensors[part].nbytes
            for name in header.tensors:
                for weight in self.weights.get(name, ()):
                    if stop.is_set():
                        raise Stopped
                    self._quantize(shard, weight, fd, file)
            if read_header(file.temporary, shard).tensors != output.tensors:
                raise CheckpointError([Fault(shard, None, "does not read back as written")])
            check_unchanged()
            file.commit()

    def _copy(self, shard: str, fd: int, begin: int, size: int, file: AtomicFile, position: int, stop: Event) -> None:
        while size:
            if stop.is_set():
                raise Stopped
            data = os.pread(fd, min(size, CHUNK_BYTES), begin)
            if not data:
                raise CheckpointError([Fault(shard, None, f"was cut short while it was read: it ends at byte {begin}")])
            file.write_at(memoryview(data), position)
            begin, position, size = begin + len(data), position + len(data), size - len(data)
            self.progress(len(data))

    def _quantize(self, shard: str, weight: Weight, fd: int, file: AtomicFile) -> None:
        from finegrained_kernels.checkpoint.codec import to_bytes

        values = self._read(shard, weight, fd)
        output, _ = self.outputs[shard]
        for (new, _, _), value in zip(self._parts(weight), self._quantized(weight, values), strict=True):
            file.write_at(to_bytes(value), output.data_start + output.tensors[new].begin)
        self.progress(values.nbytes)

    def _read(self, shard: str, weight: Weight, fd: int) -> torch.Tensor:
        import torch

        header = self.checkpoint.headers[shard]
        info = header.tensors[weight.tensor]
        dtype = getattr(torch, DTYPES[info.dtype])
        data = bytearray(math.prod(weight.block) * dtype.itemsize)
        read_exact(fd, memoryview(data), header.data_start + info.begin + weight.begin, shard, weight.tensor)
        return weight.of(torch.frombuffer(data, dtype=dtype).view(weight.block).to(self.device))

    def _quantized(self, weight: Weight, values: torch.Tensor) -> list[torch.Tensor]:
        """The values of the tensors that `_parts` lists, in its order."""
        import torch

        input_scale = torch.tensor([] if self.input_scale is None else [self.input_scale], dtype=torch.float32)
        quantize, global_scale = self.bundle.nvfp4_quantize_two_level, self._global(weight, values)
        if not self.layout.globals_divide:
            return [*quantize(values, scales=self.scales, global_scale=global_scale), *input_scale]
        divisor = 1 / global_scale
        # Readers multiply by its reciprocal, which may differ from the global from which it was made.
        packed, planes, _ = quantize(values, scales=self.scales, global_scale=1 / divisor)
        return [packed, planes, divisor, *1 / input_scale]

    def _global(self, weight: Weight, values: torch.Tensor) -> torch.Tensor:
        """The second-level scale, from the largest of all values that share it, in whichever shard they are."""
        import torch

        self._note_largest(weight, values)
        for other in self.sharing[weight.module]:
            if other.module not in self.largest:
                shard, _ = self.checkpoint.located[other.tensor]
                with opened(self.checkpoint.root / shard, shard) as fd:
                    check_unchanged = watch(fd, self.checkpoint.headers[shard], shard)
                    read = self._read(shard, other, fd)
                    check_unchanged()
                self._note_largest(other, read)
        largest = torch.stack([self.largest[other.module] for other in self.sharing[weight.module]]).max()
        return self.bundle.nvfp4_quantize_two_level(largest.expand(1, GROUP))[2]

    def _note_largest(self, weight: Weight, values: torch.Tensor) -> None:
        largest = values.abs().amax().float()
        if not largest.isfinite():
            shard, _ = self.checkpoint.located[weight.tensor]
            raise CheckpointError([Fault(shard, weight.tensor, f"expected finite values, got {float(largest)}")])
        self.largest[weight.module] = largest


def _other_linears(checkpoint: Checkpoint, weights: Collection[str]) -> list[str]:
    """Modules that are not quantized and have a weight like that of a linear layer; embeddings are recognized by their
    names."""
    return [
        name.removesuffix(WEIGHT)
        for name, (_, info) in checkpoint.located.items()
        if name.endswith(WEIGHT) and len(info.shape) == 2 and name not in weights and layer_kind(name) != "embeddings"
    ]
