"""The numeric kit of the CSF tests: exact comparison, planes with a known compressed form, and an oracle.

The oracle is written in numpy, from docs/format.md alone. The bundle has another one, in plain Python
(``csf/reference.py``); tests compare the two before they trust either.
"""

from __future__ import annotations

import dataclasses
from types import ModuleType

import numpy as np
import pytest
import torch

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
WINDOW = 16
NUM_BASES = 241
POISON = 0xA5


def to_numpy(data: torch.Tensor | np.ndarray | bytes) -> np.ndarray:
    """Bytes as uint8 and words as uint32, whatever tensor they are in."""
    if isinstance(data, bytes):
        return np.frombuffer(data, np.uint8)
    if isinstance(data, torch.Tensor):
        if data.element_size() == 1:
            return data.detach().cpu().contiguous().view(torch.uint8).numpy()
        return data.detach().cpu().contiguous().view(torch.int32).numpy().view(np.uint32)
    return data


def assert_same(
    actual: torch.Tensor | np.ndarray | bytes, expected: torch.Tensor | np.ndarray | bytes, name: str
) -> None:
    """Check that shape and every bit are equal; otherwise say where the first difference is, what was expected, and how
    many differ."""
    actual, expected = to_numpy(actual), to_numpy(expected)
    assert actual.dtype == expected.dtype, f"{name}: {actual.dtype}, expected {expected.dtype}"
    assert actual.shape == expected.shape, f"{name}: shape {actual.shape}, expected {expected.shape}"
    differs = np.argwhere(actual != expected)
    if len(differs):
        at = tuple(int(i) for i in differs[0])
        raise AssertionError(
            f"{name}: {len(differs)} of {actual.size} differ, the first at {at}: "
            f"{int(actual[at]):#04x}, expected {int(expected[at]):#04x}"
        )


@dataclasses.dataclass(frozen=True)
class Stack:
    """Planes `[E, R, C]` and their compressed form: `fixed` uint8 `[E, bytes]`, `words` uint32, one array a plane."""

    planes: torch.Tensor
    fixed: torch.Tensor
    words: list[torch.Tensor]

    def to(self, device: str) -> Stack:
        return Stack(self.planes.to(device), self.fixed.to(device), [words.to(device) for words in self.words])

    @property
    def geometry(self) -> dict[str, int]:
        return {"num_rows": self.planes.shape[1], "num_cols": self.planes.shape[2]}


def make_stack(num_exceptions: list[int], num_rows: int, num_cols: int, seed: int) -> Stack:
    """Random planes with exactly `num_exceptions[e]` exceptions each, whose compressed form is known by construction.

    A row with x exceptions has x + 1 bytes `base` and x + 1 bytes `base + 15`. Every other window loses one of these
    groups, and gains at most x bytes, so `base` is the only best one. A row has at most (C - 2) // 3 exceptions.
    """
    rng = np.random.default_rng(seed)
    shape = (len(num_exceptions), num_rows, num_cols)
    row_limit = (num_cols - 2) // 3
    per_row = np.zeros(shape[:2], np.int64)
    for plane, count in enumerate(num_exceptions):
        slots = rng.permutation(num_rows * row_limit)[:count]
        assert len(slots) == count, f"{num_rows} rows of {num_cols} hold at most {num_rows * row_limit} exceptions"
        per_row[plane] = np.bincount(slots % num_rows, minlength=num_rows)
    bases = rng.integers(0, NUM_BASES, shape[:2], np.uint8)
    codes = rng.integers(0, WINDOW, shape, np.uint8)
    rank = rng.random(shape, np.float32).argsort(-1).argsort(-1)
    x = per_row[:, :, None]
    codes[rank < 3 * x + 2] = WINDOW - 1
    codes[rank < 2 * x + 1] = 0
    values = codes + bases[:, :, None]
    outside = rank < x
    below = rng.integers(0, 256 - WINDOW, shape, np.uint8)
    values[outside] = (below + WINDOW * (below >= bases[:, :, None]))[outside]
    words = [wire_words(plane, mask) for plane, mask in zip(values, outside, strict=True)]
    fixed = wire_fixed(bases, codes)
    return Stack(torch.from_numpy(values), torch.from_numpy(fixed), [torch.from_numpy(word) for word in words])


