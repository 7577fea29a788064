"""The swizzled scale layout of block-scaled tensor cores, and its inverse.

A plane [N, C] of scale bytes is cut into tiles of 128 rows by 4 columns; one tile is 512 consecutive bytes, in which
row r, column c of the tile sits at (r % 32) * 16 + (r // 32) * 4 + c. The swizzled tensor keeps its tile grid as
dimensions, [.., ceil(N/128), ceil(C/4), 32, 16], so that it is never mistaken for a dense plane and its geometry is
never guessed from a flat size. Padding bytes are 0.
"""

from __future__ import annotations

import torch

TILE_ROWS, TILE_COLS = 128, 4
TILE_SHAPE = (32, 16)


def swizzled_shape(num_rows: int, num_cols: int) -> tuple[int, int, int, int]:
    """Shape of one swizzled plane of `num_rows` x `num_cols` scale bytes.

    >>> swizzled_shape(640, 160)
    (5, 40, 32, 16)
    """
    return -(-num_rows // TILE_ROWS), -(-num_cols // TILE_COLS), *TILE_SHAPE


def swizzle_mx_scales(scales: torch.Tensor) -> torch.Tensor:
    """Swizzled copy [.., ceil(N/128), ceil(C/4), 32, 16] of dense one-byte scales [.., N, C], same dtype.

    Raises ValueError unless it is a tensor of one-byte elements with at least two dimensions.

    >>> scales = torch.arange(16 * 6, dtype=torch.uint8).view(16, 6)
    >>> swizzled = swizzle_mx_scales(scales)
    >>> swizzled.shape
    torch.Size([1, 2, 32, 16])
    >>> torch.equal(unswizzle_mx_scales(swizzled, num_rows=16, num_cols=6), scales)
    True
    """
    if not isinstance(scales, torch.Tensor):
        raise ValueError(f"scales: expected a tensor, got {type(scales).__name__}")
    if scales.ndim < 2 or scales.element_size() != 1:
        raise ValueError(f"scales: expected one-byte [.., N, C], got {scales.dtype} {tuple(scales.shape)}")
    lead, (num_rows, num_cols) = scales.shape[:-2], scales.shape[-2:]
    row_tiles, col_tiles, _, _ = swizzled_shape(num_rows, num_cols)
    padding = (0, col_tiles * TILE_COLS - num_cols, 0, row_tiles * TILE_ROWS - num_rows)
    padded = torch.nn.functional.pad(scales.view(torch.uint8), padding)
    tiles = padded.reshape(*lead, row_tiles, 4, 32, col_tiles, 4)  # row = tile*128 + quarter*32 + r, col = tile*4 + c
    swizzled = tiles.movedim((-1, -4), (-1, -2)).transpose(-4, -3)
    return swizzled.reshape(*lead, row_tiles, col_tiles, *TILE_SHAPE).view(scales.dtype)


def unswizzle_mx_scales(swizzled: torch.Tensor, *, num_rows: int, num_cols: int) -> torch.Tensor:
    """Dense scales [.., num_rows, num_cols] of a swizzled tensor, same dtype; the inverse of `swizzle_mx_scales`.

    Raises ValueError if the tensor's shape is not that of a swizzled plane of this size.
    """
    if not isinstance(swizzled, torch.Tensor):
        raise ValueError(f"swizzled: expected a tensor, got {type(swizzled).__name__}")
    expected = swizzled_shape(num_rows, num_cols)
    if tuple(swizzled.shape[-4:]) != expected or swizzled.element_size() != 1:
        raise ValueError(
            f"swizzled: expected one-byte [.., {', '.join(map(str, expected))}] for a {num_rows} x {num_cols} plane, "
            f"got {swizzled.dtype} {tuple(swizzled.shape)}"
        )
    lead, (row_tiles, col_tiles) = swizzled.shape[:-4], expected[:2]
    tiles = swizzled.view(torch.uint8).reshape(*lead, row_tiles, col_tiles, 32, 4, 4)
    rows = tiles.transpose(-4, -3).movedim((-1, -2), (-1, -4))
    padded = rows.reshape(*lead, row_tiles * TILE_ROWS, col_tiles * TILE_COLS)
    return padded[..., :num_rows, :num_cols].contiguous().view(swizzled.dtype)
