"""The mixture-of-experts layer, from routing to the weighted sum, and the scratch that its layers share."""

from __future__ import annotations
