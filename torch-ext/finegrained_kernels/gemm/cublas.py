"""cuBLAS's GEMM with a multiplier in device memory, which torch does not offer. So the sums are rounded only once.

The library is the one that torch has loaded. Handles are made once per device and plans once per shape; they are never
freed, and threads may share them.
"""

from __future__ import annotations

import ctypes
import functools
import os

import torch

COMPUTE_32F, REAL_32F, REAL_16BF = 68, 0, 14
TRANSPOSED, DEVICE_POINTERS = 1, 1
POINTER_MODE, TRANSA = 2, 3  # attributes of a matmul descriptor
MAX_WORKSPACE, MIN_ALIGNMENTS = 1, (5, 6, 7, 8)  # attributes of a preference
WORKSPACE_BYTES, ALIGNMENT = 32 << 20, 16


class Heuristic(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t"""

    _fields_ = [
        ("algorithm", ctypes.c_uint64 * 8), ("workspace_bytes", ctypes.c_size_t), ("state", ctypes.c_int),
        ("waves", ctypes.c_float), ("reserved", ctypes.c_int * 4),
    ]  # fmt: skip


@functools.lru_cache(maxsize=1)
def library() -> ctypes.CDLL | None:
    """cublasLt, or None if torch has not loaded it."""
    major = (torch.version.cuda or "").split(".")[0]
    try:
        return ctypes.CDLL(f"libcublasLt.so.{major}", mode=os.RTLD_NOLOAD | os.RTLD_NOW)
    except OSError:
        return None


def call(name: str, *arguments: object) -> None:
    status = getattr(library(), name)(*arguments)
    if status:
        raise RuntimeError(f"{name} failed with status {status}")


def made(name: str, *arguments: object) -> ctypes.c_void_p:
    handle = ctypes.c_void_p()
    call(name, ctypes.byref(handle), *arguments)
    return handle


@functools.lru_cache(maxsize=None)
def handle_of(device_index: int) -> ctypes.c_void_p:
    with torch.cuda.device(device_index):
        return made("cublasLtCreate")


def set_attribute(function: str, described: ctypes.c_void_p, attribute: int, value: ctypes._SimpleCData) -> None:
    call(function, described, attribute, ctypes.byref(value), ctypes.c_size_t(ctypes.sizeof(value)))


class Plan:
    """out[:, :rows] = factor * x @ weights.T, in bf16 with float32 sums: x [M, K], weights [rows, K], out [M,
    stride]."""

    def __init__(self, device_index: int, num_tokens: int, rows: int, depth: int, stride: int) -> None:
        self.handle = handle_of(device_index)
        self.product = made("cublasLtMatmulDescCreate", COMPUTE_32F, REAL_32F)
        for attribute, value in ((TRANSA, TRANSPOSED), (POINTER_MODE, DEVICE_POINTERS)):
            set_attribute("cublasLtMatmulDescSetAttribute", self.product, attribute, ctypes.c_int32(value))
        sizes = ((depth, rows, depth), (depth, num_tokens, depth), (rows, num_tokens, stride))
        self.layouts = [
            made("cublasLtMatrixLayoutCreate", REAL_16BF, ctypes.c_uint64(r), ctypes.c_uint64(c), ctypes.c_int64(ld))
            for r, c, ld in sizes
        ]
        preference = made("cublasLtMatmulPreferenceCreate")
        wishes = {MAX_WORKSPACE: ctypes.c_uint64(WORKSPACE_BYTES)} | dict.fromkeys(
            MIN_ALIGNMENTS, ctypes.c_uint32(ALIGNMENT)
        )
        for attribute, wish in wishes.items():
            set_attribute("cublasLtMatmulPreferenceSetAttribute", preference, attribute, wish)
        self.heuristic, found = Heuristic(), ctypes.c_int()
        weights, x, out = self.layouts
        call(
            "cublasLtMatmulAlgoGetHeuristic", self.handle, self.product, weights, x, out, out, preference, 1,
            ctypes.byref(self.heuristic), ctypes.byref(found),
        )  # fmt: skip
        call("cublasLtMatmulPreferenceDestroy", preference)
        if not found.value:
            raise RuntimeError(f"cuBLAS has no product of {sizes}")
        self.workspace_bytes = max(16, self.heuristic.workspace_bytes)

    def __call__(self, x: int, weights: int, out: int, factors: int, workspace: int, stream: int) -> None:
        """All arguments are addresses; at `factors` is (factor, 0) in float32."""
        left, right, result = self.layouts
        pointer = ctypes.c_void_p
        call(
            "cublasLtMatmul", self.handle, self.product, pointer(factors), pointer(weights), left, pointer(x), right,
            pointer(factors + 4), pointer(out), result, pointer(out), result, ctypes.byref(self.heuristic.algorithm),
            pointer(workspace), ctypes.c_size_t(self.heuristic.workspace_bytes), pointer(stream),
        )  # fmt: skip


plan = functools.lru_cache(maxsize=4096)(Plan)
