"""`from_pretrained` with the plug-in: the same tokens however scales are kept, and logits close to those of float64."""

from __future__ import annotations

import copy
import importlib
import pickle
from pathlib import Path

import pytest
import torch

from numeric import DEVICES

pytest.importorskip("transformers", reason="needs transformers, the extra [transformers]")

import transformers

import finegrained_kernels
from finegrained_kernels.checkpoint import CheckpointError
from finegrained_kernels.integrations.transformers import NVFP4CSFConfig, nvfp4_experts, set_scale_strategy
from finegrained_kernels.integrations.transformers.registration import claim
from moe_models import ARCHITECTURES, generate, load, reference_model, write_checkpoints, write_compressed_tensors

every_device = pytest.mark.parametrize("device", DEVICES)
every_architecture = pytest.mark.parametrize("architecture", ARCHITECTURES)


@pytest.fixture(scope="module")
def checkpoints(bundle, tmp_path_factory):
    """By architecture: "bf16", "dense" and "csf" of one random model."""
    made: dict[str, dict[str, Path]] = {}

    def get(architecture: str) -> dict[str, Path]:
        if architecture not in made:
            made[architecture] = write_checkpoints(tmp_path_factory.mktemp(architecture), architecture)
        return made[architecture]

    return get


@pytest.fixture(autouse=True)
def quiet_and_quick():
    """Use one thread: tensors are so small that several threads would only get in each other's way."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    transformers.logging.disable_progress_bar()
    yield
    torch.set_num_threads(threads)


@every_device
@every_architecture
def test_every_strategy_generates_the_same_tokens(checkpoints, architecture, device):
    paths = checkpoints(architecture)
    expected = generate(load(paths["csf"], "dense", device=device))
    assert len(expected) == 64 and len(set(expected.tolist())) > 20
    model = load(paths["csf"], "staged", device=device)
    assert torch.equal(generate(model), expected)
    set_scale_strategy(model, "staged", prefetch=True)
    assert torch.equal(generate(model), expected)
    assert torch.equal(generate(load(paths["csf"], "fused", device=device)), expected)


@every_device
@every_architecture
def test_other_ways_to_the_same_tokens(checkpoints, architecture, device):
    paths = checkpoints(architecture)
    expected = generate(load(paths["csf"], "dense", device=device), 12)
    dense = load(paths["dense"], device=device)
    assert not any(layer.scratch_bytes for layer in nvfp4_experts(dense))
    assert torch.equal(generate(dense, 12), expected)
    compressed = load(paths["dense"], "staged", device=device)
    assert all(layer.scratch_bytes for layer in nvfp4_experts(compressed))
    assert torch.equal(generate(compressed, 12), expected)
    for implementation in ("eager", "finegrained_kernels_staged", "finegrained_kernels_fused", "finegrained_kernels"):
        compressed.set_experts_implementation(implementation)
        assert torch.equal(generate(compressed, 12), expected), implementation


class _Roundings:
    """Runs a float64 model and records what a bfloat16 model would round: inputs and outputs of every module.

    To first order, rounding an intermediate value y changes a logit by (d logit / d y) * e with |e| <= 2^-8 |y|, which
    has a variance of (2^-8 |y|)^2 / 3. Roundings inside experts are relative to the sum of the magnitudes that make up
    a value. There are four: of inner rows, of each expert's result, of the sum, and of its input; so the deviation is
    twice that of one.
    """

    def __init__(self, model: torch.nn.Module, ids: torch.Tensor) -> None:
        self._kept: list[tuple[torch.Tensor, torch.Tensor]] = []
        hooks = [module.register_forward_hook(self._remember) for module in model.modules()]
        self.logits = model(ids).logits[0, -1]
        self.spread = self.logits.detach().std()
        for hook in hooks:
            hook.remove()

    def _remember(self, module: torch.nn.Module, args: tuple, out: object) -> None:
        if hasattr(module, "gate_up_proj"):
            self._keep(out, 2 * _magnitude(module, *args))
            return
        for value in (*args, *(out if isinstance(out, tuple) else (out,))):
            if isinstance(value, torch.Tensor) and value.is_floating_point() and value.requires_grad:
                self._keep(value, value.detach().abs())

    def _keep(self, value: torch.Tensor, magnitude: torch.Tensor) -> None:
        value.retain_grad()
        self._kept.append((value, magnitude))

    def deviation(self, i_logit: int) -> float:
        """Standard deviation of a logit's error."""
        for value, _ in self._kept:
            value.grad = None
        self.logits[i_logit].backward(retain_graph=True)
        terms = [(value.grad * magnitude).square().sum() for value, magnitude in self._kept if value.grad is not None]
        return 2**-8 * float(torch.stack(terms).sum().div(3).sqrt())


