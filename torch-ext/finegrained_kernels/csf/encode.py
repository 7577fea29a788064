"""Encodes scale bytes into the wire form: `compress_nvfp4_csf_scales`.

The encoding is lossless by construction: every byte that a row's window does not cover is an exception. A row's base is
the lowest one whose window covers the most bytes (docs/format.md, "Encoding"), so equal input gives equal bytes on
every device.
"""

from __future__ import annotations

import torch

from ..arguments import kind_of, no_dense_tensor
from ..formats import NVFP4_CSF
from ..one_thread import on_one_thread
from .exception_list import ExceptionList

_CHUNK_BYTES = 1 << 18
"""Bytes encoded at a time by torch, so that every pass after the first finds them, and their counters, in cache."""

_CANDIDATES = 16
"""How many windows are ranked at first. With 16 values each, they cover 31 values together."""

_HIGH_NIBBLES = -0x0F0F0F0F0F0F0F10
"""0xF0 in each byte of an int64."""

_MEAN_OFFSET = 18
"""The first candidate is this far below the mean. In a row of few different values, the lowest best base is 15 below
the largest."""


def compress_nvfp4_csf_scales(scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | ExceptionList]:
    """Compress scale planes, losslessly and deterministically, on the planes' device.

    Args:
        scales: float8_e4m3fn or uint8 `[N, C]` or `[E, N, C]`; `N` a multiple of 16, `C` even, `N * C` at most 2^24.

    Returns:
        For `[N, C]`: `fixed` uint8 `[bytes]` and `exceptions` uint32 `[X]`. For `[E, N, C]`: `fixed` uint8
        `[E, bytes]` and a sequence of `E` uint32 exception tensors, views of one storage that are made when they are
        asked for; `list(exceptions)` makes them all.

    Raises:
        ValueError: the dtype, the number of dimensions or the size of a plane is not as above.

    One host sync on an NVIDIA or AMD GPU, to learn how many exceptions there are.
    """
    if not isinstance(scales, torch.Tensor) or scales.dtype not in (torch.float8_e4m3fn, torch.uint8):
        raise ValueError(f"scales must be float8_e4m3fn or uint8, got {kind_of(scales)}")
    if got := no_dense_tensor(scales):
        raise ValueError(f"scales must be a tensor on a CPU or GPU, got {got}")
    if scales.dim() not in (2, 3) or 0 in scales.shape:
        raise ValueError(f"scales must be [N, C] or [E, N, C] and not empty, got shape {tuple(scales.shape)}")
    NVFP4_CSF.check_plane(*scales.shape[-2:])
    planes = scales.view(torch.uint8).contiguous()
    planes = planes.unsqueeze(0) if planes.dim() == 2 else planes
    if planes.device.type != "cpu":
        from .encode_triton import encode_gpu as encode
    else:
        encode = encode_torch
    with on_one_thread():
        fixed, words, ends = encode(planes)
    return (fixed[0], words) if scales.dim() == 2 else (fixed, ExceptionList(words, ends))


