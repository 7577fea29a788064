"""The examples run, and print what they promise."""

from __future__ import annotations

import runpy

import pytest
import torch

pytest.importorskip("transformers", reason="needs transformers, the extra [transformers]")

from conftest import ROOT
from moe_models import write_checkpoints
from numeric import DEVICES


@pytest.mark.parametrize("device", DEVICES)
def test_generate(bundle, tmp_path, capsys, device):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    path = write_checkpoints(tmp_path, "qwen3_moe")["csf"]
    main = runpy.run_path(str(ROOT / "examples" / "generate.py"))["main"]
    main([str(path), "--device", device, "--tokens", "8"])
    torch.set_num_threads(threads)
    lines = capsys.readouterr().out.splitlines()[-4:]
    assert [line.split()[0] for line in lines] == ["dense", "staged", "fused", "all"]
    scales = [float(line.split()[2]) for line in lines[:3]]
    assert scales[1] == scales[2] < scales[0]
    assert lines[3] == "all generate the same tokens"
