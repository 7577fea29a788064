"""API pages of the host package and of the bundle, from their docstrings. A warning is an error.

python scripts/build_docs.py [--out build-docs]
"""

from __future__ import annotations

import argparse
import importlib
import shutil
import sys
import tempfile
import warnings
from pathlib import Path

import pdoc

from build_bundle import build

ROOT = Path(__file__).resolve().parent.parent
MODULES = (
    "finegrained_kernels",
    "finegrained_kernels.checkpoint",
    "finegrained_kernels.integrations.transformers",
)
BUNDLE = "finegrained_kernels_bundle"
"""The bundle's name in the pages; when it is loaded, its module is named after its content."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=ROOT / "build-docs", help="directory to replace")
    out = parser.parse_args().out
    if out.exists():
        shutil.rmtree(out)
    with tempfile.TemporaryDirectory() as directory:
        build(ROOT, Path(directory, "build"))
        Path(directory, "build", "torch-cpu").rename(Path(directory, BUNDLE))
        sys.path[:0] = [directory, str(ROOT)]
        package = importlib.import_module(MODULES[0])
        for name in package.__all__:
            getattr(package, name)  # pdoc does not see a name before its first use
        warnings.filterwarnings("error", module=r"pdoc\b")
        pdoc.render.configure(
            docformat="google", footer_text="finegrained-kernels", template_directory=ROOT / "scripts" / "api_pages"
        )
        pdoc.pdoc(*MODULES, BUNDLE, output_directory=out)
    pages = sorted(path.relative_to(out).as_posix() for path in out.rglob("*.html"))
    print(f"{len(pages)} pages in {out}")


if __name__ == "__main__":
    main()
