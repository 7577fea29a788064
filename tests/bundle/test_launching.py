"""Repeated launches without Triton's launch path: never a binary for other arguments, and through Triton if in doubt.

Triton itself tells what it specializes on. Launches are observed through a stand-in for the compiled kernel. That
results are right needs a GPU, and is tested in test_csf_cuda.py.
"""

from __future__ import annotations

import importlib
import itertools
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

triton = pytest.importorskip("triton", reason="needs triton")


@pytest.fixture(scope="module")
def launching(bundle) -> ModuleType:
    return importlib.import_module(f"{bundle.__name__}.launching")


@pytest.fixture(scope="module")
def decode_triton(bundle) -> ModuleType:
    return importlib.import_module(f"{bundle.__name__}.csf.decode_triton")


class Named(NamedTuple):
    first: Any
    second: Any


def arguments_of_every_class() -> list:
    memory = torch.empty(256, dtype=torch.uint8)
    aligned = -memory.data_ptr() % 16
    tensors = [
        memory[aligned + offset :][: 64 - 64 % dtype.itemsize].view(dtype)
        for dtype in (torch.uint8, torch.int8, torch.float8_e4m3fn, torch.int32, torch.int64, torch.float32)
        for offset in (0, 1, 4, 8, 12, 15, 16)
        if offset % dtype.itemsize == 0
    ]
    limits = [sign * (1 << bits) + near for bits in (4, 30, 31, 32, 62) for sign in (1, -1) for near in (-1, 0, 1)]
    numbers = [0, 1, 2, 3, 5, 15, 16, 17, 32, -1, -16, 48, (1 << 63) - 1, 1 << 63, (1 << 64) - 1, (1 << 64) - 16]
    plain = [*tensors, None, True, False, 0.0, 1.0, 16.0, 0.5, *numbers, *limits]
    nested = [(), (1,), (16,), (3,), (True,), (1.0,), (None,), (1, 3), (3, 1), (16, 3), ((1, 3), 5), (1, 3, 5)]
    nested += [(tensor,) for tensor in tensors[:4]]
    nested += [Named(first, second) for first in (tensors[0], None, 1, 3) for second in (16, (1, None), Named(1, 3))]
    return plain + nested


def test_no_two_classes_of_triton_are_one_here(launching):
    """Equal keys mean equal specialization by NVIDIA's backend, with and without `do_not_specialize`."""
    from triton._C.libtriton import native_specialize_impl
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.compiler import CUDABackend

    backend = CUDABackend(GPUTarget("cuda", 90, 32))
    by_key: dict = {}
    for argument in arguments_of_every_class():
        key, _ = launching.specialize((argument,))
        for specialize_value, align in itertools.product((True, False), repeat=2):
            triton_class = native_specialize_impl(backend, argument, False, specialize_value, align)
            known, of = by_key.setdefault((*key, specialize_value, align), (triton_class, argument))
            assert triton_class == known, f"{argument!r} and {of!r} share the key {key}"
    assert len(by_key) // 4 >= 30


def test_keys_of_several_arguments_do_not_run_together(launching):
    """Every pair of arguments of different classes has its own key, nested or not."""
    memory = torch.empty(64, dtype=torch.uint8)
    memory = memory[-memory.data_ptr() % 16 :]
    some = [None, True, 1, 16, 3, 1.0, memory, memory[1:], memory[:4].view(torch.int32), 1 << 40]
    some += [(), (1,), (16, 3), (memory,), (memory[1:],), ((1,), 3), (1, (3,))]
    lists = [*itertools.product(some, repeat=2), *itertools.product(some, repeat=1), *itertools.product(some, repeat=3)]
    keys = {tuple(launching.specialize(arguments)[0]) for arguments in lists}
    assert len(keys) == len(lists)


def test_values_are_addresses_and_the_arguments_themselves(launching):
    tensor = torch.empty(64, dtype=torch.uint8)
    parameter = torch.nn.Parameter(torch.empty(3))
    _, values = launching.specialize((tensor[3:], None, 7, (1.5, tensor), parameter))
    assert values == [tensor.data_ptr() + 3, None, 7, (1.5, tensor.data_ptr()), parameter.data_ptr()]


class Subclass(torch.Tensor):
    pass


@pytest.mark.parametrize(
    "argument", ["text", [1], torch.empty(4).as_subclass(Subclass), SimpleNamespace(), (1, "text")]
)
def test_arguments_of_other_types_are_left_to_triton(launching, argument):
    assert launching.specialize((3, argument)) is None


