"""The scratch that layers share: what lies where in it, and how threads and streams take turns with it.

From decoding to the last GEMM that reads what was decoded, a call has the scratch for itself. While it launches, a lock
keeps other threads out. On a GPU the next use may come from another stream, which then waits for an event of the last
one's; uses by one stream leave none and wait for none.

No event from outside can be waited for inside a graph capture, and a replay is a use that nothing here sees. So the
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
    """Uses of a scratch one after the other: those outside of captures, or those of one capture. Streams are the
    handles that `current_stream` gives."""

    def __init__(self, device: torch.device, *, captured: bool = False) -> None:
        self._device, self._captured = device, captured
        self._holder: weakref.ref[NVFP4Experts] | None = None
        self._stream: int | None = None
        self._prefetched: torch.cuda.Event | None = None

    @property
    def holder(self) -> NVFP4Experts | None:
        """Whose scales, all of them, the scratch holds ahead of a call."""
        return None if self._holder is None else self._holder()

    def hold(self, experts: NVFP4Experts) -> None:
        """What the stream that uses it was given so far decodes the scales of `experts`."""
        self._holder = weakref.ref(experts)
        if self._stream is not None:
            self._prefetched = torch.cuda.Event()
            self._prefetched.record(stream_of(self._stream, self._device))

    def is_in_a_capture(self, stream: int) -> bool:
        """Whether the last use was by another stream that is part of a capture by now: no event tells of it then."""
        last = self._stream
        return last is not None and last != stream and is_capturing(last, self._device)

    def begin(self, stream: int | None) -> None:
        """A use by `stream` begins, behind the last one; the scratch holds nobody's scales any longer."""
        last, end = self._stream, self._prefetched
        self._holder, self._stream, self._prefetched = None, stream, None
        if stream is None or last is None or last == stream:
            return
        if self._captured:  # on one stream, but for prefetches; one that is in no capture was left by an earlier one
            end = end if is_capturing(last, self._device) else None
        elif end is None:
            end = torch.cuda.Event()
            end.record(stream_of(last, self._device))
        if end is not None:
            stream_of(stream, self._device).wait_event(end)


class Scratch:
    """One block of memory that scales are decoded into, known by its address to whoever was given a tensor of it.

    Attributes:
        lock: to be held during a use, and while `turns` are looked at.
    """

    def __init__(self, device: torch.device) -> None:
        self.lock = threading.RLock()
        self.device = device
        self._eager, self._captured = Turns(device), Turns(device, captured=True)
        self._capturing: int | None = None

    def turns(self, stream: int | None) -> Turns | None:
        """Which a use by the current stream belongs to; None where nothing can order it behind the last one: another
        stream uses the scratch in a capture that is under way, the same or another one; or has gone on to one."""
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
        """What a capture left that was interrupted is nothing to the next."""
        if self._capturing is not None and not is_capturing(self._capturing, self.device):
            self._capturing = None


def current_stream(device: torch.device) -> int | None:
    """The handle of the current one; None where there are none to order."""
    return torch._C._cuda_getCurrentRawStream(device.index) if device.type == "cuda" else None


def stream_of(handle: int, device: torch.device) -> torch.cuda.Stream:
    # torch takes the handle 0 for none, and gives any stream.
    return torch.cuda.ExternalStream(handle, device=device) if handle else torch.cuda.default_stream(device)


def is_capturing(handle: int, device: torch.device) -> bool:
    """Whether a stream is part of a graph capture."""
    with torch.cuda.stream(stream_of(handle, device)):
        return torch.cuda.is_current_stream_capturing()


_scratches: dict[tuple[torch.device, int], tuple[StorageWeakRef, Scratch]] = {}
_scratches_lock = threading.Lock()


def scratch_of(memory: torch.Tensor) -> Scratch:
    """The one `Scratch` of the storage that `memory` lies in, for as long as that lives."""
    storage = memory.untyped_storage()
    key = memory.device, storage.data_ptr()
    with _scratches_lock:
        for other in [other for other, (alive, _) in _scratches.items() if other != key and alive.expired()]:
            del _scratches[other]
        known = _scratches.get(key)
        if known is None or known[0].expired():  # what used the address before may still be running
            known = StorageWeakRef(storage), Scratch(memory.device) if known is None else known[1]
            _scratches[key] = known
    return known[1]


class turn:  # noqa: N801  (a context manager, which as a generator would cost the CPU more than all it does)
    """Use the experts' scratch: its memory, for the caller alone; None if they have none, or it cannot be had now."""

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
    """Both stacks of scales, dense: such as are so already, and compressed ones decoded into `memory`, or a new one."""
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
    """The same, of what `decode_scales` has put into `memory`."""
    return [
        scales if part is None else part.view(torch.float8_e4m3fn).view(scales.shape)
        for scales, part in _parts(experts, memory)
    ]


def _parts(experts: NVFP4Experts, memory: torch.Tensor | None) -> Iterator[tuple[Scales, torch.Tensor | None]]:
    """Both stacks of scales, and the bytes of `memory` for those that are compressed."""
    offset = 0
    for scales in (experts.gate_up_scales, experts.down_scales):
        size = csf_workspace_size(scales) if isinstance(scales, NVFP4CSFScales) else 0
        yield scales, memory.view(-1)[offset : offset + size] if size and memory is not None else None
        offset += size
