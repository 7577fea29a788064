"""The scratch that layers share: what lies where in it, and how threads and streams take turns with it.

From decoding to the last GEMM that reads what was decoded, a call has the scratch for itself. While it launches, a lock
keeps other threads out. On a GPU the next use may come from another stream, which then waits for an event that the last
one left; uses by one stream wait for nothing.

No event from outside can be waited for inside a graph capture, and a replay is a use that nothing here sees. So the
uses in a capture are ordered among themselves, and the caller orders replays.
"""

from __future__ import annotations

import contextlib
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
    """Uses of a scratch one after the other: those outside of captures, or those of one capture."""

    def __init__(self, *, captured: bool = False) -> None:
        self._captured = captured
        self._holder: weakref.ref[NVFP4Experts] | None = None
        self._stream: torch.cuda.Stream | None = None
        self._end: torch.cuda.Event | None = None

    @property
    def holder(self) -> NVFP4Experts | None:
        """Whose scales, all of them, the scratch holds ahead of a call."""
        return None if self._holder is None else self._holder()

    def hold(self, experts: NVFP4Experts) -> None:
        self._holder = weakref.ref(experts)

    def begin(self, stream: torch.cuda.Stream | None) -> None:
        """A use by `stream` begins, behind the last one; the scratch holds nobody's scales any longer."""
        self._holder = None
        if stream is None or self._end is None or self._stream is None or self._stream == stream:
            return
        if not self._captured or is_capturing(self._stream):  # else it is what an interrupted capture left
            stream.wait_event(self._end)

    def end(self, stream: torch.cuda.Stream | None) -> None:
        """What `stream` has been given so far ends its use."""
        if stream is not None:
            self._end = self._end or getattr(torch, stream.device.type).Event()
            self._end.record(stream)
            self._stream = stream


class Scratch:
    """One block of memory that scales are decoded into, known by its address to whoever was given a tensor of it.

    Attributes:
        lock: to be held during a use, and while `turns` are looked at.
    """

    def __init__(self, device: torch.device) -> None:
        self.lock = threading.RLock()
        self._device = device
        self._eager, self._captured = Turns(), Turns(captured=True)
        self._capturing: torch.cuda.Stream | None = None

    def stream(self) -> torch.cuda.Stream | None:
        """The current one, where there are streams."""
        kind = self._device.type
        return getattr(torch, kind).current_stream(self._device) if kind in ("cuda", "xpu") else None

    def turns(self, stream: torch.cuda.Stream | None) -> Turns | None:
        """Which a use by the current stream belongs to; None where another stream uses the scratch in a capture that is
        under way, since nothing tells whether it is the same capture, and can be waited for, or another one."""
        with on_device(self._device):
            if stream is None or stream.device.type != "cuda" or not torch.cuda.is_current_stream_capturing():
                return self._eager
        if self._capturing != stream:
            if self._capturing is not None and is_capturing(self._capturing):
                return None
            self._capturing, self._captured = stream, Turns(captured=True)
        return self._captured

    def forget_captures(self) -> None:
        """What a capture left that was interrupted is nothing to the next."""
        if self._capturing is not None and not is_capturing(self._capturing):
            self._capturing = None


def is_capturing(stream: torch.cuda.Stream) -> bool:
    """Whether `stream`, of a GPU of NVIDIA or AMD, is part of a graph capture."""
    with torch.cuda.stream(stream):
        return torch.cuda.is_current_stream_capturing()


_scratches: dict[tuple[torch.device, int], tuple[StorageWeakRef, Scratch]] = {}
_scratches_lock = threading.Lock()


def scratch_of(memory: torch.Tensor) -> Scratch:
    """The one `Scratch` of the storage that `memory` lies in, for as long as that lives."""
    storage = memory.untyped_storage()
    key = memory.device, storage.data_ptr()
    known = _scratches.get(key)
    if known is None or known[0].expired():
        with _scratches_lock:
            for other in [other for other, (alive, _) in _scratches.items() if other != key and alive.expired()]:
                del _scratches[other]
            known = _scratches.get(key)
            if known is None or known[0].expired():  # what used the address before may still be running
                known = StorageWeakRef(storage), Scratch(memory.device) if known is None else known[1]
                _scratches[key] = known
    return known[1]


@contextlib.contextmanager
def turn(experts: NVFP4Experts) -> Iterator[torch.Tensor | None]:
    """Use the experts' scratch: its memory, for the caller alone; None if they have none, or a capture's other stream
    has it."""
    if experts.scratch is None:
        yield None
        return
    scratch = scratch_of(experts.scratch)
    with scratch.lock:
        stream = scratch.stream()
        turns = scratch.turns(stream)
        if turns is None:
            yield None
            return
        turns.begin(stream)
        try:
            yield experts.scratch
        finally:
            turns.end(stream)


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