class Launches:
    """A stand-in for Triton and its driver. It records which launches went through Triton, and the arguments of
    binaries."""

    def __init__(self, launching: ModuleType, kernel, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ordinary, self.direct, self.current = [], [], None
        launches = self

        class Compiled:
            metadata = SimpleNamespace(target=SimpleNamespace(backend="cuda"))
            packed_metadata = (4, 1, 0)

            def __init__(self, name: int) -> None:
                self.function = name

            def run(self, x, y, z, stream, function, *rest) -> None:
                (metadata, *launch_metadata_and_hooks), values = rest[:4], rest[4:]
                assert metadata == self.packed_metadata and launch_metadata_and_hooks == [None, None, None]
                launches.direct.append(((x, y, z), stream, function, values))

        def run(self, *arguments, grid, warmup, **constants):
            launches.ordinary.append((grid, arguments, constants))
            return Compiled(len(launches.ordinary))

        monkeypatch.setattr(type(kernel), "run", run)
        monkeypatch.setattr(triton.compiler, "CompiledKernel", Compiled)
        monkeypatch.setattr(torch.version, "cuda", "13.0")
        monkeypatch.setattr(torch.cuda, "current_device", lambda: self.current)
        monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: ("stream of", index), raising=False)
        self.bound = launching.BoundKernel(kernel, **DECODE_CONSTANTS, num_warps=4)


DECODE_CONSTANTS = {"PLANE": "of 16 rows", "LAUNCH": "of every plane"}  # nothing compiles here


@pytest.fixture
def launches(launching, decode_triton, monkeypatch) -> Launches:
    return Launches(launching, decode_triton.decode_kernel, monkeypatch)


def decode_arguments(offset: int = 0, num_planes: int = 3) -> list:
    memory = torch.empty(256, dtype=torch.uint8)
    memory = memory[-memory.data_ptr() % 16 :]
    words = [torch.empty(8, dtype=torch.int32) for _ in range(3)]
    return [memory[offset:], (memory, memory, *words[:2]), words[2], num_planes, 0]


def test_the_first_launch_of_a_class_is_ordinary_and_the_next_ones_direct(launches):
    given = [decode_arguments(), decode_arguments(3), decode_arguments(num_planes=16), decode_arguments()]
    for arguments in given * 2:
        launches.bound((5,), *arguments)
    grid, arguments, constants = launches.ordinary[0]
    assert grid == (5,) and constants == DECODE_CONSTANTS | {"num_warps": 4}
    assert [argument is own for argument, own in zip(arguments, given[0], strict=True)] == [True] * 5
    assert len(launches.ordinary) == 3
    assert [function for _, _, function, _ in launches.direct] == [1, 1, 2, 3, 1]
    grid, stream, _, values = launches.direct[2]
    assert grid == (5, 1, 1) and stream == ("stream of", None)
    out, stream, expert_start = given[1][:3]
    addresses = tuple(tensor.data_ptr() for tensor in stream)
    assert values == (out.data_ptr(), addresses, expert_start.data_ptr(), 3, 0, *DECODE_CONSTANTS.values())


@pytest.mark.parametrize("grid", [(5,), (5, 6), (5, 6, 7)])
def test_grids_are_filled_up_to_three(launches, grid):
    arguments = decode_arguments()
    for _ in range(2):
        launches.bound(grid, *arguments)
    assert launches.direct[0][0] == (*grid, 1, 1)[:3]


@pytest.mark.parametrize("hook", ["launch_enter_hook", "launch_exit_hook", "debug", "pre_run_hooks"])
def test_nobody_who_watches_misses_a_launch(launches, decode_triton, monkeypatch, hook):
    arguments = decode_arguments()
    for _ in range(2):
        launches.bound((1,), *arguments)
    assert (len(launches.ordinary), len(launches.direct)) == (1, 1)
    with monkeypatch.context() as patch:
        if hook == "pre_run_hooks":
            patch.setattr(decode_triton.decode_kernel, hook, [print])
        elif hook == "debug":
            patch.setattr(triton.knobs.runtime, hook, True)
        else:
            patch.setattr(getattr(triton.knobs.runtime, hook), "calls", [print])
        launches.bound((1,), *arguments)
        assert (len(launches.ordinary), len(launches.direct)) == (2, 1)
        if hook.startswith("launch"):
            patch.setattr(triton.knobs.runtime, hook, print)
            launches.bound((1,), *arguments)
            assert len(launches.ordinary) == 3
            patch.setattr(triton.knobs.runtime, hook, None)
            if hook == "launch_enter_hook":
                launches.bound((1,), *arguments)
                assert len(launches.ordinary) == 3
    launches.bound((1,), *arguments)
    assert launches.direct


