"""`one_torch_thread`, in threads whose contexts overlap: afterwards, torch has as many threads as before."""

from __future__ import annotations

import threading

import pytest
import torch

from finegrained_kernels.checkpoint.output import one_torch_thread
from threads import in_threads


@pytest.fixture
def three_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("three_threads")
@pytest.mark.parametrize("first_out", [0, 1])
@pytest.mark.parametrize("fails", [False, True])
def test_overlapping_contexts_leave_what_was_there(first_out, fails):
    both_in, one_out = threading.Barrier(2, timeout=30), threading.Event()

    def work(i: int) -> tuple[int, int]:
        try:
            with one_torch_thread():
                both_in.wait()
                within = torch.get_num_threads()
                if i != first_out:
                    assert one_out.wait(30)
                if fails:
                    raise ZeroDivisionError
        except ZeroDivisionError:
            pass
        one_out.set()
        return within, torch.get_num_threads()

    assert in_threads(work, 2) == [(1, 3), (1, 3)]
    assert in_threads(lambda _: torch.get_num_threads(), 1) == [3] and torch.get_num_threads() == 3
    with one_torch_thread(), one_torch_thread():
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == 3
