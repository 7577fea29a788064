"""How much of the expansion of scales does prefetching hide? Measured on the GPU's own timeline, layer by layer.

Whole steps cannot tell: expansion is a few percent of a prefill, and the clock drifts by as much. So events are
recorded in an eager step. Every other layer is prefetched, so its scales are expanded on the side stream beside its
attention; the layers between them expand alone, on the main stream after attention. The next step swaps them, and both
steps together are a round, in which each layer runs once in either way, at the same clock.

    main stream  | begin | attention                          | ready | MoE
    side stream  | expansion begin .. end |                        (waits for the end of the expansion)

exposed    what prefetched layers wait: `max(0, end - ready)`, summed over layers.
loss       what their attention, `ready - begin`, takes longer than without an expansion beside it, summed.

The hidden share is `1 - exposed / expansion`, where the expansions ran alone; strictly, it is
`1 - (exposed + loss) / expansion`. A sleeping kernel delays the GPU until the whole step is launched, so that no layer
waits for a launch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import time
from collections.abc import Callable, Iterator
from types import ModuleType

import harness
import torch

SLEEP_CYCLES = 40_000_000
"""About 20 ms; launching a step of several layers takes less."""


class Clock:
    """Marks on the current stream's timeline, by name; without a GPU, by the wall clock."""

    def __init__(self) -> None:
        self._origin = self._now()

    def mark(self) -> Callable[[], float]:
        """Mark this moment on this stream. Its time in us is available once the GPU has passed it."""
        now = self._now()
        if isinstance(now, float):
            return lambda: (now - self._origin) * 1e6
        return lambda: self._origin.elapsed_time(now) * 1000

    @staticmethod
    def _now() -> float | torch.cuda.Event:
        if not torch.cuda.is_available():
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


@dataclasses.dataclass
class LayerMarks:
    """The marks of one layer in one step."""

    is_prefetched: bool
    begin: Callable[[], float]
    ready: Callable[[], float]
    expansion: tuple[Callable[[], float], Callable[[], float]]

    def spans(self) -> dict[str, float]:
        """Spans in us by name, as in `Timeline.round`."""
        begin, ready, expansion_begin, expansion_end = (mark() for mark in (self.begin, self.ready, *self.expansion))
        attention, expansion = ready - begin, expansion_end - expansion_begin
        if not self.is_prefetched:
            return {"attention_alone": attention, "expansion": expansion}
        exposed = max(0.0, expansion_end - ready)
        return {"attention_with_prefetch": attention, "expansion_beside": expansion, "exposed": exposed}


@contextlib.contextmanager
def noted_expansions(bundle: ModuleType, clock: Clock) -> Iterator[list]:
    """Marks around each expansion that a `ScalePrefetcher` starts meanwhile, on the stream on which it starts."""
    prefetch = importlib.import_module(f"{bundle.__name__}.moe.prefetch")
    decode, noted = prefetch.decode_scales, []

    def decode_noted(*arguments) -> list[torch.Tensor]:
        begin = clock.mark()
        done = decode(*arguments)
        noted.append((begin, clock.mark()))
        return done

    prefetch.decode_scales = decode_noted
    try:
        yield noted
    finally:
        prefetch.decode_scales = decode


class Timeline:
    """Steps of a `moe_layer.Stack` for one call, with marks."""

    def __init__(self, stack, call: tuple[torch.Tensor, torch.Tensor, torch.Tensor], options: dict) -> None:
        self.stack, self.call, self.options = stack, call, options
        self.cycles = SLEEP_CYCLES

    def step(self, first: int) -> tuple[torch.Tensor, list[LayerMarks]]:
        """The stack's output, with layers `first`, `first + 2`, .. prefetched."""
        clock = Clock()
        if torch.cuda.is_available():
            torch.cuda._sleep(self.cycles)
            awake = torch.cuda.Event()
            awake.record()
        x, *routing = self.call
        marks = []
        with noted_expansions(self.stack.bundle, clock) as expansions:
            for i in range(len(self.stack.compressed)):
                x, layer_marks = self._layer(i, x, routing, clock, expansions, is_prefetched=i % 2 == first)
                marks.append(layer_marks)
        if torch.cuda.is_available():
            if awake.query():
                print(f"a step took longer to launch than {self.cycles} cycles: asleep for twice as long", flush=True)
                self.cycles *= 2
            torch.cuda.synchronize()
        return x, marks

    def _layer(self, i: int, x, routing, clock: Clock, expansions: list, *, is_prefetched: bool):
        stack, prefetcher = self.stack, self.stack.prefetchers[1]
        begin = clock.mark()
        if is_prefetched:
            prefetcher.prefetch(i, len(x), "staged")
        x = x + stack.attention(i, stack.norm(x), None)
        call = (stack.norm(x), *routing)
        ready = clock.mark()
        if is_prefetched:
            out = prefetcher.forward(i, *call, **self.options, strategy="staged")
            return x + out, LayerMarks(True, begin, ready, expansions[-1])
        experts, expansion_begin = stack.compressed[i], clock.mark()
        stack.bundle.expand_scales(experts)
        expansion = (expansion_begin, clock.mark())
        out = stack.bundle.moe_forward(experts, *call, **self.options, strategy="staged", scales_expanded=True)
        return x + out, LayerMarks(False, begin, ready, expansion)

    def round(self) -> dict[str, float]:
        """us summed over all layers, each run once in either way."""
        sums: dict[str, float] = {}
        for first in range(2):
            for marks in self.step(first)[1]:
                for name, span in marks.spans().items():
                    sums[name] = sums.get(name, 0.0) + span
        return sums | {"attention_loss": sums["attention_with_prefetch"] - sums["attention_alone"]}

    def measure(self, rounds: int) -> dict[str, harness.Timing]:
        """Quantiles of the stack's sums over rounds. The first round is not counted."""
        found = [self.round() for _ in range(rounds + 1)][1:]
        return {name: harness.quantiles([sums[name] for sums in found]) for name in found[0]}


def hidden(timings: dict[str, harness.Timing]) -> tuple[float, float]:
    """The share of the expansion that prefetching hides: counting exposed time, and counting that and attention's
    loss."""
    expansion, exposed, loss = (timings[name].p50 for name in ("expansion", "exposed", "attention_loss"))
    return 1 - exposed / expansion, 1 - (exposed + max(0.0, loss)) / expansion
