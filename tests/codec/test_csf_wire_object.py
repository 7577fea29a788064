"""`NVFP4CSFWire`: by an oracle, what it cuts and stacks decodes to the rows and columns of the planes; and what it
refuses."""

from __future__ import annotations

import dataclasses
import importlib

import numpy as np
import pytest
import torch

from finegrained_kernels.checkpoint import wire as host
from numeric import DEVICES, Stack, assert_same, make_stack, oracle_decode, to_numpy

every_device = pytest.mark.parametrize("device", DEVICES)
CUTS = [
    (None, None),
    (range(16, 32), None),
    (range(48), range(0, 2)),
    (None, range(10, 22)),
    (range(32, 48), range(4, 20)),
    (range(16), range(20, 22)),
]


@pytest.fixture(params=DEVICES)
def stack(request) -> Stack:
    return make_stack([40, 0, 7, 250], 48, 22, seed=3).to(request.param)


def wire_of(bundle, stack: Stack):
    return bundle.NVFP4CSFWire.of(stack.fixed, stack.words, **stack.geometry)


def check(bundle, wire, planes: torch.Tensor) -> None:
    """Every plane's stream and words are decoded by the oracle, and all planes by the bundle."""
    assert wire.device == planes.device and wire.ends.device.type == "cpu"
    assert len(wire.exceptions) == len(planes)
    for fixed, words, plane in zip(wire.fixed, wire.exceptions, planes, strict=True):
        assert_same(oracle_decode(to_numpy(fixed), to_numpy(words), *plane.shape), to_numpy(plane), "plane")
    scales = bundle.NVFP4CSFScales.from_wire(wire.check())
    assert_same(bundle.decompress_nvfp4_csf_scales(scales), planes, "decoded")
    fixed, words = scales.to_wire()
    assert_same(fixed, wire.fixed.contiguous(), "fixed")
    assert_same(words.words, wire.words, "words")


@pytest.mark.parametrize(("rows", "cols"), CUTS)
def test_cuts(bundle, stack, rows, cols):
    planes = stack.planes[:, slice(None) if rows is None else slice(rows.start, rows.stop)]
    planes = planes[:, :, slice(None) if cols is None else slice(cols.start, cols.stop)]
    check(bundle, wire_of(bundle, stack).cut(rows, cols), planes)


