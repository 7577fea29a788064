"""The codec is exact: golden bytes, enumerated small domains, geometries, and what is refused."""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from numeric import (
    DEVICES,
    NUM_BASES,
    Stack,
    assert_same,
    bytes_tensor,
    check_codec,
    check_decode,
    check_wire,
    make_stack,
    oracle_decode,
    oracle_encode,
    wire_fixed,
    words_tensor,
)

ROOT = Path(__file__).resolve().parent.parent.parent
VECTORS = json.loads((ROOT / "tests/data/csf_vectors.json").read_text())
FAULTS = {
    "base 241": ("fixed", r": base 241 at row 3 is above 240"),
    "fixed one byte short": ("fixed", r" must have shape \(160,\).*\b159\b"),
    "fixed one byte long": ("fixed", r" must have shape \(160,\)"),
    "positions unsorted": ("exceptions", r": position \d+ at index \d+ is not above \d+ before it"),
    "position repeated": ("exceptions", r": position 1 at index 1 is not above 1 before it"),
    "position = R*C": ("exceptions", r": position 256 at index 25 is out of range for a plane of 256 bytes"),
    "rows not a multiple of 16": ("num_rows", r" must be .* multiple of 16, got 24"),
    "odd columns": ("num_cols", r" must be .* even .*, got 7"),
    "base 255 in the second slab": ("fixed", r": base 255 at row \d+ is above 240"),
}
"""The tensor or number at fault, and the message about it."""

every_device = pytest.mark.parametrize("device", DEVICES)


def by_name(entries: list[dict]):
    return pytest.mark.parametrize("entry", entries, ids=[entry["name"] for entry in entries])


@pytest.fixture(scope="module")
def reference(bundle):
    return importlib.import_module(f"{bundle.__name__}.csf.reference")


# --- golden bytes


@pytest.mark.kernels_ci
@every_device
@by_name(VECTORS["planes"])
def test_golden_plane(bundle, entry, device):
    plane = bytes_tensor(bytes.fromhex(entry["decoded"]), device).view(entry["rows"], entry["cols"])
    fixed, exceptions = bundle.compress_nvfp4_csf_scales(plane)
    assert_same(fixed, bytes.fromhex(entry["fixed"]), "fixed")
    assert_same(exceptions, words_tensor(entry["exceptions"]), "exceptions")
    check_decode(bundle, Stack(plane[None], fixed[None], [exceptions]))


def test_every_rejected_vector_has_its_fault_here():
    assert sorted(entry["name"] for entry in VECTORS["rejected"]) == sorted(FAULTS)


@pytest.mark.kernels_ci
@every_device
@by_name(VECTORS["rejected"])
def test_rejected_plane(bundle, entry, device):
    fixed = bytes_tensor(bytes.fromhex(entry["fixed"]), device)
    words = words_tensor(entry["exceptions"], device)
    geometry = {"num_rows": entry["rows"], "num_cols": entry["cols"]}
    name, fault = FAULTS[entry["name"]]
    with pytest.raises(ValueError, match=f"^{name}{fault}"):
        bundle.prepare_nvfp4_csf_scales(fixed, words, **geometry)
    with pytest.raises(ValueError, match=rf"^{name}(\[0\])?{fault}"):
        bundle.prepare_nvfp4_csf_scales([fixed], [words], **geometry)


def test_the_specifications_example(bundle, reference):
    text = (ROOT / "docs/format.md").read_text()
    blocks = dict(re.findall(r"^```(plane|fixed|exceptions)\n(.*?)^```", text, re.M | re.S))
    plane = bytes_tensor(bytes.fromhex(blocks["plane"])).view(16, 4)
    fixed, words = bytes.fromhex(blocks["fixed"]), [int(word, 16) for word in blocks["exceptions"].split()]
    assert reference.reference_encode(plane) == (fixed, words)
    check_codec(bundle, Stack(plane[None], bytes_tensor(fixed)[None], [words_tensor(words)]))


