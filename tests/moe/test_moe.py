"""`moe_forward` compared with float64, and compressed scales that give the same bits as dense ones, however they are
read."""

from __future__ import annotations

import dataclasses
import importlib

import pytest
import torch

from experts import NUM_EXPERTS, Shape, compressed, make_call, make_experts, make_scratch, reference
from numeric import DEVICES

every_device = pytest.mark.parametrize("device", DEVICES)
every_format = pytest.mark.parametrize("activation_format", [None, "bf16"], ids=["w4a4", "w4a16"])
IDS = {"all": (0, NUM_EXPERTS), "sentinels": (-2, NUM_EXPERTS + 3), "one": (4, 5)}
CALLS = [(1, 1), (5, 3), (64, 2), *((6, top_k) for top_k in range(1, 11)), (4096, 2)]
REAL = {"qwen": (Shape(512, 2560, 640), 10), "glm": (Shape(288, 4096, 2048), 8)}


def check_weight_only(bundle, experts, call) -> None:
    out = bundle.moe_forward(experts, *call, activation_format="bf16")
    expected, magnitude = reference(experts, *call)
    assert out.dtype == call[0].dtype
    # Rounded to bf16 (2^-9 each): the inner row, each choice's row, the sum; the float32 sums are far below that.
    error = (out.double() - expected).abs()
    assert bool((error <= 4 * 2**-9 * magnitude + 1e-9).all()), float((error / (magnitude + 1e-9)).max())


def check_quantized(bundle, experts, call) -> None:
    """Compare with float64 with the same roundings to four bits, a few of which go the other way because of float32
    sums."""
    out = bundle.moe_forward(experts, *call).double()
    expected, magnitude = reference(experts, *call, quantized=True)
    assert float((out - expected).norm()) <= 0.01 * float(expected.norm())
    unrouted = magnitude.sum(1) == 0
    assert not out[unrouted].any()


def calibrated(device: str, per_expert: bool) -> dict[str, torch.Tensor]:
    """Input globals whose range is 448 * 6 / 256 = 10.5 for the hidden states, and eight times that inside."""
    factor = torch.full((NUM_EXPERTS,) if per_expert else (), 2.0**-8, device=device)
    if per_expert:
        factor *= torch.linspace(1, 2, NUM_EXPERTS, device=device)
    return {"gate_up_input_global": factor, "down_input_global": 8 * factor}


@every_device
@pytest.mark.parametrize(("num_tokens", "top_k"), CALLS)
@pytest.mark.parametrize("ids", IDS)
def test_weight_only_forward(bundle, device, num_tokens, top_k, ids):
    check_weight_only(bundle, make_experts(bundle, device), make_call(device, num_tokens, top_k, 0, *IDS[ids]))


@every_device
@pytest.mark.parametrize(("num_tokens", "top_k"), [(1, 1), (1, 10), (33, 4), (150, 3)])
@pytest.mark.parametrize("ids", IDS)
@pytest.mark.parametrize("inputs", ["measured", "one global", "one an expert"])
def test_quantized_activations(bundle, device, num_tokens, top_k, ids, inputs):
    extra = {} if inputs == "measured" else calibrated(device, inputs == "one an expert")
    experts = make_experts(bundle, device, **extra)
    call = make_call(device, num_tokens, top_k, 0, *IDS[ids])
    check_quantized(bundle, experts, call)
    exact, _ = reference(experts, *call)
    out = bundle.moe_forward(experts, *call).double()
    if exact.any():
        assert 0.01 < float((out - exact).norm() / exact.norm()) < 0.3, "activations must have been quantized"


@every_device
def test_half_precision_and_one_global_for_both_halves(bundle, device):
    experts = make_experts(bundle, device)
    check_weight_only(bundle, experts, make_call(device, 9, 2, dtype=torch.float16))
    call = make_call(device, 9, 2)
    shared = dataclasses.replace(experts, gate_up_global=experts.gate_up_global[:, 0].contiguous())
    doubled = dataclasses.replace(experts, gate_up_global=experts.gate_up_global[:, :1].expand(-1, 2))
    out = bundle.moe_forward(shared, *call, activation_format="bf16")
    assert torch.equal(out, bundle.moe_forward(doubled, *call, activation_format="bf16"))
    assert not torch.equal(out, bundle.moe_forward(experts, *call, activation_format="bf16"))


@every_device
@every_format
def test_no_tokens(bundle, device, activation_format):
    experts = make_experts(bundle, device)
    for given in (experts, compressed(bundle, experts)):
        out = bundle.moe_forward(given, *make_call(device, 0, 2), activation_format=activation_format)
        assert out.shape == (0, experts.hidden_size) and out.dtype == torch.bfloat16


