"""Build the hub bundle: ``build/torch-<backend>/`` from ``build.toml`` and ``torch-ext/``.

The hub's own builder runs under nix; this is only its torch-noarch step, for a checkout, the wheel and the tests. It
copies the source, generates ``_ops.py`` and ``metadata.json``, and checks both with the code that loads them. The same
tree gives the same bytes: they do not depend on the clock, the machine or the git state.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import json
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path, PurePosixPath

from kernels.compat import tomllib

from bundle_rules import violations

try:
    from kernels._rust import Build, Digest, DigestAlgorithm, Metadata
except ImportError:  # kernels 0.16 has the readers in a separate package, and none for build.toml
    from kernels_data import Digest, DigestAlgorithm, Metadata

    Build = None

UID_DIGITS = 12
OPS_TEMPLATE = '''\
import torch

ops = torch.ops.{id}


def add_op_namespace_prefix(op_name: str):
    """
    Prefix op by namespace.
    """
    return f"{id}::{{op_name}}"
'''


class BundleError(ValueError):
    """The tree cannot be built into a bundle; the message lists everything that is wrong with it."""


def build(root: Path, out: Path) -> list[Path]:
    """Build every variant that ``root/build.toml`` names into ``out`` and return their directories.

    ``out`` is replaced as a whole, by a rename, so it never contains half a build, or files of an earlier one.

    Raises:
        BundleError: ``build.toml`` or the source breaks a rule, or ``out`` contains something other than a bundle.
    """
    config = _read_config(root)
    module = config["name"].replace("-", "_")
    sources = _read_sources(root / "torch-ext" / module, config["extensions"])
    if problems := violations(module, sources):
        raise BundleError("\n".join([f"torch-ext/{module} cannot be built:", *problems]))
    if out.exists() and any(not entry.name.startswith("torch-") for entry in out.iterdir()):
        raise BundleError(f"{out} holds more than a bundle; it would be replaced, so give another directory")

    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}-") as staging:
        fresh = Path(staging, "fresh")
        for backend in config["backends"]:
            _write_variant(fresh / f"torch-{backend}", backend, config, sources)
        if out.exists():
            out.rename(Path(staging, "stale"))
        fresh.rename(out)
    return sorted(out.iterdir())


def _read_config(root: Path) -> dict:
    """The part of ``build.toml`` that a torch-noarch build needs, after kernel-builder's own parser has accepted it."""
    if Build is not None:
        try:
            Build.open(root)
        except ValueError as error:
            raise BundleError(f"{root / 'build.toml'}: {error}") from error
    document = tomllib.loads((root / "build.toml").read_text())
    general = document["general"]
    if unknown := (general.keys() - {"name", "version", "edition", "license", "backends", "hub"}) | (
        document.keys() - {"general", "torch-noarch"}
    ):
        raise BundleError(f"build.toml: {sorted(unknown)} would be left out of the metadata by this builder")
    return {
        "name": general["name"],
        "version": general["version"],
        "license": general["license"],
        "backends": general["backends"],
        "extensions": document["torch-noarch"]["pyext"],
    }


def _read_sources(directory: Path, extensions: list[str]) -> dict[str, bytes]:
    """Contents by path relative to ``directory``; bytecode and hidden directories are not source."""
    sources = {}
    for path in sorted(directory.rglob("*")):
        relative = path.relative_to(directory)
        hidden = any(part == "__pycache__" or part.startswith(".") for part in relative.parts)
        if path.is_file() and not hidden and path.suffix.lstrip(".") in extensions:
            sources[relative.as_posix()] = path.read_bytes()
    return sources


def _write_variant(directory: Path, backend: str, config: Mapping, sources: Mapping[str, bytes]) -> None:
    metadata = {
        "name": config["name"],
        "version": config["version"],
        "license": config["license"],
        "python-depends": [],
        "kernel-depends": [],
        "backend": {"type": backend},
    }
    identifier = f"_{config['name'].replace('-', '_')}_{backend}_{_uid(metadata, sources)}"
    files = {**sources, "_ops.py": OPS_TEMPLATE.format(id=identifier).encode()}
    for path, content in files.items():
        target = directory / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content)

    digest = Digest.hash_variant(DigestAlgorithm.SHA256, directory)
    metadata |= {"id": identifier, "digest": {"algorithm": "sha256", "files": digest.files}}
    (directory / "metadata.json").write_text(json.dumps(metadata, indent=2, sort_keys=True) + "\n")
    _check_variant(directory, identifier, files)


def _uid(metadata: Mapping, sources: Mapping[str, bytes]) -> str:
    """A name for this content, under which kernels imports a variant and registers its operators."""
    hashes = {path: hashlib.sha256(content).hexdigest() for path, content in sources.items()}
    content = json.dumps([metadata, hashes, OPS_TEMPLATE], sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()[:UID_DIGITS]


def _check_variant(directory: Path, identifier: str, files: Mapping[str, bytes]) -> None:
    """Read the variant back as a loader does, and compare it with hashes of what should have been written."""
    metadata = Metadata.read_from_file(directory / "metadata.json")
    metadata.digest.validate(Digest.hash_variant(metadata.digest.algorithm, directory))
    expected = {path: base64.b64encode(hashlib.sha256(content).digest()).decode() for path, content in files.items()}
    if metadata.id != identifier or metadata.digest.files != expected:
        raise BundleError(f"{directory} does not read back as it was written")


def main() -> int:
    root = Path(__file__).resolve().parent.parent
    parser = argparse.ArgumentParser(description="Build the hub bundle of this checkout.")
    parser.add_argument("--out", type=Path, default=root / "build", help="directory to replace (default: %(default)s)")
    out = parser.parse_args().out
    try:
        variants = build(root, out)
    except BundleError as error:
        print(error, file=sys.stderr)
        return 1
    for variant in variants:
        print(PurePosixPath(out.name, variant.name), Metadata.read_from_file(variant / "metadata.json").id)
    return 0


if __name__ == "__main__":
    sys.exit(main())
