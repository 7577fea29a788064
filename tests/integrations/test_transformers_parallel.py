"""Two and four processes on the CPU (gloo), tensor and expert parallel, give what one process gives."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("transformers", reason="needs transformers, the extra [transformers]")

from conftest import REPO_ID, ROOT
from finegrained_kernels.checkpoint import compress
from moe_models import hidden_states, load, write_checkpoints
from replicas import Stored, cosine, small_config, store_fp8, store_nvfp4, write_replica

WORKER = """
import dataclasses, json, sys
import torch
import torch.distributed
sys.path[:0] = [{tests!r}, {scripts!r}]
import transformers
from transformers.distributed import DistributedConfig
from finegrained_kernels.checkpoint import CheckpointError
from finegrained_kernels.integrations.transformers import nvfp4_experts
from moe_models import generate, hidden_states, load

torch.set_num_threads(1)
new = "ep_size" in {{field.name for field in dataclasses.fields(DistributedConfig)}}
modes = {{"tp": {{}}, "ep": {{"ep_size": 2}} if new else {{"enable_expert_parallel": True}}}}
ids = torch.tensor([{tokens!r}])
results = {{}}
for mode, options in modes.items():
    for path in {paths!r}:
        for strategy in ("staged", "dense"):
            model = load(path, strategy, distributed_config=DistributedConfig(tp_size=2, **options))
            experts = nvfp4_experts(model)[-1].experts
            shapes = [list(part.shape) for part in (experts.gate_up, experts.gate_up_scales, experts.down_scales)]
            block = model.model.layers[-1].mlp(hidden_states(128)).float().tolist()
            generate(model, 4)
            results[mode + path + strategy] = shapes, block, model(ids).logits[0].tolist()
    try:
        model.save_pretrained("saved")
    except ValueError as error:
        results[mode + "save"] = str(error)
try:
    load({narrow!r}, distributed_config=DistributedConfig(tp_size=2))
except CheckpointError as error:
    results["narrow"] = str(error)
print(json.dumps(results))
torch.distributed.destroy_process_group()
"""


@pytest.mark.slow
def test_two_processes_give_the_result_of_one(bundle, bundle_dir, tmp_path):
    pytest.importorskip("accelerate", reason="needs accelerate, without which transformers has no parallel loads")
    checkpoints = [write_checkpoints(tmp_path / name, name)["csf"] for name in ("qwen3_moe", "mixtral")]
    narrow = write_checkpoints(tmp_path / "narrow", "qwen3_moe", moe_intermediate_size=32)["csf"]
    tokens = (torch.arange(40) * 7 % 128).tolist()
    code = WORKER.format(
        tokens=tokens,
        tests=str(ROOT / "tests" / "support"),
        scripts=str(ROOT / "scripts"),
        paths=[str(path) for path in checkpoints],
        narrow=str(narrow),
    )
    results = run_ranks(code, 2, tmp_path, LOCAL_KERNELS=f"{REPO_ID}={bundle_dir}", PYTHONPATH=str(ROOT))
    assert results[0] == results[1]
    for path in checkpoints:
        model = load(path, "staged")
        block, logits = model.model.layers[-1].mlp(hidden_states(128)).float(), model(torch.tensor([tokens])).logits[0]
        for mode, shapes in (
            ("tp", [[8, 64, 64], [8, 64, 8], [8, 128, 2]]),  # gate's half, then up's; down by columns
            ("ep", [[4, 128, 64], [4, 128, 8], [4, 128, 4]]),
        ):
            assert results[0][f"{mode}{path}staged"] == results[0][f"{mode}{path}dense"]
            got_shapes, got_block, got_logits = results[0][f"{mode}{path}staged"]
            assert got_shapes == shapes
            # Two partial sums are rounded to bf16, and then their sum: 3 roundings more.
            tolerance = 3 * 2**-8 * float(block.abs().max())
            torch.testing.assert_close(torch.tensor(got_block), block, atol=tolerance, rtol=0)
            # Where a router is near a tie, that may be enough to send a token to another expert: not often.
            far = (torch.tensor(got_logits) - logits.float()).abs().amax(1) > 0.3
            assert far.sum() <= 3, f"{mode}: {far.sum()} of {len(far)} tokens"
    assert "model that one process holds whole" in results[0]["tpsave"]
    assert results[0]["epsave"] == results[0]["tpsave"]
    assert "mlp.experts.0.down_proj.weight_scale: 2 columns cannot be cut into 2 parts" in results[0]["narrow"]


WHOLE = """
import dataclasses, json, sys
import torch
import torch.distributed
sys.path[:0] = [{tests!r}, {scripts!r}]
from transformers.distributed import DistributedConfig
from moe_models import load

