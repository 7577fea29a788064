"""What no routed row uses never reaches a result: unused tokens and experts, padding, stale outputs and scratch."""

from __future__ import annotations

import pytest

from numeric import DEVICES
from poisoned import check_unused_values


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("gate", [False, True], ids=["plain", "gate"])
@pytest.mark.parametrize("activation_format", ["bf16", None], ids=["w4a16", "w4a4"])
@pytest.mark.parametrize("swizzled", [False, True], ids=["dense", "swizzled"])
@pytest.mark.parametrize(("cols", "depth"), [(80, 192), (48, 160), (272, 576)])
def test_unused_values_change_nothing(bundle, device, gate, activation_format, swizzled, cols, depth):
    check_unused_values(bundle, device, gate, activation_format, swizzled, cols, depth)
