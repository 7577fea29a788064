"""The scratch that layers share: what is where in it, and how threads and streams take turns using it.

A call has the scratch to itself from decoding to the last GEMM that reads what was decoded. While it launches, a lock
keeps other threads out. On a GPU the next use may come from another stream, which then waits for an event of the
previous stream; consecutive uses by the same stream need no event.

Inside a graph capture no event from outside can be waited for, and nothing here sees when a graph is replayed. So the
uses in a capture are ordered among themselves, and the caller orders replays.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ..csf.decode import csf_workspace_size, decode_into
from ..csf.scales import NVFP4CSFScales
from ..device import on_device
from .experts import NVFP4Experts, Scales


class Turns:
    """Orders the uses of a scratch: those outside of captures, or those in one capture. Streams are handles, as
    returned by `current_stream`."""

    def __init__(self, device: torch.device, *, captured: bool = False) -> None:
        self._device, self._captured = device, captured
        self._holder: weakref.ref[NVFP4Experts] | None = None
        self._stream: int | None = None
        self._prefetched: torch.cuda.Event | None = None

    @property
    def holder(self) -> NVFP4Experts | None:
        """The experts whose scales, all of them, have been decoded into the scratch ahead of a call."""
        return None if self._holder is None else self._holder()

    def hold(self, experts: NVFP4Experts) -> None:
        """Say that the stream that uses the scratch has been given the work of decoding the scales of `experts`."""
        self._holder = weakref.ref(experts)
        if self._stream is not None:
            self._prefetched = torch.cuda.Event()
            self._prefetched.record(stream_of(self._stream, self._device))

    def is_in_a_capture(self, stream: int) -> bool:
        """Whether the last use was by another stream that is now part of a capture, so that no event can be recorded on
        it."""
        last = self._stream
        return last is not None and last != stream and is_capturing(last, self._device)

    def begin(self, stream: int | None) -> None:
        """Begin a use by `stream` after the last one. The scratch no longer holds anybody's scales."""
        last, end = self._stream, self._prefetched
        self._holder, self._stream, self._prefetched = None, stream, None
        if stream is None or last is None or last == stream:
            return
        # A capture uses one stream, except for prefetches. One that is not being captured is left from an earlier one.
        if self._captured:
            end = end if is_capturing(last, self._device) else None
        elif end is None:
            end = torch.cuda.Event()
            end.record(stream_of(last, self._device))
        if end is not None:
            stream_of(stream, self._device).wait_event(end)


class Scratch:
    """One block of memory into which scales are decoded. It is found by its address, from any tensor in it.

    Attributes:
        lock: has to be held during a use, and while `turns` is called.
    """

    def __init__(self, device: torch.device) -> None:
        self.lock = threading.RLock()
        self.device = device
        self._eager, self._captured = Turns(device), Turns(device, captured=True)
        self._capturing: int | None = None

    def turns(self, stream: int | None) -> Turns | None:
        """The turns to which a use by the current stream belongs. None if nothing can order it after the last use,
        because another stream uses the scratch in a capture that is under way, or has used it and is now in a
        capture."""
        if stream is None:
            return self._eager
        with on_device(self.device):
            if not torch.cuda.is_current_stream_capturing():
                return None if self._eager.is_in_a_capture(stream) else self._eager
        if self._capturing is None or self._capturing != stream:
            if self._capturing is not None and is_capturing(self._capturing, self.device):
                return None
            self._capturing, self._captured = stream, Turns(self.device, captured=True)
        return self._captured

    def forget_captures(self) -> None:
        """Forget what an interrupted capture left, so that it does not affect the next one."""
        if self._capturing is not None and not is_capturing(self._capturing, self.device):
            self._capturing = None


def current_stream(device: torch.device) -> int | None:
    """The handle of the current stream; None on devices without streams to order."""
    return torch._C._cuda_getCurrentRawStream(device.index) if device.type == "cuda" else None


def stream_of(handle: int, device: torch.device) -> torch.cuda.Stream:
    # For torch the handle 0 means that there is none, and it returns an arbitrary stream.
    return torch.cuda.ExternalStream(handle, device=device) if handle else torch.cuda.default_stream(device)


def is_capturing(handle: int, device: torch.device) -> bool:
    """Whether a stream is part of a graph capture."""
    with torch.cuda.stream(stream_of(handle, device)):
        return torch.cuda.is_current_stream_capturing()


_scratches: dict[tuple[torch.device, int], tuple[StorageWeakRef, Scratch]] = {}
_scratches_lock = threading.Lock()


def scratch_of(memory: torch.Tensor) -> Scratch:
    """The only `Scratch` for the storage of `memory`, as long as that storage exists."""
    storage = memory.untyped_storage()
    key = memory.device, storage.data_ptr()
    with _scratches_lock:
        for other in [other for other, (alive, _) in _scratches.items() if other != key and alive.expired()]:
            del _scratches[other]
        known = _scratches.get(key)
        if known is None or known[0].expired():  # whatever used this address before may still be running
            known = StorageWeakRef(storage), Scratch(memory.device) if known is None else known[1]
            _scratches[key] = known
    return known[1]


class turn:  # noqa: N801  (a context manager; a generator would take more time than all that it does)
    """Use the experts' scratch. Gives its memory, for the caller alone; None if they have no scratch, or it cannot be
    used now."""

    __slots__ = ("experts", "scratch")

    def __init__(self, experts: NVFP4Experts) -> None:
        self.experts = experts
        self.scratch: Scratch | None = None

    def __enter__(self) -> torch.Tensor | None:
        experts = self.experts
        if experts.scratch is None:
            return None
        scratch = experts.__dict__.get("_turns")
        if scratch is None:
            scratch = experts.__dict__["_turns"] = scratch_of(experts.scratch)
        scratch.lock.acquire()
        self.scratch = scratch
        stream = current_stream(scratch.device)
        turns = scratch.turns(stream)
        if turns is None:
            return None
        turns.begin(stream)
        return experts.scratch

    def __exit__(self, *error: object) -> None:
        if self.scratch is not None:
            self.scratch.lock.release()


def decode_scales(
    experts: NVFP4Experts,
    memory: torch.Tensor | None,
    expert_start: torch.Tensor | None = None,
    max_active: int | None = None,
) -> list[Scales]:
    """Both stacks of scales, dense. Compressed ones are decoded into `memory`, or into new memory if it is None."""
    dense: list[Scales] = []
    for scales, part in _parts(experts, memory):
        if isinstance(scales, NVFP4CSFScales):
            if part is None:
                part = torch.empty(csf_workspace_size(scales), dtype=torch.uint8, device=scales.device)
            dense.append(decode_into(part, scales, expert_start, max_active))
        else:
            dense.append(scales)
    return dense


def decoded_scales(experts: NVFP4Experts, memory: torch.Tensor) -> list[Scales]:
    """The same, if `decode_scales` has already decoded them into `memory`."""
    return [
        scales if part is None else part.view(torch.float8_e4m3fn).view(scales.shape)
        for scales, part in _parts(experts, memory)
    ]


def _parts(experts: NVFP4Experts, memory: torch.Tensor | None) -> Iterator[tuple[Scales, torch.Tensor | None]]:
    """Both stacks of scales, each with its part of `memory` if it is compressed."""
    offset = 0
    for scales in (experts.gate_up_scales, experts.down_scales):
        size = csf_workspace_size(scales) if isinstance(scales, NVFP4CSFScales) else 0
        yield scales, memory.view(-1)[offset : offset + size] if size and memory is not None else None
        offset += size
