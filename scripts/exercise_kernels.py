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
        active = torch.arange(shape[0], device="cuda") != 1
        starts = torch.cat([active.new_zeros(1, dtype=torch.int32), active.cumsum(0, dtype=torch.int32)])
        routings = ({}, {"expert_start": starts}, {"expert_start": starts, "max_active": shape[0]})
        for swizzled, offset, routing in itertools.product((False, True), (0, 3, 8, 13), routings):
            # The workspace ends where its allocation ends, so that a byte too many is seen.
            size = bundle.csf_workspace_size(scales, swizzled=swizzled)
            workspace = torch.zeros(offset + size, dtype=torch.uint8, device="cuda")[offset:]
            decoded = bundle.decompress_nvfp4_csf_scales(scales, workspace=workspace, swizzled=swizzled, **routing)
            expected = bundle.swizzle_mx_scales(planes) if swizzled else planes.clone()
            if routing:
                expected[1] = 0
            assert torch.equal(decoded.view(torch.uint8), expected), (shape, swizzled, offset, *routing)
    torch.cuda.synchronize()
    print("every kernel ran, outputs exact")


if __name__ == "__main__":
    main()
