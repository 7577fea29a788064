"""Two and four processes on the CPU (gloo), with tensor and expert parallelism, give the results of one process."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers", reason="needs transformers, the extra [transformers]")

import transformers

from conftest import REPO_ID, ROOT
from moe_models import hidden_states, load, write_checkpoints
from replica_kinds import KINDS, write_kind
from replicas import cosine

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
            ("tp", [[8, 64, 64], [8, 64, 8], [8, 128, 2]]),  # half of gate, then half of up; down by columns
            ("ep", [[4, 128, 64], [4, 128, 8], [4, 128, 4]]),
        ):
            assert results[0][f"{mode}{path}staged"] == results[0][f"{mode}{path}dense"]
            got_shapes, got_block, got_logits = results[0][f"{mode}{path}staged"]
            assert got_shapes == shapes
            # Two partial sums are rounded to bf16, and then their sum: 3 more roundings.
            tolerance = 3 * 2**-8 * float(block.abs().max())
            torch.testing.assert_close(torch.tensor(got_block), block, atol=tolerance, rtol=0)
            # If a router is close to a tie, that may send a token to another expert, but not often.
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
import transformers
from transformers.distributed import DistributedConfig
from finegrained_kernels.integrations.transformers import FP8Linear, nvfp4_experts, nvfp4_linears
from moe_models import load

torch.set_num_threads(1)
new = "ep_size" in {{field.name for field in dataclasses.fields(DistributedConfig)}}
modes = {{"tp": {{}}, "ep": {{"ep_size": {size}}} if new else {{"enable_expert_parallel": True}}}}
ids = torch.tensor([{tokens!r}])
results = {{}}
for name, path, model_class, mode, options in {jobs!r}:
    distributed = DistributedConfig(tp_size={size}, **modes[mode])
    with torch.no_grad():
        model = load(path, distributed_config=distributed, model_class=getattr(transformers, model_class), **options)
        stored = [*nvfp4_linears(model), *(m for m in model.modules() if isinstance(m, FP8Linear))]
        weights = [layer.weight for layer in stored] + [layer.gate_up_proj for layer in nvfp4_experts(model)]
        parts = [weight.to_local() if hasattr(weight, "to_local") else weight for weight in weights]
        shares = sorted({{whole.numel() // part.numel() for whole, part in zip(weights, parts)}})
        results[name + mode] = shares, model(ids).logits[0].tolist()
    del model
print(json.dumps(results))
torch.distributed.destroy_process_group()
"""

WIDE = {"num_attention_heads": 4, "num_key_value_heads": 4, "intermediate_size": 256}
WIDE_EXPERTS = {"moe_intermediate_size": 128, "shared_expert_intermediate_size": 128}
"""Sizes that can be cut for four processes, in pairs of 16 columns."""


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
def test_every_kind_on_several_processes(bundle, bundle_dir, tmp_path, size):
    """Linear layers cut by columns and by rows, with biases and AWQ's scales, in NVFP4 and in FP8; experts in every
    layout, cut or distributed; with alternating strategies."""
    pytest.importorskip("accelerate", reason="needs accelerate, without which transformers has no parallel loads")
    tokens, jobs, paths = (torch.arange(24) * 7 % 128).tolist(), [], {}
    for i, (name, kind) in enumerate(KINDS.items()):
        paths[name] = write_kind(kind, tmp_path / name, **WIDE, **(WIDE_EXPERTS if kind.experts else {}))
        form = ("csf", "dense")[i % 2]
        for j, mode in enumerate(("tp", "ep") if kind.experts else ("tp",)):
            options = {"strategy": ("staged", "fused", "dense", "auto")[(i + j) % 4]}
            options |= {"fp8": "dequantized"} if kind.fp8 and mode == "tp" else {}
            jobs.append((name, str(paths[name][form]), kind.model_class.__name__, mode, options))
    w4a4 = {"activation_format": "nvfp4_dynamic"}
    jobs.append((f"{jobs[-1][0]}, W4A4", *jobs[-1][1:-1], w4a4))
    support = {"tests": str(ROOT / "tests" / "support"), "scripts": str(ROOT / "scripts")}
    code = WHOLE.format(**support, tokens=tokens, size=size, jobs=jobs)
    results = run_ranks(code, size, tmp_path, LOCAL_KERNELS=f"{REPO_ID}={bundle_dir}", PYTHONPATH=str(ROOT))
    assert all(result == results[0] for result in results)
    for name, path, model_class, mode, options in jobs:
        with torch.no_grad():
            model = load(Path(path), model_class=getattr(transformers, model_class), **options)
            expected = model(torch.tensor([tokens])).logits[0]
        shares, logits = results[0][name + mode]
        assert size in shares, f"{name}, {mode}: nothing is cut"
        # Partial sums are rounded to bf16, which moves some of the activations that are then quantized by a whole step.
        bound = 0.99 if options is w4a4 else 0.9998
        assert cosine(torch.tensor(logits), expected) > bound, (name, mode, options)


def run_ranks(code: str, world_size: int, directory: Path, **environment: str) -> list[dict]:
    """The last line that each rank of a script printed, read as JSON."""
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
