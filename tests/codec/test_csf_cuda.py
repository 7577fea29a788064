"""What only a GPU can show: streams, devices, graph replay without allocation, and the device's encoder."""

from __future__ import annotations

import dataclasses
import importlib
import itertools

import pytest
import torch

from numeric import assert_same, make_stack

pytestmark = pytest.mark.gpu
GEOMETRY = (24, 640, 160)


@pytest.fixture(scope="module")
def planes() -> torch.Tensor:
    return make_stack([16 * i for i in range(GEOMETRY[0])], *GEOMETRY[1:], seed=5).planes


def prepare(bundle, planes: torch.Tensor):
    num_rows, num_cols = planes.shape[1:]
    return bundle.prepare_nvfp4_csf_scales(
        *bundle.compress_nvfp4_csf_scales(planes), num_rows=num_rows, num_cols=num_cols
    )


def expert_start(active: torch.Tensor) -> torch.Tensor:
    return torch.cat([active.new_zeros(1), active.cumsum(0)]).to(torch.int32)


@pytest.mark.kernels_ci
def test_encoding_gives_the_bytes_of_the_cpu(bundle, planes):
    """Realistic planes, and planes in which every row needs the whole search."""
    noise = torch.randint(0, 256, GEOMETRY, dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    two_values = torch.where(noise < 100, 3, 250).to(torch.uint8)
    constant = noise[:, :, :1].expand(GEOMETRY)
    for name, given in {"planes": planes, "noise": noise, "two values": two_values, "constant": constant}.items():
        fixed, words = bundle.compress_nvfp4_csf_scales(given.cuda())
        expected_fixed, expected_words = bundle.compress_nvfp4_csf_scales(given)
        assert_same(fixed, expected_fixed, f"{name}: fixed")
        for plane, (own, expected) in enumerate(zip(words, expected_words, strict=True)):
            assert_same(own, expected, f"{name}: exceptions[{plane}]")


def test_encoding_reads_planes_at_any_offset(bundle, planes):
    memory = torch.empty(planes.numel() + 3, dtype=torch.uint8, device="cuda")
    given = memory[3:].view(planes.shape).copy_(planes)
    assert_same(bundle.compress_nvfp4_csf_scales(given)[0], bundle.compress_nvfp4_csf_scales(planes)[0], "fixed")


def test_ends_are_ordinary_memory_of_their_own(bundle):
    """The kernel writes them to page-locked memory, which the next call reuses. This also holds on a stream that lags
    behind, and if the default device is the GPU."""
    stacks = [torch.full((1025, 16, 2), 100, dtype=torch.uint8) for _ in range(3)]
    for i, planes in enumerate(stacks):
        planes[i::7, i, 1] = 1
    given = [planes.cuda() for planes in stacks]
    torch.cuda.synchronize()
    with torch.device("cuda"), torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(10_000_000)
        actual = [bundle.compress_nvfp4_csf_scales(planes)[1] for planes in given]
    torch.cuda.synchronize()
    for planes, own in zip(stacks, actual, strict=True):
        expected = bundle.compress_nvfp4_csf_scales(planes)[1]
        assert_same(own.words, expected.words, "words")
        assert torch.equal(own.ends, expected.ends) and not own.ends.is_pinned()


def test_replays_allocate_nothing_and_follow_the_routing(bundle, planes):
    scales = prepare(bundle, planes.cuda())
    workspace = torch.empty(planes.numel() + 5, dtype=torch.uint8, device="cuda")
    starts = expert_start(torch.ones(GEOMETRY[0], dtype=torch.int64)).cuda()

    def decode() -> torch.Tensor:
        return bundle.decompress_nvfp4_csf_scales(scales, workspace=workspace[5:], expert_start=starts)

    decode()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        decoded = decode()
    generator = torch.Generator().manual_seed(2)
    for _ in range(50):
        active = torch.randint(0, 2, GEOMETRY[:1], generator=generator)
        starts.copy_(expert_start(active))
        workspace.fill_(0xA5)
        torch.cuda.synchronize()
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        graph.replay()
        torch.cuda.synchronize()
        assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
        expected = torch.where(active.bool()[:, None, None], planes, 0xA5).to(torch.uint8)
        assert_same(decoded, expected, "replayed")
        assert (workspace[:5] == 0xA5).all()


def test_repeated_launches_take_the_binary_of_their_own_alignment(bundle, planes):
    """Aligned, unaligned and aligned again, over and over; also if codes or exceptions are at an odd address."""
    scales = prepare(bundle, planes.cuda())

    def moved(tensor: torch.Tensor) -> torch.Tensor:
        memory = torch.empty(tensor.numel() + 1, dtype=tensor.dtype, device="cuda")
        return memory[1:].view(tensor.shape).copy_(tensor)

    odd = dataclasses.replace(scales, bases=moved(scales.bases), exceptions=moved(scales.exceptions))
    memory = torch.empty(planes.numel() + 24, dtype=torch.uint8, device="cuda")
    starts = expert_start(torch.ones(GEOMETRY[0], dtype=torch.int64)).cuda()
    for _ in range(3):
        for own, offset, routing in itertools.product((scales, odd), (0, 8, 1, 16, 3), (None, starts)):
            memory.fill_(0)
            decoded = bundle.decompress_nvfp4_csf_scales(own, workspace=memory[offset:], expert_start=routing)
            assert decoded.data_ptr() == memory.data_ptr() + offset
            assert_same(decoded, planes, f"from byte {offset}")


def test_repeated_launches_skip_triton_but_not_its_hooks(bundle, planes):
    """Launches are direct, a profiler's hook still sees each of them, and the first may be in a capture."""
    launching = importlib.import_module(f"{bundle.__name__}.launching")
    decode = importlib.import_module(f"{bundle.__name__}.csf.decode_triton")
    triton = pytest.importorskip("triton")
    scales = prepare(bundle, planes.cuda())
    workspace = torch.empty(planes.numel(), dtype=torch.uint8, device="cuda")
    bundle.decompress_nvfp4_csf_scales(scales, workspace=workspace)
    seen = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(decode.decode_kernel), "run", lambda *_, **__: pytest.fail("went through Triton"))
        assert_same(bundle.decompress_nvfp4_csf_scales(scales, workspace=workspace), planes, "decoded")
    triton.knobs.runtime.launch_enter_hook.add(seen.append)
    try:
        bundle.decompress_nvfp4_csf_scales(scales, workspace=workspace)
    finally:
        triton.knobs.runtime.launch_enter_hook.remove(seen.append)
    assert len(seen) == 1
    launching._bind.cache_clear()
    decode.decode_launch.cache_clear()
    workspace.zero_()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(2):
            decoded = bundle.decompress_nvfp4_csf_scales(scales, workspace=workspace)
    graph.replay()
    assert_same(decoded, planes, "replayed")


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_repeated_launches_on_two_devices_take_each_its_own_binary(bundle, planes):
    scales = [prepare(bundle, planes.to(f"cuda:{index}")) for index in range(2)]
    for index in [0, 1] * 4:
        decoded = bundle.decompress_nvfp4_csf_scales(scales[index])
        assert decoded.device.index == index
        assert_same(decoded, planes, f"device {index}")


