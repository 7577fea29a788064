"""One weight on Hopper: tiles whose K a cluster shares, and weights unpacked ahead of cuBLAS."""

from __future__ import annotations

import importlib
import itertools

import pytest
import torch

from conftest import ROOT

CUDA = torch.cuda.is_available()
HOPPER = CUDA and torch.cuda.get_device_capability()[0] == 9
TABLES = [path.stem.replace("_", " ") for path in (ROOT / "torch-ext").rglob("tables/split/*.json")]
SHARED_BYTES = 227 << 10
"""Shared memory that a program may have on Hopper."""
DECLARED_BYTES = 48 << 10
"""The part of it that a kernel may declare by itself."""
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


@pytest.fixture(scope="module")
def split(bundle):
    return importlib.import_module(f"{bundle.__name__}.gemm.split")


@pytest.fixture(scope="module")
def ahead(bundle):
    return importlib.import_module(f"{bundle.__name__}.gemm.ahead")


def shared_bytes(config, plan) -> int:
    """A ring of chunks, with half a byte per weight, two bytes per activation and one per scale; and the strip."""
    scales = 0 if plan.STRIPS else config.block_n * config.block_k // 16
    stage = config.block_n * config.block_k // 2 + config.block_t * config.block_k * 2 + scales
    return config.num_stages * stage + plan.STRIP_BYTES


