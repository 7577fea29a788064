"""A recorded call, ready to be made again (plans.py)."""

from __future__ import annotations

import functools
from typing import Any, Callable, List, NamedTuple, Optional, Tuple

import torch

from .launching import is_observed, shortest_way
from .recording import Recorder, picker

_ALIGNMENT = 256
"""Alignment of temporary memory in bytes."""


def _new_by_dispatch(shape: tuple, strides: tuple, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty_strided(shape, strides, dtype=dtype, device="cuda")


_new: Callable[[tuple, tuple, torch.dtype], torch.Tensor]
_new = getattr(torch._C._dynamo.guards, "_empty_strided_cuda", _new_by_dispatch)
"""Allocates on the current GPU the way compiled code does, in a third of the time."""


class NotTraced(Exception):
    """A pointer belongs to no tensor, or may belong to two, or a result is neither new memory nor an argument's."""


class _Memory(NamedTuple):
    """Bytes `[first, last]` that belong to entry `owner` of a call's pool, `offset` bytes into it."""

    first: int
    last: int
    owner: int
    offset: int


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """The addresses of its first and last byte. If it is empty, the last is before the first."""
    first = tensor.data_ptr()
    if not tensor.numel():
        return first, first - 1
    steps = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
    return first, first + (steps + 1) * tensor.element_size() - 1


class _Launch(NamedTuple):
    call: Callable
    grid: Tuple[int, int, int]
    between: tuple
    pick: Callable[[list], tuple]


class Plan:
    """A recorded call. It fills a pool of values: the addresses of the call's tensors, of the new tensors that it
    returns, and of one block for all temporary ones; constants; then values made from these, which are addresses inside
    them and tuples. Each launch picks its arguments from the pool."""

    def __init__(
        self, tensors: tuple, of_any_size: list[int], allocated: list[torch.Tensor], recorder: Recorder, result: Any
    ) -> None:
        self.device = tensors[0].device
        self.hooks = [launch.hooks for launch in recorder.launches]
        self.is_observed = functools.partial(is_observed, self.hooks)
        self.is_tuple = isinstance(result, (tuple, list))
        self.returned: List[Tuple[Optional[int], torch.dtype, tuple]] = []
        self.made: list[tuple[tuple, tuple, torch.dtype]] = []
        self.kept = tuple(recorder.constants)
        self.written: tuple[int, int] | None = None
        self.others: list[tuple[int, int]] = []
        memories = [_Memory(*_extent(tensor), i, 0) for i, tensor in enumerate(tensors)]
        for returned in result if self.is_tuple else (result,):
            index = None
            if not any(returned.data_ptr() == new.data_ptr() and returned.nbytes == new.nbytes for new in allocated):
                index = next((i for i, tensor in enumerate(tensors) if _is_in(returned, tensor)), None)
                if index is None or self.is_tuple or not returned.is_contiguous() or returned.is_inference():
                    raise NotTraced
                self.written = index, returned.nbytes
                sizes = [0 if i in of_any_size else tensor.nbytes for i, tensor in enumerate(tensors)]
                self.others = [(i, size) for i, size in enumerate(sizes) if i != index]
            elif not returned.is_contiguous():
                raise NotTraced
            else:
                memories.append(_Memory(*_extent(returned), len(tensors) + len(self.made), 0))
                self.made.append((tuple(returned.shape), returned.stride(), returned.dtype))
            self.returned.append((index, returned.dtype, tuple(returned.shape)))
        block = len(tensors) + len(self.made)
        is_new = {memory.first for memory in memories[len(tensors) :]}
        self.block_bytes = 0
        for new in allocated:
            if new.numel() and new.data_ptr() not in is_new:
                memories.append(_Memory(*_extent(new), block, self.block_bytes))
                self.block_bytes += -(-new.nbytes // _ALIGNMENT) * _ALIGNMENT
        self.give_back = self._give_tuple if self.is_tuple else self._give_new if self.made else self._give_view
        self._trace(recorder, memories, block + 1)

    def _trace(self, recorder: Recorder, memories: list[_Memory], pool_size: int) -> None:
        """Find the constants, steps and launches. The pool holds `pool_size` addresses so far."""
        constants: list = []
        derived: list[Any] = []
        kept = {tensor.data_ptr() for tensor in self.kept}

        def constant(value: Any) -> tuple[str, int]:
            constants.append(value)
            return "constant", len(constants) - 1

        def entry(argument: Any) -> tuple[str, int]:
            if isinstance(argument, tuple):
                derived.append([entry(item) for item in argument])
                return "derived", len(derived) - 1
            if not isinstance(argument, torch.Tensor):
                return constant(argument)
            address = argument.data_ptr()
            if not argument.numel() or address in kept:
                return constant(address if address in kept else 0)
            owners = [memory for memory in memories if memory.first <= address <= memory.last]
            if len(owners) != 1:
                raise NotTraced
            offset = owners[0].offset + address - owners[0].first
            if not offset:
                return "pool", owners[0].owner
            derived.append((owners[0].owner, offset))
            return "derived", len(derived) - 1

        traced = [[entry(argument) for argument in launch.arguments] for launch in recorder.launches]
        begins = {"pool": 0, "constant": pool_size, "derived": pool_size + len(constants)}

        def index(place: tuple[str, int]) -> int:
            return begins[place[0]] + place[1]

        self.constants = constants
        self.steps = [
            _adder(*step) if isinstance(step, tuple) else picker([index(place) for place in step]) for step in derived
        ]
        self.launches = []
        for launch, places in zip(recorder.launches, traced):
            call, between, is_packed = shortest_way(launch)
            pick = picker([index(place) for place in places])
            self.launches.append(_Launch(call, launch.grid, between, _packer(pick) if is_packed else pick))

    def is_apart(self, tensors: tuple, addresses: list) -> bool:
        """Whether no tensor that the call writes overlaps another of its tensors. Only addresses tell; keys do not."""
        if self.written is None:
            return True
        index, size = self.written
        begin = addresses[index]
        end = begin + size
        for i, size in self.others:  # noqa: SIM110  (a generator would take twice as long)
            if addresses[i] < end and begin < addresses[i] + (size or tensors[i].nbytes):
                return False
        return True

    def __call__(self, tensors: tuple, pool: list) -> Any:
        device = self.device
        if device.index != torch._C._cuda_getDevice():
            with torch.cuda.device(device):
                return self(tensors, pool)
        made, block = [], None
        if self.made:
            made = [_new(*described) for described in self.made]
            pool.extend(map(torch.Tensor.data_ptr, made))
        if self.block_bytes:
            block = _new((self.block_bytes,), (1,), torch.uint8)
        pool.append(0 if block is None else block.data_ptr())
        pool.extend(self.constants)
        for step in self.steps:
            pool.append(step(pool))
        stream = torch._C._cuda_getCurrentRawStream(device.index)
        for call, (x, y, z), between, pick in self.launches:
            call(x, y, z, stream, *between, *pick(pool))
        return self.give_back(tensors, made)

    def _give_new(self, tensors: tuple, made: list[torch.Tensor]) -> torch.Tensor:
        return made[0]

    def _give_view(self, tensors: tuple, made: list[torch.Tensor]) -> torch.Tensor:
        owner, dtype, shape = self.returned[0]
        return tensors[owner or 0].view(dtype).resize_(*shape)

    def _give_tuple(self, tensors: tuple, made: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        return tuple(made)


def _is_in(returned: torch.Tensor, tensor: torch.Tensor) -> bool:
    """Whether `returned` is the memory of `tensor`, from its start, perhaps in another shape."""
    if returned.data_ptr() != tensor.data_ptr() or returned.element_size() != tensor.element_size():
        return False
    return tensor.is_contiguous() and 0 < returned.nbytes <= tensor.nbytes


def _packer(pick: Callable[[list], tuple]) -> Callable[[list], tuple]:
    return lambda pool: (pick(pool),)


def _adder(index: int, offset: int) -> Callable[[list], int]:
    return lambda pool: pool[index] + offset
