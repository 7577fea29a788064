"""Commands on checkpoints that are killed at random moments, and run again.

A process that has imported everything, but has no threads yet, forks the runs that it kills; otherwise, each would take
seconds. This module is also that process's program.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from safetensors import safe_open

ROOT = Path(__file__).resolve().parent.parent.parent
SEED = 20
KILLS = 20


def kill_and_repeat(name: str, source: Path, root: Path, **options: str) -> list[int]:
    """Kill the command `name` of `finegrained_kernels.checkpoint` KILLS times while it writes to `root / <number>`, and
    run it again there each time. Returns how many files had their final names at each kill; all of them were whole."""
    command = [sys.executable, __file__, name, str(source), str(root), json.dumps(options)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"seed {SEED}\n{done.stdout}\n{done.stderr}"
    return json.loads(done.stdout.splitlines()[-1])


def forked(call: Callable[[], object]) -> int:
    """Fork a process that makes the call, and exits with 0, or with 1 if the call raises."""
    child = os.fork()
    if child == 0:
        try:
            call()
        except BaseException as error:
            print(repr(error), file=sys.stderr, flush=True)
            os._exit(1)
        os._exit(0)
    return child


def status(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def count_whole(destination: Path) -> int:
    """How many files have their final names; checks that each of them can be read."""
    finished = [path for path in destination.rglob("*") if path.is_file() and ".incomplete" not in path.parts]
    for path in finished:
        if path.suffix == ".safetensors":
            with safe_open(path, "pt") as file:
                assert file.keys()
        elif path.suffix == ".json":
            json.loads(path.read_text())
    return len(finished)


def main() -> None:
    import torch

    from finegrained_kernels import checkpoint, load

    name, source, root, options = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]), json.loads(sys.argv[4])
    torch.set_num_threads(1)
    load()

    def start(destination: Path) -> int:
        return forked(lambda: getattr(checkpoint, name)(source, destination, jobs=2, **options))

    began = time.perf_counter()
    assert status(start(root / "timed")) == 0
    duration = time.perf_counter() - began
    shutil.rmtree(root / "timed")
    moments, counts = random.Random(SEED), []
    for kill in range(KILLS):
        child = start(root / str(kill))
        time.sleep(moments.random() * duration)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        counts.append(count_whole(root / str(kill)))
        had_finished = counts[-1] > 0 and not (root / str(kill) / ".incomplete").exists()
        repeated = status(start(root / str(kill)))
        assert repeated == 0 or (had_finished and name != "compress"), f"kill {kill}"  # others refuse what is finished
    print(json.dumps(counts))


if __name__ == "__main__":
    main()