def wire_fixed(bases: np.ndarray, codes: np.ndarray) -> np.ndarray:
    """Fixed streams `[E, bytes]` of `bases [E, R]` and `codes [E, R, C]`."""
    num_planes, num_rows, num_cols = codes.shape
    pairs = codes[:, :, 0::2] + WINDOW * codes[:, :, 1::2]
    slabs = num_planes, num_rows // 16
    fixed = np.concatenate([bases.reshape(*slabs, 16), pairs.reshape(*slabs, 16 * (num_cols // 2))], axis=2)
    return fixed.reshape(num_planes, -1).astype(np.uint8)


def wire_words(plane: np.ndarray, outside: np.ndarray) -> np.ndarray:
    """Exception words uint32 for the bytes of `plane [R, C]` where `outside` is true."""
    (position,) = outside.ravel().nonzero()
    return plane.ravel()[position].astype(np.uint32) * np.uint32(1 << 24) + position.astype(np.uint32)


def oracle_encode(plane: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Fixed stream uint8 `[bytes]` and exception words uint32 `[X]` of a plane `[R, C]`: docs/format.md, "Encoding"."""
    values = to_numpy(plane)
    # As bytes, values below a base wrap around to 16 or more, because no base is above 240.
    columns = np.ascontiguousarray(values.T)
    coverage = [(columns - np.uint8(base) < WINDOW).sum(0, dtype=np.uint32) for base in range(NUM_BASES)]
    bases = np.argmax(coverage, axis=0)[:, None]  # argmax returns the first of equal maxima
    codes = values.astype(np.int64) - bases
    outside = (codes < 0) | (codes >= WINDOW)
    codes[outside] = 0
    return wire_fixed(bases[None, :, 0], codes[None])[0], wire_words(values, outside)


def oracle_decode(fixed: np.ndarray, words: np.ndarray, num_rows: int, num_cols: int) -> np.ndarray:
    """Plane uint8 `[R, C]`; `ValueError` for what the format rejects (docs/format.md, "Decoding" and "Rejected")."""
    if num_rows % 16 or num_rows < 16 or num_cols % 2 or num_cols < 2 or num_rows * num_cols > 1 << 24:
        raise ValueError("geometry")
    if fixed.size != num_rows + num_rows * num_cols // 2:
        raise ValueError("length")
    slabs = fixed.reshape(num_rows // 16, -1)
    bases, pairs = slabs[:, :16].reshape(num_rows, 1), slabs[:, 16:].reshape(num_rows, -1)
    if bases.max() > 240:
        raise ValueError("base")
    values, positions = words // np.uint32(1 << 24), (words % np.uint32(1 << 24)).astype(np.int64)
    if np.any(positions >= num_rows * num_cols):
        raise ValueError("position beyond the plane")
    if np.any(np.diff(positions) <= 0):
        raise ValueError("positions not increasing")
    plane = np.empty((num_rows, num_cols), np.uint8)
    plane[:, 0::2] = bases + pairs % WINDOW
    plane[:, 1::2] = bases + pairs // WINDOW
    plane.ravel()[positions] = values
    return plane


def oracle_swizzle(planes: torch.Tensor) -> np.ndarray:
    """Planes `[E, R, C]` as block-scaled MMA reads them, zero-padded to tiles of 128 x 4: uint8 `[E, bytes]`.

    Row r, column c of a tile of 512 bytes is at `(r % 32) * 16 + (r // 32) * 4 + c`.
    """
    values = to_numpy(planes)
    num_planes, num_rows, num_cols = values.shape
    row, col = np.mgrid[:num_rows, :num_cols]
    row_tiles, col_tiles = -(-num_rows // 128), -(-num_cols // 4)
    tile = row // 128 * col_tiles + col // 4
    swizzled = np.zeros((num_planes, row_tiles * col_tiles * 512), np.uint8)
    swizzled[:, tile * 512 + row % 32 * 16 + row % 128 // 32 * 4 + col % 4] = values
    return swizzled


def words_tensor(words: list[int], device: str = "cpu") -> torch.Tensor:
    return torch.from_numpy(np.array(words, np.uint32)).to(device)


def bytes_tensor(data: bytes, device: str = "cpu") -> torch.Tensor:
    return torch.tensor(list(data), dtype=torch.uint8, device=device)


def check_wire(actual: tuple, fixed: torch.Tensor, words: list[torch.Tensor]) -> None:
    assert_same(actual[0], fixed, "fixed")
    assert len(actual[1]) == len(words)
    for plane, (own, expected) in enumerate(zip(actual[1], words, strict=True)):
        assert own.dtype == torch.uint32 and own.dim() == 1
        assert_same(own, expected, f"exceptions[{plane}]")


def check_decode(bundle: ModuleType, stack: Stack):
    """Prepare the stack's wire form and decode it; the result is its planes, and the same wire form again."""
    scales = bundle.prepare_nvfp4_csf_scales(stack.fixed, stack.words, **stack.geometry)
    assert scales.shape == tuple(stack.planes.shape)
    decoded = bundle.decompress_nvfp4_csf_scales(scales)
    assert decoded.dtype == torch.float8_e4m3fn and decoded.device == stack.planes.device
    assert_same(decoded, stack.planes, "decoded")
    check_wire(scales.to_wire(), stack.fixed, stack.words)
    return scales


def check_codec(bundle: ModuleType, stack: Stack):
    """Check that the encoder gives exactly the stack's wire form, and that it decodes to its planes."""
    check_wire(bundle.compress_nvfp4_csf_scales(stack.planes), stack.fixed, stack.words)
    return check_decode(bundle, stack)


def make_coded_planes(shape: tuple[int, int, int], percent: float, kind: str, seed: int) -> Stack:
    """Planes with any rate of exceptions, 0 to 100 %, made from their compressed form, so no encoder has to find it.

    kind: "ordinary" bytes, as in trained weights; "any" byte but NaN, including negative, zero and subnormal ones;
    "nan": ordinary ones, but three rows per plane have 0x7F and 0xFF in windows, and 0xFF as an exception.
    """
    rng = np.random.default_rng(seed)
    wild = kind == "any"
    bases = rng.integers(*((0, NUM_BASES) if wild else (0x30, 0x39)), shape[:2], np.uint8)
    codes = rng.integers(0, WINDOW, shape, np.uint8)
    others = rng.integers(*((0, 256) if wild else (0x20, 0x50)), shape, np.uint8)
    outside = rng.random(shape, np.float32) < percent / 100
    if kind == "nan":
        bases[:, 3], codes[:, 3, 5], outside[:, 3, 5] = 0x70, 15, False
        bases[:, -2], codes[:, -2, 0], outside[:, -2, 0] = 240, 15, False
        others[:, 7, -1], outside[:, 7, -1] = 0xFF, True
    windows = codes + bases[:, :, None]
    if wild:
        codes ^= windows % 128 == 127
        others -= others % 128 == 127
        windows = codes + bases[:, :, None]
    planes = np.where(outside, others, windows)
    words = [torch.from_numpy(wire_words(plane, mask)) for plane, mask in zip(planes, outside, strict=True)]
    return Stack(torch.from_numpy(planes), torch.from_numpy(wire_fixed(bases, codes)), words)


def oracle_weights(packed: torch.Tensor, planes: torch.Tensor) -> torch.Tensor:
    """code * scale as float64 [.., N, K] of packed codes [.., N, K/2] and scale bytes [.., N, K/16]."""
    e2m1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
    byte = np.arange(256)
    exponent, mantissa = byte // 8 % 16, byte % 8
    e4m3 = np.where(exponent > 0, (8 + mantissa) * 2.0 ** (exponent - 10.0), mantissa * 2.0**-9)
    e4m3 = np.where(byte % 128 == 127, np.nan, np.where(byte >= 128, -e4m3, e4m3))
    codes = to_numpy(packed)
    values = e2m1[np.stack([codes % 16, codes // 16], -1)].reshape(*codes.shape[:-1], -1)
    return torch.from_numpy(values * e4m3[to_numpy(planes)].repeat(16, -1))
