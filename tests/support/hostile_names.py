"""Names in a downloaded checkpoint that lead out of it: none may be opened or written.

python tests/support/hostile_names.py DIRECTORY SCRATCH, where DIRECTORY has a compressed checkpoint called "small"
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import sys
import threading
from pathlib import Path

from finegrained_kernels.checkpoint import CheckpointError, inspect, restore


class Opened:
    """Paths that this process opens, makes, moves or removes, recorded from Python's own audit events."""

    EVENTS = ("open", "os.mkdir", "os.rename", "os.remove", "os.link", "os.symlink", "os.truncate", "os.chmod")

    def __init__(self) -> None:
        self.paths: set[str] | None = None
        sys.addaudithook(self._audit)

    def _audit(self, event: str, arguments: tuple) -> None:
        if self.paths is not None and event in self.EVENTS:
            self.paths.update(os.path.abspath(os.fsdecode(a)) for a in arguments[:2] if isinstance(a, str | bytes))


PIECES = [
    "victim.json",
    "..",
    "..",
    "/",
    "/",
    "//",
    ".",
    "\\",
    "C:",
    "\0",
    "\n",
    "é",
    "a",
    "~",
    "\ud834",
    "csf_digests",
]


def hostile_names(count: int, outside: Path) -> list[str]:
    """Half of the names lead to a file that exists outside; the others are made of what confuses path code."""
    rng = random.Random(16)
    certain = ["../victim.json", "sub/../../victim.json", "./../victim.json", f"{outside}/victim.json"]
    certain += [
        f"{'sub/' * n}{'../' * (n + 1)}{end}" for n in range(8) for end in ("victim.json", "victim.safetensors")
    ]
    others = ["".join(rng.choices(PIECES, k=rng.randint(1, 8))) for _ in range(count // 2)]
    return certain + rng.choices(certain, k=count - len(others) - len(certain)) + others


def spoiled(small: Path, field: str, name: str) -> tuple[Path, bytes]:
    """A file of a checkpoint, and its text with a name inserted and a digest that fits."""
    path = small / "csf_digests" / "job.json"
    if field == "index":
        path = small / "model.safetensors.index.json"
    elif field == "record":
        path = small / "csf_digests" / "shards" / "sub" / "model-00001-of-00003.safetensors.json"
    document = json.loads(path.read_text())
    if field == "record":
        document["file"] = name
    elif field == "index":
        document["weight_map"][next(iter(document["weight_map"]))] = name
    elif field == "shards":
        document["shards"][name] = name
    else:
        document[field][name] = hashlib.sha256(b"{}").hexdigest()
    if "digest" in document:
        del document["digest"]
        text = json.dumps(document, ensure_ascii=False).encode("utf-8", "replace")
        document["digest"] = hashlib.sha256(text).hexdigest()
    text = json.dumps(document, indent=1, ensure_ascii="\ud834" in name) + "\n"
    return path, text.encode()


def names_lead_nowhere(opened: Opened, made: Path, tmp_path: Path, field: str, count: int = 100) -> None:
    sandbox = tmp_path / "sandbox"
    small, out = sandbox / "small", sandbox / "out"
    shutil.copytree(made / "small", small)
    for victim in (sandbox / "victim.json", sandbox / "victim.safetensors", tmp_path / "victim.json"):
        victim.write_text("{}")
    named = 0
    for name in hostile_names(count, tmp_path):
        path, content = spoiled(small, field, name)
        before = path.read_bytes()
        path.write_bytes(content)
        opened.paths = set()
        text = ""
        try:
            for call, *arguments in ((restore, small, out), (inspect, small)):
                try:
                    call(*arguments)
                except CheckpointError as error:
                    text += str(error)
        finally:
            paths, opened.paths = opened.paths, None
        assert text.isprintable()
        named += "names the file" in text or "is of the file" in text
        ours = (path for path in map(Path, paths) if path.is_relative_to(tmp_path))
        assert all(any(path.is_relative_to(inside) for inside in (small, out)) for path in ours), ascii(name)
        path.write_bytes(before)
        shutil.rmtree(out, ignore_errors=True)
    assert named >= count // 2, "refused for another reason, as a digest that does not fit"


def main() -> None:
    sys.settrace(None)
    threading.settrace(None)
    opened = Opened()
    for field in ("rewritten", "copied", "shards", "record", "index"):
        names_lead_nowhere(opened, Path(sys.argv[1]), Path(sys.argv[2], field), field)


if __name__ == "__main__":
    main()
