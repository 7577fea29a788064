"""Every wrapper of ptx.py by itself, on a GPU."""

from __future__ import annotations

import importlib

import pytest
import torch

triton = pytest.importorskip("triton")
gluon = pytest.importorskip("triton.experimental.gluon")
gl = pytest.importorskip("triton.experimental.gluon.language")
ptx = None
"""The bundle's module, once it is loaded. Kernels find their functions in it."""

E4M3 = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.float64)


@pytest.fixture(scope="module", autouse=True)
def wrappers(bundle):
    global ptx
    ptx = importlib.import_module(f"{bundle.__name__}.gemm.kernels.ptx")
    ptx.barrier = importlib.import_module(f"{bundle.__name__}.gemm.kernels.unpack").barrier


@gluon.jit
def decode_kernel(base_ptr, codes_ptr, out_ptr, scalar, WORDS: gl.constexpr):
    LANES: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    lane = gl.arange(0, 32, LANES)
    address = ptx.declare_shared(scalar, 32 * 8 * WORDS) + 8 * WORDS * lane
    base = gl.load(base_ptr + lane).to(gl.int32) * 0x01010101
    if WORDS == 1:
        ptx.store_decoded(address, base, gl.load(codes_ptr + lane))
    else:
        ptx.store_decoded_twice(address, base, gl.load(codes_ptr + 2 * lane), gl.load(codes_ptr + 2 * lane + 1))
    ptx.barrier()
    for word in gl.static_range(WORDS):
        pairs = ptx.load_pairs(address + 8 * word, 4)
        for i in gl.static_range(4):
            gl.store(out_ptr + (WORDS * lane + word) * 4 + i, pairs[i])


