"""Wire forms that are accepted and that are refused, and the resident form when it is moved and stored."""

from __future__ import annotations

import io
from collections.abc import Iterable

import numpy as np
import pytest
import torch
from torch.utils import _pytree

from numeric import (
    DEVICES,
    Stack,
    assert_same,
    check_codec,
    check_decode,
    check_wire,
    make_stack,
    oracle_decode,
    wire_fixed,
)

every_device = pytest.mark.parametrize("device", DEVICES)


def in_one_storage(words: list[torch.Tensor], order: Iterable[int], gap: int = 0) -> list[torch.Tensor]:
    """The planes' words as views of one storage, in this order, after a word that belongs to none of them."""
    memory = words[0].new_empty(1 + sum(len(plane) + gap for plane in words), dtype=torch.int32)
    views, begin = {}, 1
    for plane in order:
        views[plane] = memory[begin : begin + len(words[plane])]
        views[plane].copy_(words[plane].view(torch.int32))
        begin += len(words[plane]) + gap
    return [views[plane].view(torch.uint32) for plane in range(len(words))]


@every_device
@pytest.mark.parametrize(
    "form",
    [
        lambda fixed, words: (fixed, words),
        lambda fixed, words: (fixed, tuple(words)),
        lambda fixed, words: (list(fixed), words),
        lambda fixed, words: ([plane.view(2, -1) for plane in fixed], words),
        lambda fixed, words: ([fixed[0].view(2, -1), *fixed[1:]], words),
        lambda fixed, words: (fixed, [plane.view(torch.int32) for plane in words]),
        lambda fixed, words: (fixed, [words[0].view(torch.int32), *words[1:]]),
        lambda fixed, words: (fixed.repeat(1, 2)[:, : fixed.shape[1]], words),
        lambda fixed, words: (fixed, [plane.view(torch.int32).repeat_interleave(2)[::2] for plane in words]),
        lambda fixed, words: (fixed, in_one_storage(words, range(len(words)))),
        lambda fixed, words: (fixed, in_one_storage(words, range(len(words)), gap=1)),
        lambda fixed, words: (fixed, in_one_storage(words, reversed(range(len(words))))),
    ],
    ids=[
        *("tensor", "tuple", "list", "2-D", "mixed ranks", "int32", "mixed words", "strided fixed", "strided words"),
        *("one storage", "one storage with gaps", "one storage backwards"),
    ],
)
def test_wire_forms_of_a_stack(bundle, device, form):
    stack = make_stack([7, 0, 19], 32, 10, seed=1).to(device)
    scales = bundle.prepare_nvfp4_csf_scales(*form(stack.fixed, stack.words), **stack.geometry)
    assert_same(bundle.decompress_nvfp4_csf_scales(scales), stack.planes, "decoded")
    check_wire(scales.to_wire(), stack.fixed, stack.words)


@every_device
@pytest.mark.parametrize("words_dtype", [torch.uint32, torch.int32])
@pytest.mark.parametrize("shape", [(-1,), (2, -1)], ids=["1-D", "2-D"])
def test_wire_forms_of_one_plane(bundle, device, words_dtype, shape):
    stack = make_stack([7], 32, 10, seed=1).to(device)
    fixed, words = stack.fixed[0].view(shape), stack.words[0].view(words_dtype)
    scales = bundle.prepare_nvfp4_csf_scales(fixed, words, **stack.geometry)
    assert_same(bundle.decompress_nvfp4_csf_scales(scales), stack.planes, "decoded")


@every_device
def test_prepared_scales_share_no_memory_with_the_wire(bundle, device):
    stack = make_stack([7], 32, 10, seed=1).to(device)
    scales = bundle.prepare_nvfp4_csf_scales(stack.fixed[0], stack.words[0], **stack.geometry)
    stack.fixed.fill_(0xFF)
    stack.words[0].view(torch.int32).fill_(-1)
    assert_same(bundle.decompress_nvfp4_csf_scales(scales), stack.planes, "decoded")


META = "meta"  # a device that every machine has beside the CPU
MALFORMED = [
    ("fixed int8", lambda f, w: (f.view(torch.int8), w), r"fixed must be torch\.uint8, got torch\.int8"),
    ("fixed[1] int8", lambda f, w: ([f[0], f[1].view(torch.int8)], w), r"fixed\[1\] must be torch\.uint8"),
    ("words int64", lambda f, w: (f, [w[0], w[1].long()]), r"exceptions\[1\] must be .*uint32 or .*int32, got .*int64"),
    ("words uint8", lambda f, w: (f, [w[0].view(torch.uint8), w[1]]), r"exceptions\[0\] must be .*, got torch\.uint8"),
    ("words on meta", lambda f, w: (f, [w[0], w[1].to(META)]), r"exceptions\[1\] must be on \w+(:0)? .*, got meta"),
    ("fixed on meta", lambda f, w: ([f[0], f[1].to(META)], w), r"fixed\[1\] must be on \w+(:0)? .*, got meta"),
    ("words 2-D", lambda f, w: (f, [w[0], w[1].view(1, -1)]), r"exceptions\[1\] must be 1-D, got shape \(1, 19\)"),
    ("one fixed less", lambda f, w: (list(f)[:1], w), r"one fixed and one exceptions tensor per plane, got 1 and 2"),
    ("one words more", lambda f, w: (f, [*w, w[0]]), r"one fixed and one exceptions tensor per plane, got 2 and 3"),
    ("no planes", lambda f, w: ([], []), r"one fixed and one exceptions tensor per plane, got 0 and 0"),
    ("fixed long", lambda f, w: (torch.cat([f, f[:, :1]], 1), w), r"fixed must have shape \(2, 192\).*\(2, 193\)"),
    ("fixed[1] short", lambda f, w: ([f[0], f[1, 1:]], w), r"fixed\[1\] must have shape \(192,\).*got \(191,\)"),
    ("fixed[1] 3-D", lambda f, w: ([f[0], f[1].view(2, 2, -1)], w), r"fixed\[1\] must"),
    ("fixed for one", lambda f, w: (f, w[0]), r"fixed must have shape \(192,\) or \(2, 96\), got \(2, 192\)"),
    ("words a list", lambda f, w: (f, [w[0], w[1].tolist()]), r"exceptions\[1\] must be a tensor, got list"),
    ("fixed a list", lambda f, w: ([f[0], f[1].tolist()], w), r"fixed\[1\] must be a tensor, got list"),
]


