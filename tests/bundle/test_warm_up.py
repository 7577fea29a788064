"""`warm_up` compiles what launches would compile, so that they find it in Triton's cache, and leaves the rest alone.

Here it compiles for an H200 that is only described to it: there is no GPU, and its workers see none on any machine.
That programs find what it compiles is tested in test_warmed_programs.py.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="needs triton")

from told_gpu import TOLD, beside_an_h200

E, H, I, TOP_K = 4, 256, 128, 2  # noqa: E741


def make_experts(bundle, device: str = "meta"):
    def bytes_(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.uint8, device=device)

    scales = [bytes_(E, 2 * I, H // 16), bytes_(E, H, I // 16)]
    globals_ = [torch.ones(E, device=device) for _ in range(2)]
    scales = [one.view(torch.float8_e4m3fn) for one in scales]
    return bundle.NVFP4Experts(bytes_(E, 2 * I, H // 2), bytes_(E, H, I // 2), *scales, *globals_)


@pytest.fixture
def warming(bundle, monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    return beside_an_h200(bundle, monkeypatch)


def test_without_a_gpu_nothing_is_done(bundle, monkeypatch):
    monkeypatch.setattr(subprocess, "Popen", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert bundle.warm_up(make_experts(bundle)) == 0
    assert bundle.warm_up(make_experts(bundle, "cpu")) == 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"tokens": [0, 3]}, "tokens: expected positive numbers, got 0"),
        ({"formats": ["fp8"]}, "formats: expected None or 'bf16', got 'fp8'"),
    ],
)
def test_what_is_refused(bundle, arguments, said):
    with pytest.raises(ValueError, match=said):
        bundle.warm_up(make_experts(bundle), **arguments)
    with pytest.raises(TypeError, match="layers: expected NVFP4Experts or pairs of weight and scales, got str"):
        bundle.warm_up(["text"])
    with pytest.raises(TypeError, match=r"index_dtype: expected torch.int32 or torch.int64, got torch.int16"):
        bundle.warm_up(make_experts(bundle), index_dtype=torch.int16)


def test_a_worker_that_fails_says_why(bundle, warming, monkeypatch):
    monkeypatch.setattr(warming, "_facts_of", lambda device: {})
    with pytest.raises(RuntimeError, match=r"compiling kernels ahead failed: (?s:.*)KeyError: 'capability'"):
        bundle.warm_up(make_experts(bundle), tokens=[1], formats=["bf16"], max_workers=1)


def test_a_worker_that_says_nothing(bundle, warming, monkeypatch):
    monkeypatch.setattr(warming.sys, "executable", shutil.which("false"))
    said = r"^compiling kernels ahead failed: the program that compiles them ended with status 1$"
    with pytest.raises(RuntimeError, match=said):
        bundle.warm_up(make_experts(bundle), tokens=[1])


def test_rows_too_long_to_be_read_compressed(bundle, warming):
    """Tiles have no room for their scales, so calls decode them first, with kernels that are compiled too."""
    planes = torch.full((1, 64, 12288 // 16), 0x38, dtype=torch.uint8)
    fixed, exceptions = bundle.compress_nvfp4_csf_scales(planes)
    scales = bundle.prepare_nvfp4_csf_scales(fixed, exceptions, num_rows=64, num_cols=12288 // 16)
    weight = torch.empty(64, 12288 // 2, dtype=torch.uint8)
    assert bundle.warm_up((weight, scales), tokens=[64], formats=["bf16"], max_workers=1) > 1


def states_of_group(leader: int) -> set[str]:
    states = set()
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, group = path.read_text().rpartition(")")[2].split()[:3]
            states |= {state} if group == str(leader) else set()
    return states


def test_an_interruption_ends_every_process(bundle, warming, monkeypatch):
    started: list[subprocess.Popen] = []

    class Popen(subprocess.Popen):
        def __init__(self, *arguments, **options) -> None:
            super().__init__(*arguments, **options)
            started.append(self)

    def interrupt(done: int, total: int) -> None:
        assert 0 < done < total
        raise KeyboardInterrupt

    monkeypatch.setattr(subprocess, "Popen", Popen)
    with pytest.raises(KeyboardInterrupt):
        bundle.warm_up(make_experts(bundle), tokens=[1, 100], max_workers=2, progress=interrupt)
    (process,) = started
    ends = time.monotonic() + 30
    while states_of_group(process.pid) - {"Z"} and time.monotonic() < ends:
        time.sleep(0.05)
    assert states_of_group(process.pid) <= {"Z"}


@pytest.mark.skipif(not hasattr(os, "O_DIRECT"), reason="needs pipes that keep writes apart, which Linux has")
def test_lines_of_several_processes_do_not_mix(bundle, warming, monkeypatch):
    """Each line is one write, even if Python does not buffer."""
    writes: list[bytes] = []

    class Popen(subprocess.Popen):
        def __init__(self, *arguments, **options) -> None:
            readable, writable = os.pipe2(os.O_DIRECT)
            super().__init__(*arguments, **{**options, "stdout": writable})
            os.close(writable)
            self.stdout = self.read(readable)

        def read(self, readable: int):
            while data := os.read(readable, 1 << 16):
                writes.append(data)
                yield writes[-1]

    monkeypatch.setattr(subprocess, "Popen", Popen)
    monkeypatch.setenv("PYTHONUNBUFFERED", "1")
    assert bundle.warm_up(make_experts(bundle), tokens=[1], formats=["bf16"], max_workers=2)
    assert len(writes) > 2 and all(line.endswith(b"\n") for line in writes)


SCRIPT = f"""
import subprocess, sys
from pathlib import Path
sys.path.insert(0, {str(Path(__file__).resolve().parent.parent / "support")!r})
import pytest, torch, triton
from kernels import get_kernel
from told_gpu import beside_an_h200

