"""Layers that share a scratch, called from several threads and streams, give the same bits as consecutive calls."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import importlib
import random
import threading

import pytest
import torch

from experts import Shape, compressed, make_call, make_experts, make_scratch
from numeric import DEVICES
from threads import NUM_THREADS, in_threads

NUM_FORWARDS = 50
SHAPE = Shape(4, 64, 32)
OPTIONS = {"activation_format": "bf16"}
every_device = pytest.mark.parametrize("device", DEVICES)


def make_stack(bundle, device: str, num_scratches: int = 1):
    """Layers with dense scales, and the same layers compressed, which alternate between the scratches."""
    dense = [make_experts(bundle, device, seed, SHAPE) for seed in range(3)]
    scratches = [make_scratch(dense[0]) for _ in range(num_scratches)]
    return dense, [compressed(bundle, experts, scratch=scratches[i % num_scratches]) for i, experts in enumerate(dense)]


def make_calls(device: str) -> list:
    """A call for each thread; every other one is batched."""
    return [make_call(device, 3 + 20 * (i % 2), 2, i, -1, 5, hidden=64) for i in range(NUM_THREADS)]


def run_in_threads(forward, dense_outputs, num_layers: int, device: str, own_streams: bool) -> int:
    """How many outputs of `forward(i_layer, i_thread)` are wrong, in 8 threads with 50 forwards each, and layers in any
    order."""

    def work(i_thread: int) -> list:
        chooser = random.Random(i_thread)
        stream = torch.cuda.Stream() if own_streams else torch.cuda.current_stream() if device == "cuda" else None
        differs = []
        with contextlib.nullcontext() if stream is None else torch.cuda.stream(stream):
            for step in range(NUM_FORWARDS):
                i_layer = step % num_layers if chooser.random() < 0.8 else chooser.randrange(num_layers)
                if device == "cuda" and chooser.random() < 0.1:
                    torch.cuda._sleep(chooser.choice([20_000, 400_000]))
                out = forward(i_layer, i_thread)
                differs.append((out != dense_outputs[i_layer][i_thread]).any())
        return differs

    outcomes = [differs for own in in_threads(work) for differs in own]
    if device == "cuda":
        torch.cuda.synchronize()
    return sum(map(bool, outcomes))


@pytest.mark.parametrize(
    ("device", "own_streams"),
    [("cpu", False), *(pytest.param("cuda", own, marks=pytest.mark.gpu) for own in (False, True))],
    ids=["cpu", "one-stream", "own-streams"],
)
@pytest.mark.parametrize("strategy", ["staged", "prefetched", "two scratches", "fused", "auto"])
def test_every_output_is_the_single_threaded_one(bundle, device, own_streams, strategy):
    dense, layers = make_stack(bundle, device, 2 if strategy == "two scratches" else 1)
    calls = make_calls(device)
    expected = [[bundle.moe_forward(experts, *call, **OPTIONS) for call in calls] for experts in dense]
    prefetcher = bundle.ScalePrefetcher(layers)
    named = {"fused": "fused", "auto": None}.get(strategy, "staged")

    def forward(i_layer: int, i_thread: int) -> torch.Tensor:
        call = calls[i_thread]
        if strategy not in ("prefetched", "two scratches"):
            return bundle.moe_forward(layers[i_layer], *call, **OPTIONS, strategy=named)
        out = prefetcher.forward(i_layer, *call, **OPTIONS, strategy="staged")
        prefetcher.prefetch((i_layer + 1) % len(layers), len(call[0]), "staged")
        return out

    if device == "cuda":
        torch.cuda.synchronize()
    assert run_in_threads(forward, expected, len(layers), device, own_streams) == 0


def test_ways_to_one_scratch_take_turns(bundle):
    """Prefetched, staged by `moe_forward`, expanded explicitly, and used by another model's layers in a part of the
    memory."""
    dense, layers = make_stack(bundle, "cpu")
    calls = make_calls("cpu")
    expected = [[bundle.moe_forward(experts, *call, **OPTIONS) for call in calls] for experts in dense]
    others = [dataclasses.replace(layer, scratch=layer.scratch[:]) for layer in layers]
    prefetcher = bundle.ScalePrefetcher(layers)

    def forward(i_layer: int, i_thread: int) -> torch.Tensor:
        call = calls[i_thread]
        if i_thread % 4 == 0:
            prefetcher.prefetch(i_layer, len(call[0]), "staged")
            return prefetcher.forward(i_layer, *call, **OPTIONS, strategy="staged")
        if i_thread % 4 == 1:
            bundle.expand_scales(layers[i_layer])
        return bundle.moe_forward((layers, others)[i_thread % 2][i_layer], *call, **OPTIONS, strategy="staged")

    assert run_in_threads(forward, expected, len(layers), "cpu", own_streams=False) == 0


def test_a_prefetch_of_another_thread_is_no_error(bundle):
    """Whoever calls the prefetched layer uses it. A call of another layer decodes its own scales, and the prefetch is
    lost."""
    dense, layers = make_stack(bundle, "cpu")
    call = make_calls("cpu")[0]
    expected = [bundle.moe_forward(experts, *call, **OPTIONS) for experts in dense]
    prefetcher = bundle.ScalePrefetcher(layers)
    options = {**OPTIONS, "strategy": "staged"}
    assert in_threads(lambda _: prefetcher.prefetch(0, 3, "staged"), 2) == [True, True]
    assert in_threads(lambda _: prefetcher.prefetch(1, 3, "staged"), 2) == [False, False]
    for i_layer in (1, 0, 2):
        (out,) = in_threads(lambda _, i=i_layer: prefetcher.forward(i, *call, **options), 1)
        assert torch.equal(out, expected[i_layer])
    assert prefetcher.prefetch(1, 3, "staged") is True
    assert torch.equal(prefetcher.forward(1, *call, **options), expected[1])


def test_a_call_that_fails_leaves_the_scratch_to_others(bundle, monkeypatch):
    dense, layers = make_stack(bundle, "cpu")
    call = make_calls("cpu")[1]
    layer = importlib.import_module(f"{bundle.__name__}.moe.layer")
    prefetcher = bundle.ScalePrefetcher(layers)
    with monkeypatch.context() as patch:
        patch.setattr(layer, "matmul_grouped", lambda *args, **options: 1 / 0)
        prefetcher.prefetch(0, 23, "staged")
        with pytest.raises(ZeroDivisionError):
            prefetcher.forward(0, *call, **OPTIONS, strategy="staged")
    (out,) = in_threads(lambda _: bundle.moe_forward(layers[1], *call, **OPTIONS, strategy="staged"), 1)
    assert torch.equal(out, bundle.moe_forward(dense[1], *call, **OPTIONS))


def test_turns_belong_to_the_memory(bundle):
    """They do not belong to a tensor: views of one storage share them, copies and other storages do not. Nothing is
    kept for memory that has been freed, and experts can be copied as before."""
    scratch = importlib.import_module(f"{bundle.__name__}.moe.scratch")
    memory = torch.empty(4096, dtype=torch.uint8)
    turns = scratch.scratch_of(memory)
    assert scratch.scratch_of(memory[1024:]) is turns and scratch.scratch_of(memory.view(64, 64)) is turns
    assert scratch.scratch_of(memory.clone()) is not turns
    _, (first, *_) = make_stack(bundle, "cpu")
    for again in (copy.deepcopy(first), copy.copy(first), dataclasses.replace(first)):
        call = make_calls("cpu")[0]
        assert torch.equal(bundle.moe_forward(again, *call, **OPTIONS), bundle.moe_forward(first, *call, **OPTIONS))
    for _ in range(100):
        scratch.scratch_of(torch.empty(1 << 16, dtype=torch.uint8))
    assert len(scratch._scratches) < 50


def test_a_turn_lasts_until_the_last_read(bundle, monkeypatch):
    """While one thread is between its GEMMs, another thread's call with the same scratch waits, but not a call with
    another scratch."""
    dense, layers = make_stack(bundle, "cpu", 2)
    call = make_calls("cpu")[1]
    module = importlib.import_module(f"{bundle.__name__}.moe.layer")
    real, reached, go_on, holder = module.matmul_grouped, threading.Event(), threading.Event(), []

    def slow(*args, **options):
        if threading.get_ident() in holder and options.get("gate") is None:  # the second
            reached.set()
            assert go_on.wait(30)
        return real(*args, **options)

    monkeypatch.setattr(module, "matmul_grouped", slow)
    order = []

    def work(i_layer: int) -> torch.Tensor:
        out = bundle.moe_forward(layers[i_layer], *call, **OPTIONS, strategy="staged")
        order.append(i_layer)
        return out

    def first() -> None:
        holder.append(threading.get_ident())
        outs[0] = work(0)

    outs: dict[int, torch.Tensor] = {}
    threads = [threading.Thread(target=first), threading.Thread(target=lambda: outs.update({2: work(2)}))]
    threads[0].start()
    assert reached.wait(30)
    threads[1].start()
    outs[1] = work(1)
    threads[1].join(0.2)
    assert order == [1], "layer 2 shares the scratch of layer 0, which is not done"
    go_on.set()
    for thread in threads:
        thread.join(30)
    assert set(order) == {0, 1, 2}
    for i_layer, out in outs.items():
        assert torch.equal(out, bundle.moe_forward(dense[i_layer], *call, **OPTIONS))


@pytest.mark.gpu
def test_streams_of_one_capture_do_not_meet_in_the_scratch(bundle):
    """Two branches of a capture, and alternating captures on two streams."""
    dense, layers = make_stack(bundle, "cuda")
    call = make_calls("cuda")[1]
    expected = [bundle.moe_forward(experts, *call, **OPTIONS) for experts in dense]
    options = {**OPTIONS, "strategy": "staged"}
    bundle.moe_forward(layers[0], *call, **options)
    prefetcher = bundle.ScalePrefetcher(layers)
    torch.cuda.synchronize()
    for capture_stream in (torch.cuda.Stream(), torch.cuda.Stream()):
        graph, branch = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        with torch.cuda.graph(graph, stream=capture_stream):
            main = torch.cuda.current_stream()
            branch.wait_stream(main)
            outs = [bundle.moe_forward(layers[0], *call, **options)]
            with torch.cuda.stream(branch):
                torch.cuda._sleep(100_000)
                outs.append(bundle.moe_forward(layers[1], *call, **options))
                assert prefetcher.prefetch(0, 23, "staged") is False
            outs.append(bundle.moe_forward(layers[2], *call, **options))
            main.wait_stream(branch)
        for _ in range(3):
            layers[0].scratch.fill_(0x7F)
            graph.replay()
            for i_layer, out in enumerate(outs):
                assert torch.equal(out, expected[i_layer]), i_layer


@every_device
def test_compiled_code_does_not_take_turns(bundle, device):
    """It decodes into memory of its own while another thread's call uses the scratch."""
    dense, layers = make_stack(bundle, device)
    call = make_calls(device)[1]
    compiled = torch.compile(
        lambda *call: bundle.moe_forward(layers[0], *call, **OPTIONS, strategy="staged"),
        fullgraph=True, backend="aot_eager",
    )  # fmt: skip
    scratch = importlib.import_module(f"{bundle.__name__}.moe.scratch").scratch_of(layers[0].scratch)
    layers[0].scratch.fill_(0x7F)
    with scratch.lock:
        (out,) = in_threads(lambda _: compiled(*call), 1)
    assert torch.equal(out, bundle.moe_forward(dense[0], *call, **OPTIONS))
    assert bool((layers[0].scratch == 0x7F).all())


def test_the_default_stream_is_a_stream(bundle, monkeypatch):
    """Its handle is 0, which torch's `ExternalStream` takes to mean that there is none, and returns another stream."""
    scratch = importlib.import_module(f"{bundle.__name__}.moe.scratch")
    monkeypatch.setattr(torch.cuda, "ExternalStream", lambda handle, device: (handle, device))
    monkeypatch.setattr(torch.cuda, "default_stream", lambda device: ("default", device))
    device = torch.device("cuda", 0)
    assert scratch.stream_of(0, device) == ("default", device)
    assert scratch.stream_of(7, device) == (7, device)
