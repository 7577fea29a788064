"""Decoding writes exactly the active planes of the workspace, at any address, and no other byte."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from numeric import DEVICES, POISON, Stack, assert_same, make_stack, oracle_swizzle, to_numpy

GUARD = 64
GEOMETRIES = [(3, 16, 2), (5, 16, 6), (5, 48, 22), (9, 160, 40), (4, 272, 8), (2, 128, 160)]
COUNTS = {  # routed rows an expert, of as many experts as there are
    "all": lambda num_experts: [3] * num_experts,
    "none": lambda num_experts: [0] * num_experts,
    "first": lambda num_experts: [7] + [0] * (num_experts - 1),
    "last": lambda num_experts: [0] * (num_experts - 1) + [1],
    "alternating": lambda num_experts: [expert % 2 for expert in range(num_experts)],
    "uneven": lambda num_experts: [(expert * 5 + 2) % 3 * 100 for expert in range(num_experts)],
}
TAILS = {
    "exact": lambda starts: [],
    "padded": lambda starts: [starts[-1]] * ((1 << len(starts).bit_length()) - len(starts)),
    "other data": lambda starts: [starts[-1] + 5, 0, 2**31 - 1],
}

every_device = pytest.mark.parametrize("device", DEVICES)
both_forms = pytest.mark.parametrize("swizzled", [False, True], ids=["rows", "swizzled"])
every_geometry = pytest.mark.parametrize("geometry", GEOMETRIES, ids=lambda geometry: "x".join(map(str, geometry)))


def prepared(bundle, geometry: tuple[int, int, int], device: str):
    """A stack with exceptions in every second plane, and its resident form."""
    num_planes, num_rows, num_cols = geometry
    most = num_rows * ((num_cols - 2) // 3)
    stack = make_stack(
        [(0, most // 5)[plane % 2] for plane in range(num_planes)], num_rows, num_cols, seed=sum(geometry)
    )
    stack = stack.to(device)
    return stack, bundle.prepare_nvfp4_csf_scales(stack.fixed, stack.words, **stack.geometry)


def make_starts(counts: list[int], tail="exact", device="cpu") -> torch.Tensor:
    starts = np.cumsum([0, *counts]).tolist()
    return torch.tensor(starts + TAILS[tail](starts), dtype=torch.int32, device=device)


class Poisoned:
    """A workspace of `size` bytes, `offset` bytes past an aligned address, between guard bands, all poisoned."""

    def __init__(self, size: int, offset: int, device: str) -> None:
        self.memory = torch.full((GUARD + offset + size + GUARD,), POISON, dtype=torch.uint8, device=device)
        assert self.memory.data_ptr() % 16 == 0
        self.begin, self.size = GUARD + offset, size
        self.workspace = self.memory[self.begin : self.begin + size]

    def check(self, planes: np.ndarray, active: list[bool], name: str) -> None:
        expected = np.full(self.memory.numel(), POISON, np.uint8)
        body = expected[self.begin : self.begin + planes.size].reshape(planes.shape)
        body[active] = planes[active]
        assert_same(self.memory, expected, f"{name}, workspace from byte {self.begin}, {planes.shape[1]} bytes a plane")


def expected_planes(stack: Stack, swizzled: bool) -> np.ndarray:
    return oracle_swizzle(stack.planes) if swizzled else to_numpy(stack.planes).reshape(len(stack.planes), -1)


@every_device
@both_forms
@every_geometry
@pytest.mark.parametrize("counts", [None, *COUNTS])
def test_writes_the_active_planes_and_nothing_else(bundle, device, swizzled, geometry, counts):
    stack, scales = prepared(bundle, geometry, device)
    planes = expected_planes(stack, swizzled)
    size = bundle.csf_workspace_size(scales, swizzled=swizzled)
    assert size == planes.size
    for offset in range(16):
        for tail in ["exact"] if counts is None else TAILS:
            per_expert = [1] * geometry[0] if counts is None else COUNTS[counts](geometry[0])
            starts = None if counts is None else make_starts(per_expert, tail, device)
            poisoned = Poisoned(size, offset, device)
            result = bundle.decompress_nvfp4_csf_scales(
                scales, workspace=poisoned.workspace, expert_start=starts, swizzled=swizzled
            )
            poisoned.check(planes, [count > 0 for count in per_expert], f"{counts} active, {tail} expert_start")
            assert result.data_ptr() == poisoned.workspace.data_ptr() and result.dtype == torch.float8_e4m3fn
            assert result.numel() == size and result.is_contiguous()


@pytest.mark.kernels_ci
@every_device
@every_geometry
def test_swizzled_is_swizzled_rows(bundle, device, geometry):
    stack, scales = prepared(bundle, geometry, device)
    rows = bundle.decompress_nvfp4_csf_scales(scales)
    swizzled = bundle.decompress_nvfp4_csf_scales(scales, swizzled=True)
    assert_same(rows, stack.planes, "rows")
    assert_same(swizzled, bundle.swizzle_mx_scales(rows), "swizzled")
    assert_same(swizzled.reshape(geometry[0], -1), oracle_swizzle(stack.planes), "swizzled by the oracle")
    back = bundle.unswizzle_mx_scales(swizzled, num_rows=geometry[1], num_cols=geometry[2])
    assert_same(back, stack.planes, "unswizzled")


@pytest.mark.kernels_ci
@every_device
@both_forms
def test_a_new_workspace_has_zeros_where_no_expert_is_active(bundle, device, swizzled):
    stack, scales = prepared(bundle, (9, 160, 40), device)
    for counts in COUNTS.values():
        planes = expected_planes(stack, swizzled).copy()
        planes[np.array(counts(9)) == 0] = 0
        starts = make_starts(counts(9), device=device)
        result = bundle.decompress_nvfp4_csf_scales(scales, expert_start=starts, swizzled=swizzled)
        assert_same(result.reshape(9, -1), planes, "decoded")


@every_device
@both_forms
def test_a_larger_workspace_of_any_shape(bundle, device, swizzled):
    stack, scales = prepared(bundle, (5, 48, 22), device)
    size = bundle.csf_workspace_size(scales, swizzled=swizzled)
    workspace = torch.full((3, size), POISON, dtype=torch.uint8, device=device)
    result = bundle.decompress_nvfp4_csf_scales(scales, workspace=workspace, swizzled=swizzled)
    assert_same(result.reshape(5, -1), expected_planes(stack, swizzled), "decoded")
    assert_same(workspace[1:], np.full((2, size), POISON, np.uint8), "beyond the needed size")


REFUSED_WORKSPACES = [
    ("one byte short", lambda w, size: w.view(-1)[: size - 1], "workspace must hold {size} bytes .* got {short}"),
    ("empty", lambda w, size: w.view(-1)[:0], "workspace must hold {size} bytes .* got 0"),
    (
        "float8",
        lambda w, size: w.view(torch.float8_e4m3fn),
        r"workspace must be torch\.uint8, got torch\.float8_e4m3fn",
    ),
    ("int8", lambda w, size: w.view(torch.int8), r"workspace must be torch\.uint8, got torch\.int8"),
    ("strided", lambda w, size: w.view(-1)[::2], r"workspace must be contiguous, got strides \(2,\)"),
    ("transposed", lambda w, size: w.t(), "workspace must be contiguous"),
    ("meta", lambda w, size: w.to("meta"), r"workspace must be on \w+(:0)? like the scales, got meta"),
]
REFUSED_STARTS = [
    ("int64", lambda s: s.long(), r"expert_start must be torch\.int32, got torch\.int64"),
    ("uint32", lambda s: s.view(torch.uint32), r"expert_start must be torch\.int32, got torch\.uint32"),
    ("E entries", lambda s: s[:-1], r"at least 6 entries for 5 planes, got shape \(5,\)"),
    ("2-D", lambda s: s[None], r"expert_start must be 1-D .*, got shape \(1, 6\)"),
    ("strided", lambda s: s.repeat(2)[::2], "expert_start must be 1-D and contiguous"),
    ("meta", lambda s: s.to("meta"), r"expert_start must be on \w+(:0)? like the scales, got meta"),
]


@every_device
@both_forms
@pytest.mark.parametrize(
    "form, message", [case[1:] for case in REFUSED_WORKSPACES], ids=[c[0] for c in REFUSED_WORKSPACES]
)
def test_refused_workspaces_stay_untouched(bundle, device, swizzled, form, message):
    _, scales = prepared(bundle, (5, 48, 22), device)
    size = bundle.csf_workspace_size(scales, swizzled=swizzled)
    memory = torch.full((2, size), POISON, dtype=torch.uint8, device=device)
    with pytest.raises(ValueError, match=message.format(size=size, short=size - 1)):
        bundle.decompress_nvfp4_csf_scales(scales, workspace=form(memory, size), swizzled=swizzled)
    assert_same(memory, np.full((2, size), POISON, np.uint8), "refused workspace")


@every_device
@pytest.mark.parametrize(
    "form, message", [case[1:] for case in REFUSED_STARTS], ids=[case[0] for case in REFUSED_STARTS]
)
def test_refused_expert_starts(bundle, device, form, message):
    _, scales = prepared(bundle, (5, 48, 22), device)
    workspace = torch.full((bundle.csf_workspace_size(scales),), POISON, dtype=torch.uint8, device=device)
    starts = form(make_starts([1, 0, 2, 0, 3], device=device))
    with pytest.raises(ValueError, match=message):
        bundle.decompress_nvfp4_csf_scales(scales, workspace=workspace, expert_start=starts)
    assert_same(workspace, np.full(workspace.shape, POISON, np.uint8), "workspace")


@every_device
def test_one_workspace_serves_stacks_of_other_sizes(bundle, device):
    """Layers may share a workspace: what an earlier, larger stack has left in it never shows."""
    stacks = [prepared(bundle, geometry, device) for geometry in GEOMETRIES]
    size = max(bundle.csf_workspace_size(scales, swizzled=True) for _, scales in stacks)
    workspace = torch.full((size,), POISON, dtype=torch.uint8, device=device)
    for stack, scales in sorted(stacks, key=lambda pair: -pair[0].planes.numel()):
        for swizzled in (True, False):
            result = bundle.decompress_nvfp4_csf_scales(scales, workspace=workspace, swizzled=swizzled)
            assert_same(result.reshape(len(stack.planes), -1), expected_planes(stack, swizzled), "decoded")


@every_device
def test_more_planes_than_a_grid_dimension(bundle, device):
    stack, scales = prepared(bundle, (66_000, 16, 2), device)
    assert_same(bundle.decompress_nvfp4_csf_scales(scales), stack.planes, "decoded")
    starts = make_starts([0] * 65_999 + [1], device=device)
    result = bundle.decompress_nvfp4_csf_scales(scales, expert_start=starts)
    assert_same(result[-1], stack.planes[-1], "last plane")
    assert not result[:-1].view(torch.uint8).any()


@pytest.mark.parametrize(
    "device, backend",
    [
        ("cpu", "aot_eager"),
        pytest.param("cuda", "aot_eager", marks=pytest.mark.gpu),
        pytest.param("cuda", "inductor", marks=pytest.mark.gpu),
    ],
)
def test_compiles_whole_and_once(bundle, device, backend):
    """One graph, without breaks, for every content of `expert_start`; it returns a view of the caller's workspace."""
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    counter = CompileCounterWithBackend(backend)

    @torch.compile(fullgraph=True, backend=counter)
    def decode(scales, workspace, expert_start):
        decoded = bundle.decompress_nvfp4_csf_scales(scales, workspace=workspace, expert_start=expert_start)
        return decoded, decoded.view(torch.uint8) ^ 1

    stack, scales = prepared(bundle, (9, 160, 40), device)
    planes = expected_planes(stack, swizzled=False)
    for counts in COUNTS.values():
        poisoned = Poisoned(planes.size, 0, device)
        decoded, flipped = decode(scales, poisoned.workspace, make_starts(counts(9), device=device))
        poisoned.check(planes, [count > 0 for count in counts(9)], "compiled")
        assert decoded.data_ptr() == poisoned.workspace.data_ptr()
        assert_same(flipped.view(-1), to_numpy(poisoned.workspace) ^ 1, "read by the graph")
    assert counter.frame_count == 1


