"""`ScalePrefetcher`: decodes layers' scales on a side stream while other layers run.

It is for layers that share one scratch, or alternate between two. For each scratch, this order has to hold:

    its previous reader, the MoE of layer i -> expand layer j into it (side stream) -> MoE of layer j (reads it)

With one scratch, call `prefetch(j)` when the MoE of layer j - 1 has been launched. Scales are then expanded while layer
j's attention runs. With two scratches, between which layers alternate, call `prefetch(j)` before the MoE of layer j -
1, which reads the other scratch. Scales are then expanded while that MoE runs, too.

`prefetch` makes the side stream wait for all work in the current stream so far, which includes that reader, but for
nothing launched later. `forward` makes its stream wait for its own layer's expansion, but for no later one. Inside a
graph capture, the same waits fork the side stream and join it again.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..csf.scales import NVFP4CSFScales
from .experts import NVFP4Experts
from .layer import moe_forward, uses_expanded_scales
from .scratch import Scratch, current_stream, decode_scales, scratch_of, stream_of

MAX_SCRATCHES = 2


class ScalePrefetcher:
    """Expands scales of `layers` ahead of their calls.

    It may be used from any stream and any thread. If the scratch holds another layer's prefetched scales, a prefetch is
    not made. A call that finds another layer's scales, or none, decodes its own, so outputs never depend on who was
    first. The prefetcher cannot see when a graph is replayed: the caller has to order replays, and only calls of layers
    may write to the scratch between a prefetch and its `forward`.
    """

    def __init__(self, layers: Sequence[NVFP4Experts]) -> None:
        """Raises `ValueError` if compressed layers have more than two scratches, or if scratches overlap."""
        self.layers = list(layers)
        staged = [layer for layer in self.layers if layer.scratch_size and layer.scratch is not None]
        memories = [layer.scratch for layer in staged if layer.scratch is not None]
        _check_scratches(memories)
        self._scratch_of = dict(zip(map(id, staged), map(scratch_of, memories)))
        device = staged[0].gate_up.device if staged else torch.device("cpu")
        self._side = torch.cuda.Stream(device) if device.type == "cuda" else None
        if self._side is not None:
            for layer in staged:  # freed memory must not be reused before the side stream is done with it
                for tensor in _side_stream_tensors(layer):
                    tensor.record_stream(self._side)

    def prefetch(
        self, i_layer: int, num_tokens: int, strategy: str | None = None, activation_format: str | None = None
    ) -> bool:
        """Start expanding layer `i_layer`'s scales for a call on `num_tokens` tokens with these arguments.

        Returns:
            Whether they are, or will be, in the scratch. They are not if that call would not read them there, if
            another layer's scales were prefetched into the scratch and have not been used, or, inside a graph capture,
            if another stream uses the scratch.
        """
        experts, scratch = self._layer(i_layer)
        if scratch is None or not uses_expanded_scales(experts, num_tokens, strategy, activation_format):
            return False
        with scratch.lock:
            stream = current_stream(scratch.device)
            turns = scratch.turns(stream)
            if turns is None or turns.holder is not None:
                return turns is not None and turns.holder is experts
            if self._side is None or stream is None:
                turns.begin(stream)
                decode_scales(experts, experts.scratch)
            else:
                self._side.wait_stream(stream_of(stream, scratch.device))
                with torch.cuda.stream(self._side):
                    turns.begin(current_stream(scratch.device))
                    decode_scales(experts, experts.scratch)
            turns.hold(experts)
        return True

    def _layer(self, i_layer: int) -> tuple[NVFP4Experts, Scratch | None]:
        if not 0 <= i_layer < len(self.layers):
            raise IndexError(f"i_layer must be 0 to {len(self.layers) - 1}, got {i_layer}")
        experts = self.layers[i_layer]
        return experts, self._scratch_of.get(id(experts))

    def forward(self, i_layer: int, hidden_states: torch.Tensor, *routing: torch.Tensor, **options) -> torch.Tensor:
        """`moe_forward` of a layer, on its prefetched scales if there are any. Another layer's prefetched scales in the
        same scratch are lost."""
        experts, scratch = self._layer(i_layer)
        if scratch is None:
            return moe_forward(experts, hidden_states, *routing, **options)
        with scratch.lock:
            stream = current_stream(scratch.device)
            turns = scratch.turns(stream)
            expanded = turns is not None and turns.holder is experts
            out = moe_forward(experts, hidden_states, *routing, scales_expanded=expanded, **options)
            if expanded and turns is not None and turns.holder is experts:  # the call has read them compressed
                turns.begin(stream)
        return out

    def discard(self) -> None:
        """Give up prefetches that no call will use.

        Inside a graph capture, these are the prefetches in that capture, and the side stream is joined, as it must be
        before a capture ends. Outside, they are all prefetches, including those that an interrupted capture left.
        """
        for scratch in set(self._scratch_of.values()):
            with scratch.lock:
                stream = current_stream(scratch.device)
                turns = scratch.turns(stream)
                if turns is not None and turns.holder is not None:
                    turns.begin(stream)
                scratch.forget_captures()


def _check_scratches(memories: list[torch.Tensor]) -> None:
    ends: dict[int, int] = {}
    for memory in memories:
        begin = memory.data_ptr()
        ends[begin] = max(ends.get(begin, 0), begin + memory.numel())
    if len(ends) > MAX_SCRATCHES:
        raise ValueError(f"layers must share one scratch, or alternate between two, got {len(ends)}")
    if any(begin < other < end for begin, end in ends.items() for other in ends):
        raise ValueError("layers must share a scratch from its first byte on, got two that overlap")


def _side_stream_tensors(layer: NVFP4Experts) -> list[torch.Tensor]:
    compressed = [s for s in (layer.gate_up_scales, layer.down_scales) if isinstance(s, NVFP4CSFScales)]
    tensors = [tensor for scales in compressed for tensor in scales.state_dict().values()]
    return tensors if layer.scratch is None else [layer.scratch, *tensors]
