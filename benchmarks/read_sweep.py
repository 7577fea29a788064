"""The read-only roof: a sweep that loads every byte once and stores one word per program."""

from __future__ import annotations

import functools
from collections.abc import Callable

import harness
import torch
import triton
import triton.language as tl


@triton.jit
def read_sweep_kernel(in_ptr, out_ptr, num_words, BLOCK: tl.constexpr):
    """Sum int64 words; every program goes through blocks pid, pid + programs, .."""
    total = tl.zeros((BLOCK,), tl.int64)
    for block in tl.range(
        tl.program_id(0), tl.cdiv(num_words, BLOCK), tl.num_programs(0), num_stages=1, loop_unroll_factor=4
    ):
        offs = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        total += tl.load(in_ptr + offs, mask=offs < num_words, other=0)
    tl.store(out_ptr + tl.program_id(0), tl.sum(total, 0))


def read_sweep(words: torch.Tensor, programs_per_sm: int, num_warps: int) -> torch.Tensor:
    """Read `words` (int64, 1-D) once, with two 16-byte loads per lane and step."""
    sms = torch.cuda.get_device_properties(words.device).multi_processor_count
    block = num_warps * 32 * 4
    grid = min(sms * programs_per_sm, triton.cdiv(words.numel(), block))
    out = torch.empty(grid, dtype=torch.int64, device=words.device)
    read_sweep_kernel[(grid,)](words, out, words.numel(), BLOCK=block, num_warps=num_warps)
    return out


LAUNCHES = ((4, 4), (8, 4), (8, 8), (16, 4))
"""(programs per SM, warps) of the sweeps, the fastest of which is the roof."""


def time_beside_roofs(
    calls: dict[str, Callable[[], object]],
    moved: dict[str, int],
    memory: torch.Tensor,
    *,
    launches: tuple[tuple[int, int], ...] = LAUNCHES,
    **options,
) -> tuple[dict[str, harness.Timing], dict[str, float]]:
    """`harness.time_in_turns`, with its options, of calls that move `moved` bytes, and of sweeps of as many bytes of
    `memory`, launched in each of `launches`.

    Returns the calls' timings, and for each the us of its roof, scaled if `memory` has fewer bytes.
    """
    words = memory.flatten()[: memory.numel() // 8 * 8].view(torch.int64)
    sweeps, swept = {}, {}
    for num_bytes in set(moved.values()):
        part = words[: max(1, num_bytes // 8)]
        swept[num_bytes] = part.nbytes
        if not part.is_cuda:
            sweeps[num_bytes, None] = part.sum
            continue
        for launch in launches:
            sweeps[num_bytes, launch] = functools.partial(read_sweep, part, *launch)
    timings = harness.time_in_turns(calls | sweeps, **options)
    fastest = {
        num_bytes: min(timings[key].p50 for key in sweeps if key[0] == num_bytes) * num_bytes / swept[num_bytes]
        for num_bytes in swept
    }
    return {name: timings[name] for name in calls}, {name: fastest[moved[name]] for name in calls}
