"""What loading uses and leaves behind: the hub's kernels, memory, and no other tensors."""

from __future__ import annotations

import gc
import json
import os
import weakref
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

pytest.importorskip("transformers", reason="needs transformers, the extra [transformers]")

from transformers import AutoConfig, AutoModelForCausalLM

from checkpoints import edit_json
from conftest import REPO_ID, ROOT
from finegrained_kernels.checkpoint import slices
from finegrained_kernels.integrations.transformers import loading, nvfp4_experts
from hub import Hub, Repository
from moe_models import ARCHITECTURES, COMMON, load, write_checkpoints

LOAD_MODEL = """
import torch
from huggingface_hub import snapshot_download
from kernels import get_kernel
from transformers import AutoModelForCausalLM
import finegrained_kernels.integrations.transformers

torch.set_num_threads(1)
snapshot_download({repo_id!r}, repo_type="kernel", revision="v1")
model = AutoModelForCausalLM.from_pretrained({path!r})
bundle = model.model.layers[0].mlp.experts.schedule.bundle
assert bundle is get_kernel({repo_id!r}, version=1)
print(bundle.__file__, model(torch.arange(8).view(1, -1)).logits.argmax(-1).tolist())
"""


@pytest.fixture(scope="module")
def paths(bundle, tmp_path_factory) -> dict[str, Path]:
    return write_checkpoints(tmp_path_factory.mktemp("loading"), "qwen3_moe")


def test_from_the_hub_and_offline(run_python, paths, bundle_dir, tmp_path):
    """In two fresh processes, the kernels are those of `get_kernel`, from the hub and then, offline, from its cache."""
    code = LOAD_MODEL.format(path=str(paths["csf"]), repo_id=REPO_ID)
    with Hub({REPO_ID: Repository(bundle_dir.parent)}) as hub:
        online = run_python(code, HF_ENDPOINT=hub.url)
        assert hub.requests
    offline = run_python(code, HF_HUB_OFFLINE="1")
    assert online.stdout.startswith(str(tmp_path / "hf"))
    assert offline.stdout == online.stdout


@pytest.mark.parametrize(("layout", "strategy"), [("csf", "dense"), ("dense", "staged"), ("csf", "staged")])
def test_copies_that_are_not_needed_are_gone(paths, monkeypatch, layout, strategy):
    """Compressed scales after decoding, dense ones after compressing, and headers in any case."""
    passing, kept = [], []

    def watch(module, name: str, into: list) -> None:
        original = getattr(module, name)

        def call(*args, **options):
            result = original(*args, **options)
            tensors = [result] if isinstance(result, torch.Tensor) else getattr(result, "state_dict", dict)().values()
            into.extend(weakref.ref(tensor) for tensor in tensors)
            return result

        monkeypatch.setattr(module, name, call)

    watch(slices, "_read_dense", passing)
    watch(loading, "read_compressed_stack", passing if strategy == "dense" else kept)
    headers = []
    monkeypatch.setattr(loading, "part_of", lambda *args: loading.Part(range(8)))
    original = loading.load_experts
    monkeypatch.setattr(
        "finegrained_kernels.integrations.transformers.quantizer.load_experts",
        lambda reader, *args, **options: (
            headers.append(weakref.ref(reader.checkpoint)) or original(reader, *args, **options)
        ),
    )
    model = load(paths[layout], strategy)
    gc.collect()
    assert (passing or layout == "csf") and not any(reference() is not None for reference in passing)
    assert all(reference() is not None for reference in kept)
    assert headers and not any(reference() is not None for reference in headers)
    alive = [weakref.ref(tensor) for experts in nvfp4_experts(model) for tensor in experts.buffers()]
    del model
    gc.collect()
    assert not any(reference() is not None for reference in alive)


