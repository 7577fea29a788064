"""The ops under torch.compile fullgraph, and captured in a CUDA graph whose routing changes between replays."""

from __future__ import annotations

import pytest
import torch

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
E, N, K, TOP_K, M = 5, 64, 128, 2, 6


def make_layer(bundle, device: str):
    """An expert layer from the public ops: routed, gated, requantized, reduced; and its first GEMM in other forms."""
    torch.manual_seed(0)
    up, up_scales, up_global = bundle.nvfp4_quantize_two_level(torch.randn(E, 2 * N, K, device=device))
    down, down_scales, down_global = bundle.nvfp4_quantize_two_level(torch.randn(E, K, N, device=device))
    middle_global = torch.full((), 0.01, device=device)

    def layer(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor):
        start, gather, scatter = bundle.compute_grouped_scheduling(ids, E, TOP_K)
        packed, scales = bundle.matmul_grouped(
            x, up, None, up_scales, expert_start=start, gather_idx=gather, gate=True, b_global_scale=up_global,
            quantize_output=True, output_global_scale=middle_global,
        )  # fmt: skip
        rows = bundle.matmul_grouped(
            packed, down, scales, down_scales, expert_start=start, scatter_idx=scatter,
            a_global_scale=middle_global, b_global_scale=down_global,
        )  # fmt: skip
        decode = bundle.matmul_batched(
            x, up, None, up_scales, expert_ids=ids[:, 0], activation_format="bf16", b_global_scale=up_global
        )
        dense = bundle.matmul_2d(x, up[0], None, up_scales[0], gate=True, b_global_scale=up_global[0])
        return bundle.weighted_reduce(rows, ids, weights, E), decode, dense, bundle.nvfp4_act_quant(x)[0]

    return layer


def make_inputs(seed: int, device: str) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(seed)
    ids = torch.randint(-1, E + 1, (M, TOP_K), dtype=torch.int32)
    return tuple(t.to(device) for t in (torch.randn(M, K).bfloat16(), ids, torch.rand(M, TOP_K)))


@pytest.mark.parametrize("device", DEVICES)
def test_compiles_in_one_graph(bundle, device):
    layer = make_layer(bundle, device)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for seed in range(3):
        inputs = make_inputs(seed, device)
        for got, want in zip(compiled(*inputs), layer(*inputs), strict=True):
            assert torch.equal(got, want)


@pytest.mark.gpu
def test_replays_with_other_routing(bundle):
    layer = make_layer(bundle, "cuda")
    static = make_inputs(0, "cuda")
    layer(*static)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = layer(*static)
    for seed in range(1, 5):
        inputs = make_inputs(seed, "cuda")
        for holder, value in zip(static, inputs, strict=True):
            holder.copy_(value)
        allocated = torch.cuda.memory_allocated()
        graph.replay()
        torch.cuda.synchronize()
        assert torch.cuda.memory_allocated() == allocated
        for got, want in zip(outputs, layer(*inputs), strict=True):
            assert torch.equal(got, want)