print("once")
csf = get_kernel("kernels-community/finegrained-kernels", version=1)
beside_an_h200(csf, pytest.MonkeyPatch())
weight = torch.empty(64, 64, dtype=torch.uint8, device="meta")
scales = torch.empty(64, 8, dtype=torch.float8_e4m3fn, device="meta")
told = []
arguments = dict(tokens=[1], formats=["bf16"], progress=lambda *now: told.append(now), max_workers=2)
count = csf.warm_up((weight, scales), **arguments)
binaries = sorted(Path(triton.knobs.cache.dir).glob("*/*.cubin"))
print(count == len(binaries) > 0, told == [(i + 1, count) for i in range(count)])
print(not any(Path(triton.knobs.cache.dir).glob("*/*.ptx")))
binaries[0].rename(binaries[0].with_suffix(".lost"))
print(csf.warm_up([(weight, scales), (weight, scales)], **arguments) == count, binaries[0].exists())
subprocess.Popen = None  # nothing is started where all is there
print(csf.warm_up((weight, scales), **arguments) == count, told[-1] == (count, count))
"""


@pytest.mark.slow
def test_kernels_are_compiled_once_and_found_again_by_a_script_that_runs_once(bundle_dir, tmp_path):
    """The script has no main guard; every kernel is reported; one that is missing in the cache is compiled again."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    environment = os.environ | {
        "TRITON_CACHE_DIR": str(tmp_path / "cache"),
        "LOCAL_KERNELS": f"kernels-community/finegrained-kernels={bundle_dir}",
    }
    done = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["once", *["True"] * 7]


def test_every_number_of_tokens_launches_what_was_found(bundle, warming, monkeypatch):
    """Calls with all numbers of tokens up to 4,096 launch only kernels that were found with the few chosen numbers."""
    calls = importlib.import_module(f"{bundle.__name__}.warming_calls")
    task = {
        "layers": [warming._describe(make_experts(bundle), TOP_K, torch.bfloat16)], "formats": ["bf16", None],
        "tokens": [*range(1, 20), *range(20, 4097, 211)], "index_dtype": "int64",
    }  # fmt: skip
    few = calls.find_kernels(task, TOLD)
    each = itertools.count()
    monkeypatch.setattr(calls, "config_chooser", lambda *arguments: lambda rows: next(each))
    assert len(few) > 5
    assert calls.find_kernels(task, TOLD).keys() == few.keys()


def test_looking_for_kernels_leaves_nothing_behind(bundle, warming):
    """Calls are made in the user's program, where no constant and no later tensor may be a placeholder."""
    task = {
        "layers": [warming._describe(make_experts(bundle), TOP_K, torch.bfloat16)], "formats": ["bf16", None],
        "tokens": [1, 20], "index_dtype": "int64",
    }  # fmt: skip
    calls, constants, recording = (
        importlib.import_module(f"{bundle.__name__}.{name}") for name in ("warming_calls", "constants", "recording")
    )
    before = dict(constants._constants)
    assert calls.find_kernels(task, TOLD)
    assert constants._constants == before
    assert type(torch.empty(2)) is torch.Tensor and recording._current.note is None


def test_the_default_dtype_makes_no_difference(bundle, warming):
    """A model that is loaded meanwhile may have set it, for all threads."""
    calls = importlib.import_module(f"{bundle.__name__}.warming_calls")
    weight = torch.empty(64, 64, dtype=torch.uint8), torch.empty(64, 8, dtype=torch.float8_e4m3fn)
    layers = [warming._describe(layer, TOP_K, torch.bfloat16) for layer in (make_experts(bundle), weight)]
    task = {"layers": layers, "formats": ["bf16", None], "tokens": [1, 20], "index_dtype": "int64"}
    kernels = calls.find_kernels(task, TOLD).keys()
    try:
        torch.set_default_dtype(torch.bfloat16)
        assert calls.find_kernels(task, TOLD).keys() == kernels
    finally:
        torch.set_default_dtype(torch.float32)


def test_indices_of_one_dtype(bundle, warming):
    """Kernels that read indices are compiled for the dtype that was asked for."""
    layers = [warming._describe(make_experts(bundle), TOP_K, torch.bfloat16)]
    calls = importlib.import_module(f"{bundle.__name__}.warming_calls")
    dtypes = {}
    for name in ("int32", "int64"):
        task = {"layers": layers, "formats": ["bf16"], "tokens": [1, 20, 5000], "index_dtype": name}
        jobs = calls.find_kernels(task, TOLD).values()
        dtypes[name] = {job[3][0].dtype for job in jobs if job[1] in ("schedule_kernel", "count_kernel")}
    assert dtypes == {"int32": {"torch.int32"}, "int64": {"torch.int64"}}