def check_plans(split, config, weight_rows: int, depth: int) -> None:
    for gate, compressed in itertools.product((False, True), (False, True)):
        plan = split.plan_split(config, weight_rows // (2 if gate else 1), depth, gate, compressed)
        assert plan is not None, (config, depth)
        assert shared_bytes(config, plan) <= SHARED_BYTES
        assert plan.STRIP_BYTES <= DECLARED_BYTES
        assert config.block_n == plan.HALF * plan.HALVES
        assert plan.N_TILES * plan.HALF * plan.HALVES >= weight_rows > (plan.N_TILES - 1) * plan.HALF * plan.HALVES
        chunks = depth // config.block_k // config.programs
        assert chunks * config.programs * config.block_k == depth
        assert plan.COLS % plan.GROUPS == 0 and chunks % (plan.COLS // plan.GROUPS) == 0
        # Sums cross the cluster in the ring's memory: a program gets those of every program for its share of the
        # tokens.
        owners = min(config.programs, config.block_t // 8)
        assert config.programs * config.block_n * config.block_t // owners * 4 <= shared_bytes(config, plan)


def test_measured_tiles_fit_with_scales_in_either_form(split):
    assert TABLES
    for name in TABLES:
        for (weight_rows, depth), entries in split.load_split_table(name).items():
            assert [tokens for tokens, _ in entries] == sorted({tokens for tokens, _ in entries})
            for _, config in entries:
                check_plans(split, config, weight_rows, depth)


def test_any_shape_has_tiles_or_none(split):
    for depth, weight_rows in itertools.product(range(64, 32768, 448), (16, 32, 80, 640, 4096, 50_000)):
        for tokens in (1, 8, 9, 17, 64, 65, 129, 300, 5000):
            config = split.default_split(weight_rows, depth, tokens, 132)
            assert config is not None or depth % 128 != 0 or depth > 12288
            if config is not None and weight_rows % 32 == 0:
                check_plans(split, config, weight_rows, depth)


def test_small_weights_are_shared_and_large_ones_hardly(split):
    assert split.default_split(1024, 4096, 1, 132).programs == 8
    assert split.default_split(28672, 8192, 1, 132).programs <= 2
    assert split.default_split(8192, 8192, 4096, 132).block_t == 256


def test_scratch_is_bounded_and_parts_cover_the_weight(ahead):
    for weight_rows, depth in itertools.product((16, 128, 1000, 4096, 28672, 200_000), (128, 4096, 12288, 53248)):
        rows = ahead.part_rows(weight_rows, depth)
        assert 0 < rows <= weight_rows
        assert rows == weight_rows or rows % 128 == 0
        assert ahead.scratch_size(weight_rows, depth) <= ahead.SCRATCH_BYTES + 128 * depth * 2 + 16
        assert ahead.scratch_size(weight_rows, depth) >= rows * depth * 2 + 8


def make_weight(bundle, rows: int, depth: int):
    """(codes, dense scales with a window of 16 values per row and some exceptions, compressed scales, float64
    values)."""
    packed = torch.randint(0, 256, (rows, depth // 2), dtype=torch.uint8, device="cuda")
    scales = torch.randint(60, 70, (rows, 1), device="cuda") + torch.randint(0, 16, (rows, depth // 16), device="cuda")
    scales[torch.rand(scales.shape, device="cuda") < 0.02] = 17
    scales = scales.to(torch.uint8)
    wire = bundle.compress_nvfp4_csf_scales(scales.unsqueeze(0))
    compressed = bundle.prepare_nvfp4_csf_scales(*wire, num_rows=rows, num_cols=depth // 16)
    codes = torch.stack([packed & 15, packed >> 4], -1).flatten(-2).int()
    values = torch.tensor(E2M1, dtype=torch.float64, device="cuda")[codes]
    values = values * scales.view(torch.float8_e4m3fn).double().repeat_interleave(16, -1)
    return packed, scales.view(torch.float8_e4m3fn), compressed, values


def check_product(out: torch.Tensor, x: torch.Tensor, values: torch.Tensor, factor: float) -> None:
    """Compare up to one rounding of the output, and float32 sums of K exact products, in which each addition rounds by
    2^-24 of a value that is bounded by the sum of magnitudes."""
    exact = x.double() @ values.T * factor
    size = x.double().abs() @ values.abs().T * factor
    allowed = torch.finfo(out.dtype).eps / 2 * exact.abs() + (x.shape[1] + 2) * 2.0**-24 * size
    assert bool(((out.double() - exact).abs() <= allowed).all())


SHAPES = ((1024, 4096), (4096, 4096), (2048, 12288), (272, 1152), (640, 2560))


@pytest.mark.gpu
@pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")
@pytest.mark.parametrize("rows, depth", SHAPES)
def test_products_are_right_and_bits_the_same_in_both_forms_and_every_run(bundle, rows, depth):
    torch.manual_seed(rows + depth)
    packed, dense, compressed, values = make_weight(bundle, rows, depth)
    factor = 0.01 / depth**0.5
    options = {"activation_format": "bf16", "b_global_scale": torch.tensor(factor, device="cuda")}
    for tokens, dtype in itertools.product((1, 7, 16, 33, 64, 100, 200, 515, 1700), (torch.bfloat16, torch.float16)):
        x = torch.randn(tokens, depth, device="cuda").to(dtype)
        outs = [bundle.matmul_2d(x, packed, None, s, **options) for s in (dense, dense, compressed, compressed)]
        check_product(outs[0], x, values, float(options["b_global_scale"]))
        assert all(torch.equal(out, outs[0]) for out in outs)
    assert bundle.matmul_2d_scratch_size(packed, 4096) == rows * depth * 2 + 16
    assert bundle.matmul_2d_scratch_size(packed, 1) == bundle.matmul_2d_scratch_size(packed.cpu(), 4096) == 0


@pytest.mark.gpu
@pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")
def test_gated_and_requantized_results_are_those_of_routed_calls(bundle):
    torch.manual_seed(0)
    packed, dense, compressed, _ = make_weight(bundle, 2048, 4096)
    for tokens, quantize in itertools.product((1, 16, 40, 300), (False, True)):
        x = torch.randn(tokens, 4096, dtype=torch.bfloat16, device="cuda")
        start = torch.tensor([0, tokens], dtype=torch.int32, device="cuda")
        options = {"gate": True, "quantize_output": quantize, "b_global_scale": 1e-4}
        routed = bundle.matmul_grouped(x, packed.unsqueeze(0), None, dense.unsqueeze(0), expert_start=start, **options)
        outs = [bundle.matmul_2d(x, packed, None, s, **options) for s in (dense, compressed)]
        if quantize:
            assert all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(*outs, strict=True))
            codes = (outs[0][0] != routed[0]).float().mean()  # sums in another order sometimes round to another code
            assert codes < 0.02
        else:
            assert torch.equal(*outs)
            error = (outs[0].double() - routed.double()).norm() / routed.double().norm()
            assert error < 2.0**-8


@pytest.mark.gpu
@pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")
def test_unpacked_weights_are_exact_whatever_the_scale(bundle, ahead):
    """All codes times all 256 scale bytes, including NaN, and exceptions of compressed scales."""
    every = torch.arange(256, dtype=torch.uint8, device="cuda")
    packed = torch.tensor([0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE], dtype=torch.uint8, device="cuda")
    packed = packed.repeat(128, 16)
    dense = every.reshape(16, 16).repeat(8, 1)
    values = torch.tensor(E2M1, device="cuda").repeat(128, 16)
    wanted = (values * dense.view(torch.float8_e4m3fn).float().repeat_interleave(16, -1)).bfloat16()
    eye = torch.eye(256, dtype=torch.bfloat16, device="cuda").repeat(8, 1)
    assert ahead.unpacks_ahead(eye.device, 128, 256, len(eye))
    wire = bundle.compress_nvfp4_csf_scales(dense.unsqueeze(0))
    compressed = bundle.prepare_nvfp4_csf_scales(*wire, num_rows=128, num_cols=16)
    finite = wanted.isfinite().all(1)
    for scales in (dense.view(torch.float8_e4m3fn), compressed):
        out = bundle.matmul_2d(eye, packed, None, scales, activation_format="bf16")[:256].T
        assert torch.equal(out[finite], wanted[finite])
        assert bool(out[~finite].isnan().all())


@pytest.mark.gpu
@pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")
@pytest.mark.parametrize("tokens", (1, 64, 600, 2000))
def test_graphs_allocate_nothing_and_give_the_same_bits(bundle, tokens):
    torch.manual_seed(1)
    packed, dense, compressed, _ = make_weight(bundle, 1024, 4096)
    x = torch.randn(tokens, 4096, dtype=torch.bfloat16, device="cuda")
    for scales in (dense, compressed):
        want = bundle.matmul_2d(x, packed, None, scales, activation_format="bf16")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = bundle.matmul_2d(x, packed, None, scales, activation_format="bf16")
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        out.zero_()
        graph.replay()
        assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
        assert torch.equal(out, want)
