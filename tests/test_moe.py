"""The MoE forward against float64, and compressed scales that give the bits of dense ones, however they are decoded."""

from __future__ import annotations

import dataclasses
from types import ModuleType

import pytest
import torch

from numeric import DEVICES

every_device = pytest.mark.parametrize("device", DEVICES)
NUM_EXPERTS, HIDDEN, INTERMEDIATE = 7, 256, 192
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.float64)


def dequantize(packed: torch.Tensor, scales: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """float64 `[E, N, K]` from the definition of NVFP4; `factor` broadcasts over `[E, N]`."""
    codes = torch.stack([packed & 15, packed >> 4], dim=-1).flatten(-2)
    return E2M1[codes.long()] * scales.double().repeat_interleave(16, -1) * factor.double()[..., None]


def make_experts(bundle: ModuleType, device: str, seed: int = 0, **replaced):
    """Random experts whose gate and up have global scales of their own, and their float64 weights, on the CPU."""
    generator = torch.Generator().manual_seed(seed)

    def quantized(rows: int, cols: int):
        weight = torch.randn(NUM_EXPERTS, rows, cols, generator=generator) * 0.05
        weight *= torch.rand(NUM_EXPERTS, rows, 1, generator=generator) + 0.5
        return bundle.nvfp4_quantize_two_level(weight)

    gate, gate_scales, gate_global = quantized(INTERMEDIATE, HIDDEN)
    up, up_scales, up_global = quantized(INTERMEDIATE, HIDDEN)
    down, down_scales, down_global = quantized(HIDDEN, INTERMEDIATE)
    up_global = up_global * 1.75
    scales = torch.cat([gate_scales.view(torch.uint8), up_scales.view(torch.uint8)], 1).view(torch.float8_e4m3fn)
    fields = {
        "gate_up": torch.cat([gate, up], 1),
        "down": down,
        "gate_up_scales": scales,
        "down_scales": down_scales,
        "gate_up_global": torch.stack([gate_global.view(-1), up_global.view(-1)], 1),
        "down_global": down_global.view(-1),
    }
    weights = [
        dequantize(gate, gate_scales, gate_global.view(-1, 1)),
        dequantize(up, up_scales, up_global.view(-1, 1)),
        dequantize(down, down_scales, down_global.view(-1, 1)),
    ]
    return bundle.NVFP4Experts(**{name: tensor.to(device) for name, tensor in fields.items()} | replaced), weights


def compressed(bundle: ModuleType, experts, **replaced):
    """The same experts with both scales compressed and a scratch, poisoned with NaN."""
    fields = {}
    for name in ("gate_up_scales", "down_scales"):
        scales = getattr(experts, name)
        fields[name] = bundle.prepare_nvfp4_csf_scales(
            *bundle.compress_nvfp4_csf_scales(scales), num_rows=scales.shape[1], num_cols=scales.shape[2]
        )
    size = experts.gate_up_scales.numel() + experts.down_scales.numel()
    scratch = torch.full((size,), 0x7F, dtype=torch.uint8, device=experts.gate_up.device)
    return dataclasses.replace(experts, **fields | {"scratch": scratch} | replaced)


def make_call(device: str, num_tokens: int, top_k: int, seed: int = 0, low: int = 0, high: int = NUM_EXPERTS):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(num_tokens, HIDDEN, generator=generator).to(torch.bfloat16)
    index = torch.randint(low, high, (num_tokens, top_k), generator=generator)
    weights = torch.rand(num_tokens, top_k, generator=generator)
    return hidden.to(device), index.to(device), weights.to(device)


def reference(weights: list[torch.Tensor], hidden, index, top_k_weights) -> tuple[torch.Tensor, torch.Tensor]:
    """float64 output, and the sum of magnitudes that bounds its rounding."""
    gate, up, down = weights
    hidden, index, top_k_weights = hidden.cpu().double(), index.cpu(), top_k_weights.cpu().double()
    out = torch.zeros(hidden.shape, dtype=torch.float64)
    magnitude = torch.zeros_like(out)
    for token, choice in ((t, c) for t in range(index.shape[0]) for c in range(index.shape[1])):
        expert = int(index[token, choice])
        if not 0 <= expert < NUM_EXPERTS:
            continue
        inner = torch.nn.functional.silu(gate[expert] @ hidden[token]) * (up[expert] @ hidden[token])
        out[token] += top_k_weights[token, choice] * (down[expert] @ inner)
        magnitude[token] += top_k_weights[token, choice] * (down[expert].abs() @ inner.abs())
    return out, magnitude


@every_device
@pytest.mark.parametrize(("num_tokens", "top_k"), [(1, 1), (1, 10), (5, 3), (64, 2)])
@pytest.mark.parametrize("ids", [(0, NUM_EXPERTS), (-2, NUM_EXPERTS + 3), (4, 5)], ids=["all", "sentinels", "one"])
def test_weight_only_forward(bundle, device, num_tokens, top_k, ids):
    experts, weights = make_experts(bundle, device)
    call = make_call(device, num_tokens, top_k, low=ids[0], high=ids[1])
    out = bundle.moe_forward(experts, *call, activation_format="bf16")
    expected, magnitude = reference(weights, *call)
    assert out.dtype == torch.bfloat16
    # Rounded to bf16 (2^-9 each): the inner row, each choice's row, the sum; the float32 sums are far below that.
    error = (out.cpu().double() - expected).abs()
    assert bool((error <= 4 * 2**-9 * magnitude + 1e-9).all()), float((error / (magnitude + 1e-9)).max())


@every_device
@pytest.mark.parametrize("calibrated", [False, True])
def test_quantized_activations(bundle, device, calibrated):
    """W4A4 is the same layer up to four-bit activations: close in the whole, and not W4A16."""
    inputs = torch.full((NUM_EXPERTS,), 2.0**-8, device=device)  # reaches 448 * 6 / 256 = 10.5
    extra = {"gate_up_input_global": inputs, "down_input_global": 8 * inputs} if calibrated else {}
    experts, weights = make_experts(bundle, device, **extra)
    call = make_call(device, 33, 4)
    out = bundle.moe_forward(experts, *call).cpu().double()
    expected, _ = reference(weights, *call)
    assert 0.01 < float((out - expected).norm() / expected.norm()) < 0.2


@every_device
@pytest.mark.parametrize("activation_format", [None, "bf16"])
@pytest.mark.parametrize("num_tokens", [0, 1, 40])
def test_compressed_scales_give_the_bits_of_dense_ones(bundle, device, activation_format, num_tokens):
    experts, _ = make_experts(bundle, device)
    call = make_call(device, num_tokens, 2, low=-1, high=NUM_EXPERTS + 1)
    expected = bundle.moe_forward(experts, *call, activation_format=activation_format)
    assert bundle.expand_scales(experts) is False
    staged = compressed(bundle, experts)
    half = compressed(bundle, experts, down_scales=experts.down_scales)
    for given in (staged, half, dataclasses.replace(staged, scratch=None)):
        assert torch.equal(bundle.moe_forward(given, *call, activation_format=activation_format), expected)
    staged.scratch.fill_(0x7F)
    assert bundle.expand_scales(staged) is True
    for _ in range(2):
        out = bundle.moe_forward(staged, *call, activation_format=activation_format, scales_expanded=True)
        assert torch.equal(out, expected)


@every_device
def test_the_flag_really_skips_decoding(bundle, device):
    experts, _ = make_experts(bundle, device)
    call = make_call(device, 9, 2)
    expected = bundle.moe_forward(experts, *call, activation_format="bf16")
    staged = compressed(bundle, experts)
    staged.scratch.zero_()
    out = bundle.moe_forward(staged, *call, activation_format="bf16", scales_expanded=True)
    assert not torch.equal(out, expected)
    assert not out.any()
    assert torch.equal(bundle.moe_forward(experts, *call, activation_format="bf16", scales_expanded=True), expected)


@every_device
def test_only_routed_experts_are_decoded(bundle, device):
    experts, _ = make_experts(bundle, device)
    staged = compressed(bundle, experts)
    bundle.moe_forward(staged, *make_call(device, 9, 2, low=2, high=4), activation_format="bf16")
    planes = staged.scratch[: experts.gate_up_scales.numel()].view(NUM_EXPERTS, -1)
    touched = (planes != 0x7F).any(1).tolist()
    assert touched == [False, False, True, True, False, False, False]


@every_device
def test_prefetched_layers_sharing_a_scratch(bundle, device):
    """A random order of prefetched and plain calls over layers that share a scratch: always the dense layers' bits."""
    dense = [make_experts(bundle, device, seed=i)[0] for i in range(3)]
    scratch = torch.full((compressed(bundle, dense[0]).scratch_size,), 0x7F, dtype=torch.uint8, device=device)
    layers = [compressed(bundle, experts, scratch=scratch) for experts in dense]
    call = make_call(device, 17, 2)
    expected = [bundle.moe_forward(experts, *call, activation_format="bf16") for experts in dense]
    prefetcher = bundle.ScalePrefetcher(layers)
    steps = 1000 if device == "cuda" else 30
    order = torch.randint(0, 6, (steps,), generator=torch.Generator().manual_seed(3)).tolist()
    for step, (i_layer, plain) in enumerate((choice % 3, choice > 3) for choice in order):
        if not plain:
            assert prefetcher.prefetch(i_layer, num_tokens=17) is True
            if step % 7 == 0 and device == "cuda":
                torch.cuda._sleep(200_000)  # attention that takes its time
        out = prefetcher.forward(i_layer, *call, activation_format="bf16")
        assert torch.equal(out, expected[i_layer]), (step, i_layer, plain)


def test_what_the_prefetcher_refuses(bundle):
    dense = make_experts(bundle, "cpu")[0]
    layers = [compressed(bundle, dense)] * 2
    call = make_call("cpu", 3, 2)
    prefetcher = bundle.ScalePrefetcher(layers)
    assert prefetcher.prefetch(0, num_tokens=3)
    with pytest.raises(RuntimeError, match="layer 0 is prefetched and not used yet"):
        prefetcher.prefetch(1, num_tokens=3)
    with pytest.raises(RuntimeError, match="layer 0 is prefetched, got a call of layer 1"):
        prefetcher.forward(1, *call)
    prefetcher.discard()
    prefetcher.forward(1, *call)
    with pytest.raises(ValueError, match="must share one scratch"):
        bundle.ScalePrefetcher([compressed(bundle, dense), compressed(bundle, dense)])
    assert bundle.ScalePrefetcher([dense]).prefetch(0, num_tokens=3) is False


def test_whether_expanded_scales_are_used(bundle):
    dense = make_experts(bundle, "cpu")[0]
    staged = compressed(bundle, dense)
    assert bundle.uses_expanded_scales(staged, 8) is True
    assert bundle.uses_expanded_scales(staged, 0) is False
    assert bundle.uses_expanded_scales(dense, 8) is False


def test_experts_that_do_not_fit_together(bundle):
    dense = make_experts(bundle, "cpu")[0]
    staged = compressed(bundle, dense)
    for experts, change, message in (
        (dense, {"down": dense.down[:-1]}, "down must have shape"),
        (dense, {"gate_up_scales": dense.gate_up_scales[:, :-16]}, "gate_up_scales must have shape"),
        (staged, {"scratch": staged.scratch[1:]}, f"hold {staged.scratch_size} bytes"),
        (staged, {"scratch": staged.scratch.view(torch.int8)}, "scratch must be torch.uint8"),
    ):
        with pytest.raises(ValueError, match=message):
            dataclasses.replace(experts, **change)
    with pytest.raises(ValueError, match="scratch must be a uint8 tensor"):
        bundle.expand_scales(dataclasses.replace(staged, scratch=None))


@pytest.mark.gpu
def test_the_forward_in_a_graph_with_its_side_stream(bundle):
    """Captured with the prefetch in it, replayed with other routing, allocating nothing."""
    dense = make_experts(bundle, "cuda")[0]
    staged = compressed(bundle, dense)
    prefetcher = bundle.ScalePrefetcher([staged])
    call = make_call("cuda", 17, 2)

    def run() -> torch.Tensor:
        prefetcher.prefetch(0, num_tokens=17)
        return prefetcher.forward(0, *call, activation_format="bf16")

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    for seed in range(20):
        other = make_call("cuda", 17, 2, seed=seed)
        for given, new in zip(call, other, strict=True):
            given.copy_(new)
        staged.scratch.fill_(0x7F)
        torch.cuda.synchronize()
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        graph.replay()
        torch.cuda.synchronize()
        assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
        assert torch.equal(out, bundle.moe_forward(dense, *other, activation_format="bf16"))


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=pytest.mark.gpu)])
def test_compiles_in_one_graph(bundle, device):
    staged = compressed(bundle, make_experts(bundle, device)[0])
    compiled = torch.compile(
        lambda *call: bundle.moe_forward(staged, *call, activation_format="bf16"), fullgraph=True, backend="aot_eager"
    )
    for seed in range(3):
        call = make_call(device, 17, 2, seed=seed)
        assert torch.equal(compiled(*call), bundle.moe_forward(staged, *call, activation_format="bf16"))
