"""What the layers of one model share: the bundle, the workspace for decoded scales, and the order in which they run."""

from __future__ import annotations

import threading
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch

from finegrained_kernels import load

if TYPE_CHECKING:
    from finegrained_kernels.integrations.transformers.experts import NVFP4ExpertsModule


class Schedule:
    """Runs layers with one strategy, and prefetches in their order.

    Attributes:
        bundle: the kernels, as returned by `finegrained_kernels.load()`.
        strategy: "auto", "staged", "fused" or "dense".
        prefetch: whether each layer starts decoding the next layer's scales.
        layers: the modules, in the model's order.
    """

    def __init__(self, strategy: str, prefetch: bool) -> None:
        self.bundle: ModuleType = load()
        self.strategy, self.prefetch = strategy, prefetch
        self.layers: list[NVFP4ExpertsModule] = []
        self._scratch: dict[torch.device, torch.Tensor] = {}
        self._prefetchers: dict[torch.device, _Prefetcher] = {}
        self._lock = threading.RLock()

    def __getstate__(self) -> dict[str, Any]:
        """The state without what cannot be copied or stored: the bundle, streams, the lock, and the workspace."""
        return {**self.__dict__, "bundle": None, "_scratch": {}, "_prefetchers": {}, "_lock": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, bundle=load(), _lock=threading.RLock())

    def scratch(self, device: torch.device) -> torch.Tensor | None:
        """The workspace on ``device``, large enough for every layer; None if none is needed.

        With "auto", the GEMMs of nearly every call read compressed scales; other calls decode them into new memory.
        """
        size = max((layer.scratch_bytes for layer in self.layers), default=0) if self.strategy == "staged" else 0
        used = {layer.device for layer in self.layers} | {device}
        self._scratch = {place: scratch for place, scratch in self._scratch.items() if place in used}
        if size and (device not in self._scratch or self._scratch[device].numel() < size):
            self._scratch[device] = torch.empty(size, dtype=torch.uint8, device=device)
        return self._scratch.get(device)

    def prepare(self) -> None:
        """Prepare all layers for running. It is done for all together, because the size of the workspace depends on all
        of them."""
        with self._lock:
            for layer in self.layers:
                layer.prepare()

    def prepare_copy(self) -> None:
        """The same for layers that were copied or unpickled, in whichever thread calls one first."""
        with self._lock:
            if any(layer.experts is None for layer in self.layers):
                self.prepare()

    def switch(self, strategy: str, prefetch: bool) -> None:
        """Run all layers with another strategy from now on."""
        with self._lock:
            self.changed()
            self.strategy, self.prefetch = strategy, prefetch
            self._scratch.clear()
            self.prepare()

    def changed(self) -> None:
        """Drop what was prefetched, after layers were loaded, moved or switched."""
        with self._lock:
            for prefetcher in self._prefetchers.values():
                prefetcher.discard()
            self._prefetchers.clear()

    def run(
        self,
        layer: NVFP4ExpertsModule,
        strategy: str,
        hidden_states: torch.Tensor,
        top_k_index: torch.Tensor,
        top_k_weights: torch.Tensor,
    ) -> torch.Tensor:
        # "auto" leaves the choice to the kernels, and with dense scales there is none.
        named = strategy if strategy in ("staged", "fused") else None
        options = {"strategy": named, "activation_format": layer.activation_format}
        routing = top_k_index, top_k_weights
        # Streams and their order are not part of a compiled graph. There, each layer decodes for itself.
        if not self.prefetch or strategy != "staged" or torch.compiler.is_compiling():
            return self.bundle.moe_forward(layer.experts, hidden_states, *routing, **options)
        prefetcher = self._prefetcher(layer.device)
        return prefetcher.run(layer, hidden_states, routing, options)

    def _prefetcher(self, device: torch.device) -> _Prefetcher:
        with self._lock:
            if device not in self._prefetchers:
                layers = [layer for layer in self.layers if layer.device == device]
                self._prefetchers[device] = _Prefetcher(self.bundle, layers)
            return self._prefetchers[device]


class _Prefetcher:
    """`ScalePrefetcher` for layers that usually, but not necessarily, run in order."""

    def __init__(self, bundle: ModuleType, layers: list[NVFP4ExpertsModule]) -> None:
        self._prefetcher = bundle.ScalePrefetcher([layer.experts for layer in layers])
        self._positions = {id(layer): i for i, layer in enumerate(layers)}

    def run(
        self,
        layer: NVFP4ExpertsModule,
        hidden_states: torch.Tensor,
        routing: tuple[torch.Tensor, ...],
        options: dict[str, Any],
    ) -> torch.Tensor:
        i_layer = self._positions[id(layer)]
        out = self._prefetcher.forward(i_layer, hidden_states, *routing, **options)
        # The first layer is not prefetched for the next pass, which may never come, or may have another number of
        # tokens.
        if i_layer + 1 < len(self._positions):
            self._prefetcher.prefetch(i_layer + 1, len(hidden_states), "staged")
        return out

    def discard(self) -> None:
        self._prefetcher.discard()