@pytest.mark.gpu
@pytest.mark.parametrize("model", REAL)
def test_real_shapes(bundle, model):
    shape, top_k = REAL[model]
    experts = make_experts(bundle, "cuda", shape=shape)
    staged = compressed(bundle, experts)
    for num_tokens in (1, 4, 64, 4096):
        call = make_call("cuda", num_tokens, top_k, num_tokens, -1, shape.num_experts + 1, hidden=shape.hidden)
        check_weight_only(bundle, experts, call)
        check_quantized(bundle, experts, call)
        for activation_format in (None, "bf16"):
            expected = bundle.moe_forward(experts, *call, activation_format=activation_format)
            for strategy in ("staged", "fused"):
                out = bundle.moe_forward(staged, *call, activation_format=activation_format, strategy=strategy)
                assert torch.equal(out, expected), (num_tokens, activation_format, strategy)


@every_device
@every_format
@pytest.mark.parametrize("num_tokens", [0, 1, 8, 9, 40])
def test_compressed_scales_give_the_bits_of_dense_ones(bundle, device, activation_format, num_tokens):
    """Batched and grouped calls, both strategies and the default, one or two compressed stacks, with and without a
    scratch."""
    options = {"activation_format": activation_format}
    experts = make_experts(bundle, device)
    staged = compressed(bundle, experts)
    half = compressed(bundle, experts, down_scales=experts.down_scales)
    for seed in range(3 if device == "cuda" else 1):
        call = make_call(device, num_tokens, 2, seed, -1, NUM_EXPERTS + 1)
        expected = bundle.moe_forward(experts, *call, **options)
        for strategy in (None, "staged", "fused"):
            assert torch.equal(bundle.moe_forward(experts, *call, **options, strategy=strategy), expected)
            for given in (staged, half, dataclasses.replace(staged, scratch=None)):
                staged.scratch.fill_(0x7F)
                out = bundle.moe_forward(given, *call, **options, strategy=strategy)
                assert torch.equal(out, expected), (seed, strategy)
        staged.scratch.fill_(0x7F)
        assert bundle.expand_scales(staged) is True
        for _ in range(2):
            out = bundle.moe_forward(staged, *call, **options, strategy="staged", scales_expanded=True)
            assert torch.equal(out, expected)


@every_device
@pytest.mark.parametrize("num_tokens", [3, 40])
def test_the_flag_really_skips_decoding(bundle, device, num_tokens):
    experts = make_experts(bundle, device)
    call = make_call(device, num_tokens, 2)
    options = {"activation_format": "bf16", "scales_expanded": True}
    expected = bundle.moe_forward(experts, *call, activation_format="bf16")
    staged = compressed(bundle, experts)
    staged.scratch.zero_()
    assert not bundle.moe_forward(staged, *call, **options, strategy="staged").any()
    assert torch.equal(bundle.moe_forward(experts, *call, **options), expected)
    assert bundle.expand_scales(experts) is False
    bundle.moe_forward(staged, *call, activation_format="bf16", strategy="staged")
    assert staged.scratch.any(), "a call without the flag expands its own experts"
    if device == "cuda":
        staged.scratch.fill_(0x7F)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            assert bundle.expand_scales(staged) is True
        torch.cuda.current_stream().wait_stream(side)
        assert torch.equal(bundle.moe_forward(staged, *call, **options, strategy="staged"), expected)


@every_device
@pytest.mark.parametrize("num_tokens", [3, 40])
def test_fused_calls_never_touch_the_scratch(bundle, device, num_tokens):
    experts = make_experts(bundle, device)
    call = make_call(device, num_tokens, 2)
    expected = bundle.moe_forward(experts, *call, activation_format="bf16")
    staged = compressed(bundle, experts)
    for given in (staged, dataclasses.replace(staged, scratch=None)):
        for flag in (False, True):
            out = bundle.moe_forward(given, *call, activation_format="bf16", strategy="fused", scales_expanded=flag)
            assert torch.equal(out, expected)
    assert bool((staged.scratch == 0x7F).all())


@every_device
@pytest.mark.parametrize("num_tokens", [4, 30])
def test_only_routed_experts_are_decoded(bundle, device, num_tokens):
    experts = make_experts(bundle, device)
    staged = compressed(bundle, experts)
    call = make_call(device, num_tokens, 2, low=2, high=4)
    bundle.moe_forward(staged, *call, activation_format="bf16", strategy="staged")
    planes = staged.scratch[: experts.gate_up_scales.numel()].view(NUM_EXPERTS, -1)
    touched = (planes != 0x7F).any(1).tolist()
    assert touched == [False, False, True, True, False, False, False]


