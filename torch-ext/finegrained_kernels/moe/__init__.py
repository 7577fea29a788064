"""The mixture-of-experts layer, from routing to the weighted sum, and the scratch that its layers share."""

from __future__ import annotations

from .layer import is_batched

__all__ = ["is_batched"]
