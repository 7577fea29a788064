"""`make bench`: runs every benchmark that this machine can run, one after another, each in a separate process.

    python benchmarks/run.py --out benchmarks/local [--only csf_cpu ...]

A benchmark is a script here that writes the CSV file of its name with `--out FILE`. All need a CUDA GPU, except those
in `ON_CPU`.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

HERE = Path(__file__).resolve().parent
ON_CPU = {"csf_cpu": [], "stored_scales": [], "checkpoint_speed": ["--gigabytes", "1", "--directory"]}
"""Arguments of those that run anywhere; a directory for large files is added."""

FILE_NAMES = {"checkpoint_speed": "checkpoints"}
HELPERS = {
    *("cases", "figures", "harness", "measured", "model_parts", "moe_cases"),
    *("prefetch_timeline", "read_sweep", "report", "run", "scale_planes"),
}


def scripts() -> list[str]:
    """Names of the benchmarks, without modules that they share, tuning, and what `kernels benchmark` runs."""
    names = sorted(path.stem for path in HERE.glob("*.py"))
    return [name for name in names if name not in HELPERS and not name.startswith(("tune_", "benchmark"))]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="directory for the CSV files")
    parser.add_argument("--only", nargs="+", choices=scripts(), default=scripts())
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    failed = []
    for name in arguments.only:
        if name not in ON_CPU and not torch.cuda.is_available():
            print(f"{name}: skipped, needs a CUDA GPU", flush=True)
            continue
        print(f"{name}:", flush=True)
        with tempfile.TemporaryDirectory() as directory:
            options = ON_CPU.get(name, [])
            options = [*options, directory] if options and options[-1] == "--directory" else options
            out = arguments.out / f"{FILE_NAMES.get(name, name)}.csv"
            command = [sys.executable, str(HERE / f"{name}.py"), "--out", str(out), *options]
            if subprocess.run(command, check=False).returncode:
                failed.append(name)
    for name in failed:
        print(f"{name}: failed", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