def test_whether_expanded_scales_are_used(bundle):
    dense = make_experts(bundle, "cpu")
    staged = compressed(bundle, dense)
    assert bundle.uses_expanded_scales(staged, 8, "staged") is True
    assert bundle.uses_expanded_scales(staged, 8, strategy="fused") is False
    assert bundle.uses_expanded_scales(staged, 0, "staged") is False
    assert bundle.uses_expanded_scales(dataclasses.replace(staged, scratch=None), 8, "staged") is False
    assert bundle.uses_expanded_scales(dense, 8) is False
    assert bundle.uses_expanded_scales(dense, 8, "staged") is False
    moe = importlib.import_module(f"{bundle.__name__}.moe.layer")
    for num_tokens in (1, 64, 100_000):  # on a CPU, whose GEMMs read compressed scales
        assert bundle.uses_expanded_scales(staged, num_tokens) is (moe.choose_strategy(num_tokens, True) == "staged")


def test_the_rules_change_once(bundle):
    """Few tokens are fused and many staged; few rows are batched and many grouped; calls follow the rule."""
    moe = importlib.import_module(f"{bundle.__name__}.moe.layer")
    most = moe.FUSED_MAX_TOKENS
    assert [moe.choose_strategy(n, True) for n in (1, most, most + 1, 10**6)] == ["fused", "fused", "staged", "staged"]
    assert moe.choose_strategy(1, False) == "staged"
    most = moe.BATCHED_MAX_ROWS
    assert [moe.is_batched(n) for n in (0, most, most + 1)] == [True, True, False]
    experts = make_experts(bundle, "cpu")
    counts = [num_tokens for num_tokens in (most, most + 1) if num_tokens]
    taken = []
    with pytest.MonkeyPatch.context() as patch:
        for name in ("matmul_batched", "matmul_grouped"):
            real = getattr(moe, name)
            patch.setattr(moe, name, lambda *a, real=real, name=name, **k: taken.append(name) or real(*a, **k))
        for num_tokens in counts:
            bundle.moe_forward(experts, *make_call("cpu", num_tokens, 1))
    expected = ["matmul_batched" if num_tokens <= most else "matmul_grouped" for num_tokens in counts]
    assert taken == [name for name in expected for _ in ("gate_up", "down")]


def test_what_the_forward_refuses(bundle):
    dense = make_experts(bundle, "cpu")
    staged = compressed(bundle, dense)
    hidden, index, weights = make_call("cpu", 3, 2)
    for error, message, call, options in (
        (ValueError, r"hidden_states must be \[M, 256\]", (hidden[:, :-16], index, weights), {}),
        (ValueError, r"top_k_index must be \[3, top_k\]", (hidden, index[:2], weights), {}),
        (ValueError, r"top_k_index must be \[3, top_k\]", (hidden, index[:, :0], weights[:, :0]), {}),
        (ValueError, r"top_k_weights must have shape \(3, 2\)", (hidden, index, weights[:, :1]), {}),
        (ValueError, "top_k_index must be on cpu", (hidden, index.to("meta"), weights), {}),
        (TypeError, "hidden_states must be torch.bfloat16", (hidden.double(), index, weights), {}),
        (TypeError, "top_k_index must be torch.int32", (hidden, index.short(), weights), {}),
        (TypeError, "top_k_weights must be floating", (hidden, index, index), {}),
        (ValueError, "activation_format must be None or", (hidden, index, weights), {"activation_format": "fp8"}),
        (ValueError, "strategy must be None or one of 'staged', 'fused', got 'fast'", (hidden, index, weights),
         {"strategy": "fast"}),
    ):  # fmt: skip
        for experts in (dense, staged):
            with pytest.raises(error, match=message):
                bundle.moe_forward(experts, *call, **options)
    assert bool((staged.scratch == 0x7F).all()), "nothing may have run"
    with pytest.raises(ValueError, match="strategy must be None or one of"):
        bundle.uses_expanded_scales(dense, 3, "fast")
    bare = dataclasses.replace(staged, scratch=None)
    with pytest.raises(ValueError, match=r"scales_expanded needs experts\.scratch"):
        bundle.moe_forward(bare, hidden, index, weights, strategy="staged", scales_expanded=True)
    with pytest.raises(ValueError, match="scratch must be a uint8 tensor"):
        bundle.expand_scales(bare)


