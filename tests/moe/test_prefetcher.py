"""`ScalePrefetcher`, on a model of streams that tracks the order of operations, and on real streams with delays."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import random
from types import SimpleNamespace

import pytest
import torch

from experts import NUM_EXPERTS, compressed, make_call, make_experts, make_scratch
from numeric import DEVICES

NUM_LAYERS = 4
GPU = SimpleNamespace(type="cuda")


class Machine:
    """A model of `torch.cuda` with streams, events and a graph capture, which tracks only the order of operations.

    A stream or event has the set of operations that come before everything that is launched after it. Every access of a
    scratch has to come after those with which it conflicts.
    """

    def __init__(self) -> None:
        self.operations = 0
        self.writes, self.reads, self.content = {}, {}, {}  # by scratch: operations, and the layer that it holds
        self.captures = 0

        class Stream:
            def __init__(self, device=None) -> None:
                self.device, self.seen, self.capture = GPU, set(), 0  # the number of the capture that it is part of

            def wait_event(self, event) -> None:
                assert event.capture == self.capture, "CUDA refuses to wait across a capture's begin or end"
                self.seen |= event.seen

            def wait_stream(self, other) -> None:
                if not self.capture:
                    self.capture = other.capture  # forked off
                assert other.capture == self.capture, "CUDA refuses to wait across a capture's begin or end"
                self.seen |= other.seen

        class Event:
            def record(self, stream) -> None:
                self.seen, self.capture = set(stream.seen), stream.capture

        self.Stream, self.Event, self.current = Stream, Event, Stream()

    def current_stream(self, device=None):
        return self.current

    def is_current_stream_capturing(self) -> bool:
        return self.current.capture > 0

    @contextlib.contextmanager
    def stream(self, stream):
        before, self.current = self.current, stream
        yield
        self.current = before

    def access(self, layer, *, write: bool) -> None:
        scratch, seen = layer.scratch.data_ptr(), self.current.seen
        conflicts = self.writes.get(scratch, set()) | (self.reads.get(scratch, set()) if write else set())
        assert conflicts <= seen, f"a {'write' if write else 'read'} of layer {layer.name} races for its scratch"
        if write:
            self.writes[scratch], self.reads[scratch] = {self.operations}, set()
            self.content[scratch] = layer.name
        else:
            assert self.content[scratch] == layer.name, f"layer {layer.name} reads scales of {self.content[scratch]}"
            self.reads[scratch].add(self.operations)
        seen.add(self.operations)
        self.operations += 1

    def begin_capture(self, streams: list) -> list:
        """Two streams of a capture, the second forked from the first. Replays come after everything in `streams`."""
        self.captures += 1
        self.begin = self.operations
        self.before = self.current, dict(self.writes), {name: set(own) for name, own in self.reads.items()}
        self.before += (dict(self.content),)
        captured = [self.Stream(), self.Stream()]
        for stream in captured:
            stream.seen, stream.capture = set().union(*(stream.seen for stream in streams)), self.captures
        self.current = captured[0]
        return captured

    def end_capture(self, captured: list, side) -> None:
        forked = {operation for operation in side.seen if operation >= self.begin}
        assert forked <= captured[0].seen | captured[1].seen, "the side stream is not joined: CUDA refuses the capture"
        self.interrupt_capture(captured, side)

    def interrupt_capture(self, captured: list, side) -> None:
        """None of it has run, so eager operations see the state from before."""
        self.current, self.writes, self.reads, self.content = self.before
        for stream in (*captured, side):
            stream.capture = 0


class Memory:
    def __init__(self, address: int, size: int = 64) -> None:
        self.address, self.size, self.used_by, self.device = address, size, [], GPU

    def data_ptr(self) -> int:
        return self.address

    def numel(self) -> int:
        return self.size

    def record_stream(self, stream) -> None:
        self.used_by.append(stream)


class Layer:
    gate_up = SimpleNamespace(device=GPU)
    gate_up_scales = down_scales = None
    scratch_size = 64

    def __init__(self, name: int, scratch: Memory) -> None:
        self.name, self.scratch = name, scratch


def make_layers(addresses: list[int]) -> list[SimpleNamespace]:
    memories = {address: Memory(address) for address in addresses}
    return [Layer(i, memories[address]) for i, address in enumerate(addresses)]


@pytest.fixture
def machine(bundle, monkeypatch):
    """The bundle's scratches and prefetcher on a `Machine`, with the work of layers replaced by its accesses."""
    machine = Machine()
    prefetch, scratch = (importlib.import_module(f"{bundle.__name__}.moe.{name}") for name in ("prefetch", "scratch"))
    scratches: dict[int, object] = {}

    def forward(layer, hidden, *, scales_expanded=False, strategy="staged"):
        if strategy == "staged":
            with scratch.turn(layer) as memory:
                if memory is not None and not scales_expanded:
                    machine.access(layer, write=True)
                if memory is not None:
                    machine.access(layer, write=False)

    for module in (prefetch, scratch):
        monkeypatch.setattr(module, "torch", SimpleNamespace(cuda=machine, device=torch.device))
        monkeypatch.setattr(
            module, "scratch_of", lambda memory: scratches.setdefault(memory.data_ptr(), scratch.Scratch(GPU))
        )
        monkeypatch.setattr(module, "current_stream", machine.current_stream)
        monkeypatch.setattr(module, "stream_of", lambda stream, device: stream)
    monkeypatch.setattr(scratch, "on_device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(prefetch, "moe_forward", forward)
    monkeypatch.setattr(prefetch, "decode_scales", lambda layer, memory: machine.access(layer, write=True))
    monkeypatch.setattr(
        prefetch,
        "uses_expanded_scales",
        lambda _, num_tokens, strategy=None, activation_format=None: strategy != "fused",
    )
    machine.forward = forward
    return machine


@pytest.mark.parametrize("addresses", [[0] * NUM_LAYERS, [0, 64] * (NUM_LAYERS // 2)], ids=["one", "two"])
@pytest.mark.parametrize("seed", range(20))
def test_every_order_of_calls_is_free_of_races(bundle, machine, addresses, seed):
    """1,000 random steps of two streams, including captures. Every call has to run, and none may wait where CUDA
    forbids it."""
    chooser = random.Random(seed)
    layers = make_layers(addresses)
    prefetcher = bundle.ScalePrefetcher(layers)
    streams = [machine.current, machine.Stream()]
    captured = []
    prefetched = 0
    for _ in range(1000):
        action = chooser.choice(
            ["prefetch", "prefetch", "forward", "forward", "forward", "plain", "fused", "discard", "switch", "capture"]
        )
        layer = chooser.randrange(NUM_LAYERS)
        if action == "prefetch":
            prefetched += prefetcher.prefetch(layer, 1)
        elif action in ("forward", "fused"):
            prefetcher.forward(layer, [0], **({"strategy": "fused"} if action == "fused" else {}))
        elif action == "plain":
            machine.forward(layers[layer], [0])
        elif action == "discard":
            if chooser.random() < 0.3:
                prefetcher.discard()
        elif action == "switch":
            machine.current = chooser.choice(captured or streams)
        elif captured:
            for machine.current in captured:
                prefetcher.discard()
            machine.end_capture(captured, prefetcher._side)
            captured = []
        elif chooser.random() < 0.3:
            captured = machine.begin_capture([*streams, prefetcher._side])
    assert prefetched > 80


@pytest.mark.parametrize("missing", ["wait_event", "wait_stream"])
def test_the_model_sees_a_missing_wait(bundle, machine, monkeypatch, missing):
    monkeypatch.setattr(machine.Stream, missing, lambda self, other: None)
    layers = make_layers([0, 0])
    prefetcher = bundle.ScalePrefetcher(layers)
    machine.access(layers[0], write=True)  # a use that does not go through the prefetcher
    with pytest.raises(AssertionError, match="races"):
        prefetcher.prefetch(1, 1)
        prefetcher.forward(1, [0])


def test_two_scratches_overlap_a_layer_with_the_next_expansion(bundle, machine):
    """With one scratch the second expansion waits for the layer before it; with two it does not."""
    for addresses, overlaps in (([0, 0], False), ([0, 64], True)):
        prefetcher = bundle.ScalePrefetcher(make_layers(addresses))
        prefetcher.prefetch(0, 1)
        if overlaps:
            prefetcher.prefetch(1, 1)
        before = machine.operations
        prefetcher.forward(0, [0])
        assert machine.operations - 1 in machine.current.seen
        if overlaps:
            assert before not in prefetcher._side.seen
        else:
            prefetcher.prefetch(1, 1)
            assert before in prefetcher._side.seen
        prefetcher.forward(1, [0])


def test_prefetches_stay_on_their_side_of_a_capture(bundle, machine):
    """What was prefetched outside is not used inside, and the other way round: calls decode."""
    prefetcher = bundle.ScalePrefetcher(make_layers([0, 0]))
    assert prefetcher.prefetch(0, 1) is True
    eager = machine.current
    captured = machine.begin_capture([eager, prefetcher._side])
    before = machine.operations
    prefetcher.forward(0, [0])
    assert machine.operations == before + 2, "decoded and read"
    prefetcher.discard()  # the capture must not discard it
    assert prefetcher.prefetch(1, 1) is True
    prefetcher.forward(1, [0])
    machine.end_capture(captured, prefetcher._side)
    before = machine.operations
    prefetcher.forward(0, [0])
    assert machine.operations == before + 1, "read"


def test_one_stream_alone_uses_a_scratch_in_a_capture(bundle, machine):
    """Prefetches of another stream of the capture are not made, and its calls decode into other memory."""
    prefetcher = bundle.ScalePrefetcher(make_layers([0, 0]))
    eager = machine.current
    captured = machine.begin_capture([eager, prefetcher._side])
    assert prefetcher.prefetch(1, 1) is True
    before, machine.current = machine.operations, captured[1]
    assert prefetcher.prefetch(0, 1) is False
    for i_layer in (0, 1):
        prefetcher.forward(i_layer, [0])
    assert machine.operations == before
    machine.current = captured[0]
    prefetcher.forward(1, [0])
    assert prefetcher.prefetch(0, 1) is True
    machine.interrupt_capture(captured, prefetcher._side)
    prefetcher.discard()
    captured = machine.begin_capture([eager, prefetcher._side])
    prefetcher.forward(0, [0])
    assert prefetcher.prefetch(1, 1) is True


def test_memory_of_the_side_stream_is_kept_for_it(bundle, machine):
    layers = make_layers([0, 64])
    prefetcher = bundle.ScalePrefetcher(layers)
    assert all(layer.scratch.used_by == [prefetcher._side] for layer in layers)


def test_which_scratches_are_refused(bundle, machine):
    with pytest.raises(ValueError, match="must share one scratch, or alternate between two, got 3"):
        bundle.ScalePrefetcher(make_layers([0, 64, 128]))
    with pytest.raises(ValueError, match="two that overlap"):
        bundle.ScalePrefetcher(make_layers([0, 32]))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("num_scratches", [1, 2])
def test_real_layers_in_any_order(bundle, device, num_scratches):
    """Prefetched, plain and fused calls; on a GPU 1,000 of them, on two streams, with delays anywhere."""
    dense, layers = make_stack(bundle, device, num_scratches)
    call = make_call(device, 17, 2)
    expected = [bundle.moe_forward(experts, *call, activation_format="bf16") for experts in dense]
    prefetcher = bundle.ScalePrefetcher(layers)
    chooser = random.Random(0)
    on_gpu = device == "cuda"
    streams = [torch.cuda.Stream() for _ in range(2)] if on_gpu else [None]
    if on_gpu:
        torch.cuda.synchronize()
    outputs = []
    for step in range(1000 if on_gpu else 12):
        i_layer = chooser.randrange(len(layers))
        strategy = chooser.choice(["staged", "staged", "staged", "fused"])
        prefetches = chooser.random() < 0.7
        with torch.cuda.stream(streams[0]) if on_gpu else contextlib.nullcontext():
            if prefetches:
                delay(chooser, streams[0], prefetcher)
                prefetcher.prefetch(i_layer, 17, strategy)
        chooser.shuffle(streams)
        with torch.cuda.stream(streams[0]) if on_gpu else contextlib.nullcontext():
            delay(chooser, streams[0], prefetcher)
            out = prefetcher.forward(i_layer, *call, activation_format="bf16", strategy=strategy)
            outputs.append(((out != expected[i_layer]).any(), step))
    if on_gpu:
        torch.cuda.synchronize()
    assert not [step for differs, step in outputs if differs]


def make_stack(bundle, device: str, num_scratches: int):
    """Dense layers, and the same layers compressed, which alternate between the scratches."""
    dense = [make_experts(bundle, device, seed) for seed in range(3)]
    scratches = [make_scratch(dense[0]) for _ in range(num_scratches)]
    return dense, [compressed(bundle, experts, scratch=scratches[i % num_scratches]) for i, experts in enumerate(dense)]


def delay(chooser: random.Random, stream, prefetcher) -> None:
    """Sometimes delay the caller's stream or the side stream."""
    if stream is not None and chooser.random() < 0.2:
        with torch.cuda.stream(chooser.choice([stream, prefetcher._side])):
            torch.cuda._sleep(chooser.choice([20_000, 400_000]))


def test_what_the_prefetcher_refuses(bundle):
    dense = make_experts(bundle, "cpu")
    staged = compressed(bundle, dense)
    call = make_call("cpu", 3, 2)
    options = {"strategy": "staged", "activation_format": "bf16"}
    expected = bundle.moe_forward(dense, *call, activation_format="bf16")
    bare = dataclasses.replace(staged, scratch=None)
    prefetcher = bundle.ScalePrefetcher([staged, dataclasses.replace(staged), dense, bare])
    assert prefetcher.prefetch(0, 3, "staged") is True
    for beyond in (-1, 4):
        with pytest.raises(IndexError, match=f"i_layer must be 0 to 3, got {beyond}"):
            prefetcher.prefetch(beyond, 3, "staged")
    for other in (2, 3):  # these read no scratch, so they do not affect others
        assert prefetcher.prefetch(other, 3, "staged") is False
        assert torch.equal(prefetcher.forward(other, *call, **options), expected)
    with pytest.raises(ValueError, match="top_k_weights"):
        prefetcher.forward(0, call[0], call[1], call[2][:1], **options)
    assert torch.equal(prefetcher.forward(0, *call, **options), expected), "a refused call loses no prefetch"
    assert prefetcher.prefetch(0, 3, "staged") is True
    prefetcher.discard()
    staged.scratch.fill_(0x7F)
    assert torch.equal(prefetcher.forward(0, *call, **options), expected)
    assert prefetcher.prefetch(0, 3, "fused") is False
    with pytest.raises(ValueError, match="strategy must be None or one of"):
        prefetcher.prefetch(0, 3, "fast")


@pytest.mark.gpu
@pytest.mark.parametrize("late", ["producer", "consumer"])
@pytest.mark.parametrize("num_scratches", [1, 2])
def test_a_late_side(bundle, late, num_scratches):
    dense, layers = make_stack(bundle, "cuda", num_scratches)
    call = make_call("cuda", 17, 2)
    expected = [bundle.moe_forward(experts, *call, activation_format="bf16") for experts in dense]
    prefetcher = bundle.ScalePrefetcher(layers)
    torch.cuda.synchronize()
    outputs = []
    for i_layer in (0, 1, 2, 0, 1, 2):
        layers[i_layer].scratch.fill_(0x7F)
        with torch.cuda.stream(prefetcher._side) if late == "producer" else contextlib.nullcontext():
            torch.cuda._sleep(2_000_000)
        assert prefetcher.prefetch(i_layer, 17, "staged")
        if late == "consumer":
            torch.cuda._sleep(2_000_000)
        outputs.append((i_layer, prefetcher.forward(i_layer, *call, activation_format="bf16", strategy="staged")))
    for i_layer, out in outputs:
        assert torch.equal(out, expected[i_layer]), i_layer


@pytest.mark.gpu
@pytest.mark.parametrize("num_scratches", [1, 2])
def test_a_captured_stack_with_its_side_stream(bundle, num_scratches):
    """All layers are captured with their prefetches, and replayed with other routing, without allocating."""
    dense, layers = make_stack(bundle, "cuda", num_scratches)
    prefetcher = bundle.ScalePrefetcher(layers)
    call = make_call("cuda", 17, 2)
    options = {"activation_format": "bf16", "strategy": "staged"}

    def run() -> list[torch.Tensor]:
        outputs = []
        prefetcher.prefetch(0, 17, "staged")
        for i_layer in range(len(layers)):
            if num_scratches == 2 and i_layer + 1 < len(layers):
                prefetcher.prefetch(i_layer + 1, 17, "staged")
            outputs.append(prefetcher.forward(i_layer, *call, **options))
            if num_scratches == 1 and i_layer + 1 < len(layers):
                prefetcher.prefetch(i_layer + 1, 17, "staged")
        return outputs

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    captured = []
    for _ in range(2):  # one after the other, with the same prefetcher
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured.append((graph, run()))
    for seed in range(20):
        graph, outputs = captured[seed % 2]
        other = make_call("cuda", 17, 2, seed, -1, NUM_EXPERTS + 1)
        for given, new in zip(call, other, strict=True):
            given.copy_(new)
        for layer in layers:
            layer.scratch.fill_(0x7F)
        torch.cuda.synchronize()
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        graph.replay()
        torch.cuda.synchronize()
        assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
        for experts, out in zip(dense, outputs, strict=True):
            assert torch.equal(out, bundle.moe_forward(experts, *other, activation_format="bf16"))


@pytest.mark.gpu
def test_a_prefetch_is_not_used_across_the_begin_of_a_capture(bundle):
    dense, layers = make_stack(bundle, "cuda", 1)
    prefetcher = bundle.ScalePrefetcher(layers)
    call = make_call("cuda", 17, 2)
    options = {"activation_format": "bf16", "strategy": "staged"}
    prefetcher.forward(0, *call, **options)
    prefetcher.prefetch(0, 17, "staged")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = prefetcher.forward(0, *call, **options)
    eager = prefetcher.forward(0, *call, **options)
    torch.cuda.synchronize()
    layers[0].scratch.fill_(0x7F)
    graph.replay()
    expected = bundle.moe_forward(dense[0], *call, activation_format="bf16")
    assert torch.equal(captured, expected) and torch.equal(eager, expected)
