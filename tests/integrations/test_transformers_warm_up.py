"""What `from_pretrained` compiles ahead."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers", reason="needs transformers, the extra [transformers]")

from transformers import AutoModelForCausalLM

from finegrained_kernels.integrations.transformers import NVFP4CSFConfig, quantizer
from finegrained_kernels.integrations.transformers.warming import WarmUp
from moe_models import write_checkpoints


@pytest.fixture(scope="module")
def paths(bundle, tmp_path_factory):
    return write_checkpoints(tmp_path_factory.mktemp("warm_up"), "qwen3_moe")


@pytest.fixture
def asked(bundle, monkeypatch) -> list[tuple]:
    """Layers and options of every call of `warm_up`."""
    calls: list[tuple] = []

    class Bundle:
        @staticmethod
        def warm_up(layers, **options) -> int:
            calls.append((layers, options))
            options["progress"](1, 1)
            return 1

    monkeypatch.setattr(quantizer, "WarmUp", lambda found, *given: WarmUp(found and Bundle, *given))
    return calls


def load(path, **options):
    return AutoModelForCausalLM.from_pretrained(path, quantization_config=NVFP4CSFConfig(**options))


@pytest.mark.parametrize(("strategy", "compressed"), [("auto", True), ("staged", False), ("dense", False)])
def test_layers_of_equal_shapes_are_compiled_once(bundle, paths, asked, strategy, compressed):
    model = load(paths["csf"], scale_strategy=strategy)
    ((layers, options),) = asked
    (experts,) = layers
    module = model.model.layers[0].mlp.experts
    assert experts.gate_up.shape == module.gate_up_proj.shape and experts.gate_up.device.type == "meta"
    assert isinstance(experts.gate_up_scales, bundle.NVFP4CSFScales) == compressed
    assert options.pop("progress")
    assert options == {
        "formats": ["bf16"],
        "device": torch.device("cuda"),
        "dtype": model.dtype,
        "top_k": model.config.num_experts_per_tok,
    }


def test_an_option_turns_it_off(paths, asked):
    load(paths["csf"], warm_up=False)
    assert asked == []


def test_a_model_loads_where_nothing_can_be_compiled(paths, bundle, monkeypatch):
    def fail(layers, **options):
        raise RuntimeError("compiling kernels ahead failed: no space left")

    class Bundle:
        warm_up = staticmethod(fail)

    said: list[str] = []
    monkeypatch.setattr("finegrained_kernels.integrations.transformers.warming.logger.warning", said.append)
    monkeypatch.setattr(quantizer, "WarmUp", lambda found, *given: WarmUp(Bundle, *given))
    load(paths["csf"])
    assert said == [
        "kernels are compiled when they are first needed, not ahead: compiling kernels ahead failed: no space left"
    ]
