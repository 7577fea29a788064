"""Run every kernel of the codec once on small cases, on a GPU: what compute-sanitizer watches.

`compute-sanitizer --tool memcheck python scripts/exercise_kernels.py`, and the same with `--tool racecheck`.
"""

from __future__ import annotations

import itertools

import torch

from finegrained_kernels import load


def main() -> None:
    bundle = load()
    generator = torch.Generator().manual_seed(0)
    for shape in ((3, 48, 10), (2, 144, 12), (2, 128, 160), (3, 64, 40)):
        noise = torch.randint(0, 256, shape, generator=generator)
        narrow = 90 + noise % 16
        planes = torch.where(torch.rand(shape, generator=generator) < 0.05, noise, narrow).to(torch.uint8).cuda()
        fixed, exceptions = bundle.compress_nvfp4_csf_scales(planes)
        scales = bundle.prepare_nvfp4_csf_scales(fixed, exceptions, num_rows=shape[1], num_cols=shape[2])
        starts = torch.arange(shape[0] + 1, dtype=torch.int32, device="cuda")
        for swizzled, offset, routing in itertools.product((False, True), (0, 3), (None, starts)):
            # The workspace ends where its allocation ends, so that a byte too many is seen.
            size = bundle.csf_workspace_size(scales, swizzled=swizzled)
            workspace = torch.zeros(offset + size, dtype=torch.uint8, device="cuda")[offset:]
            decoded = bundle.decompress_nvfp4_csf_scales(
                scales, workspace=workspace, expert_start=routing, swizzled=swizzled
            )
            expected = bundle.swizzle_mx_scales(planes) if swizzled else planes
            assert torch.equal(decoded.view(torch.uint8), expected), (shape, swizzled, offset, routing is not None)
    torch.cuda.synchronize()
    print("every kernel ran, outputs exact")


if __name__ == "__main__":
    main()