@torch.no_grad()
def _magnitude(experts: torch.nn.Module, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor):
    total = torch.zeros_like(hidden)
    for token, choice in ((t, c) for t in range(index.shape[0]) for c in range(index.shape[1])):
        expert = index[token, choice]
        gate, up = (experts.gate_up_proj[expert] @ hidden[token]).chunk(2)
        inner = torch.nn.functional.silu(gate) * up
        total[token] += weights[token, choice] * (experts.down_proj[expert].abs() @ inner.abs())
    return total


@every_device
@every_architecture
def test_logits_are_those_of_float64(checkpoints, architecture, device):
    paths = checkpoints(architecture)
    ids = torch.arange(16).view(1, -1) * 7 % 128
    reference = _Roundings(reference_model(paths), ids)
    model = load(paths["csf"], "staged", device=device)
    assert model.model.embed_tokens.weight.dtype == torch.bfloat16
    with torch.no_grad():
        error = (model(ids.to(device)).logits[0, -1].cpu().double() - reference.logits).abs()
    for i_logit in range(0, 128, 9):
        assert float(error[i_logit]) < 6 * reference.deviation(i_logit) < float(reference.spread), i_logit
    # The bound is tight enough: with gate's globals used for up, or with rows [up; gate], logits exceed it.
    for layer in nvfp4_experts(model):
        layer.gate_up_global.copy_(layer.gate_up_global.flip(1) * 1.5)
    with torch.no_grad():
        wrong = (model(ids.to(device)).logits[0, -1].cpu().double() - reference.logits).abs()
    assert any(float(wrong[i_logit]) > 6 * reference.deviation(i_logit) for i_logit in range(0, 128, 9))


@pytest.mark.parametrize("strategy", ["auto", "staged", "fused", "dense"])
def test_compressed_tensors_layout(checkpoints, tmp_path, strategy):
    """Its globals are divisors, whose reciprocals are used; those of ModelOpt for the same model are multipliers."""
    paths = checkpoints("qwen3_moe")
    other = write_compressed_tensors(tmp_path, paths["dense"])
    model, expected = load(other["csf"], strategy), load(paths["csf"], "dense")
    for layer, original in zip(nvfp4_experts(model), nvfp4_experts(expected), strict=True):
        assert torch.equal(layer.gate_up_proj, original.gate_up_proj)
        assert torch.equal(layer.gate_up_global, 1 / (1 / original.gate_up_global))
        for layer_global in (layer.gate_up_global, layer.down_global):
            assert layer_global.dtype == torch.float32
    logits = [m(torch.arange(16).view(1, -1)).logits.float() for m in (model, expected)]
    torch.testing.assert_close(*logits, atol=0.1, rtol=0.05)
    dense = load(other["dense"], strategy)
    assert torch.equal(dense(torch.arange(16).view(1, -1)).logits.float(), logits[0])


NVFP4_GROUP = {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "float", "group_size": 16}}
FP8_GROUP = {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "float", "strategy": "channel"}}


def test_only_configs_with_nvfp4_are_claimed():
    """Other checkpoints are left to transformers, even if they have the same method."""
    entry = {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}
    for said, is_ours in (
        (entry | {"config_groups": {"group_0": NVFP4_GROUP}}, True),
        (entry | {"format": "mixed-precision", "config_groups": {"a": FP8_GROUP, "b": NVFP4_GROUP}}, True),
        (entry | {"format": "float-quantized", "config_groups": {"group_0": FP8_GROUP}}, False),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, False),
        ({"quant_method": "fp8", "config_groups": {"group_0": NVFP4_GROUP}}, True),
        ({"quant_method": "gptq", "bits": 4}, False),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, True),
    ):
        for places in ({"quantization_config": said}, {"text_config": {"quantization_config": said}}):
            config = transformers.PreTrainedConfig(**places)
            claim(config, asked=False)
            found = getattr(config, "quantization_config", {})
            assert (found == {"quant_method": "finegrained-kernels", "checkpoint": said}) == is_ours, places


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_globals_and_bytes_keep_their_dtype(checkpoints, dtype):
    model = load(checkpoints("qwen3_moe")["csf"], dtype=dtype)
    module = torch.nn.Module
    for change in (None, module.bfloat16, module.float, module.half):  # others refuse this if they are quantized
        if change is not None:
            change(model)
        for layer in nvfp4_experts(model):
            types = {name: buffer.dtype for name, buffer in layer.named_buffers()}
            assert types.pop("gate_up_global") == types.pop("down_global") == torch.float32
            assert set(types.values()) == {torch.uint8, torch.int32}
            assert layer.gate_up_proj.dtype == layer.down_proj.dtype == torch.uint8
    assert model.lm_head.weight.dtype == torch.float16
    assert generate(model, 3).shape == (3,)


