"""Puts the built bundle into the wheel, so that an installed package can load it without the hub."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class BundleHook(BuildHookInterface):
    """Builds the bundle for each standard wheel; an editable install uses the checkout's own ``build/`` instead."""

    def initialize(self, version: str, build_data: dict) -> None:
        if version == "editable":
            return
        sys.path.insert(0, str(Path(self.root, "scripts")))
        from build_bundle import build

        self._staging = tempfile.TemporaryDirectory()
        built = Path(self._staging.name, "build")
        build(Path(self.root), built)
        build_data["force_include"][str(built)] = "finegrained_kernels/_bundle/build"

    def finalize(self, version: str, build_data: dict, artifact_path: str) -> None:
        if version != "editable":
            self._staging.cleanup()