def encode_torch(planes: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Encode uint8 `[E, N, C]`. Returns `fixed [E, bytes]`, words uint32 `[X]`, and where each plane's words end, int64
    `[E]` on the CPU."""
    num_planes, num_rows, num_cols = planes.shape
    slab_rows, slab_bytes = NVFP4_CSF.rows_per_slab, NVFP4_CSF.slab_bytes(num_cols)
    slabs = planes.view(-1, slab_rows, num_cols)
    fixed = planes.new_empty(slabs.shape[0], slab_bytes)
    positions, values = [], []
    chunk_slabs = max(1, _CHUNK_BYTES // (slab_rows * max(num_cols, 2 * _CANDIDATES)))
    for first in range(0, slabs.shape[0], chunk_slabs):
        rows = slabs[first : first + chunk_slabs].view(-1, num_cols)
        bases = _choose_bases(rows)
        codes = rows - bases[:, None]  # wraps around below the base, so that one comparison finds bytes on both sides
        # Eight codes at a time: few words have a code beyond the window, and only their bytes are looked at one by one.
        eights = codes.view(-1).view(torch.int64)
        at = (eights & _HIGH_NIBBLES).nonzero().view(-1)
        some = eights[at].view(torch.uint8)
        beyond = (some >= NVFP4_CSF.window).nonzero().view(-1)
        found = at[beyond >> 3] * 8 + (beyond & 7)
        some[beyond] = 0
        eights[at] = some.view(torch.int64)
        eights |= eights >> 4  # every other byte is now a pair: the first code in bits 0 to 3, the second in 4 to 7
        chunk = fixed[first : first + chunk_slabs]
        chunk[:, :slab_rows] = bases.view(-1, slab_rows)
        chunk[:, slab_rows:] = codes.view(chunk.shape[0], -1)[:, ::2]
        positions.append(found + first * slab_rows * num_cols)
        values.append(rows.view(-1)[found])
    position, value = torch.cat(positions), torch.cat(values)
    plane_bytes = num_rows * num_cols
    ends = torch.bincount(position // plane_bytes, minlength=num_planes).cumsum(0)
    words = (value.to(torch.int64) << NVFP4_CSF.position_bits | position % plane_bytes).to(torch.int32)
    return fixed.view(num_planes, -1), words.view(torch.uint32), ends


def _choose_bases(rows: torch.Tensor) -> torch.Tensor:
    """The lowest base with the best coverage, uint8 `[R]`, for each of uint8 `rows [R, C]`.

    Nearly always it is one of 16 candidates near the row's mean, which are ranked by a histogram of the 31 values that
    they cover. The counts of other values prove it: a window below the first candidate covers none of the values from
    the 16th on, and one above the last candidate covers none before the 17th. If the proof fails, all 241 windows are
    ranked.
    """
    num_rows, num_cols = rows.shape
    last_first = NVFP4_CSF.max_base + 1 - _CANDIDATES
    first = (rows.sum(1, dtype=torch.int32) // num_cols - _MEAN_OFFSET).clamp_(0, last_first)
    slots = rows - first.to(torch.uint8)[:, None]  # values that no candidate covers, on either side, get 31 or more
    slots.clamp_(max=2 * _CANDIDATES - 1)
    # One row of counts for each slot, so that everything below is vectorized over `rows`.
    bins = torch.add(torch.arange(num_rows, dtype=torch.int32, device=rows.device)[:, None], slots, alpha=num_rows)
    counts = torch.bincount(bins.view(-1), minlength=2 * _CANDIDATES * num_rows).view(-1, num_rows).to(torch.int32)
    coverage = counts[:-1]  # for windows of 1, 2, 4, 8 and finally 16 values
    for width in (1, 2, 4, 8):
        coverage = coverage[:-width] + coverage[width:]
    lowest_first = torch.arange(_CANDIDATES - 1, -1, -1, dtype=torch.int32, device=rows.device)[:, None]
    ranked = (coverage * _CANDIDATES + lowest_first).amax(0)
    most, best = ranked // _CANDIDATES, _CANDIDATES - 1 - ranked % _CANDIDATES
    outside = counts[-1] - counts[_CANDIDATES - 1]
    reach_below, reach_above = outside + coverage[0], outside + coverage[-1]
    proven = ((most > reach_below) | (first == 0)) & ((most >= reach_above) | (first == last_first))
    bases = (first + best).to(torch.uint8)
    for unproven in (~proven).nonzero().view(-1).split(_CHUNK_BYTES // 256):
        bases[unproven] = _rank_windows(_histogram(rows[unproven], 256))[1].to(torch.uint8)
    return bases


def _histogram(rows: torch.Tensor, num_bins: int) -> torch.Tensor:
    """How often each value below `num_bins` occurs in each of uint8 `rows [R, C]`: int64 `[R, num_bins]`."""
    num_counters = rows.shape[0] * num_bins
    bins = torch.arange(0, num_counters, num_bins, dtype=torch.int32, device=rows.device)[:, None] + rows
    return torch.bincount(bins.view(-1), minlength=num_counters).view(-1, num_bins)


def _rank_windows(counts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The best coverage of a window over `counts [R, V]`, and the lowest start that has it: int64 `[R]` each."""
    below = torch.nn.functional.pad(counts.cumsum(1), (1, 0))
    coverage = below[:, NVFP4_CSF.window :] - below[:, : -NVFP4_CSF.window]
    num_windows = coverage.shape[1]
    lower_first = torch.arange(num_windows - 1, -1, -1, device=counts.device)
    ranked = (coverage * num_windows + lower_first).amax(1)
    return ranked // num_windows, num_windows - 1 - ranked % num_windows