def test_experts_that_do_not_fit_together(bundle):
    dense = make_experts(bundle, "cpu")
    staged = compressed(bundle, dense)
    for experts, change, message in (
        (dense, {"down": dense.down[:-1]}, "down must have shape"),
        (dense, {"gate_up_scales": dense.gate_up_scales[:, :-16]}, "gate_up_scales must have shape"),
        (staged, {"scratch": staged.scratch[1:]}, f"hold {staged.scratch_size} bytes"),
        (staged, {"scratch": staged.scratch.view(torch.int8)}, "scratch must be torch.uint8"),
    ):
        with pytest.raises(ValueError, match=message):
            dataclasses.replace(experts, **change)
    assert staged.scratch_size == make_scratch(dense).numel() and dense.scratch_size == 0
    gate_up_global = dense.gate_up_global
    for error, change, message in (
        (TypeError, {"gate_up_global": None}, "gate_up_global must be torch.float32, got NoneType"),
        (TypeError, {"gate_up_global": gate_up_global.double()}, "gate_up_global must be .*, got torch.float64"),
        (ValueError, {"gate_up_global": gate_up_global[:-1]}, "gate_up_global must have one of the shapes"),
        (ValueError, {"down_global": gate_up_global}, "down_global must have one of the shapes"),
        (ValueError, {"down_global": dense.down_global.to("meta")}, "down_global must be on cpu .* got meta"),
        (ValueError, {"down_input_global": gate_up_global[:, :1]}, "down_input_global must have one of the shapes"),
        (TypeError, {"down": dense.down.int()}, "down must be torch.uint8 or torch.int8, got torch.int32"),
        (TypeError, {"down_scales": dense.down_scales.float()}, "down_scales must be torch.float8_e4m3fn"),
    ):  # fmt: skip
        with pytest.raises(error, match=message):
            dataclasses.replace(dense, **change)
    assert dense != dataclasses.replace(dense) and [dense, staged].index(staged) == 1
    odd = {"gate_up": dense.gate_up[:, :96], "gate_up_scales": dense.gate_up_scales[:, :96]}
    odd |= {"down": dense.down[:, :, :24], "down_scales": dense.down_scales[:, :, :3]}
    with pytest.raises(ValueError, match="multiples of 32, got hidden size 256, intermediate size 48"):
        dataclasses.replace(dense, **odd)


@pytest.mark.parametrize("activation_format", [None, "bf16"])
def test_results_have_no_gradient(bundle, activation_format):
    """A CPU could compute one, which would be wrong if activations are quantized; kernels do not."""
    hidden, index, weights = make_call("cpu", 3, 2)
    call = (hidden.requires_grad_(), index, weights.requires_grad_())
    assert not bundle.moe_forward(make_experts(bundle, "cpu"), *call, activation_format=activation_format).requires_grad


@every_device
@pytest.mark.parametrize("strategy", ["staged", "fused"])
@pytest.mark.parametrize("num_tokens", [4, 17])
def test_compiles_in_one_graph(bundle, device, strategy, num_tokens):
    experts = make_experts(bundle, device)
    staged = compressed(bundle, experts)
    for given in (staged, dataclasses.replace(staged, scratch=None)):
        compiled = torch.compile(
            lambda *call, given=given: bundle.moe_forward(given, *call, activation_format="bf16", strategy=strategy),
            fullgraph=True, backend="aot_eager",
        )  # fmt: skip
        for seed in range(3):
            call = make_call(device, num_tokens, 2, seed)
            assert torch.equal(compiled(*call), bundle.moe_forward(experts, *call, activation_format="bf16"))


@pytest.mark.gpu
@every_format
@pytest.mark.parametrize("strategy", ["dense", "staged", "fused"])
@pytest.mark.parametrize("num_tokens", [1, 17, 600])
def test_a_graph_follows_its_routing(bundle, activation_format, strategy, num_tokens):
    """It is captured once, and replayed with other tokens and routing, without allocating."""
    dense = make_experts(bundle, "cuda")
    given = dense if strategy == "dense" else compressed(bundle, dense)
    options = {"activation_format": activation_format, "strategy": None if strategy == "dense" else strategy}
    call = make_call("cuda", num_tokens, 2)
    bundle.moe_forward(given, *call, **options)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = bundle.moe_forward(given, *call, **options)
    for seed in range(5):
        other = make_call("cuda", num_tokens, 2, seed, -1, NUM_EXPERTS + 1)
        for holder, new in zip(call, other, strict=True):
            holder.copy_(new)
        torch.cuda.synchronize()
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        graph.replay()
        torch.cuda.synchronize()
        assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
        assert torch.equal(out, bundle.moe_forward(dense, *other, activation_format=activation_format))