def write_large(root: Path, bundle) -> int:
    """Write compressed experts of 5 layers, each in a shard of 113 MB, equal except for names, and everything else.
    Returns the bytes of a shard."""
    hidden, inner, num_experts, layers = 1024, 512, 128, 5
    sizes = {"num_experts": num_experts, "hidden_size": hidden, "moe_intermediate_size": inner}
    options = {**COMMON, **ARCHITECTURES["qwen3_moe"], **sizes, "num_hidden_layers": layers}
    config = AutoConfig.for_model("qwen3_moe", **options, dtype="bfloat16")
    config.save_pretrained(root)
    generator = torch.Generator().manual_seed(0)
    with torch.device("meta"):
        state = AutoModelForCausalLM.from_config(config).state_dict()
    shards = {"small": {name: torch.rand(t.shape).bfloat16() for name, t in state.items() if ".experts." not in name}}
    experts = {}
    for projection, (n, k) in {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}.items():
        packed = torch.randint(-(2**63), 2**63 - 1, (num_experts, n, k // 16), generator=generator)
        base = torch.randint(40, 60, (num_experts, n, 1), generator=generator, dtype=torch.uint8)
        scales = base + torch.randint(0, 16, (num_experts, n, k // 16), generator=generator, dtype=torch.uint8)
        fixed, exceptions = bundle.compress_nvfp4_csf_scales(scales)
        for expert in range(num_experts):
            name = f"{expert}.{projection}_proj"
            experts[f"{name}.weight"] = packed[expert].view(torch.uint8)
            experts[f"{name}.weight_scale_2"] = torch.tensor(0.001)
            experts[f"{name}.weight_scale.nvfp4_csf_fixed"] = fixed[expert].clone()
            experts[f"{name}.weight_scale.nvfp4_csf_exceptions"] = exceptions[expert].clone()
    modules = [f"model.layers.{i_layer}.mlp.experts" for i_layer in range(layers)]
    for i_layer, module in enumerate(modules):
        shards[f"layer-{i_layer}"] = {f"{module}.{name}": tensor for name, tensor in experts.items()}
    weight_map = {}
    for shard, tensors in shards.items():
        save_file(tensors, root / f"{shard}.safetensors", {"format": "pt"})
        weight_map.update(dict.fromkeys(tensors, f"{shard}.safetensors"))
    (root / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    entry = {"quant_algo": "NVFP4", "group_size": 16, "weight_scale_encoding": "csf"}
    layers_config = dict.fromkeys(modules, entry)
    quantization = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers_config}
    edit_json(root / "config.json", lambda document: document.update(quantization_config=quantization))
    return sum(tensor.nbytes for tensor in experts.values())


MEASURE = """
import gc, re, sys, torch
sys.path.insert(0, {tests!r})
from finegrained_kernels.integrations.transformers import nvfp4_experts
from moe_models import load
torch.set_num_threads(1)
load({small!r}, "staged")  # whatever is imported and allocated once

def resident(field):
    return int(re.search(field + r":\\s+(\\d+) kB", open("/proc/self/status").read())[1]) * 1024

for strategy in ("staged", "staged", "dense"):
    gc.collect()
    open("/proc/self/clear_refs", "w").write("5")  # the peak begins anew
    before = resident("VmRSS")
    model = load({path!r}, strategy)
    peak = resident("VmHWM") - before
    layer = nvfp4_experts(model)[0]
    print(strategy, peak, model.get_memory_footprint() + layer.scratch_bytes)
    del model, layer
"""


@pytest.mark.slow
@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="needs Linux, whose /proc counts peaks")
def test_peak_of_memory_while_loading_again_and_again(run_python, paths, bundle, bundle_dir, tmp_path):
    shard = write_large(tmp_path / "large", bundle)
    code = MEASURE.format(tests=str(ROOT / "tests" / "support"), small=str(paths["csf"]), path=str(tmp_path / "large"))
    output = run_python(code, LOCAL_KERNELS=f"{REPO_ID}={bundle_dir}", PYTHONPATH=f"{ROOT}:{ROOT / 'scripts'}").stdout
    assert len(output.splitlines()) == 3
    for line in output.splitlines():
        strategy, peak, final = line.split()[0], *map(int, line.split()[1:])
        assert 500e6 < final < peak + 50e6, line
        assert peak <= final + shard + 200e6, f"{strategy}: {peak / 1e6:.0f} MB for a model of {final / 1e6:.0f} MB"
