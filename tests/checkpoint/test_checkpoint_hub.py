"""Checkpoints on the hub: uploaded to and inspected on a loopback server, through huggingface_hub."""

from __future__ import annotations

import hashlib
import json

import pytest

import checkpoints
from finegrained_kernels.checkpoint import CheckpointError, compress, inspect, push
from model_hub import COMMIT, REPO, ModelHub

pytestmark = pytest.mark.usefixtures("bundle")


@pytest.fixture(scope="module")
def source(bundle, tmp_path_factory):
    return checkpoints.write_checkpoint(
        tmp_path_factory.mktemp("hub") / "source",
        checkpoints.random_moe(experts=16, hidden=256, inter=256),
        checkpoints.MODELOPT_CONFIG,
        shard_of=lambda name: f"weights/{checkpoints.by_layer(name)}",
    )


PUSH_AND_INSPECT = f"""
import json, sys
from finegrained_kernels.checkpoint import CheckpointError, inspect, push
print(push({{root!r}}, "{REPO}"))
print(json.dumps(inspect("{REPO}").to_json()))
try:
    inspect("acme/absent")
except CheckpointError as error:
    print(str(error).splitlines()[0])
"""


@pytest.mark.parametrize("layout", ["hf", "container"])
def test_push_then_inspect(source, tmp_path, run_python, layout):
    small = tmp_path / "small"
    compress(source, small, layout=layout)
    (small / ".cache").mkdir()
    (small / ".cache" / "private").write_text("")
    with ModelHub() as hub:
        code = PUSH_AND_INSPECT.format(root=str(small))
        result = run_python(code, HF_ENDPOINT=hub.url, HF_TOKEN="hf_test", HF_HUB_DISABLE_XET="1")
    (small / ".cache" / "private").unlink()
    url, report, refusal = result.stdout.strip().splitlines()
    assert url.endswith(COMMIT)
    assert {name: hashlib.sha256(content).hexdigest() for name, content in hub.files.items()} == checkpoints.tree(small)
    assert hub.sent < sum(map(len, hub.files.values())) / 2  # headers, not data
    assert refusal.startswith("acme/absent:")

    here = json.loads(json.dumps(inspect(small).to_json()))
    assert json.loads(report) == here | {"name": REPO}


def test_what_is_not_a_finished_compressed_checkpoint_is_not_pushed(source, tmp_path):
    small = tmp_path / "small"
    compress(source, small)
    (small / ".incomplete").mkdir()
    with pytest.raises(CheckpointError, match="not finished"):
        push(small, REPO)
    (small / ".incomplete").rmdir()
    checkpoints.edit_json(small / "config.json", lambda config: config.pop("quantization_config"))
    with pytest.raises(CheckpointError, match="has compressed scales, but is not marked as compressed"):
        push(small, REPO)
    with pytest.raises(CheckpointError, match="is not compressed; do that first: finegrained-kernels compress"):
        push(source, REPO)
