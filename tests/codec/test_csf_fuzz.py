"""Random planes are restored exactly; damaged wire streams decode to what the reference says, or are refused."""

from __future__ import annotations

import importlib
from collections import Counter

import numpy as np
import pytest
import torch

from numeric import DEVICES, POISON, assert_same, oracle_decode, oracle_encode, wire_fixed

pytestmark = pytest.mark.usefixtures("one_thread")

NUM_PLANES = 10_000
NUM_STREAMS = 10_000
PLANES_PER_STACK = 200
GEOMETRIES = [(32, 6), (16, 14), (48, 2), (32, 4), (16, 10), (64, 34), (16, 142)]
"""Small geometries, some with equal stream lengths, and two with more than one tile."""

every_device = pytest.mark.parametrize("device", DEVICES)


def random_planes(rng: np.random.Generator, num_planes: int, geometries: list[tuple[int, int]]) -> np.ndarray:
    """Arbitrary bytes, or wide or narrow clusters anywhere, with a random share of arbitrary bytes among them."""
    shape = (num_planes, *geometries[rng.integers(len(geometries))])
    planes = rng.integers(0, 256, shape)
    if rng.random() < 0.7:
        center, spread = rng.integers(0, 256, (num_planes, shape[1], 1)), rng.integers(1, 40, (num_planes, 1, 1))
        clusters = np.clip(center + np.rint(rng.standard_normal(shape) * spread / 3), 0, 255)
        planes = np.where(rng.random(shape) < rng.random((num_planes, 1, 1)) ** 3, planes, clusters)
    return planes.astype(np.uint8)