def test_another_stream_is_used_and_two_do_not_mix(bundle, planes):
    flipped = planes.flip(0)
    scales = [prepare(bundle, each.cuda()) for each in (planes, flipped)]
    workspaces = [torch.empty(planes.numel(), dtype=torch.uint8, device="cuda") for _ in scales]
    streams = [torch.cuda.Stream() for _ in scales]
    torch.cuda.synchronize()
    for _ in range(20):
        for own, workspace, stream in zip(scales, workspaces, streams, strict=True):
            with torch.cuda.stream(stream):
                torch.cuda._sleep(100_000)  # work launched on any other stream would overtake this
                workspace.fill_(0)
                bundle.decompress_nvfp4_csf_scales(own, workspace=workspace)
    torch.cuda.synchronize()
    assert_same(workspaces[0].view(GEOMETRY), planes, "first stream")
    assert_same(workspaces[1].view(GEOMETRY), flipped, "second stream")


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_tensors_on_a_device_that_is_not_current(bundle, planes):
    assert torch.cuda.current_device() == 0
    scales = prepare(bundle, planes.to("cuda:1"))
    starts = expert_start(torch.ones(GEOMETRY[0], dtype=torch.int64)).to("cuda:1")
    for routing in (None, starts):
        decoded = bundle.decompress_nvfp4_csf_scales(scales, expert_start=routing)
        assert decoded.device == torch.device("cuda:1")
        assert_same(decoded, planes, "decoded")
    assert torch.cuda.current_device() == 0


def test_more_planes_than_one_block_of_experts(bundle):
    """More than 2^31 bytes and more than one block of `expert_start`: 22,000 planes of 640 x 160, a few of them
    active."""
    few = make_stack([40, 3], 640, 160, seed=6).planes.cuda()
    scales = prepare(bundle, few.repeat(11_000, 1, 1))
    workspace = torch.zeros(bundle.csf_workspace_size(scales), dtype=torch.uint8, device="cuda")
    assert workspace.numel() > 1 << 31
    active = torch.zeros(22_000, dtype=torch.int64)
    active[[0, 1023, 1024, 20_973, 20_974, 21_999]] = 1
    decoded = bundle.decompress_nvfp4_csf_scales(scales, workspace=workspace, expert_start=expert_start(active).cuda())
    decoded = decoded.view(torch.uint8)
    for plane in active.nonzero().view(-1).tolist():
        assert torch.equal(decoded[plane], few[plane % 2]), f"plane {plane}"
        decoded[plane] = 0
    assert not decoded.any()
    decoded = bundle.decompress_nvfp4_csf_scales(scales, workspace=workspace).view(torch.uint8)
    assert torch.equal(decoded.view(11_000, 2, 640, 160)[-1], few)
    assert torch.equal(decoded[::7_001], few.repeat(2, 1, 1)[[0, 1, 0, 1]])
