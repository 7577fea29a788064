"""Calls that look right but are wrong, and settings that must not matter."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch

from numeric import DEVICES, assert_same, make_stack

every_device = pytest.mark.parametrize("device", DEVICES)


def prepared(bundle, device: str = "cpu"):
    stack = make_stack([7, 0, 19], 32, 10, seed=1).to(device)
    return stack, bundle.prepare_nvfp4_csf_scales(stack.fixed, stack.words, **stack.geometry)


@every_device
@pytest.mark.parametrize("ambient", ["meta", "cpu"])
def test_the_default_device_does_not_matter(bundle, device, ambient):
    """Models are built under `torch.device("meta")`."""
    stack, scales = prepared(bundle, device)
    with torch.device(ambient):
        fixed, words = bundle.compress_nvfp4_csf_scales(stack.planes)
        again = bundle.prepare_nvfp4_csf_scales(fixed, words, **stack.geometry)
        starts = torch.tensor([0, 1, 1, 2], dtype=torch.int32, device=device)
        results = [
            bundle.decompress_nvfp4_csf_scales(scales),
            bundle.decompress_nvfp4_csf_scales(again),
            bundle.decompress_nvfp4_csf_scales(again, swizzled=True),
            bundle.decompress_nvfp4_csf_scales(again, expert_start=starts),
        ]
    assert_same(fixed, stack.fixed, "fixed")
    for result in results[:2]:
        assert_same(result, stack.planes, "decoded")
    assert_same(bundle.unswizzle_mx_scales(results[2], num_rows=32, num_cols=10), stack.planes, "swizzled")
    assert_same(results[3][[0, 2]], stack.planes[[0, 2]], "routed")


@pytest.mark.parametrize(
    "arrange",
    [
        lambda fixed: [plane.view(2, -1).t() for plane in fixed],
        lambda fixed: [plane.view(-1, 1) for plane in fixed],
        lambda fixed: [plane.view(4, -1) for plane in fixed],
        lambda fixed: fixed.view(3, 2, -1).mT,
        lambda fixed: fixed.view(6, -1),
        lambda fixed: fixed.t(),
        lambda fixed: fixed.view(-1),
    ],
    ids=["transposed", "column", "quarters", "stack transposed", "slabs", "bytes first", "flat"],
)
def test_a_stream_of_the_right_size_and_another_shape(bundle, arrange):
    stack, _ = prepared(bundle)
    with pytest.raises(ValueError, match="fixed"):
        bundle.prepare_nvfp4_csf_scales(arrange(stack.fixed), stack.words, **stack.geometry)


@every_device
def test_the_wire_form_is_a_copy(bundle, device):
    stack, scales = prepared(bundle, device)
    fixed, words = scales.to_wire()
    fixed.fill_(0)
    words[2].view(torch.int32).add_(1)
    assert_same(bundle.decompress_nvfp4_csf_scales(scales), stack.planes, "decoded")


@every_device
@pytest.mark.parametrize("max_active", [0, 1, 2, 3, 1000])
def test_max_active_is_only_a_hint(bundle, device, max_active):
    """Even when it is wrong."""
    stack, scales = prepared(bundle, device)
    starts = torch.tensor([0, 2, 2, 5], dtype=torch.int32, device=device)
    workspace = torch.full((stack.planes.numel(),), 0xA5, dtype=torch.uint8, device=device)
    bundle.decompress_nvfp4_csf_scales(scales, workspace=workspace, expert_start=starts, max_active=max_active)
    expected = stack.planes.clone()
    expected[1] = 0xA5
    assert_same(workspace.view(expected.shape), expected, "decoded")


def test_wrong_types_are_value_errors_that_name_the_argument(bundle):
    _, scales = prepared(bundle)
    decode = bundle.decompress_nvfp4_csf_scales
    for call, name in (
        (lambda: decode(scales, workspace=bytearray(2000)), "workspace"),
        (lambda: decode(scales, expert_start=[0, 1, 2, 3]), "expert_start"),
        (lambda: decode(scales, max_active=-1), "max_active"),
        (lambda: decode(scales, max_active=1.5), "max_active"),
        (lambda: decode(None), "scales"),
        (lambda: bundle.csf_workspace_size(torch.zeros(1, 2, 3)), "scales"),
        (lambda: bundle.swizzle_mx_scales(np.zeros((2, 2))), "scales"),
        (lambda: bundle.unswizzle_mx_scales(None, num_rows=1, num_cols=2), "swizzled"),
        (lambda: bundle.prepare_nvfp4_csf_scales(None, None, num_rows=16, num_cols=2), "fixed"),
        (lambda: bundle.prepare_nvfp4_csf_scales([None], [None], num_rows=16, num_cols=2), "fixed"),
        (lambda: bundle.prepare_nvfp4_csf_scales([], [], num_rows="16", num_cols=2), "num_rows"),
        (lambda: bundle.prepare_nvfp4_csf_scales([], [], num_rows=16, num_cols=True), "num_cols"),
    ):
        with pytest.raises(ValueError, match=name):
            call()


def test_numpy_integers_are_integers(bundle):
    stack, _ = prepared(bundle)
    scales = bundle.prepare_nvfp4_csf_scales(stack.fixed, stack.words, num_rows=np.int64(32), num_cols=np.int32(10))
    assert_same(bundle.decompress_nvfp4_csf_scales(scales), stack.planes, "decoded")


def test_scales_compare_by_identity_and_have_no_other_dtype(bundle):
    _, scales = prepared(bundle)
    assert scales in [scales]
    assert scales != copy.deepcopy(scales)
    with pytest.raises((RuntimeError, TypeError)):
        scales.to(torch.float16)


@every_device
def test_scales_are_shown_in_a_line(bundle, device):
    """Without their bytes, which would be hundreds of lines."""
    _, scales = prepared(bundle, device)
    place = scales.device
    assert repr(scales) == f"NVFP4CSFScales(3x32x10, {scales.nbytes} bytes, 26 exceptions, {place})"
    assert str([scales]) == f"[{scales!r}]"
