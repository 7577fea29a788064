"""`ScalePrefetcher`: the next layer's scales decoded on a side stream while this layer's attention runs.

For layers that share a scratch. The order that has to hold, on one device:

    MoE of layer i - 1 (reads the scratch) -> expand layer i (side stream) -> MoE of layer i (reads it)

`prefetch(i)`, called when layer i - 1's MoE has been launched, makes the side stream wait for all that the current
stream holds so far, so for that reader, and for nothing launched after. `forward(i, ...)` makes the current stream wait
for the side stream. Inside a graph capture the same waits fork the side stream off and join it again.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .moe import NVFP4Experts, expand_scales, moe_forward, uses_expanded_scales


class ScalePrefetcher:
    """Expands scales of `layers`, which share one scratch, ahead of their calls.

    One stream at a time: the stream that called `prefetch` must call `forward`, so that two streams never race for the
    scratch.
    """

    def __init__(self, layers: Sequence[NVFP4Experts]) -> None:
        """Raises `ValueError` if compressed layers do not share one scratch."""
        self.layers = list(layers)  # kept alive: the side stream may still read them
        compressed = [layer for layer in self.layers if layer.scratch_size]
        if len({None if layer.scratch is None else layer.scratch.data_ptr() for layer in compressed}) > 1:
            raise ValueError("layers must share one scratch, got several")
        device = compressed[0].gate_up.device if compressed else torch.device("cpu")
        self._side = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._expanded: int | None = None
        self._stream: torch.cuda.Stream | None = None

    def prefetch(self, i_layer: int, num_tokens: int) -> bool:
        """Start to expand layer `i_layer`'s scales for a call on `num_tokens` tokens; whether there is any use in it.

        Raises:
            RuntimeError: another layer's prefetched scales have not been used yet. Nothing is launched.
        """
        experts = self.layers[i_layer]
        if not uses_expanded_scales(experts, num_tokens):
            return False
        if self._expanded is not None:
            raise RuntimeError(f"layer {self._expanded} is prefetched and not used yet: its scales would be lost")
        if self._side is None:
            expand_scales(experts)
        else:
            self._stream = torch.cuda.current_stream(self._side.device)
            self._side.wait_stream(self._stream)
            with torch.cuda.stream(self._side):
                expand_scales(experts)
        self._expanded = i_layer
        return True

    def forward(self, i_layer: int, hidden_states: torch.Tensor, *routing: torch.Tensor, **options) -> torch.Tensor:
        """`moe_forward` of a layer, on its prefetched scales if there are any.

        Raises:
            RuntimeError: another layer is prefetched, or this one was by another stream. Nothing is launched.
        """
        if self._expanded not in (None, i_layer):
            raise RuntimeError(f"layer {self._expanded} is prefetched, got a call of layer {i_layer}")
        expanded = self._expanded is not None
        if expanded and self._side is not None:
            if torch.cuda.current_stream(self._side.device) != self._stream:
                raise RuntimeError(f"layer {i_layer} was prefetched by another stream, which alone may use it")
            self._stream.wait_stream(self._side)
        self._expanded = None
        return moe_forward(self.layers[i_layer], hidden_states, *routing, scales_expanded=expanded, **options)

    def discard(self) -> None:
        """Give up a prefetch that no call will use; joins the side stream, as a graph capture must before it ends."""
        if self._expanded is not None and self._side is not None:
            self._stream.wait_stream(self._side)
        self._expanded = None
