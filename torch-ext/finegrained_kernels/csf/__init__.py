"""CSF: lossless compressed NVFP4 scale planes, from wire form to resident form to bytes."""

from __future__ import annotations