@every_device
def test_random_planes_round_trip(bundle, device):
    geometries = GEOMETRIES  # a GPU compiles for each
    if device == "cpu":
        geometries = [(num_rows, num_cols) for num_rows in (16, 32, 48) for num_cols in range(2, 34, 2)]
    for seed in range(NUM_PLANES // PLANES_PER_STACK):
        planes = random_planes(np.random.default_rng(seed), PLANES_PER_STACK, geometries)
        num_planes, num_rows, num_cols = planes.shape
        print(f"seed {seed}: {planes.shape}")  # shown if something fails
        fixed, exceptions = bundle.compress_nvfp4_csf_scales(torch.from_numpy(planes).to(device))

        # One tall plane has the same slabs, and thus the same fixed bytes; its positions continue through the stack.
        oracle_fixed, oracle_words = oracle_encode(planes.reshape(-1, num_cols))
        assert_same(fixed.view(-1), oracle_fixed, "fixed")
        plane_of, position = np.divmod(oracle_words & 0xFFFFFF, num_rows * num_cols)
        words = oracle_words & 0xFF000000 | position
        assert [len(own) for own in exceptions] == np.bincount(plane_of, minlength=num_planes).tolist()
        assert_same(torch.cat([own.view(torch.int32) for own in exceptions]), words.astype(np.uint32), "exceptions")

        scales = bundle.prepare_nvfp4_csf_scales(fixed, exceptions, num_rows=num_rows, num_cols=num_cols)
        assert_same(bundle.decompress_nvfp4_csf_scales(scales), planes, "decoded")


class Stream:
    """A valid stream of one plane, as some writer may have made it, and ways to damage it."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.rng = rng
        self.num_rows, self.num_cols = self.read_as = GEOMETRIES[rng.integers(len(GEOMETRIES))]
        bases = rng.integers(0, 241, (1, self.num_rows), np.uint8)
        codes = rng.integers(0, 16, (1, self.num_rows, self.num_cols), np.uint8)
        self.fixed = wire_fixed(bases, codes)[0]
        plane_bytes = self.num_rows * self.num_cols
        positions = np.sort(rng.permutation(plane_bytes)[: rng.integers(0, plane_bytes // 3)]).astype(np.uint32)
        self.words = rng.integers(0, 256, len(positions), np.uint32) << 24 | positions

    def nothing(self) -> None:
        pass

    def flip_bits_in_fixed(self) -> None:
        for bit in self.rng.integers(0, 8 * self.fixed.size, self.rng.integers(1, 9)):
            self.fixed[bit // 8] ^= 1 << bit % 8

    def set_a_base(self) -> None:
        row = self.rng.integers(self.num_rows)
        slab_bytes = 16 * (1 + self.num_cols // 2)
        self.fixed[row // 16 * slab_bytes + row % 16] = self.rng.integers(236, 256)

    def set_the_fixed_length(self) -> None:
        self.fixed = np.resize(self.fixed, max(0, self.fixed.size + int(self.rng.integers(-20, 21))))

    def flip_bits_in_words(self) -> None:
        for bit in (
            self.rng.integers(0, max(1, 32 * self.words.size), self.rng.integers(1, 4)) if self.words.size else ()
        ):
            self.words[bit // 32] ^= np.uint32(1 << bit % 32)

    def change_values(self) -> None:
        self.words ^= self.rng.integers(0, 256, self.words.size, np.uint32) << 24

    def swap_words(self) -> None:
        if self.words.size > 1:
            i, j = self.rng.integers(0, self.words.size, 2)
            self.words[[i, j]] = self.words[[j, i]]

    def duplicate_a_word(self) -> None:
        if self.words.size:
            i = self.rng.integers(self.words.size)
            self.words = np.insert(self.words, i, self.words[i] ^ np.uint32(self.rng.integers(0, 256) << 24))

    def move_the_last_word(self) -> None:
        """To a position around the plane's end, on either side of it."""
        if self.words.size:
            position = self.num_rows * self.num_cols + int(self.rng.integers(-3, 4))
            self.words[-1] = int(self.words[-1]) & 0xFF000000 | position % (1 << 24)

    def drop_words(self) -> None:
        self.words = self.words[self.rng.random(self.words.size) < 0.8]

    def add_words(self) -> None:
        self.words = np.append(self.words, self.rng.integers(0, 1 << 32, self.rng.integers(1, 4), np.uint32))

    def add_a_last_word(self) -> None:
        position = int(self.words[-1] & 0xFFFFFF) + 1 if self.words.size else 0
        self.words = np.append(self.words, np.uint32(self.rng.integers(0, 256) << 24 | position))

    def change_the_geometry(self) -> None:
        rows, cols = self.num_rows, self.num_cols
        others = [*GEOMETRIES, (cols, rows), (rows + 16, cols), (rows, cols + 1), (0, cols), (rows, 0)]
        others += [(-rows, -cols), (rows, -cols), (rows + 8, cols), (1 << 20, 1 << 20)]
        self.read_as = others[self.rng.integers(len(others))]

    def wire(self, device: str) -> tuple:
        """The tensors, in one of the forms a reader takes."""
        fixed = torch.from_numpy(self.fixed.copy()).to(device)
        words = torch.from_numpy(self.words.copy()).to(device)
        words = words.view(torch.int32) if self.rng.random() < 0.5 else words
        return (fixed, words) if self.rng.random() < 0.5 else ([fixed], [words])


DAMAGE = [name for name, value in vars(Stream).items() if not name.startswith("_") and name != "wire"]


def outcome_of(bundle, stream: Stream, device: str) -> np.ndarray | None:
    """The result of the codec: the plane, written between intact guard bands, or None if the stream is refused."""
    num_rows, num_cols = stream.read_as
    try:
        scales = bundle.prepare_nvfp4_csf_scales(*stream.wire(device), num_rows=num_rows, num_cols=num_cols)
    except ValueError:
        return None
    size = bundle.csf_workspace_size(scales)
    memory = torch.full((size + 32,), POISON, dtype=torch.uint8, device=device)
    begin = int(stream.rng.integers(8, 24))
    bundle.decompress_nvfp4_csf_scales(scales, workspace=memory[begin : begin + size])
    (fixed,), (words,) = scales.to_wire()
    assert_same(fixed, stream.fixed, "fixed again")
    assert_same(words, stream.words, "exceptions again")
    memory = memory.cpu().numpy()
    assert (memory[:begin] == POISON).all() and (memory[begin + size :] == POISON).all(), "wrote outside the workspace"
    return memory[begin : begin + size]


@every_device
def test_damaged_streams(bundle, device):
    reference = importlib.import_module(f"{bundle.__name__}.csf.reference")
    outcomes = Counter()
    for seed in range(NUM_STREAMS):
        stream = Stream(np.random.default_rng(seed))
        damage = [DAMAGE[i] for i in stream.rng.integers(0, len(DAMAGE), stream.rng.integers(1, 3))]
        for name in damage:
            getattr(stream, name)()
        wire = stream.fixed, stream.words, *stream.read_as
        try:
            expected = reference.reference_decode(wire[0].tobytes(), wire[1].tolist(), *wire[2:])
        except ValueError:
            expected = None
        try:
            by_oracle = oracle_decode(*wire).tobytes()
        except ValueError:
            by_oracle = None
        where = f"seed {seed}: {wire[2]} x {wire[3]}, {damage}"
        assert by_oracle == expected, f"{where}: the oracles differ"
        decoded = outcome_of(bundle, stream, device)
        if decoded is None or expected is None:
            assert decoded is expected, (
                f"{where}: {'refused' if decoded is None else 'accepted'}, the reference did not"
            )
        else:
            assert_same(decoded, expected, where)
        outcomes.update((name, expected is None) for name in damage)
    print(sorted(outcomes.items()))
    for refused in (False, True):
        assert sum(count for (_, was), count in outcomes.items() if was is refused) > NUM_STREAMS // 5