def test_the_kernels_are_those_of_get_kernel(checkpoints, bundle):
    for layer in nvfp4_experts(load(checkpoints("qwen3_moe")["csf"])):
        assert layer.schedule.bundle is bundle is finegrained_kernels.load()
        assert type(layer.experts) is bundle.NVFP4Experts


def test_layers_share_one_workspace(checkpoints):
    model = load(checkpoints("glm4_moe")["csf"], "staged")
    layers = nvfp4_experts(model)
    assert len(layers) == 2  # the first is dense, in both senses
    (scratch,) = {layer.experts.scratch.data_ptr() for layer in layers}
    assert layers[0].experts.scratch.numel() == layers[0].scratch_bytes == 8 * (128 * 8 + 128 * 4)
    set_scale_strategy(model, "fused")
    assert all(layer.experts.scratch is None for layer in layers)
    set_scale_strategy(model, "staged")
    assert len({layer.experts.scratch.data_ptr() for layer in layers}) == 1


def test_auto_keeps_no_workspace(checkpoints, bundle, monkeypatch):
    """A call whose GEMMs do not read compressed scales decodes them into memory of its own."""
    model = load(checkpoints("qwen3_moe")["csf"], "auto")
    expected = generate(model, 3)
    assert all(layer.is_compressed and layer.experts.scratch is None for layer in nvfp4_experts(model))
    moe, decoded = importlib.import_module(f"{bundle.__name__}.moe.layer"), []
    decode = moe.decode_scales
    monkeypatch.setattr(moe, "reads_compressed_on", lambda *_: False)
    monkeypatch.setattr(moe, "decode_scales", lambda *args: decoded.append(args[1]) or decode(*args))
    assert torch.equal(generate(model, 3), expected)
    assert decoded and not any(memory is not None for memory in decoded)


def test_prefetching_follows_the_order(checkpoints, bundle, monkeypatch):
    calls = []
    kind = bundle.ScalePrefetcher
    prefetch, forward = kind.prefetch, kind.forward
    monkeypatch.setattr(kind, "prefetch", lambda *args: calls.append(("prefetch", args[1])) or prefetch(*args))
    monkeypatch.setattr(
        kind, "forward", lambda *args, **options: calls.append(("forward", args[1])) or forward(*args, **options)
    )
    model = load(checkpoints("qwen3_moe")["csf"], "staged", prefetch=True)
    ids = torch.arange(8).view(1, -1)
    model(ids)
    assert calls == [("forward", 0), ("prefetch", 1), ("forward", 1)]
    expected = load(checkpoints("qwen3_moe")["csf"], "dense")(ids).logits
    first = nvfp4_experts(model)[0]
    hidden, routing = torch.randn(4, 128).bfloat16(), (torch.tensor([[0, 1]] * 4), torch.full((4, 2), 0.5))
    for _ in range(3):  # a layer out of order: what was prefetched after it is discarded
        first(hidden, *routing)
    assert torch.equal(model(ids).logits, expected)


def test_copies_and_pickles_run(checkpoints):
    model = load(checkpoints("qwen3_moe")["csf"], "staged", prefetch=True)
    expected = generate(model, 5)
    twin = copy.deepcopy(model)
    assert torch.equal(generate(twin, 5), expected)
    mine, its = nvfp4_experts(model)[0], nvfp4_experts(twin)[0]
    assert mine.gate_up_proj.data_ptr() != its.gate_up_proj.data_ptr()
    assert its.experts.gate_up.data_ptr() == its.gate_up_proj.data_ptr()
    call = torch.randn(4, 128).bfloat16(), torch.tensor([[0, 1]] * 4), torch.full((4, 2), 0.5)
    assert torch.equal(pickle.loads(pickle.dumps(mine))(*call), mine(*call))


