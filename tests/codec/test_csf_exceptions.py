"""The exceptions of a stack: a sequence that makes its tensors on demand, and how `prepare` uses it."""

from __future__ import annotations

import copy
import importlib
import io
import pickle
import warnings

import numpy as np
import pytest
import torch

from numeric import DEVICES, assert_same, check_wire, make_stack

COUNTS = [7, 0, 19, 0]
every_device = pytest.mark.parametrize("device", DEVICES)


@pytest.fixture(params=DEVICES)
def stack(request):
    return make_stack(COUNTS, 32, 10, seed=1).to(request.param)


@pytest.fixture
def exceptions(bundle, stack):
    return bundle.compress_nvfp4_csf_scales(stack.planes)[1]


def assert_tensors(actual: list[torch.Tensor], expected: list[torch.Tensor], name: str) -> None:
    assert type(actual) is list and len(actual) == len(expected)
    for i, (own, other) in enumerate(zip(actual, expected, strict=True)):
        assert own.dtype == torch.uint32 and own.device == other.device
        assert_same(own, other, f"{name}: {i}")


def test_it_reads_like_a_list(stack, exceptions):
    words = stack.words
    assert len(exceptions) == 4 and repr(exceptions) == f"<4 tensors of 26 exceptions on {words[0].device}>"
    first, *others = exceptions
    assert_tensors([first, *others], words, "unpacked")
    assert_tensors(list(reversed(exceptions)), words[::-1], "reversed")
    indices = [*range(-4, 4), np.int64(2), torch.tensor(2), True]
    assert_tensors([exceptions[i] for i in indices], [words[i] for i in indices], "one by one")
    for part in (slice(None), slice(1, 3), slice(-2, None), slice(None, None, -2), slice(3, 1), slice(-9, 9)):
        assert_tensors(exceptions[part], words[part], f"{part}")
    assert_tensors(exceptions + words, words + words, "before a list")
    assert_tensors(words + exceptions, words + words, "after a list")
    assert_tensors(exceptions + exceptions, words + words, "twice")
    for index in (4, -5):
        with pytest.raises(IndexError):
            exceptions[index]
    for misuse in (lambda: exceptions["0"], lambda: exceptions[1.0], lambda: exceptions + 1, lambda: 1 + exceptions):
        with pytest.raises(TypeError):
            misuse()


def test_its_tensors_are_views_of_one_storage(exceptions):
    exceptions[2].view(torch.int32).fill_(5)
    assert list(exceptions)[2].tolist() == [5] * 19 and exceptions.words.tolist()[7:] == [5] * 19
    assert_same(torch.cat(list(exceptions)), exceptions.words, "words")


def test_copies_and_files_hold_a_list(stack, exceptions):
    """The class itself could only be read by a program that has loaded the same build."""
    file = io.BytesIO()
    torch.save({"exceptions": exceptions}, file)
    file.seek(0)
    stored = pickle.dumps(exceptions)
    assert len(stored) < 400 * len(exceptions) + 4 * len(exceptions.words), "each plane's words once"
    for other in (
        copy.deepcopy(exceptions), torch.load(file, weights_only=False)["exceptions"], pickle.loads(stored)
    ):  # fmt: skip
        assert_tensors(other, stack.words, "copied")
        other[0].view(torch.int32).zero_()
    assert_tensors(copy.copy(exceptions), stack.words, "copied, not deeply")


def test_nothing_is_made_for_each_plane_before_it_is_asked_for(bundle, stack):
    with pytest.MonkeyPatch.context() as patch:
        for name in ("split", "unsafe_split_with_sizes"):
            patch.setattr(torch, name, lambda *_: pytest.fail("split into planes"))
        fixed, exceptions = bundle.compress_nvfp4_csf_scales(stack.planes)
        scales = bundle.prepare_nvfp4_csf_scales(fixed, exceptions, **stack.geometry)
        wire = scales.to_wire()
        bundle.prepare_nvfp4_csf_scales(*wire, **stack.geometry)
    check_wire(wire, stack.fixed, stack.words)


def test_prepared_from_it_or_from_its_list(bundle, stack, exceptions):
    prepared = [
        bundle.prepare_nvfp4_csf_scales(stack.fixed, form, **stack.geometry)
        for form in (exceptions, list(exceptions), stack.words)
    ]
    exceptions.words.view(torch.int32).fill_(-1)
    for name, expected in prepared[2].state_dict().items():
        for scales in prepared[:2]:
            assert scales.state_dict()[name].dtype == expected.dtype
            assert torch.equal(scales.state_dict()[name], expected), name


def set_word(plane: int, i: int, value: int):
    return lambda exceptions: exceptions[plane].view(torch.int32)[i : i + 1].fill_(value)


@pytest.mark.parametrize(
    "spoil, message",
    [
        (set_word(0, 6, 320), r"exceptions\[0\]: position 320 at index 6 is out of range for a plane of 320 bytes"),
        (set_word(2, 18, -1), r"exceptions\[2\]: position 16777215 at index 18 is out of range"),
        (set_word(2, 18, 0), r"exceptions\[2\]: position 0 at index 18 is not above \d+ before it"),
    ],
    ids=["the plane's size", "all ones", "unordered"],
)
def test_its_words_are_checked_as_those_of_a_list(bundle, stack, exceptions, spoil, message):
    spoil(exceptions)
    for form in (exceptions, list(exceptions)):
        with pytest.raises(ValueError, match=message):
            bundle.prepare_nvfp4_csf_scales(stack.fixed, form, **stack.geometry)


