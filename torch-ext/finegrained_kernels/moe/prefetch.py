"""`ScalePrefetcher`: layers' scales decoded on a side stream while other layers run.

For layers that share one scratch, or two in turns. The order that has to hold, for each scratch:

    its previous reader, the MoE of layer i -> expand layer j into it (side stream) -> MoE of layer j (reads it)

With one scratch, call `prefetch(j)` when the MoE of layer j - 1 has been launched: expansion runs beside layer j's
attention. With two, layers alternating between them, `prefetch(j)` may come before the MoE of layer j - 1, which reads
the other: expansion then runs beside that as well.

`prefetch` makes the side stream wait for all that the current stream holds so far, so for that reader, and for nothing
launched after; `forward` makes its stream wait for its own layer's expansion, and for no later one. Inside a graph
capture the same waits fork the side stream off and join it again.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch

from ..csf.scales import NVFP4CSFScales
from .experts import NVFP4Experts
from .layer import expand_scales, moe_forward, uses_expanded_scales

MAX_SCRATCHES = 2


class ScalePrefetcher:
    """Expands scales of `layers` ahead of their calls.

    Any stream, of any thread, may call: uses of a scratch through one prefetcher follow each other on the GPU. Inside a
    graph capture only one stream may. A replay is a use that the prefetcher cannot see: the caller orders replays, and
    lets nothing else write to the scratch between a prefetch and its `forward`.
    """

    def __init__(self, layers: Sequence[NVFP4Experts]) -> None:
        """Raises `ValueError` if compressed layers have more than two scratches, or ones that overlap."""
        self.layers = list(layers)
        staged = [layer for layer in self.layers if layer.scratch_size and layer.scratch is not None]
        memories = [layer.scratch for layer in staged if layer.scratch is not None]
        _check_scratches(memories)
        scratches = {memory.data_ptr(): _Scratch() for memory in memories}
        self._scratch_of = [
            None if layer.scratch is None else scratches.get(layer.scratch.data_ptr()) for layer in self.layers
        ]
        device = staged[0].gate_up.device if staged else torch.device("cpu")
        self._side = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._lock = threading.Lock()
        if self._side is not None:
            for layer in staged:  # memory that is freed must not be used anew before the side stream is done with it
                for tensor in _side_stream_tensors(layer):
                    tensor.record_stream(self._side)

    def prefetch(self, i_layer: int, num_tokens: int, strategy: str | None = None) -> bool:
        """Start to expand layer `i_layer`'s scales for a call on `num_tokens` tokens; whether there is any use in it.

        Raises:
            RuntimeError: a layer's prefetched scales in the same scratch have not been used yet; or a second stream of
                a graph capture calls. Nothing is launched.
        """
        experts, scratch = self._layer(i_layer)
        if scratch is None or not uses_expanded_scales(experts, num_tokens, strategy):
            return False
        with self._lock:
            if scratch.layer is not None:
                raise RuntimeError(f"layer {scratch.layer} is prefetched and not used yet: its scales would be lost")
            if self._side is None:
                expand_scales(experts)
            else:
                stream = torch.cuda.current_stream(self._side.device)
                scratch.check_stream(stream)
                self._side.wait_stream(stream)
                scratch.follow_last_use(self._side)
                with torch.cuda.stream(self._side):
                    expand_scales(experts)
                scratch.record_prefetch(self._side)
            scratch.layer = i_layer
        return True

    def _layer(self, i_layer: int) -> tuple[NVFP4Experts, _Scratch | None]:
        if not 0 <= i_layer < len(self.layers):
            raise IndexError(f"i_layer must be 0 to {len(self.layers) - 1}, got {i_layer}")
        return self.layers[i_layer], self._scratch_of[i_layer]

    def forward(self, i_layer: int, hidden_states: torch.Tensor, *routing: torch.Tensor, **options) -> torch.Tensor:
        """`moe_forward` of a layer, on its prefetched scales if there are any.

        Raises:
            RuntimeError: the call would overwrite another layer's prefetched scales; or this layer's were prefetched on
                the other side of a graph capture's begin or end; or a second stream of a capture calls. Nothing is
                launched.
        """
        experts, scratch = self._layer(i_layer)
        uses = scratch is not None and uses_expanded_scales(experts, len(hidden_states), options.get("strategy"))
        if scratch is None or not (uses or scratch.layer == i_layer):
            return moe_forward(experts, hidden_states, *routing, **options)
        with self._lock:
            if scratch.layer not in (None, i_layer):
                raise RuntimeError(
                    f"layer {scratch.layer} is prefetched, got a call of layer {i_layer}, which shares its scratch: "
                    f"call layer {scratch.layer} first, or discard()"
                )
            expanded = scratch.layer == i_layer
            stream = None if self._side is None else torch.cuda.current_stream(self._side.device)
            if stream is not None:
                scratch.check_stream(stream)
                if expanded:
                    scratch.follow_prefetch(stream)
                else:
                    scratch.follow_last_use(stream)
            out = moe_forward(experts, hidden_states, *routing, scales_expanded=expanded, **options)
            if stream is not None:
                scratch.record_use(stream)
            scratch.layer = None
        return out

    def discard(self) -> None:
        """Give up prefetches that no call will use.

        Inside a graph capture, those that it captured: this joins the side stream, as a capture must before it ends.
        Outside, all of them, also what an interrupted capture left.
        """
        stream = None if self._side is None else torch.cuda.current_stream(self._side.device)
        with self._lock:
            for scratch in filter(None, self._scratch_of):
                scratch.discard(stream)


class _Scratch:
    """One scratch: which layer's prefetched scales it holds, and what comes before its next use.

    Events are never waited for across the begin or end of a capture, where CUDA refuses it, nor in a later capture than
    the one that recorded them: a capture's only event is that of a prefetch which has not been used.
    """

    def __init__(self) -> None:
        self.layer: int | None = None
        self._prefetch_is_captured = False
        self._prefetched: torch.cuda.Event | None = None
        self._last_stream: torch.cuda.Stream | None = None  # of eager uses
        self._last_use: torch.cuda.Event | None = None
        self._capturing_stream: torch.cuda.Stream | None = None

    def check_stream(self, stream: torch.cuda.Stream) -> None:
        """Raise if another stream of the same capture has used the scratch, which nothing orders with this one."""
        if not _is_capturing():
            self._capturing_stream = None
        elif self._capturing_stream in (None, stream):
            self._capturing_stream = stream
        else:
            raise RuntimeError(
                "a second stream uses the scratch inside a graph capture, where one alone may; "
                "if these are two captures, call discard() between them, outside both"
            )

    def record_prefetch(self, side: torch.cuda.Stream) -> None:
        self._prefetch_is_captured = _is_capturing()
        self._prefetched = torch.cuda.Event()
        self._prefetched.record(side)

    def follow_prefetch(self, stream: torch.cuda.Stream) -> None:
        if self._prefetch_is_captured != _is_capturing():
            sides = ("inside", "outside") if self._prefetch_is_captured else ("outside", "inside")
            raise RuntimeError(
                f"layer {self.layer} was prefetched {sides[0]} a graph capture and is called {sides[1]} it: "
                "prefetch and call on the same side"
            )
        assert self._prefetched is not None  # recorded when `layer` was set
        stream.wait_event(self._prefetched)

    def record_use(self, stream: torch.cuda.Stream) -> None:
        if not _is_capturing():
            self._last_use = self._last_use or torch.cuda.Event()
            self._last_use.record(stream)
            self._last_stream = stream

    def follow_last_use(self, stream: torch.cuda.Stream) -> None:
        """Make `stream` wait for the last use; in a capture its order on the one stream is enough."""
        if self._last_use is not None and self._last_stream != stream and not _is_capturing():
            stream.wait_event(self._last_use)

    def discard(self, stream: torch.cuda.Stream | None) -> None:
        if stream is not None and not _is_capturing():
            self._capturing_stream = None
        if self.layer is not None and stream is not None:
            assert self._prefetched is not None
            if self._prefetch_is_captured == _is_capturing():
                stream.wait_event(self._prefetched)
                self.record_use(stream)
            elif _is_capturing():
                return
        self.layer = None


def _is_capturing() -> bool:
    return torch.cuda.is_current_stream_capturing()


def _check_scratches(memories: list[torch.Tensor]) -> None:
    ends: dict[int, int] = {}
    for memory in memories:
        begin = memory.data_ptr()
        ends[begin] = max(ends.get(begin, 0), begin + memory.numel())
    if len(ends) > MAX_SCRATCHES:
        raise ValueError(f"layers must share one scratch, or two in turns, got {len(ends)}")
    if any(begin < other < end for begin, end in ends.items() for other in ends):
        raise ValueError("layers must share a scratch from its first byte on, got two that overlap")


def _side_stream_tensors(layer: NVFP4Experts) -> list[torch.Tensor]:
    compressed = [s for s in (layer.gate_up_scales, layer.down_scales) if isinstance(s, NVFP4CSFScales)]
    tensors = [tensor for scales in compressed for tensor in scales.state_dict().values()]
    return tensors if layer.scratch is None else [layer.scratch, *tensors]