def test_state_dicts_of_other_models_are_refused(checkpoints, bundle, tmp_path):
    """They have packed weights without the scales that belong to them."""
    model = load(checkpoints("qwen3_moe")["csf"])
    expected = generate(model, 5)
    model.load_state_dict(copy.deepcopy(model.state_dict()))
    other = load(write_checkpoints(tmp_path, "qwen3_moe", seed=1)["csf"])
    with pytest.raises(
        RuntimeError, match=r"layers.0.mlp.experts.gate_up_proj: other NVFP4 weights, without their scales"
    ):
        model.load_state_dict({name: t for name, t in other.state_dict().items() if ".experts." in name}, strict=False)
    assert torch.equal(generate(model, 5), expected)


def test_calibrated_activations(bundle, tmp_path):
    paths = write_checkpoints(tmp_path, "qwen3_moe", input_scale=2.0**-8)
    models = {name: load(paths["csf"], activation_format=name) for name in ("auto", "nvfp4", "nvfp4_dynamic", "bf16")}
    ids = torch.arange(16).view(1, -1)
    logits = {name: model(ids).logits for name, model in models.items()}
    assert torch.equal(logits["auto"], logits["nvfp4"])
    assert not torch.equal(logits["auto"], logits["bf16"])
    assert not torch.equal(logits["auto"], logits["nvfp4_dynamic"])
    for layer in nvfp4_experts(models["auto"]):
        assert torch.equal(layer.experts.down_input_global, torch.full((8,), 2.0**-8))
    assert torch.equal(load(paths["csf"], "dense")(ids).logits, logits["auto"])


@every_device
@pytest.mark.parametrize("strategy", ["staged", "fused"])
def test_compiles_in_one_graph(checkpoints, device, strategy):
    """A decoding step with a static cache, once compiled, gives the tokens of the eager model."""
    model = load(checkpoints("qwen3_moe")["csf"], strategy, device=device)
    expected = generate(model, 8, cache_implementation="static", disable_compile=True)
    torch.compiler.reset()
    cache = transformers.StaticCache(config=model.config, max_cache_len=32)
    ids = (torch.arange(16, device=device).view(1, -1) * 7) % 128

    def step(token: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        return model(input_ids=token, position_ids=position, past_key_values=cache).logits[:, -1].argmax(-1, True)

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        tokens = [step(ids, torch.arange(16, device=device).view(1, -1))]
        for position in range(16, 23):
            tokens.append(compiled(tokens[-1], torch.tensor([[position]], device=device)).clone())
    assert torch.equal(torch.cat(tokens, 1)[0], expected)


@pytest.mark.gpu
@pytest.mark.parametrize("strategy", ["staged", "fused"])
def test_static_cache_and_cuda_graphs(checkpoints, strategy):
    """transformers itself compiles generation with a static cache, in mode "reduce-overhead", which uses CUDA
    graphs."""
    model = load(checkpoints("qwen3_moe")["csf"], strategy, device="cuda")
    expected = generate(model, 24, cache_implementation="static", disable_compile=True)
    torch.compiler.reset()
    for _ in range(2):
        assert torch.equal(generate(model, 24, cache_implementation="static"), expected)


def test_options_that_make_no_sense(checkpoints):
    for options, message in (
        ({"scale_strategy": "lazy"}, "scale_strategy must be one of auto, staged, fused, dense, got 'lazy'"),
        ({"activation_format": "fp8"}, "activation_format must be one of"),
        ({"prefetch": True}, "prefetch needs scale_strategy 'staged', got 'auto'"),
    ):
        with pytest.raises(ValueError, match=message):
            NVFP4CSFConfig(**options)
    paths = checkpoints("qwen3_moe")
    with pytest.raises(ValueError, match="no compressed scales"):
        set_scale_strategy(load(paths["dense"]), "staged")
    with pytest.raises(ValueError, match=r"bfloat16 or torch.float16 for NVFP4 layers, got torch.float32"):
        load(paths["csf"], dtype=torch.float32)
    with pytest.raises(CheckpointError, match="weight-only by its config: activation_format can be auto or bf16"):
        load(paths["csf"], activation_format="nvfp4")
    with pytest.raises(CheckpointError, match="no NVFP4 layers in it"):
        load(paths["bf16"])
