"""The read-only roof: a sweep that loads every byte once and stores one word a program."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def read_sweep_kernel(in_ptr, out_ptr, num_words, BLOCK: tl.constexpr):
    """Sum int64 words; every program walks blocks pid, pid + programs, .."""
    total = tl.zeros((BLOCK,), tl.int64)
    for block in tl.range(
        tl.program_id(0), tl.cdiv(num_words, BLOCK), tl.num_programs(0), num_stages=1, loop_unroll_factor=4
    ):
        offs = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        total += tl.load(in_ptr + offs, mask=offs < num_words, other=0)
    tl.store(out_ptr + tl.program_id(0), tl.sum(total, 0))


def read_sweep(words: torch.Tensor, programs_per_sm: int, num_warps: int) -> torch.Tensor:
    """One read of `words` (int64, 1-D), two 16-byte loads a lane a step."""
    sms = torch.cuda.get_device_properties(words.device).multi_processor_count
    block = num_warps * 32 * 4
    grid = min(sms * programs_per_sm, triton.cdiv(words.numel(), block))
    out = torch.empty(grid, dtype=torch.int64, device=words.device)
    read_sweep_kernel[(grid,)](words, out, words.numel(), BLOCK=block, num_warps=num_warps)
    return out