@pytest.mark.parametrize("rows", [range(48), range(16, 32), range(32, 48)])
def test_some_rows_of_planes_with_all_their_exceptions(bundle, stack, rows):
    whole = wire_of(bundle, stack)
    slab = stack.fixed.shape[1] // 3
    fixed = stack.fixed[:, rows.start // 16 * slab : rows.stop // 16 * slab]
    wire = bundle.NVFP4CSFWire.of_rows(fixed, whole.words, whole.ends, rows, **stack.geometry)
    check(bundle, wire, stack.planes[:, rows.start : rows.stop])


def test_stacks(bundle, stack):
    other = make_stack([3, 90, 0, 1], 16, 22, seed=4).to(stack.planes.device.type)
    both = wire_of(bundle, stack).stack(wire_of(bundle, other))
    check(bundle, both, torch.cat([stack.planes, other.planes], 1))


@pytest.mark.parametrize("order", [[0, 1, 2, 3, 4, 5], [5, 0, 3, 1, 4, 2]])
def test_planes_of_two_in_any_order(bundle, stack, order):
    other = make_stack([5, 0], 48, 22, seed=5).to(stack.planes.device.type)
    wire = wire_of(bundle, stack).with_planes(wire_of(bundle, other), order)
    check(bundle, wire, torch.cat([stack.planes, other.planes])[order])


def test_what_compress_returns_is_taken(bundle, stack):
    wire = bundle.NVFP4CSFWire.of(*bundle.compress_nvfp4_csf_scales(stack.planes), **stack.geometry)
    check(bundle, wire, stack.planes)
    assert repr(wire) == f"<NVFP4CSFWire of 4x48x22, 297 exceptions, {stack.planes.device}>"
    check(bundle, wire.to("cpu"), stack.planes.cpu())


@pytest.mark.parametrize(
    ("rows", "cols", "message"),
    [
        (range(8, 24), None, r"rows must be a range of multiples of 16 in 0 to 48, got range\(8, 24\)"),
        (range(16, 64), None, "rows must be a range of multiples of 16 in 0 to 48"),
        (range(16, 16), None, "rows must be a range"),
        (range(0, 48, 16), None, "rows must be a range"),
        (None, range(1, 5), "cols must be a range of multiples of 2 in 0 to 22"),
        (None, range(-2, 4), "cols must be a range of multiples of 2 in 0 to 22"),
    ],
)
def test_cuts_that_are_refused(bundle, stack, rows, cols, message):
    with pytest.raises(ValueError, match=message):
        wire_of(bundle, stack).cut(rows, cols)


def test_faults_say_which_plane(bundle, stack):
    """Even for exceptions that a cut would hide."""
    wire = wire_of(bundle, stack)
    slab = stack.fixed.shape[1] // 3
    wire = dataclasses.replace(wire, fixed=wire.fixed.clone())
    wire.fixed[2, 5] = 241
    for make in (wire.check, lambda: bundle.NVFP4CSFScales.from_wire(wire)):
        with pytest.raises(bundle.WireFault, match=r"^fixed\[2\]: base 241 at row 5 is above 240$") as raised:
            make()
        assert (raised.value.part, raised.value.plane) == ("fixed", 2)
    wire = wire_of(bundle, stack)
    words = wire.words.clone()
    words[42] = words[41]
    first_slab = range(16)
    with pytest.raises(bundle.WireFault, match=r"^exceptions\[2\]: position \d+ at index 2 is not above") as raised:
        bundle.NVFP4CSFWire.of_rows(stack.fixed[:, :slab], words, wire.ends, first_slab, **stack.geometry)
    assert (raised.value.part, raised.value.plane) == ("exceptions", 2)


def test_sizes_that_do_not_fit_together(bundle, stack):
    wire = wire_of(bundle, stack)
    kind = bundle.NVFP4CSFWire
    for arguments, message in (
        ((wire.fixed[:, 1:], wire.words, wire.ends, 48, 22), r"fixed must have shape \(4, 576\), got \(4, 575\)"),
        ((wire.fixed, wire.words[1:], wire.ends, 48, 22), r"296 words cannot be cut into planes of \[40, 0, 7, 250\]"),
        ((wire.fixed, wire.words, wire.ends.flip(0), 48, 22), "words cannot be cut into planes"),
        ((wire.fixed, wire.words, wire.ends, 47, 22), "num_rows must be a positive multiple of 16, got 47"),
    ):
        with pytest.raises(ValueError, match=message):
            kind(*arguments)


def test_the_format_is_the_same_in_both_packages(bundle):
    """The host package reads headers without torch, so it has its own copy of the format's numbers."""
    csf = importlib.import_module(f"{bundle.__name__}.formats").NVFP4_CSF
    assert (csf.codec, csf.rows_per_slab, csf.max_base) == (host.CODEC, host.SLAB_ROWS, host.MAX_BASE)
    assert csf.position_bits == host.POSITION_BITS
    sizes = [0, 1, 2, 3, 15, 16, 17, 22, 32, 160, 4096, 1 << 12, (1 << 20) - 2, 1 << 20, (1 << 20) + 2]
    for rows in sizes:
        for cols in sizes:
            try:
                csf.check_plane(rows, cols)
            except ValueError:
                assert host.geometry_problem(rows, cols), (rows, cols)
            else:
                assert host.geometry_problem(rows, cols) is None, (rows, cols)
                assert host.fixed_bytes(rows, cols) == csf.fixed_bytes(rows, cols)
                assert host.slab_bytes(cols) == csf.slab_bytes(cols)
    assert np.uint32(1 << csf.position_bits) - 1 == csf.position_mask
