"""Decodes compressed scales: `decompress_nvfp4_csf_scales` and the size of its workspace.

Decoding is `base[row] + code[row, col]`, then every exception overwrites its byte (docs/format.md, "Decoding").
Bytes are opaque: nothing here converts them to numbers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Optional

import torch

from .._ops import add_op_namespace_prefix, ops
from ..arguments import kind_of, no_dense_tensor
from ..expert_start import active_experts, check_expert_start
from ..formats import NVFP4_CSF
from ..one_thread import on_one_thread
from ..plans import planned
from ..swizzle import swizzle_mx_scales, swizzled_shape
from .scales import NVFP4CSFScales, tiles_per_plane

_CHUNK_BYTES = 1 << 20
"""Bytes decoded at a time by torch, so that every pass after the first finds them in cache."""


def csf_workspace_size(scales: NVFP4CSFScales, *, swizzled: bool = False) -> int:
    """Bytes that `decompress_nvfp4_csf_scales` writes for `scales`: `E * N * C`, or `E` padded swizzled planes.

    Raises:
        ValueError: `scales` is not an `NVFP4CSFScales` of this bundle.
    """
    size, _, _ = _output_layout(scales, swizzled)
    return size


def _output_layout(scales: NVFP4CSFScales, swizzled: bool) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
    """Bytes, shape and strides of the decoded scales."""
    if not isinstance(scales, NVFP4CSFScales):
        raise ValueError(f"scales must be NVFP4CSFScales of this bundle, got {kind_of(scales)}")
    if got := no_dense_tensor(scales.codes):
        raise ValueError(f"scales must be on a CPU or GPU, got {got}")
    num_planes, num_rows, half_cols = scales.codes.shape
    num_cols = 2 * half_cols
    if not swizzled:
        plane = num_rows * num_cols
        return num_planes * plane, (num_planes, num_rows, num_cols), (plane, num_cols, 1)
    row_tiles, col_tiles, *tile = swizzled_shape(num_rows, num_cols)
    row = col_tiles * tile[0] * tile[1]
    strides = (row_tiles * row, row, tile[0] * tile[1], tile[1], 1)
    return num_planes * strides[0], (num_planes, row_tiles, col_tiles, *tile), strides


def decompress_nvfp4_csf_scales(
    scales: NVFP4CSFScales,
    *,
    workspace: torch.Tensor | None = None,
    expert_start: torch.Tensor | None = None,
    max_active: int | None = None,
    swizzled: bool = False,
) -> torch.Tensor:
    """Decode scale planes into `workspace`, exactly, in one launch on the current stream.

    Args:
        scales: `E` planes of `N` rows by `C` columns.
        workspace: contiguous uint8 tensor of at least `csf_workspace_size(scales, swizzled=swizzled)` bytes, at any
            byte offset. Its first bytes are written, nothing else is. None: a new one is allocated.
        expert_start: int32 `[E + 1 or more]`, read on the device. Only planes `e` with
            `expert_start[e] < expert_start[e + 1]` are decoded, whatever the entries are. The bytes of all other planes
            stay as they are (zero in a new workspace). None: every plane is decoded.
        max_active: an upper bound on the number of active planes, for example tokens x top-k. It affects the size of
            the launch, never the result.
        swizzled: write the 32x4x4 form that block-scaled MMA reads, padding bytes zero, instead of rows.

    Returns:
        A view of the workspace: float8_e4m3fn `[E, N, C]`, or `[E, ceil(N / 128), ceil(C / 4), 32, 16]` if swizzled.

    Raises:
        ValueError: the workspace or `expert_start` has another dtype, device or rank, or is too short; the workspace
            shares memory with `scales` or `expert_start`; the device is neither a CPU nor a GPU. Nothing is written.

    Bytes moved: `E * (N + N * C / 2 + N * C)`, and 4 for each exception.
    """
    return planned(_decompress, (scales, workspace, expert_start, max_active, swizzled))


def _decompress(
    scales: NVFP4CSFScales,
    workspace: torch.Tensor | None,
    expert_start: torch.Tensor | None,
    max_active: int | None,
    swizzled: bool,
) -> torch.Tensor:
    size, _, _ = _output_layout(scales, swizzled)
    if max_active is not None and (not isinstance(max_active, int) or max_active < 0):
        raise ValueError(f"max_active must be None or an int that is not negative, got {max_active!r}")
    if expert_start is not None:
        check_expert_start(expert_start, scales.num_planes, scales.device)
    if workspace is None and expert_start is None:
        workspace = torch.empty(size, dtype=torch.uint8, device=scales.device)
    elif workspace is None:
        with on_one_thread():
            workspace = torch.zeros(size, dtype=torch.uint8, device=scales.device)
    else:
        _check_workspace(workspace, scales, size)
        check_apart("workspace", workspace, size, {**scales.state_dict(), "expert_start": expert_start})
    return decode_into(workspace, scales, expert_start, max_active, swizzled)


def decode_into(
    workspace: torch.Tensor,
    scales: NVFP4CSFScales,
    expert_start: torch.Tensor | None,
    max_active: int | None,
    swizzled: bool = False,
) -> torch.Tensor:
    """`decompress_nvfp4_csf_scales`, for arguments that have been checked."""
    size, shape, strides = _output_layout(scales, swizzled)
    tensors = (scales.bases, scales.codes, scales.exceptions, scales.exception_offsets)
    if torch.compiler.is_compiling():
        out = workspace.view(-1)[:size]
        ops.csf_decode(*tensors, out, expert_start, swizzled, max_active)
        return out.view(torch.float8_e4m3fn).view(shape)
    csf_decode(*tensors, workspace, expert_start, swizzled, max_active)
    # Only two views: four would take more CPU time than the launch.
    return workspace.view(torch.float8_e4m3fn).as_strided(shape, strides)


def _check_workspace(workspace: torch.Tensor, scales: NVFP4CSFScales, size: int) -> None:
    if not isinstance(workspace, torch.Tensor):
        raise ValueError(f"workspace must be a tensor, got {kind_of(workspace)}")
    if workspace.dtype != torch.uint8:
        raise ValueError(f"workspace must be torch.uint8, got {workspace.dtype}")
    if workspace.device != scales.device:
        raise ValueError(f"workspace must be on {scales.device} like the scales, got {workspace.device}")
    if not workspace.is_contiguous():
        raise ValueError(f"workspace must be contiguous, got strides {workspace.stride()}")
    if workspace.numel() < size:
        raise ValueError(f"workspace must hold {size} bytes for scales {scales.shape}, got {workspace.numel()}")


def check_apart(name: str, workspace: torch.Tensor, size: int, sources: dict[str, torch.Tensor | None]) -> None:
    """Raise `ValueError` if the first `size` bytes of `workspace`, which will be written, overlap a tensor in
    `sources`, which is read meanwhile or later. Does nothing in compiled code, which has no addresses to compare."""
    if torch.compiler.is_compiling():
        return
    begin = workspace.data_ptr()
    for source, tensor in sources.items():
        if tensor is not None and begin < tensor.data_ptr() + tensor.nbytes and tensor.data_ptr() < begin + size:
            raise ValueError(f"{name} must be memory of its own, got bytes of {source}")


def csf_decode(
    bases: torch.Tensor,
    codes: torch.Tensor,
    exceptions: torch.Tensor,
    exception_offsets: torch.Tensor,
    out: torch.Tensor,
    expert_start: Optional[torch.Tensor],  # noqa: UP045  (torch reads the op's schema from it, also on Python 3.9)
    swizzled: bool,
    max_active: Optional[int] = None,  # noqa: UP045
) -> None:
    """Decode into the first bytes of `out`. The arguments are those of the public function, already validated."""
    if out.device.type != "cpu":
        launch_decode = _gpu_decoder()
        launch_decode(bases, codes, exceptions, exception_offsets, out, expert_start, swizzled, max_active)
    else:
        scales = NVFP4CSFScales(bases, codes, exceptions, exception_offsets)
        out = out.view(-1)[: csf_workspace_size(scales, swizzled=swizzled)]
        with on_one_thread():
            _decode_torch(scales, out, expert_start, swizzled)


@functools.lru_cache(maxsize=None)
def _gpu_decoder() -> Callable[..., None]:
    """Imported only for a GPU, because CPU builds of torch come without triton, and only once, because an import
    statement costs time."""
    from .decode_triton import launch_decode

    return launch_decode


# The op is for compiled code. Eager calls use the function itself: dispatch would cost more than the launch.
torch.library.custom_op(add_op_namespace_prefix("csf_decode"), mutates_args={"out"})(csf_decode)


@torch.library.register_fake(add_op_namespace_prefix("csf_decode"))
def _(bases, codes, exceptions, exception_offsets, out, expert_start, swizzled, max_active=None) -> None:
    return None


def _decode_torch(scales: NVFP4CSFScales, out: torch.Tensor, expert_start: torch.Tensor | None, swizzled: bool) -> None:
    """Write the same bytes as the kernel, with torch operators on one thread, as many planes at a time as fit in
    cache."""
    num_planes, num_rows, num_cols = scales.shape
    if expert_start is None:
        runs = [(0, num_planes)]
    else:
        runs = [(plane, plane + 1) for plane in active_experts(expert_start, num_planes)]
    planes_out = out.view(num_planes, -1)
    chunk_planes = max(1, _CHUNK_BYTES // scales.plane_bytes)
    for begin, end in runs:
        for first in range(begin, end, chunk_planes):
            last = min(first + chunk_planes, end)
            planes = decode_planes(scales, first, last)
            planes_out[first:last] = (swizzle_mx_scales(planes) if swizzled else planes).view(last - first, -1)


def decode_planes(scales: NVFP4CSFScales, first: int, last: int) -> torch.Tensor:
    """Decode planes `[first, last)` into a new uint8 `[last - first, N, C]`.

    Two codes become the two bytes of an int16: `(pair | pair << 4) & 0x0F0F`. Adding `base * 0x0101` never carries from
    one to the other, because base + code stays below 256.
    """
    pairs = scales.codes[first:last].to(torch.int16)
    pairs |= pairs << 4
    pairs &= 0x0F0F
    pairs += (scales.bases[first:last].to(torch.int16) * 0x0101)[:, :, None]
    planes = pairs.view(torch.uint8)
    per_plane = tiles_per_plane(scales.plane_bytes)
    begins = scales.exception_offsets[first * per_plane : last * per_plane + 1 : per_plane]
    words = scales.exceptions[begins[0] : begins[-1]]
    positions = (words & NVFP4_CSF.position_mask).to(torch.int64)
    if last - first > 1:
        plane_of = torch.repeat_interleave(
            torch.arange(last - first, device=words.device), begins.diff(), output_size=len(words)
        )
        positions += plane_of * scales.plane_bytes
    planes.view(-1)[positions] = (words >> NVFP4_CSF.position_bits).to(torch.uint8)
    return planes