@pytest.mark.parametrize(
    "ends",
    [[7, 7, 26, 25], [7, 7, 26, 27], [7, 27, 26, 26], [-1, 7, 26, 26], [0, 0, 0, 0], [1 << 62, 0, 0, 26]],
    ids=["one too few", "one too many", "falling", "negative", "none", "huge"],
)
def test_ends_of_other_words_are_refused(bundle, stack, exceptions, ends):
    other = type(exceptions)(exceptions.words, torch.tensor(ends))
    with pytest.raises(ValueError, match=r"exceptions: 26 words cannot be cut into planes of \["):
        bundle.prepare_nvfp4_csf_scales(stack.fixed, other, **stack.geometry)


def test_it_is_refused_like_a_list(bundle, stack, exceptions):
    make = type(exceptions)
    for arguments, message in (
        ((stack.fixed, make(exceptions.words, torch.tensor([7, 26]))), r"tensor per plane, got 4 and 2"),
        ((stack.fixed[:0], make(exceptions.words[:0], torch.tensor([]).long())), r"tensor per plane, got 0 and 0"),
        ((stack.fixed, make(exceptions.words.to("meta"), exceptions.ends)), r"exceptions must be on .*, got meta"),
        ((exceptions, exceptions), r"fixed\[0\] must be torch\.uint8, got torch\.uint32"),
    ):
        with pytest.raises(ValueError, match=message):
            bundle.prepare_nvfp4_csf_scales(*arguments, **stack.geometry)
    for words, ends, message in (
        (exceptions.words.view(torch.int32), exceptions.ends, r"words must be torch\.uint32 \[X\], got torch\.int32"),
        (exceptions.words.view(2, 13), exceptions.ends, r"words must be .*, got torch\.uint32 \[2, 13\]"),
        (exceptions.words, exceptions.ends.int(), r"ends must be torch\.int64 \[E\] on cpu, got torch\.int32"),
        (exceptions.words, exceptions.ends[None], r"ends must be .* got torch\.int64 \[1, 4\]"),
        (exceptions.words, exceptions.ends.to("meta"), r"ends must be .* on meta"),
    ):
        with pytest.raises(ValueError, match=message):
            make(words, ends)


@every_device
def test_a_stream_at_any_address(bundle, device):
    """`prepare` reads eight bytes at a time, wherever the stream begins."""
    stack = make_stack([5, 0], 32, 10, seed=3).to(device)
    for offset in (0, 1, 4, 8, 13):
        memory = torch.empty(stack.fixed.numel() + offset, dtype=torch.uint8, device=device)
        fixed = memory[offset:].view(stack.fixed.shape).copy_(stack.fixed)
        for form in (fixed, list(fixed), fixed.view(2, 2, -1)):
            scales = bundle.prepare_nvfp4_csf_scales(form, stack.words, **stack.geometry)
            check_wire(scales.to_wire(), stack.fixed, stack.words)
    data = bytearray(stack.fixed.numel() + 1)  # at an odd address, though at the begin of its storage
    fixed = torch.frombuffer(data, dtype=torch.uint8, offset=1).view(stack.fixed.shape).copy_(stack.fixed)
    scales = bundle.prepare_nvfp4_csf_scales(fixed, [words.cpu() for words in stack.words], **stack.geometry)
    check_wire(scales.to_wire(), stack.fixed, stack.words)


@pytest.mark.gpu
def test_compress_and_prepare_wait_at_most_once_each(bundle):
    """For the number of exceptions, and for the result of the check."""
    planes = make_stack([9, 0, 30], 64, 40, seed=2).planes.cuda()
    wire = bundle.compress_nvfp4_csf_scales(planes)
    geometry = {"num_rows": 64, "num_cols": 40}
    for name, call in {
        "compress": lambda: bundle.compress_nvfp4_csf_scales(planes),
        "prepare": lambda: bundle.prepare_nvfp4_csf_scales(*wire, **geometry),
        "prepare lists": lambda: bundle.prepare_nvfp4_csf_scales(list(wire[0]), list(wire[1]), **geometry),
    }.items():
        call()
        torch.cuda.set_sync_debug_mode("warn")
        try:
            with warnings.catch_warnings(record=True) as seen:
                warnings.simplefilter("always")
                call()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        waits = [str(warning.message) for warning in seen if "synchronizing" in str(warning.message)]
        assert len(waits) <= 1, f"{name}: {waits}"


@pytest.mark.gpu
def test_exceptions_written_after_compress_returns(bundle):
    """The kernel that collects them may still be running. Views that are made meanwhile see its words, in the stream's
    order."""
    planes = make_stack([100] * 64, 640, 160, seed=4).planes
    expected = bundle.compress_nvfp4_csf_scales(planes)[1]
    given = planes.cuda()
    torch.cuda.synchronize()
    torch.cuda._sleep(10_000_000)
    actual = bundle.compress_nvfp4_csf_scales(given)[1]
    for i in (0, 31, 63):
        assert_same(actual[i], expected[i], f"exceptions[{i}]")


def test_the_class_is_the_same_for_compress_and_to_wire(bundle, stack, exceptions):
    wire = importlib.import_module(f"{bundle.__name__}.csf.exception_list")
    scales = bundle.prepare_nvfp4_csf_scales(stack.fixed, exceptions, **stack.geometry)
    assert type(exceptions) is type(scales.to_wire()[1]) is wire.ExceptionList
    assert_same(scales.to_wire()[1].ends.int(), exceptions.ends.int(), "ends")