torch.set_num_threads(1)
new = "ep_size" in {{field.name for field in dataclasses.fields(DistributedConfig)}}
modes = {{"tp": {{}}, "ep": {{"ep_size": {size}}} if new else {{"enable_expert_parallel": True}}}}
ids = torch.tensor([{tokens!r}])
results = {{}}
for path, mode, options in {jobs!r}:
    distributed = DistributedConfig(tp_size={size}, **modes[mode])
    with torch.no_grad():
        model = load(path, distributed_config=distributed, **options)
        results[str((path, mode, options))] = model(ids).logits[0].tolist()
print(json.dumps(results))
torch.distributed.destroy_process_group()
"""


def write_wide(root: Path, name: str) -> Path:
    """A replica that four processes can cut: "dense", with biases and quantized activations, or "moe", over FP8."""
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 4, "intermediate_size": 256}
    if name == "dense":
        said = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
        paths = write_replica(
            root,
            small_config("qwen2", **sizes),
            lambda module, weight: store_nvfp4(weight, input_scale=True) if module.endswith("_proj") else None,
            {"config.json": {"quantization_config": said}},
        )
    else:
        entries = {f"model.layers.{layer}.mlp.experts": {"quant_algo": "NVFP4"} for layer in range(2)}
        said = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": entries}
        moe = {"moe_intermediate_size": 128, "num_experts": 4, "num_experts_per_tok": 4, "norm_topk_prob": True}
        kinds = {"q_proj": "block", "k_proj": "channel", "v_proj": "mx", "o_proj": "block"}

        def store(module: str, weight: np.ndarray) -> Stored | None:
            if ".experts." in module:
                return store_nvfp4(weight)
            last = module.rpartition(".")[2]
            return store_fp8(weight, kinds[last]) if last in kinds else None

        paths = write_replica(
            root, small_config("qwen3_moe", **sizes, **moe), store, {"config.json": {"quantization_config": said}}
        )
    compress(paths["dense"], root / "csf")
    return root / "csf"


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
def test_whole_models_on_several_processes(bundle, bundle_dir, tmp_path, size):
    """Linear layers cut by columns and by rows, with biases, in NVFP4 and in every kind of FP8."""
    pytest.importorskip("accelerate", reason="needs accelerate, without which transformers has no parallel loads")
    dense, moe = (write_wide(tmp_path / name, name) for name in ("dense", "moe"))
    tokens = (torch.arange(24) * 7 % 128).tolist()
    jobs = [
        (str(dense), "tp", {"strategy": "staged", "activation_format": "bf16"}),
        (str(dense), "tp", {"strategy": "dense"}),
        (str(moe), "tp", {"fp8": "dequantized"}),
        (str(moe), "ep", {"strategy": "fused"}),
    ]
    support = {"tests": str(ROOT / "tests" / "support"), "scripts": str(ROOT / "scripts")}
    code = WHOLE.format(**support, tokens=tokens, size=size, jobs=jobs)
    results = run_ranks(code, size, tmp_path, LOCAL_KERNELS=f"{REPO_ID}={bundle_dir}", PYTHONPATH=str(ROOT))
    assert all(result == results[0] for result in results)
    for path, mode, options in jobs:
        with torch.no_grad():
            expected = load(Path(path), **options)(torch.tensor([tokens])).logits[0]
        # Partial sums are rounded to bf16, which moves some of the activations that are then quantized by a whole step.
        bound = 0.99 if options == {"strategy": "dense"} else 0.9998
        assert cosine(torch.tensor(results[0][str((path, mode, options))]), expected) > bound, (path, mode, options)


def run_ranks(code: str, world_size: int, directory: Path, **environment: str) -> list[dict]:
    """What each rank of a script printed as its last line, as JSON."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = {"WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), **environment}
    processes = []
    for rank in range(world_size):
        own = {**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        processes.append(
            subprocess.Popen(
                [sys.executable, "-c", code],
                env=own,
                cwd=directory,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    try:
        outputs = [process.communicate(timeout=300) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, (_, stderr) in zip(processes, outputs, strict=True):
        assert process.returncode == 0, stderr[-4000:]
    return [json.loads(stdout.splitlines()[-1]) for stdout, _ in outputs]
