"""A model that is called from several threads, as behind a web server, gives the logits of consecutive calls."""

from __future__ import annotations

import contextlib
import copy

import pytest
import torch

from numeric import DEVICES
from threads import NUM_THREADS, in_threads

pytest.importorskip("transformers", reason="needs transformers, the extra [transformers]")

import transformers

from finegrained_kernels.integrations.transformers import nvfp4_experts, set_scale_strategy
from moe_models import load, write_checkpoints

NUM_FORWARDS = 50
STRATEGIES = {"staged": False, "prefetched": True, "fused": False, "auto": False}


@pytest.fixture(scope="module")
def checkpoint(bundle, tmp_path_factory):
    transformers.logging.disable_progress_bar()
    return write_checkpoints(tmp_path_factory.mktemp("model"), "qwen3_moe")["csf"]


def count_wrong(model, prompts: list[torch.Tensor], expected: list[torch.Tensor], own_streams: bool) -> int:
    """How many of 50 forwards in each of 8 threads are wrong; every thread has its own prompt."""

    @torch.no_grad()
    def work(i: int) -> list[torch.Tensor]:
        with torch.cuda.stream(torch.cuda.Stream()) if own_streams else contextlib.nullcontext():
            return [(model(prompts[i]).logits != expected[i]).any() for _ in range(NUM_FORWARDS)]

    if model.device.type == "cuda":
        torch.cuda.synchronize()
    wrong = in_threads(work)
    if model.device.type == "cuda":
        torch.cuda.synchronize()
    return sum(bool(differs) for own in wrong for differs in own)


@pytest.mark.parametrize(
    ("device", "own_streams"),
    [("cpu", False), *(pytest.param("cuda", own, marks=pytest.mark.gpu) for own in (False, True))],
    ids=["cpu", "one-stream", "own-streams"],
)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_logit_is_the_single_threaded_one(checkpoint, device, own_streams, strategy):
    model = load(checkpoint, "auto", device=device)
    set_scale_strategy(model, "staged" if strategy == "prefetched" else strategy, prefetch=STRATEGIES[strategy])
    prompts = [torch.arange(i, i + 3 + 14 * (i % 2), device=device).view(1, -1) for i in range(NUM_THREADS)]
    with torch.no_grad():
        expected = [model(prompt).logits for prompt in prompts]
    assert count_wrong(model, prompts, expected, own_streams) == 0


@pytest.mark.parametrize("device", DEVICES)
def test_a_copy_is_prepared_by_whichever_thread_is_first(checkpoint, device):
    model = load(checkpoint, "staged", prefetch=True, device=device)
    ids = torch.arange(5, device=device).view(1, -1)
    with torch.no_grad():
        expected = model(ids).logits
        for _ in range(5):
            twin = copy.deepcopy(model)
            for logits in in_threads(lambda _, twin=twin: twin(ids).logits):
                assert torch.equal(logits, expected)
            (scratch,) = {layer.experts.scratch.data_ptr() for layer in nvfp4_experts(twin)}
            assert len(twin.model.layers[0].mlp.experts.schedule._prefetchers) == 1 and scratch


def test_a_strategy_is_changed_while_threads_call(checkpoint):
    model = load(checkpoint, "staged")
    ids = torch.arange(5).view(1, -1)
    with torch.no_grad():
        expected = model(ids).logits

    @torch.no_grad()
    def work(i: int) -> bool:
        if i == 0:
            for _ in range(10):
                for strategy in STRATEGIES:
                    set_scale_strategy(
                        model, "staged" if strategy == "prefetched" else strategy, prefetch=STRATEGIES[strategy]
                    )
        return all(torch.equal(model(ids).logits, expected) for _ in range(10))

    assert all(in_threads(work))
