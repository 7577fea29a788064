"""Run every kernel once on small cases, on a GPU, and check what it wrote. It is meant for compute-sanitizer.

`PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck python scripts/exercise_kernels.py`, and the same
with `--tool racecheck`. Without torch's cache of memory, tensors end where their allocations end.
"""

from __future__ import annotations

import importlib
import itertools
from types import ModuleType

import torch

from finegrained_kernels import load

E, TOP_K = 3, 2
GEMMS = [  # op, output columns, K, tokens, options
    ("grouped", 80, 192, 9, {"activation_format": "bf16", "gate": True}),
    ("grouped", 80, 192, 9, {"gate": True, "swiglu_limit": 0.5, "swizzled": True}),
    ("batched", 272, 64, 5, {"activation_format": "bf16", "swizzled": True}),
    ("batched", 48, 320, 5, {"a_global_scale": 0.01}),
    ("2d", 144, 576, 17, {"activation_format": "bf16"}),
    ("2d", 80, 160, 3, {"activation_format": "bf16", "gate": True}),  # K of the portable kernel
    ("grouped", 80, 320, 150, {"activation_format": "bf16", "gate": True}),  # rows of warpgroup tiles
    ("grouped", 272, 128, 150, {}),
    ("grouped", 80, 384, 9, {"activation_format": "bf16", "gate": True, "compressed": True}),
    ("batched", 272, 128, 5, {"compressed": True}),
    ("2d", 48, 640, 17, {"activation_format": "bf16", "compressed": True}),
    ("grouped", 48, 4096, 5, {"activation_format": "bf16", "gate": True, "compressed": True}),  # decoded in slices
    ("grouped", 80, 384, 150, {"activation_format": "bf16", "gate": True, "compressed": True}),  # warpgroup tiles
    ("2d", 48, 192, 3, {"compressed": True}),  # decoded into memory
    ("grouped", 80, 384, 9, {"activation_format": "bf16", "gate": True}),  # scales of short rows, a tile at a time
]


def exercise_codec(bundle: ModuleType, device: str) -> None:
    generator = torch.Generator().manual_seed(0)
    # In the last one so many are active that routed launches, without being told, use large tiles.
    for shape in ((3, 48, 10), (2, 144, 12), (2, 128, 160), (3, 64, 40), (45, 640, 160)):
        noise = torch.randint(0, 256, shape, generator=generator)
        narrow = 90 + noise % 16
        planes = torch.where(torch.rand(shape, generator=generator) < 0.05, noise, narrow).to(torch.uint8).to(device)
        fixed, exceptions = bundle.compress_nvfp4_csf_scales(planes)
        scales = bundle.prepare_nvfp4_csf_scales(fixed, exceptions, num_rows=shape[1], num_cols=shape[2])
        active = torch.arange(shape[0], device=device) != 1
        starts = torch.cat([active.new_zeros(1, dtype=torch.int32), active.cumsum(0, dtype=torch.int32)])
        routings = ({}, {"expert_start": starts}, {"expert_start": starts, "max_active": shape[0]})
        for swizzled, offset, routing in itertools.product((False, True), (0, 3, 8, 13), routings):
            # The workspace ends where its allocation ends, so that one byte too many is noticed.
            size = bundle.csf_workspace_size(scales, swizzled=swizzled)
            workspace = torch.zeros(offset + size, dtype=torch.uint8, device=device)[offset:]
            decoded = bundle.decompress_nvfp4_csf_scales(scales, workspace=workspace, swizzled=swizzled, **routing)
            expected = bundle.swizzle_mx_scales(planes) if swizzled else planes.clone()
            if routing:
                expected[1] = 0
            assert torch.equal(decoded.view(torch.uint8), expected), (shape, swizzled, offset, *routing)