@pytest.mark.parametrize("version", ["3.5.1", "3.10.0", "4.0.0"])
def test_versions_that_nobody_looked_at_launch_the_ordinary_way(
    launches, launching, decode_triton, monkeypatch, version
):
    monkeypatch.setattr(triton, "__version__", version)
    bound = launching.BoundKernel(decode_triton.decode_kernel, **DECODE_CONSTANTS)
    for _ in range(2):
        bound((1,), *decode_arguments())
    assert (len(launches.ordinary), len(launches.direct)) == (2, 0)


def test_constants_missing_or_elsewhere_are_left_to_triton(launches, launching, decode_triton):
    fewer = {name: value for name, value in DECODE_CONSTANTS.items() if name != "LAUNCH"}
    for constants in (fewer, DECODE_CONSTANTS | {"num_planes": 3}):
        bound = launching.BoundKernel(decode_triton.decode_kernel, **constants)
        for _ in range(2):
            bound((1,), *decode_arguments())
    assert (len(launches.ordinary), len(launches.direct)) == (4, 0)


def test_a_binary_that_is_not_for_this_driver_is_not_kept(launches):
    compiled = triton.compiler.CompiledKernel
    compiled.metadata.target.backend = "hip"
    for _ in range(2):
        launches.bound((1,), *decode_arguments())
    assert (len(launches.ordinary), len(launches.direct)) == (2, 0)


def test_equal_constants_are_bound_once_and_true_is_not_one(launching, decode_triton):
    kernel = decode_triton.decode_kernel
    assert launching.bind(kernel, ALIGNED=True) is launching.bind(kernel, ALIGNED=True)
    assert launching.bind(kernel, ALIGNED=True) is not launching.bind(kernel, ALIGNED=1)
    assert launching.bind(kernel, ALIGNED=True) is not launching.bind(kernel, ALIGNED=True, num_warps=8)


@pytest.mark.parametrize("scratch", [0, 16])
def test_the_shortest_way_gives_the_driver_what_triton_does(launching, monkeypatch, scratch):
    """Compared with what Triton's own launcher, of the installed version, passes on."""
    from triton.backends.nvidia import driver

    given: list[tuple] = []
    launcher = object.__new__(driver.CudaLauncher)
    facts = {"num_ctas": 1, "global_scratch_size": scratch, "global_scratch_align": 16, "profile_scratch_size": 0}
    facts |= {"profile_scratch_align": 16, "launch_cooperative_grid": False, "launch_pdl": True, "gsan_enabled": False}
    facts |= {
        "arg_annotations": ["annotations"],
        "kernel_signature": b"signature",
        "launch": lambda *a: given.append(a),
    }
    for name, value in facts.items():
        setattr(launcher, name, value)
    monkeypatch.setattr(triton.runtime.driver, "_active", SimpleNamespace(), raising=False)
    launcher_takes_scratch = lambda *arguments: 7  # noqa: E731
    monkeypatch.setattr(
        triton.runtime._allocation, "_allocator", SimpleNamespace(get=lambda: launcher_takes_scratch), raising=False
    )
    launch = launching.Launch(launcher, 5, (4, 1, 0), (1, 2, 3), (), [])
    call, between, is_packed = launching.shortest_way(launch)
    values = (11, None, (12, 13), 0.5)
    launcher(1, 2, 3, 9, 5, (4, 1, 0), None, None, None, *values)
    call(1, 2, 3, 9, *between, *((values,) if is_packed else values))
    assert given[0] == given[1]
    assert (call is launcher) == (bool(scratch) or launching._version() not in ((3, 6), (3, 9)))


@pytest.fixture
def first_launch(bundle) -> ModuleType:
    return importlib.import_module(f"{bundle.__name__}.first_launch")


def test_what_a_first_launch_does_can_be_done_before(first_launch, decode_triton, launching, monkeypatch):
    """All kernels are imported and their sources are read; Triton does its part for an empty kernel."""
    ran: list = []
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(triton.runtime.JITFunction, "run", lambda kernel, **how: ran.append((kernel, how["warmup"])))
    cache_keys = importlib.import_module(f"{first_launch.__package__}.cache_keys")
    monkeypatch.setattr(cache_keys, "_taken", set())
    monkeypatch.setattr(decode_triton.decode_kernel, "hash", None)
    first_launch.prepare_launches.__wrapped__()
    assert ran == [(launching.empty_kernel, True)]
    assert decode_triton.decode_kernel.hash is not None


@pytest.mark.parametrize("cuda", [None, "13.0"])
def test_where_nothing_can_be_launched_nothing_is_said(first_launch, monkeypatch, cuda):
    def refuse(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(importlib, "import_module", refuse)
    first_launch.prepare_launches.__wrapped__()