@pytest.mark.parametrize("high", [256, 40, 18, 2])
def test_the_oracles_agree(reference, high):
    rng = np.random.default_rng(high)
    for num_rows, num_cols in [(16, 2), (16, 10), (32, 6), (48, 24)]:
        plane = torch.from_numpy(rng.integers(0, high, (num_rows, num_cols)).astype(np.uint8) * (255 // (high - 1)))
        fixed, words = oracle_encode(plane)
        assert (fixed.tobytes(), words.tolist()) == reference.reference_encode(plane)
        assert_same(oracle_decode(fixed, words, num_rows, num_cols), plane, "oracle")
        assert (
            reference.reference_decode(fixed.tobytes(), words.tolist(), num_rows, num_cols) == plane.numpy().tobytes()
        )


# --- small domains, enumerated


@pytest.mark.kernels_ci
@every_device
def test_every_base_with_every_code(bundle, device):
    bases = np.repeat(np.arange(NUM_BASES, dtype=np.uint8)[:, None], 16, 1)
    codes = (np.arange(16)[:, None] + np.arange(16)) % 16  # every code of every base, in every column
    codes = np.broadcast_to(codes.astype(np.uint8), (NUM_BASES, 16, 16))
    planes, fixed = torch.from_numpy(codes + bases[:, :, None]), torch.from_numpy(wire_fixed(bases, codes))
    check_codec(bundle, Stack(planes, fixed, [words_tensor([])] * NUM_BASES).to(device))


@every_device
def test_every_base_with_every_pair_of_codes(bundle, device):
    """As another writer may store them: no base here is the lowest possible one."""
    low, high = (half.ravel().astype(np.uint8) for half in np.mgrid[:16, :16])
    codes = np.broadcast_to(np.stack([low, high], 1), (NUM_BASES, 256, 2))
    bases = np.repeat(np.arange(NUM_BASES, dtype=np.uint8)[:, None], 256, 1)
    planes, fixed = torch.from_numpy(codes + bases[:, :, None]), torch.from_numpy(wire_fixed(bases, codes))
    check_decode(bundle, Stack(planes, fixed, [words_tensor([])] * NUM_BASES).to(device))


@pytest.mark.kernels_ci
@every_device
def test_every_byte_as_an_exception(bundle, device):
    value = np.arange(256)
    bases = np.where(value < 128, 180, 20).astype(np.uint8)
    codes = np.broadcast_to(np.array([0, 15] * 9, np.uint8), (256, 18)).copy()
    column = value % 18
    codes[value, column] = 0
    plane = codes + bases[:, None]
    plane[value, column] = value
    words = [int(v) << 24 | int(v * 18 + c) for v, c in zip(value, column, strict=True)]
    fixed = torch.from_numpy(wire_fixed(bases[None], codes[None]))
    check_codec(bundle, Stack(torch.from_numpy(plane)[None], fixed, [words_tensor(words)]).to(device))


@every_device
@pytest.mark.parametrize("num_exceptional", [0, 1, 2, 7, 8])
def test_exceptional_columns_of_one_row(bundle, device, num_exceptional):
    """Up to a whole row, as only another writer would store it; codes under exceptions are not zero here."""
    bases, codes = np.full((1, 32), 90, np.uint8), np.full((1, 32, 8), 13, np.uint8)
    plane = codes[0] + bases[0][:, None]
    plane[17, :num_exceptional] = 0x80 + np.arange(num_exceptional)
    words = [0x80 + c << 24 | 17 * 8 + c for c in range(num_exceptional)]
    fixed = torch.from_numpy(wire_fixed(bases, codes))
    check_decode(bundle, Stack(torch.from_numpy(plane)[None], fixed, [words_tensor(words)]).to(device))


@every_device
@pytest.mark.parametrize("fill", [0x00, 0x01, 0x0F, 0x10, 0x38, 0x7F, 0x80, 0xEF, 0xF0, 0xF1, 0xFF])
def test_a_plane_of_one_value(bundle, device, fill):
    """For NaN, both zeros, subnormals and both ends of the byte range, the base is the lowest that covers the value."""
    base = max(0, fill - 15)
    bases, codes = np.full((2, 16), base, np.uint8), np.full((2, 16, 6), fill - base, np.uint8)
    fixed = torch.from_numpy(wire_fixed(bases, codes))
    stack = Stack(torch.full((2, 16, 6), fill, dtype=torch.uint8), fixed, [words_tensor([])] * 2).to(device)
    check_codec(bundle, stack)
    fixed, _ = bundle.compress_nvfp4_csf_scales(stack.planes.view(torch.float8_e4m3fn))
    assert_same(fixed, stack.fixed, "fixed of float8 input")


# --- geometries


@every_device
@pytest.mark.parametrize(
    "num_rows, num_cols",
    [
        *((16, num_cols) for num_cols in (2, 4, 6, 8, 10, 12, 14, 16)),
        *((48, num_cols) for num_cols in (2, 22, 40, 62, 66, 130)),
        *((144, num_cols) for num_cols in (2, 14, 24, 160, 256)),
    ],
)
def test_geometry(bundle, device, num_rows, num_cols):
    limit = num_rows * ((num_cols - 2) // 3)
    check_codec(bundle, make_stack([0, limit // 40, 0, limit], num_rows, num_cols, seed=num_cols).to(device))


@pytest.mark.kernels_ci
@every_device
@pytest.mark.parametrize("num_planes", [1, 2, 9, 300])
def test_planes_without_exceptions_among_others(bundle, device, num_planes):
    counts = [(0, 0, 5, 40, 1, 0)[plane % 6] for plane in range(num_planes)]
    check_codec(bundle, make_stack(counts, 16, 12, seed=num_planes).to(device))


@every_device
def test_first_and_last_position_of_the_largest_plane(bundle, device):
    plane = torch.full((16, 1 << 20), 0x40, dtype=torch.uint8, device=device)
    plane[0, 0], plane[15, -1] = 0x00, 0xFF
    fixed, exceptions = bundle.compress_nvfp4_csf_scales(plane)
    assert_same(exceptions, words_tensor([0x00000000, 0xFFFFFFFF]), "exceptions")
    check_decode(bundle, Stack(plane[None], fixed[None], [exceptions]))


@every_device
def test_a_stack_is_its_planes(bundle, device):
    """Planes of a stack do not depend on their neighbours, and rows do not depend on others in the same chunk of
    work."""
    planes = torch.from_numpy(np.random.default_rng(8).integers(0, 256, (50, 160, 40)).astype(np.uint8)).to(device)
    planes[::3] = planes[::3] // 20 + 60
    fixed, exceptions = bundle.compress_nvfp4_csf_scales(planes)
    for plane in range(0, 50, 7):
        own_fixed, own_exceptions = bundle.compress_nvfp4_csf_scales(planes[plane])
        assert_same(own_fixed, fixed[plane], f"fixed[{plane}]")
        assert_same(own_exceptions, exceptions[plane], f"exceptions[{plane}]")
        expected = oracle_encode(planes[plane])
        assert_same(own_fixed, expected[0], f"fixed[{plane}] by the oracle")
        assert_same(own_exceptions, expected[1], f"exceptions[{plane}] by the oracle")


@every_device
def test_compress_takes_any_strides_and_gives_the_same_each_time(bundle, device):
    stack = make_stack([30, 0], 32, 20, seed=4).to(device)
    wide = torch.zeros(2, 20, 64, dtype=torch.uint8, device=device)
    wide[:, :, ::2] = stack.planes.mT
    strided = wide[:, :, ::2].mT
    assert not strided.is_contiguous()
    for planes in (strided, stack.planes, stack.planes.view(torch.float8_e4m3fn)):
        check_wire(bundle.compress_nvfp4_csf_scales(planes), stack.fixed, stack.words)


@pytest.mark.parametrize(
    "scales, message",
    [
        (torch.zeros(24, 4, dtype=torch.uint8), r"num_rows must be a positive multiple of 16, got 24"),
        (torch.zeros(2, 16, 5, dtype=torch.uint8), r"num_cols must be a positive even number, got 5"),
        (torch.zeros(16, (1 << 20) + 2, dtype=torch.uint8), r"at most 2\^24 bytes, got 16 x 1048578"),
        (torch.zeros(16, 4, dtype=torch.int8), r"must be float8_e4m3fn or uint8, got torch\.int8"),
        (torch.zeros(16, 4), r"must be float8_e4m3fn or uint8, got torch\.float32"),
        (torch.zeros(64, dtype=torch.uint8), r"must be \[N, C\] or \[E, N, C\].*\(64,\)"),
        (torch.zeros(1, 1, 16, 4, dtype=torch.uint8), r"must be \[N, C\] or \[E, N, C\].*\(1, 1, 16, 4\)"),
        (torch.zeros(0, 16, 4, dtype=torch.uint8), r"not empty, got shape \(0, 16, 4\)"),
        (b"bytes", r"must be float8_e4m3fn or uint8, got bytes"),
    ],
    ids=["rows", "columns", "size", "int8", "float32", "1-D", "4-D", "empty", "bytes"],
)
def test_what_compress_refuses(bundle, scales, message):
    with pytest.raises(ValueError, match=message):
        bundle.compress_nvfp4_csf_scales(scales)
