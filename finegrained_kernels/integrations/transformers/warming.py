"""Compiles the kernels of layers that are loaded while the other layers are read."""

from __future__ import annotations

import threading
from typing import Any

import torch
from transformers.utils import logging

logger = logging.get_logger(__name__)


class WarmUp:
    """Runs the bundle's `warm_up` while a checkpoint is read, once for layers of equal shapes and formats.

    If ``bundle`` is None, does nothing. If a machine has several ranks, the first compiles for all.
    """

    def __init__(self, bundle: Any, dtype: torch.dtype, top_k: int) -> None:
        distributed = torch.distributed
        is_first = not (distributed.is_available() and distributed.is_initialized()) or distributed.get_rank() == 0
        self._bundle = bundle if is_first else None
        self._options = {"dtype": dtype, "top_k": top_k}
        self._known: set[tuple] = set()
        self._waiting: list[tuple[Any, str | None, torch.device]] = []
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._is_last = False
        self._progress = (0, 0)

    def add(self, layer: Any, activation_format: str | None, device: torch.device) -> None:
        """Compile for ``layer``, which is as `warm_up` takes it. A layer on the CPU may move to a GPU once all are
        loaded."""
        if self._bundle is None:
            return
        key = (activation_format, device, *_shapes(layer))
        if key in self._known:
            return
        self._known.add(key)
        with self._changed:
            self._waiting.append((layer, activation_format, device))
            self._changed.notify()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, daemon=True)
            self._thread.start()

    def finish(self) -> None:
        """Wait until everything is compiled, with a progress bar."""
        with self._changed:
            self._is_last = True
            self._changed.notify()
        if self._thread is None:
            return
        self._thread.join(0.2)
        if not self._thread.is_alive():
            return
        with logging.tqdm(desc="Compiling kernels", unit="kernel") as bar:
            while self._thread.is_alive():
                self._thread.join(0.2)
                bar.n, bar.total = self._progress
                bar.refresh()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._is_last)
                found, self._waiting = self._waiting, []
            if not found:
                return
            for kind in dict.fromkeys(one[1:] for one in found):
                self._compile([layer for layer, *rest in found if tuple(rest) == kind], *kind)

    def _compile(self, layers: list[Any], activation_format: str | None, device: torch.device) -> None:
        def note(done: int, total: int) -> None:
            self._progress = done, total

        assert self._bundle is not None  # otherwise, nothing was added
        place = device if device.type != "cpu" else torch.device("cuda")
        try:
            self._bundle.warm_up(layers, formats=[activation_format], device=place, progress=note, **self._options)
        except (OSError, RuntimeError, ValueError) as error:
            logger.warning(f"kernels are compiled when they are first needed, not ahead: {error}")


def _shapes(layer: Any) -> list[Any]:
    """A key that is equal for layers that launch the same kernels."""
    parts = layer if isinstance(layer, tuple) else vars(layer).values()
    return [part.shape if isinstance(part, torch.Tensor) else getattr(part, "shape", type(part)) for part in parts]
