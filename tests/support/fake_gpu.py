"""Calls as on a GPU, but without one: CPU tensors are treated like CUDA tensors, and binaries are stand-ins.

Where its kernel would write results, a stand-in writes four bytes that depend on every argument, and on the first four
bytes at every pointer. So a call that launches with a wrong pointer, number or grid returns other bytes.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib
import struct
from types import ModuleType, SimpleNamespace

import pytest
import torch
import triton

OUTPUTS = {
    "schedule_kernel": ("expert_start_ptr", "gather_ptr", "scatter_ptr"),
    "count_kernel": ("counts_ptr",),
    "sum_kernel": ("firsts_ptr", "expert_start_ptr"),
    "place_kernel": ("gather_ptr", "scatter_ptr"),
    "weighted_reduce_kernel": ("out_ptr",),
    "decode_kernel": ("out_ptr",),
    "nvfp4_gemm_kernel": ("epilogue.out", "epilogue.out_scales"),
    "nvfp4_wgmma_kernel": ("epilogue.out", "epilogue.out_scales"),
    "portable_gemm_kernel": ("epilogue.out", "epilogue.out_scales"),
    "scaled_gemm_kernel": ("epilogue.out", "epilogue.out_scales"),
    "permute_tokens_kernel": ("out_ptr",),
    "quantize_rows_kernel": ("packed_ptr", "scales_ptr", "operand_ptr"),
    "expand_rows_kernel": ("operand_ptr",),
}
"""Where kernels write: an argument, or a member of a group of arguments. Pointers, which are addresses here, are
distinguished from other integers by their size."""

LEAST_ADDRESS = 1 << 32


def leaves(values: tuple) -> list:
    return [leaf for value in values for leaf in (leaves(value) if isinstance(value, tuple) else [value])]


class FakeGPU:
    """`ordinary` has the names of kernels that were launched through Triton, and `direct` of those launched without
    it."""

    def __init__(self, bundle: ModuleType, patch: pytest.MonkeyPatch) -> None:
        self.ordinary: list[str] = []
        self.direct: list[str] = []
        gpu = self

        class Compiled:
            metadata = SimpleNamespace(target=SimpleNamespace(backend="cuda"))
            packed_metadata = (4, 1, 0)

            def __init__(self, kernel, constants: dict) -> None:
                self.function = kernel, tuple(sorted((name, str(value)) for name, value in constants.items()))

            def run(self, x, y, z, stream, function, *rest) -> None:
                values = rest[4:]  # after metadata, launch metadata and hooks
                gpu.direct.append(function[0].fn.__name__)
                gpu.execute(function, (x, y, z), values)

        def run(kernel, *arguments, grid, warmup, **constants):
            gpu.ordinary.append(kernel.fn.__name__)
            compiled = Compiled(kernel, constants)
            trailing = [constants[p.name] for p in kernel.params[len(arguments) :] if p.name in constants]
            values = bundle_module("launching").specialize(arguments)[1]
            gpu.execute(compiled.function, (*grid, 1, 1)[:3], (*values, *trailing))
            return compiled

        def bundle_module(name: str) -> ModuleType:
            return importlib.import_module(f"{bundle.__name__}.{name}")

        patch.setattr(triton.runtime.JITFunction, "run", run)
        patch.setattr(triton.compiler, "CompiledKernel", Compiled)
        patch.setattr(torch.version, "cuda", "13.0")
        patch.setattr(torch.cuda, "current_device", lambda: None)
        patch.setattr(torch._C, "_cuda_getDevice", lambda: None, raising=False)
        patch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
        patch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
        patch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0, raising=False)
        dispatch, self.operands = bundle_module("gemm.dispatch"), bundle_module("gemm.kernels.operands")
        patch.setattr(bundle_module("plans"), "_is_planned", lambda tensor: True)
        patch.setattr(bundle_module("gemm.api"), "_run_on_device", dispatch.run_on_gpu)
        patch.setattr(bundle_module("gemm.capability"), "is_nvidia", lambda device: True)
        patch.setattr(dispatch, "num_sms", lambda device: 132)
        patch.setattr(bundle_module("gemm.config"), "num_sms", lambda device: 132)
        patch.setattr(bundle_module("csf.decode"), "csf_decode", bundle_module("csf.decode_triton").launch_decode)
        patch.setattr(
            bundle_module("moe.routing"), "_schedule_by_sort", bundle_module("moe.routing_triton").schedule_on_gpu
        )
        reduce = bundle_module("moe.reduction_triton").weighted_reduce_on_gpu
        patch.setattr(bundle_module("moe.reduction"), "_reduce_on_device", reduce)
        constants = bundle_module("constants")
        patch.setattr(constants, "_is_kept", lambda device: True)
        bundle_module("launching")._bind.cache_clear()
        bundle_module("csf.decode_triton").decode_launch.cache_clear()
        patch.setattr(bundle_module("plans"), "_signatures", {})
        patch.setattr(bundle_module("replay"), "_new", torch._C._dynamo.guards._empty_strided_cpu)
        self.plans = bundle_module("plans")

    def num_plans(self) -> int:
        """The number of kinds of calls that are replayed."""
        signatures = self.plans._signatures.values()
        return sum(bool(kind.plan) for signature in signatures for kinds in signature.kinds.values() for kind in kinds)

    def execute(self, function: tuple, grid: tuple, values: tuple) -> None:
        kernel, constants = function
        names = [parameter.name for parameter in kernel.params if not parameter.is_constexpr]
        arguments = dict(zip(names, values, strict=False))
        if "epilogue" in arguments:
            members = self.operands.Epilogue(*arguments.pop("epilogue"))._asdict()
            arguments |= {f"epilogue.{name}": value for name, value in members.items()}
        names = OUTPUTS[kernel.fn.__name__]
        if dict(constants).get("IS_DYNAMIC") == "True":
            names = (*names, "global_ptr")
        outputs = [arguments.pop(name) for name in names if arguments.get(name)]
        assert outputs, kernel
        digest = hashlib.sha256(repr((kernel.fn.__name__, constants, grid)).encode())
        for leaf in leaves(tuple(arguments.values())):
            is_pointer = type(leaf) is int and leaf >= LEAST_ADDRESS
            digest.update(ctypes.string_at(leaf, 4) if is_pointer else repr(leaf).encode())
        (number,) = struct.unpack("<I", digest.digest()[:4])
        for i, output in enumerate(outputs):
            ctypes.memmove(output, struct.pack("<I", (number + i) & 0x3F3F3F3F), 4)  # finite in every dtype