@gluon.jit
def store_kernel(values_ptr, words_ptr, mask_ptr, out_ptr, scalar, COUNT: gl.constexpr):
    """Store zeros, then a word in every other lane's 8 bytes, then a byte over the last one of some; read them in
    pairs."""
    LANES: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    lane = gl.arange(0, 32, LANES)
    strip = ptx.declare_shared(scalar, 32 * 16)
    for i in gl.static_range(4):
        ptx.store_zero(strip + 128 * i + 4 * lane)
    ptx.barrier()
    ptx.store_word(strip + 16 * lane, gl.load(words_ptr + lane))
    ptx.barrier()
    ptx.store_byte(strip + 16 * lane + 7, gl.load(values_ptr + lane), gl.load(mask_ptr + lane) != 0)
    ptx.barrier()
    for step in gl.static_range(8 // COUNT):
        pairs = ptx.load_pairs(strip + 16 * lane + 2 * COUNT * step, COUNT)
        for i in gl.static_range(COUNT):
            gl.store(out_ptr + 8 * lane + COUNT * step + i, pairs[i])


@gluon.jit
def scalar_kernel(value_ptr, out_ptr):
    value = gl.load(value_ptr)
    gl.store(out_ptr, ptx.first_lane(value))
    gl.store(out_ptr + 1, value + ptx.opaque_zero())
    ptx.prefetch_to_l2(value_ptr + gl.arange(0, 32, gl.BlockedLayout([1], [32], [1], [0])))


@gluon.jit
def early_kernel(value_ptr, out_ptr):
    ptx.wait_for_last_launch()
    gl.store(out_ptr, gl.load(value_ptr) + 1)


@gluon.jit
def row_kernel(start_ptr, row_ptr, out_ptr, NUM_BYTES: gl.constexpr):
    lane = gl.arange(0, 32, gl.BlockedLayout([1], [32], [1], [0]))
    gl.store(out_ptr + lane, ptx.row_address(gl.load(start_ptr), gl.load(row_ptr + lane), NUM_BYTES))


@gluon.jit
def factor_kernel(pairs_ptr, out_ptr, IS_FP16: gl.constexpr):
    index = gl.program_id(0) * 32 + gl.arange(0, 32, gl.BlockedLayout([1], [32], [1], [0]))
    gl.store(out_ptr + index, ptx.scale_factors(gl.load(pairs_ptr + index), IS_FP16))


@gluon.jit
def unpack_kernel(groups_ptr, factors_ptr, out_ptr, WORD: gl.constexpr, ODD: gl.constexpr, IS_FP16: gl.constexpr):
    index = gl.program_id(0) * 32 + gl.arange(0, 32, gl.BlockedLayout([1], [32], [1], [0]))
    values = ptx.unpack_word(gl.load(groups_ptr + index), gl.load(factors_ptr + index), WORD, ODD, IS_FP16)
    for i in gl.static_range(8):
        gl.store(out_ptr + 8 * index + i, values[i])


def integers(low: int, high: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randint(low, high, (size,), generator=torch.Generator().manual_seed(size)).to(dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("words", [1, 2])
def test_codes_become_bytes_above_their_base(words):
    base, codes = integers(0, 241, 32, torch.uint8), integers(-(2**31), 2**31, 32 * words, torch.int32)
    out = torch.zeros(32 * words * 4, dtype=torch.int16, device="cuda")
    decode_kernel[(1,)](base.cuda(), codes.cuda(), out, 3, words, num_warps=1)
    nibbles = codes[:, None] >> (4 * torch.arange(8)) & 15
    expected = (nibbles.view(32, words, 8) + base[:, None, None]).to(torch.uint8)
    assert torch.equal(out.cpu().view(torch.uint8).view(32, words, 8), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("count", [1, 2, 4])
def test_stores_reach_their_bytes_and_no_other(count):
    values, words = integers(0, 2**31, 32, torch.int32), integers(-(2**62), 2**62, 32, torch.int64)
    mask = integers(0, 2, 32, torch.int32)
    out = torch.zeros(32 * 8, dtype=torch.int16, device="cuda")
    store_kernel[(1,)](values.cuda(), words.cuda(), mask.cuda(), out, 3, count, num_warps=1)
    expected = torch.zeros(32, 16, dtype=torch.uint8)
    expected[:, :8] = words.view(torch.uint8).view(32, 8)
    expected[:, 7] = torch.where(mask != 0, (values & 0xFF).to(torch.uint8), expected[:, 7])
    assert torch.equal(out.cpu().view(torch.uint8).view(32, 16), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("value", [0, 1, -1, 2**31 - 1, -(2**31)])
def test_scalars_stay_what_they_are(value):
    out = torch.zeros(2, dtype=torch.int32, device="cuda")
    scalar_kernel[(1,)](torch.full((32,), value, dtype=torch.int32, device="cuda"), out, num_warps=1)
    assert out.tolist() == [value, value]


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] < 9, reason="needs early launches: Hopper"
)
def test_early_launches_see_what_those_before_them_wrote():
    values = torch.zeros(65, dtype=torch.int32, device="cuda")
    for i in range(64):
        early_kernel[(1,)](values[i:], values[i + 1 :], num_warps=1, launch_pdl=True)
    assert values.tolist() == list(range(65))


@pytest.mark.gpu
@pytest.mark.parametrize("num_bytes", [2, 5120, 65536])
def test_rows_are_addressed_in_64_bits(num_bytes):
    start, rows = torch.tensor([1 << 45]), torch.cat([torch.tensor([0, 1, -1, 2**31 - 1]), torch.arange(28) * 99991])
    out = torch.zeros(32, dtype=torch.int64, device="cuda")
    row_kernel[(1,)](start.cuda(), rows.int().cuda(), out, num_bytes, num_warps=1)
    assert torch.equal(out.cpu(), start + rows * num_bytes)


@pytest.mark.gpu
@pytest.mark.parametrize("is_fp16", [False, True])
def test_pairs_of_scale_bytes_become_factors(is_fp16):
    first, second = torch.arange(65536) % 256, torch.arange(65536) // 256
    pairs = (first | second << 8).to(torch.int32).to(torch.int16)
    out = torch.zeros(65536, dtype=torch.int32, device="cuda")
    factor_kernel[(2048,)](pairs.cuda(), out, is_fp16, num_warps=1)
    factors = out.cpu().view(torch.float16 if is_fp16 else torch.bfloat16).view(-1, 2).double()
    expected = torch.stack([E4M3[first], E4M3[second]], -1) * (1 if is_fp16 else 2.0**119)
    assert torch.equal(factors.nan_to_num(7.0), expected.nan_to_num(7.0))


@pytest.mark.gpu
@pytest.mark.parametrize("is_fp16", [False, True])
@pytest.mark.parametrize("word", [0, 1])
@pytest.mark.parametrize("odd", [0, 1])
def test_codes_become_scaled_operands(is_fp16, word, odd):
    """Every code in every place, times scales of every exponent; the other word and the other factor are noise."""
    dtype = torch.float16 if is_fp16 else torch.bfloat16
    codes = integers(0, 16, 4096 * 16, torch.int64).view(4096, 16)
    groups = (codes << (4 * torch.arange(16))).sum(-1)
    scales = E4M3[integers(0, 0x7F, 4096 * 2, torch.int64).view(4096, 2)]
    factors = (scales * (1 if is_fp16 else 2.0**119)).to(dtype)
    out = torch.zeros(4096, 8, dtype=dtype, device="cuda")
    unpack_kernel[(128,)](groups.cuda(), factors.view(torch.int32)[:, 0].cuda(), out, word, odd, is_fp16, num_warps=1)
    order = [p + half for p in range(4) for half in (0, 4)]  # product p takes codes p and p + 4 of the word
    values = E2M1[codes[:, 8 * word :][:, order]] * scales[:, odd, None]
    assert torch.equal(out.cpu().double() * (2.0**14 if is_fp16 else 2.0**7), values)