@every_device
@pytest.mark.parametrize("form, message", [case[1:] for case in MALFORMED], ids=[case[0] for case in MALFORMED])
def test_malformed_wire(bundle, device, form, message):
    stack = make_stack([7, 19], 32, 10, seed=1).to(device)
    with pytest.raises(ValueError, match=message):
        bundle.prepare_nvfp4_csf_scales(*form(stack.fixed, stack.words), **stack.geometry)


@every_device
def test_a_fault_is_named_with_its_plane(bundle, device):
    stack = make_stack([7, 19, 3], 32, 10, seed=1).to(device)
    high = stack.fixed.clone()
    high[2, 192 // 2 + 5] = 250  # row 5 of the second slab
    with pytest.raises(ValueError, match=r"fixed\[2\]: base 250 at row 21 is above 240"):
        bundle.prepare_nvfp4_csf_scales(high, stack.words, **stack.geometry)
    words = [plane.view(torch.int32).clone() for plane in stack.words]
    words[1][18] = 320
    with pytest.raises(ValueError, match=r"exceptions\[1\]: position 320 at index 18 is out of range"):
        bundle.prepare_nvfp4_csf_scales(stack.fixed, words, **stack.geometry)
    words[1][18] = words[1][17]
    with pytest.raises(ValueError, match=r"exceptions\[1\]: position \d+ at index 18 is not above"):
        bundle.prepare_nvfp4_csf_scales(stack.fixed, words, **stack.geometry)


@every_device
def test_streams_of_other_writers_keep_their_bytes(bundle, device):
    rng = np.random.default_rng(12)
    for num_cols in (2, 22, 160):
        bases, codes = rng.integers(0, 241, (3, 48), np.uint8), rng.integers(0, 16, (3, 48, num_cols), np.uint8)
        words = []
        for count in (0, 5, 48 * num_cols):
            position = np.sort(rng.permutation(48 * num_cols)[:count]).astype(np.uint32)
            words.append(rng.integers(0, 256, count, np.uint32) << 24 | position)
        fixed = wire_fixed(bases, codes)
        planes = np.stack([oracle_decode(*wire, 48, num_cols) for wire in zip(fixed, words, strict=True)])
        wire = torch.from_numpy(planes), torch.from_numpy(fixed), [torch.from_numpy(plane) for plane in words]
        check_decode(bundle, Stack(*wire).to(device))


@every_device
def test_travels_as_a_pytree_a_state_dict_and_to_a_device(bundle, device):
    stack = make_stack([7, 0, 19], 32, 10, seed=1)
    scales = bundle.prepare_nvfp4_csf_scales(stack.fixed, stack.words, **stack.geometry).to(device)
    assert scales.device.type == device
    leaves, spec = _pytree.tree_flatten({"layer": scales})
    assert (
        all(isinstance(leaf, torch.Tensor) for leaf in leaves) and sum(leaf.nbytes for leaf in leaves) == scales.nbytes
    )
    file = io.BytesIO()
    torch.save(scales.state_dict(), file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    copies = [_pytree.tree_unflatten(leaves, spec)["layer"], bundle.NVFP4CSFScales(**state), scales.to("cpu")]
    for copy in copies:
        assert type(copy) is bundle.NVFP4CSFScales and copy.shape == scales.shape and copy.nbytes == scales.nbytes
        assert_same(bundle.decompress_nvfp4_csf_scales(copy), stack.planes, "decoded")
        check_wire(copy.to_wire(), stack.fixed, stack.words)
    with pytest.raises(AttributeError):
        scales.codes = scales.codes


@pytest.mark.parametrize("num_rows, num_cols", [(640, 160), (2560, 40), (2048, 256), (4096, 128)])
def test_resident_bytes_exceed_the_wires_by_less_than_one_percent(bundle, num_rows, num_cols):
    stack = make_stack([num_rows * num_cols // 100, num_rows * num_cols // 450], num_rows, num_cols, seed=2)
    scales = check_codec(bundle, stack)
    wire = stack.fixed.nbytes + sum(words.nbytes for words in stack.words)
    assert wire < scales.nbytes <= 1.01 * wire
