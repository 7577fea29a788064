"""The Triton kernels of the codec, run by Triton's interpreter on CPU tensors, against the oracle.

Triton decides on import whether it interprets, so the cases run in a separate process, with this file as its script,
and each test reads the outcome of its case.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import traceback
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

import interpreter
from numeric import POISON, assert_same, make_stack, oracle_encode, oracle_swizzle, to_numpy

GUARD = 64
DECODE_GEOMETRIES = [(2, 32, 40), (3, 48, 22), (2, 16, 2), (2, 144, 10), (2, 144, 48)]
STARTS = {"every plane": None, "second": [0, 0, 4, 4], "none": [2, 2, 2, 2], "first, long": [0, 1, 1, 1, 0, 9]}
ENCODE_SHAPES = {
    "whole words": (1, 16, 40), "half a word left": (2, 48, 22), "three words": (1, 48, 10),
    "several chunks": (1, 16, 300), "two threads a row": (3, 32, 48), "more slabs than a program's": (1, 48, 160),
}  # fmt: skip
FAR_RANGES = {"any": (0, 256), "the lowest": (0, 12), "the highest": (244, 256), "two ends": (-10, 10)}
FAR_SHAPES = {"pairs": (2, 16, 2), "few columns": (1, 16, 6), "half a chunk": (1, 16, 16)}
PLANES_OF_ENDS = (1, 3, 1024, 1025, 2500)


try:
    import triton
    import triton.language as tl
except ImportError:  # the tests below skip
    pass
else:

    @triton.jit
    def decode_plane(
        out_ptr, stream, plane, decode_tile: tl.constexpr,
        PLANE: tl.constexpr, BLOCK: tl.constexpr, BLOCK_X: tl.constexpr,
    ):  # fmt: skip
        """Decode one tile, which is a whole small plane, of a plane that a grid would only reach after 2^31 bytes."""
        decode_tile(out_ptr, stream, plane, tl.program_id(0), 0, PLANE, BLOCK, BLOCK_X, True)


def decode_case(bundle: ModuleType, geometry: tuple[int, int, int], starts: list[int] | None, swizzled: bool) -> None:
    """Decode at an aligned and at two unaligned addresses. Inactive planes and guard bands do not change."""
    launch = importlib.import_module(f"{bundle.__name__}.csf.decode_triton").launch_decode
    num_planes, num_rows, num_cols = geometry
    stack = make_stack([num_rows * ((num_cols - 2) // 3) // 3, 0, 5][:num_planes], num_rows, num_cols, seed=num_cols)
    scales = bundle.prepare_nvfp4_csf_scales(stack.fixed, stack.words, **stack.geometry)
    planes = oracle_swizzle(stack.planes) if swizzled else to_numpy(stack.planes).reshape(num_planes, -1)
    active = [True] * num_planes
    if starts is not None:
        active = [starts[plane] < starts[plane + 1] for plane in range(num_planes)]
        starts = torch.tensor(starts, dtype=torch.int32)
    for offset in (0, 1, 6):
        memory = torch.full((GUARD + offset + planes.size + GUARD,), POISON, dtype=torch.uint8)
        body = slice(GUARD + offset, GUARD + offset + planes.size)
        launch(*scales.state_dict().values(), memory[body], starts, swizzled)
        expected = np.full(memory.shape, POISON, np.uint8)
        expected[body].reshape(planes.shape)[active] = planes[active]
        assert_same(memory, expected, f"workspace from byte {body.start}, {planes.shape[1]} bytes a plane")


def many_case(bundle: ModuleType, many: int, offset: int) -> None:
    """Five active planes of seven, ranked two at a time: in large tiles if `many` of the first two are active."""
    launch = importlib.import_module(f"{bundle.__name__}.csf.decode_triton").launch_decode
    num_planes, num_rows, num_cols = 7, 48, 24
    stack = make_stack([40, 0, 5, 9, 100, 3, 0], num_rows, num_cols, seed=many)
    scales = bundle.prepare_nvfp4_csf_scales(stack.fixed, stack.words, **stack.geometry)
    starts = torch.tensor([0, 2, 2, 3, 4, 5, 5, 9], dtype=torch.int32)  # one of the first two is active
    memory = torch.full((GUARD + offset + scales.num_planes * scales.plane_bytes + GUARD,), POISON, dtype=torch.uint8)
    body = slice(GUARD + offset, len(memory) - GUARD)
    tiles = {"BLOCK": 16, "TILES": 9, "MANY_BLOCK": 64, "MANY_TILES": 3}
    launch(*scales.state_dict().values(), memory[body], starts, False, MANY=many, BLOCK_E=2, grid=4, **tiles)
    expected = np.full(memory.shape, POISON, np.uint8)
    active = [0, 2, 3, 4, 6]
    expected[body].reshape(num_planes, -1)[active] = to_numpy(stack.planes).reshape(num_planes, -1)[active]
    assert_same(memory, expected, f"workspace from byte {body.start}")


def misaligned_codes_case(bundle: ModuleType) -> None:
    """Codes are loaded as words, so misaligned ones are refused, and nothing is written."""
    launch = importlib.import_module(f"{bundle.__name__}.csf.decode_triton").launch_decode
    stack = make_stack([3], 16, 32, seed=1)
    scales = bundle.prepare_nvfp4_csf_scales(stack.fixed, stack.words, **stack.geometry)
    elsewhere = torch.empty(scales.codes.numel() + 4, dtype=torch.uint8)[4:].view(scales.codes.shape)
    out = torch.full((16 * 32,), POISON, dtype=torch.uint8)
    with pytest.raises(ValueError, match="codes: expected memory aligned to 8 bytes, got address 0x"):
        launch(*(scales.state_dict() | {"codes": elsewhere}).values(), out, None, False)
    assert bool((out == POISON).all())


def encode_case(bundle: ModuleType, shape: tuple[int, int, int], low: int = 100, high: int = 112) -> None:
    """Bytes from a range, modulo 256, with exceptions. If they are scattered, all 241 bases have to be tried, which is
    slow."""
    encode_triton = importlib.import_module(f"{bundle.__name__}.csf.encode_triton")
    exception_list = importlib.import_module(f"{bundle.__name__}.csf.exception_list").ExceptionList
    rng = np.random.default_rng(sum(shape))
    planes = rng.integers(low, high, shape).astype(np.uint8)
    planes[:, ::4, -2] = 0x00  # where they do not move the first columns' mean, which would cost a search as well
    planes[:, 1::4, -1] = 0x7F
    given = torch.from_numpy(planes)
    fixed, words, ends = encode_triton.encode_gpu(given)
    oracle_fixed, oracle_words = zip(*(oracle_encode(values) for values in planes), strict=True)
    for plane, own in enumerate(exception_list(words, ends)):
        assert_same(fixed[plane].view(-1), oracle_fixed[plane], f"fixed[{plane}]")
        assert_same(own, oracle_words[plane], f"exceptions[{plane}]")


def ends_case(bundle: ModuleType, num_planes: int) -> None:
    """Sums of more than 32 bits, in place and in host memory; nothing is written behind them."""
    launch = importlib.import_module(f"{bundle.__name__}.csf.encode_triton").launch_ends
    counts = np.random.default_rng(num_planes).integers(0, 1 << 24, num_planes)
    counts[::5] = 0
    counts[-1] = 1 << 40
    guard = 1024  # all that a block could write beyond
    memory, host = (torch.full((num_planes + guard,), -1, dtype=torch.int64) for _ in range(2))
    memory[:num_planes] = torch.from_numpy(counts)
    launch(memory[:num_planes], host[:num_planes])
    expected = np.concatenate([np.cumsum(counts), np.full(guard, -1)])
    for name, actual in (("the device's", memory), ("the host's", host)):
        assert actual.tolist() == expected.tolist(), name


def own_ends_case(bundle: ModuleType) -> None:
    """The returned ends are in memory of their own: the tensor to which the kernel wrote goes back to a pool."""
    encode_triton = importlib.import_module(f"{bundle.__name__}.csf.encode_triton")
    launch, written = encode_triton.launch_ends, []

    def noted(plane_counts: torch.Tensor, host_ends: torch.Tensor) -> None:
        launch(plane_counts, host_ends)
        written.extend([plane_counts, host_ends])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(encode_triton, "launch_ends", noted)
        planes = torch.full((3, 16, 2), 100, dtype=torch.uint8)
        planes[0, 0, 0] = planes[2, 5, 1] = planes[2, 9, 0] = 1
        *_, ends = encode_triton.encode_gpu(planes)
    for memory in written:
        memory.fill_(-1)
    assert len(written) == 2 and ends.tolist() == [1, 1, 3]


def far_plane_case(bundle: ModuleType, swizzled: bool) -> None:
    """The last plane of a stack of more than 2^31 bytes, of which only that plane's memory is touched."""
    tiles = importlib.import_module(f"{bundle.__name__}.csf.decode_tiles")
    num_rows, num_cols = 32, 10
    stack = make_stack([30], num_rows, num_cols, seed=5)
    scales = bundle.prepare_nvfp4_csf_scales(stack.fixed, stack.words, **stack.geometry)
    expected = oracle_swizzle(stack.planes)[0] if swizzled else to_numpy(stack.planes).reshape(-1)
    plane = (1 << 31) // expected.size + 7

    def far(tensor: torch.Tensor, size: int) -> torch.Tensor:
        """`size` items per plane, none of which is in memory before it is written; the last plane has those of
        `tensor`."""
        memory = torch.empty((plane + 1) * size, dtype=tensor.dtype)
        memory[-size:] = tensor.view(-1)
        return memory

    out = torch.empty((plane + 1) * expected.size, dtype=torch.uint8)
    offsets = torch.empty(plane + 2, dtype=torch.int32)
    offsets[-2:] = scales.exception_offsets
    bases, codes = far(scales.bases, num_rows), far(scales.codes, num_rows * num_cols // 2)
    decode_plane[(1,)](
        out, tiles.Stream(bases, codes, scales.exceptions, offsets), plane,
        tiles.decode_swizzled_tile if swizzled else tiles.decode_row_tile,
        PLANE=tiles.Plane(num_rows, num_cols, num_rows * num_cols), BLOCK=128 if swizzled else 64, BLOCK_X=32,
    )  # fmt: skip
    assert_same(out[-expected.size :], expected, f"plane {plane} from byte {plane * expected.size}")


CASES = {
    "decode past 2^31 bytes, rows": (far_plane_case, False),
    "decode past 2^31 bytes, swizzled": (far_plane_case, True),
    **{
        f"decode {'x'.join(map(str, geometry))} {form} {name}": (decode_case, geometry, starts, form == "swizzled")
        for geometry in DECODE_GEOMETRIES
        for form in ("rows", "swizzled")
        for name, starts in STARTS.items()
    },
    "codes that lie elsewhere": (misaligned_codes_case,),
    **{
        f"decode in large tiles from {many} of two planes on, at byte {offset}": (many_case, many, offset)
        for many in (0, 1, 2)
        for offset in (0, 3)
    },
    **{f"encode {name}": (encode_case, shape) for name, shape in ENCODE_SHAPES.items()},
    **{
        f"encode {values} of {name}": (encode_case, shape, *bounds)
        for name, shape in FAR_SHAPES.items()
        for values, bounds in FAR_RANGES.items()
    },
    **{f"ends of {num_planes} planes": (ends_case, num_planes) for num_planes in PLANES_OF_ENDS},
    "ends returned": (own_ends_case,),
}


def run_cases(variant: Path) -> dict[str, str]:
    """What went wrong in each case; empty if nothing did."""
    from kernels import get_local_kernel

    interpreter.mend()
    bundle = get_local_kernel(variant, backend=variant.name.removeprefix("torch-"))
    outcomes = {}
    for name, (check, *arguments) in CASES.items():
        try:
            check(bundle, *arguments)
            outcomes[name] = ""
        except Exception:
            outcomes[name] = traceback.format_exc()
    return outcomes


@pytest.fixture(scope="module")
def outcomes(bundle_dir: Path) -> dict[str, str]:
    pytest.importorskip("triton", reason="needs triton, whose interpreter runs the kernels")
    environment = os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = str(Path(__file__).parent.parent / "support")
    result = subprocess.run(
        [sys.executable, __file__, str(bundle_dir / "torch-cpu")], env=environment, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", CASES)
def test_interpreted(outcomes, name):
    if outcomes[name]:
        pytest.fail(outcomes[name], pytrace=False)


if __name__ == "__main__":
    print(json.dumps(run_cases(Path(sys.argv[1]))))