@pytest.mark.gpu
@both_forms
def test_a_captured_graph_follows_expert_start(bundle, swizzled):
    stack, scales = prepared(bundle, (9, 160, 40), "cuda")
    planes = expected_planes(stack, swizzled)
    starts = make_starts([1] * 9, device="cuda")
    poisoned = Poisoned(planes.size, 3, "cuda")
    arguments = {"workspace": poisoned.workspace, "expert_start": starts, "swizzled": swizzled}
    bundle.decompress_nvfp4_csf_scales(scales, **arguments)  # compiles, which a capture must not
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        bundle.decompress_nvfp4_csf_scales(scales, **arguments)
    for counts in COUNTS.values():
        poisoned.memory.fill_(POISON)
        starts.copy_(make_starts(counts(9)))
        graph.replay()
        poisoned.check(planes, [count > 0 for count in counts(9)], "replayed")


@pytest.mark.gpu
@both_forms
def test_a_stack_past_two_to_the_31_bytes(bundle, swizzled):
    planes = torch.randint(100, 116, (132, 4096, 4096), dtype=torch.uint8, device="cuda")
    planes[:, 0, 0], planes[:, -1, -1] = 0x7F, 0x80
    assert planes.numel() > 1 << 31
    scales = bundle.prepare_nvfp4_csf_scales(*bundle.compress_nvfp4_csf_scales(planes), num_rows=4096, num_cols=4096)
    result = bundle.decompress_nvfp4_csf_scales(scales, swizzled=swizzled).view(torch.uint8)
    for plane in range(0, 132, 131):
        expected = bundle.swizzle_mx_scales(planes[plane]) if swizzled else planes[plane]
        assert torch.equal(result[plane], expected), f"plane {plane}"
    if not swizzled:
        assert torch.equal(result, planes)
