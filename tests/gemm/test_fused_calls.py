"""GEMMs on compressed scales in programs: refused arguments, torch.compile, CUDA graphs, memory, poison."""

from __future__ import annotations

import dataclasses
import importlib

import pytest
import torch

from fused_scenarios import bits, one_configuration
from gemm_scenarios import poisoned_memory
from numeric import make_coded_planes

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
E, N, K, TOP_K = 7, 128, 384, 2
FEW, MANY = 6, 240  # tokens; many fill warpgroup tiles on Hopper
UNUSED = [2, E - 1]
OPS = ("matmul_grouped", "matmul_batched", "matmul_2d")


class Layer:
    """Expert weights with both kinds of scales, and every GEMM on them."""

    def __init__(self, bundle, device: str) -> None:
        self.bundle = bundle
        torch.manual_seed(0)
        self.b = torch.randint(0, 256, (E, 2 * N, K // 2), dtype=torch.uint8, device=device)
        stack = make_coded_planes((E, 2 * N, K // 16), 2, "ordinary", 0).to(device)
        self.dense = stack.planes.view(torch.float8_e4m3fn)
        self.compressed = bundle.prepare_nvfp4_csf_scales(stack.fixed, stack.words, **stack.geometry)
        self.b_global = torch.full((E,), 0.01, device=device)
        one = bundle.prepare_nvfp4_csf_scales(stack.fixed[:1], stack.words[:1], **stack.geometry)
        self.first = {id(self.dense): self.dense[0], id(self.compressed): one}

    def run(self, op: str, scales, x, ids, b=None, b_global=None, **options):
        b, b_global = self.b if b is None else b, self.b_global if b_global is None else b_global
        if op == "matmul_2d":
            options |= {"b_global_scale": b_global[0]}
            return self.bundle.matmul_2d(x, b[0], None, self.first[id(scales)], gate=True, **options)
        options |= {"b_global_scale": b_global, "gate": True}
        if op == "matmul_grouped":
            start, gather, scatter = self.bundle.compute_grouped_scheduling(ids, E, TOP_K)
            options |= {"expert_start": start, "gather_idx": gather, "scatter_idx": scatter}
        else:
            token = torch.arange(ids.numel(), device=x.device) // TOP_K
            options |= {"expert_ids": ids.flatten(), "gather_idx": token}
        return getattr(self.bundle, op)(x, b, None, scales, **options)

    def all_results(self, scales, x, ids) -> list[torch.Tensor]:
        """bf16 and requantized results, weight-only and W4A4."""
        results = []
        for op in OPS:
            results.append(self.run(op, scales, x, ids, activation_format="bf16"))
            results += self.run(op, scales, x, ids, quantize_output=True, output_global_scale=0.01)
        return results


@pytest.fixture(params=DEVICES)
def device(request) -> str:
    return request.param


@pytest.fixture
def layer(bundle, device):
    return Layer(bundle, device)


def make_inputs(seed: int, tokens: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(seed)
    ids = torch.randint(-1, E + 1, (tokens, TOP_K), dtype=torch.int32)
    return torch.randn(tokens, K).bfloat16().to(device), ids.to(device)


def assert_same_results(got: list[torch.Tensor], want: list[torch.Tensor]) -> None:
    for one, other in zip(bits(tuple(got)), bits(tuple(want)), strict=True):
        assert torch.equal(one, other)


def test_wrong_scales_are_named(bundle):
    layer = Layer(bundle, "cpu")
    x, ids = make_inputs(0, FEW, "cpu")
    shape = f"({E}, {2 * N}, {K // 16})"
    for wrong in ((E - 1, 2 * N, K // 16), (E, N, K // 16), (E, 2 * N, K // 16 + 2)):
        stack = make_coded_planes(wrong, 1, "ordinary", 0)
        scales = bundle.prepare_nvfp4_csf_scales(stack.fixed, stack.words, **stack.geometry)
        with pytest.raises(ValueError) as error:
            layer.run("matmul_grouped", scales, x, ids)
        assert str(error.value) == f"Bs: expected compressed scales of shape {shape}, got {wrong}"
    with pytest.raises(ValueError, match="Bs: expected device cpu, as A has, got meta"):
        layer.run("matmul_grouped", layer.compressed.to("meta"), x, ids)
    with pytest.raises(ValueError, match="Bs: expected compressed scales of shape"):
        bundle.matmul_2d(x, layer.b[0], None, layer.compressed, gate=True)  # a stack is not one plane


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["bases", "codes", "exceptions", "exception_offsets"])
def test_memory_that_kernels_cannot_read_is_refused(bundle, name):
    layer = Layer(bundle, "cuda")
    inputs = make_inputs(0, FEW, "cuda")
    tensor = getattr(layer.compressed, name)
    shifted = torch.cat([tensor.flatten()[:1], tensor.flatten()])[1:].view(tensor.shape)
    spread = torch.stack([tensor, tensor], -1)[..., 0]
    for wrong, message in ((shifted, "16-byte alignment"), (spread, "a contiguous tensor")):
        scales = dataclasses.replace(layer.compressed, **{name: wrong})
        with pytest.raises(ValueError, match=f"{name}: expected {message}"):
            layer.run("matmul_grouped", scales, *inputs)


@pytest.mark.parametrize(
    ("device", "tokens"), [("cpu", FEW), *(pytest.param("cuda", n, marks=pytest.mark.gpu) for n in (FEW, MANY))]
)
def test_compiles_in_one_graph(bundle, device, tokens):
    """Scales from the closure and scales as arguments; they are flattened into the op's list of tensors and
    restored."""
    layer = Layer(bundle, device)

    def closed(x, ids):
        return layer.all_results(layer.compressed, x, ids)

    def grouped(x, ids, scales):
        return layer.run("matmul_grouped", scales, x, ids)

    compiled = torch.compile(closed, fullgraph=True, backend="aot_eager")
    compiled_grouped = torch.compile(grouped, fullgraph=True, backend="aot_eager")
    for seed in range(2):
        inputs = make_inputs(seed, tokens, device)
        assert_same_results(compiled(*inputs), closed(*inputs))
        assert_same_results([compiled_grouped(*inputs, layer.compressed)], [grouped(*inputs, layer.compressed)])
    if device == "cpu":
        assert_same_results(closed(*inputs), layer.all_results(layer.dense, *inputs))


@pytest.mark.parametrize("quantize_output", [False, True], ids=["plain", "requantized"])
@pytest.mark.parametrize("kind", ["dense", "compressed"])
def test_op_keeps_its_contract(layer, device, kind, quantize_output):
    """Schema, fake result and dispatch of the registered op, scales as one tensor or four."""
    matmul, problem = (importlib.import_module(f"{layer.bundle.__name__}.gemm.{name}") for name in ("api", "problem"))
    x, ids = make_inputs(0, FEW, device)
    token = torch.arange(ids.numel(), device=device) // TOP_K
    scales = layer.compressed if kind == "compressed" else layer.dense.view(torch.uint8)  # opcheck multiplies inputs
    gemm = problem.check_gemm(problem.Arguments(
        x, layer.b, Bs=scales, expert_ids=ids.flatten(), gather_idx=token, gate=True,
        quantize_output=quantize_output, b_global_scale=layer.b_global,
    ))  # fmt: skip
    flat = matmul._to_flat(gemm)
    back = matmul._from_flat(flat)
    assert back.b_scales.shape == gemm.b_scales.shape and back.output_dtype == gemm.output_dtype
    torch.library.opcheck(matmul._nvfp4_gemm, flat)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [FEW, MANY])
def test_graph_replays_with_other_routing_and_no_allocation(bundle, tokens):
    layer = Layer(bundle, "cuda")
    static = make_inputs(0, tokens, "cuda")
    with one_configuration(bundle, K, None) as decoded:
        layer.all_results(layer.compressed, *static)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outputs = layer.all_results(layer.compressed, *static)
        for seed in range(1, 5):
            inputs = make_inputs(seed, tokens, "cuda")
            for holder, value in zip(static, inputs, strict=True):
                holder.copy_(value)
            torch.cuda.synchronize()
            before = torch.cuda.memory_stats()
            graph.replay()
            torch.cuda.synchronize()
            after = torch.cuda.memory_stats()
            for count in ("allocation.all.allocated", "segment.all.allocated", "allocated_bytes.all.allocated"):
                assert after[count] == before[count], count
            assert_same_results(outputs, layer.all_results(layer.dense, *inputs))
    assert not decoded, "scales went through memory"


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [FEW, MANY])
@pytest.mark.parametrize("op", OPS)
def test_nothing_but_results_is_allocated(bundle, tokens, op):
    """At most, a call holds its result, indices, and on Hopper the activations in another order."""
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("needs a Hopper GPU (sm_90): programs of kernels in Triton have memory for the scales of a tile")
    layer = Layer(bundle, "cuda")
    x, ids = make_inputs(0, tokens, "cuda")
    layer.run(op, layer.compressed, x, ids, activation_format="bf16")
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_stats()["requested_bytes.all.current"]
    out = layer.run(op, layer.compressed, x, ids, activation_format="bf16")
    torch.cuda.synchronize()
    peak = torch.cuda.memory_stats()["requested_bytes.all.peak"] - before
    assert out.nbytes <= peak <= out.nbytes + x.nbytes + 64 * ids.numel() + 64 * E


def poison(layer: Layer, x: torch.Tensor) -> tuple:
    """(x, weights, compressed scales, globals) with NaN, and other exceptions, in everything that no routed row
    uses."""
    x, b, b_global = x.clone(), layer.b.clone(), layer.b_global.clone()
    x[-2:] = torch.nan
    b[UNUSED], b_global[UNUSED] = 0xFF, torch.nan
    scales = dataclasses.replace(layer.compressed, **{k: v.clone() for k, v in layer.compressed.state_dict().items()})
    scales.bases[UNUSED], scales.codes[UNUSED] = 240, 0xFF
    tiles = (len(scales.exception_offsets) - 1) // E
    for expert in UNUSED:
        first, end = scales.exception_offsets[[expert * tiles, (expert + 1) * tiles]].tolist()
        positions = torch.arange(end - first, dtype=torch.int32, device=x.device) * 9
        scales.exceptions[first:end] = positions | (0x7F << 24)
    return x, b, scales, b_global


@pytest.mark.parametrize("tokens", [FEW, MANY])
@pytest.mark.parametrize("activation_format", ["bf16", None], ids=["w4a16", "w4a4"])
@pytest.mark.parametrize("op", OPS[:2])
def test_unused_values_change_nothing(layer, device, op, activation_format, tokens):
    x, _ = make_inputs(1, tokens, device)
    ids = torch.tensor([0, 1, 3, 4, 5])[torch.randint(0, 5, (tokens, TOP_K))].int()
    ids[0, 1], ids[-2], ids[-1] = E, E + 3, -1
    of_none = ((ids < 0) | (ids >= E)).flatten().to(device)
    poisoned_x, b, scales, b_global = poison(layer, x)
    for options in ({}, {"quantize_output": True, "output_global_scale": 0.01}):
        options = options | {"activation_format": activation_format}
        with poisoned_memory():
            clean = bits(layer.run(op, layer.compressed, x, ids.to(device), **options))
            poisoned = bits(layer.run(op, scales, poisoned_x, ids.to(device), b, b_global, **options))
        for one, other in zip(clean, poisoned, strict=True):
            assert torch.equal(one, other)
        assert not poisoned[0][of_none].any(), "rows of no expert are 0"


@pytest.mark.gpu
def test_inputs_are_only_read(bundle):
    """Compressed scales stay in memory: no call may change them, or anything around them."""
    layer = Layer(bundle, "cuda")
    state = layer.compressed.state_dict()
    guarded = {
        name: torch.full((tensor.nbytes + 512,), 0xA5, dtype=torch.uint8).cuda() for name, tensor in state.items()
    }
    views = {}
    for name, tensor in state.items():
        views[name] = guarded[name][256 : 256 + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        views[name].copy_(tensor)
    scales = dataclasses.replace(layer.compressed, **views)
    layer.first[id(scales)] = layer.first[id(layer.compressed)]
    before = {name: buffer.clone() for name, buffer in guarded.items()}
    for tokens in (FEW, MANY):
        inputs = make_inputs(tokens, tokens, "cuda")
        assert_same_results(layer.all_results(scales, *inputs), layer.all_results(layer.compressed, *inputs))
    for name, buffer in guarded.items():
        assert torch.equal(buffer, before[name]), name