def make_gemm(bundle: ModuleType, op: str, cols: int, depth: int, tokens: int, options: dict):
    """(positional arguments, keywords) of a call, on the CPU; one id belongs to no expert."""
    generator = torch.Generator().manual_seed(depth)
    options = {**options}
    rows = cols * 2 if options.get("gate") else cols
    weight = torch.randn(E, rows, depth, generator=generator) / depth**0.5
    b, b_scales, b_global = bundle.nvfp4_quantize_two_level(weight)
    if op == "2d":
        b, b_scales = b[:1], b_scales[:1]
    if options.pop("swizzled", False):
        b_scales = bundle.swizzle_mx_scales(b_scales)
    if options.pop("compressed", False):
        planes = b_scales.view(torch.uint8)
        planes[torch.rand(planes.shape, generator=generator) < 0.05] = 0x20  # exceptions, the last byte among them
        planes[:, -1, -1] = 0x20
        wire = bundle.compress_nvfp4_csf_scales(planes)
        b_scales = bundle.prepare_nvfp4_csf_scales(*wire, num_rows=rows, num_cols=depth // 16)
    x = torch.randn(tokens, depth, generator=generator).bfloat16()
    if op == "2d":
        b_scales = b_scales[0] if isinstance(b_scales, torch.Tensor) else b_scales
        return (x, b[0], None, b_scales), options | {"b_global_scale": b_global[0]}
    ids = torch.randint(0, E, (tokens, TOP_K), generator=generator, dtype=torch.int32)
    ids[-1, 0] = E
    start, gather, scatter = bundle.compute_grouped_scheduling(ids, E, TOP_K)
    grouped = {"expert_start": start, "gather_idx": gather, "scatter_idx": scatter}
    batched = {"expert_ids": ids.flatten(), "gather_idx": torch.arange(tokens * TOP_K) // TOP_K}
    return (x, b, None, b_scales), options | {"b_global_scale": b_global} | (grouped if op == "grouped" else batched)


def exercise_gemm(bundle: ModuleType, device: str, op: str, cols: int, depth: int, tokens: int, options: dict) -> None:
    """Results on the device equal those of torch; with a gate, requantized results equal those quantized afterwards."""
    args, keywords = make_gemm(bundle, op, cols, depth, tokens, options)
    matmul = getattr(bundle, f"matmul_{op}")
    expected = matmul(*args, **keywords)
    args = [value if value is None else value.to(device) for value in args]
    keywords = {key: value.to(device) if isinstance(value, torch.Tensor) else value for key, value in keywords.items()}
    out = matmul(*args, **keywords)
    error = (out.cpu().double() - expected.double()).norm() / expected.double().norm()
    assert error < 4e-3, (op, cols, depth, tokens, options, error)
    if not options.get("gate"):
        return
    packed, scales = matmul(*args, **keywords, quantize_output=True, output_global_scale=0.01)
    again, again_scales, _ = bundle.nvfp4_act_quant(out, 0.01)
    assert torch.equal(packed, again), (op, cols, depth, tokens, options)
    assert torch.equal(scales.view(torch.uint8), again_scales.view(torch.uint8)), (op, cols, depth, tokens, options)


def exercise_gemms(bundle: ModuleType, device: str) -> None:
    for case in GEMMS:
        exercise_gemm(bundle, device, *case)
    names = ("config", "dispatch", "smem_plan")
    configs, launch, plan = (importlib.import_module(f"{bundle.__name__}.gemm.{name}") for name in names)
    if torch.device(device).type == "cuda" and torch.cuda.get_device_capability()[0] == 9:
        chosen = launch.choose_config
        for tile in tiles_of_each_kind(configs):  # real shapes use them if there are enough rows
            options = {"activation_format": "bf16", "gate": True}
            launch.choose_config = lambda *_, tile=tile: tile
            exercise_gemm(bundle, device, "grouped", 272, 320, 150, options)
            if tile.warpgroup:  # whole scales, and results in parts
                exercise_gemm(bundle, device, "grouped", 144, 1152, 150, options | {"gate": False})
            launch.choose_config = lambda *_, tile=tile: plan.with_strip(tile, 384)
            exercise_gemm(bundle, device, "grouped", 272, 384, 150, options)
            exercise_gemm(bundle, device, "grouped", 272, 384, 150, options | {"compressed": True})
        launch.choose_config = chosen


def tiles_of_each_kind(configs: ModuleType) -> list:
    """The largest shipped tile for each kernel, number of warps, and number of chunks requested at once."""
    table = configs.load_table("NVIDIA H200")
    shipped = [config for entries in table.values() for _, config in entries]
    shipped.sort(key=lambda tile: tile.block_n * tile.block_t)
    return list({(tile.warpgroup, tile.num_warps, tile.chunks_at_once): tile for tile in shipped}.values())


def exercise_rows(bundle: ModuleType, device: str) -> None:
    """Check that activations are quantized to the same bytes as on the CPU, and weighted sums."""
    generator = torch.Generator().manual_seed(1)
    for depth, scale in itertools.product((16, 192, 2560), (None, 0.01)):
        x = torch.randn(5, depth, generator=generator).bfloat16()
        for got, want in zip(
            bundle.nvfp4_act_quant(x.to(device), scale), bundle.nvfp4_act_quant(x, scale), strict=True
        ):
            got, want = (tensor.cpu().reshape(-1).view(torch.uint8) for tensor in (got, want))
            assert torch.equal(got, want), (depth, scale)
    rows, weights = torch.randn(10, 1040, generator=generator).bfloat16(), torch.rand(5, 2, generator=generator)
    ids = torch.randint(-1, E + 1, (5, 2), generator=generator)
    want = bundle.weighted_reduce(rows, ids, weights, E)
    got = bundle.weighted_reduce(rows.to(device), ids.to(device), weights.to(device), E)
    torch.testing.assert_close(got.cpu(), want, rtol=2**-7, atol=1e-6)


def main(device: str = "cuda") -> None:
    bundle = load()
    exercise_codec(bundle, device)
    exercise_rows(bundle, device)
    exercise_gemms(bundle, device)
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize()
    print("every kernel ran, outputs right")


if __name__ == "__main__":
    main()
