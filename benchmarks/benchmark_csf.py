"""What `kernels benchmark kernels-community/finegrained-kernels` runs for the hub's page: wall clock, a sync per call.

Decoding is verified with the same formula written in torch, and compared with its time. The numbers in this project's
documents are measured by other scripts here, under CUDA graphs.
"""

from __future__ import annotations

import torch
from kernels.benchmark import Benchmark

NUM_ROWS, NUM_COLS = 640, 160
EXCEPTION_RATE = 0.01


class CSFScales(Benchmark):
    """One stack of scale planes, 512 on a GPU and 16 on a CPU, with 1 % exceptions."""

    seed = 0

    def setup(self) -> None:
        num_planes = 16 if self.device == "cpu" else 512
        shape = (num_planes, NUM_ROWS, NUM_COLS)
        rows = torch.randint(60, 110, (num_planes, NUM_ROWS, 1), device=self.device)
        planes = (rows + torch.randint(0, 16, shape, device=self.device)).to(torch.uint8)
        planes[torch.rand(shape, device=self.device) < EXCEPTION_RATE] = 0x7E
        self.planes = planes
        fixed, exceptions = self.kernel.compress_nvfp4_csf_scales(planes)
        self.scales = self.kernel.prepare_nvfp4_csf_scales(fixed, exceptions, num_rows=NUM_ROWS, num_cols=NUM_COLS)
        self.workspace = torch.empty(planes.numel(), dtype=torch.uint8, device=self.device)
        counts = torch.tensor([len(words) for words in exceptions], device=self.device)
        self.plane_starts = torch.arange(num_planes, device=self.device).repeat_interleave(counts) * planes[0].numel()

    def expression(self) -> torch.Tensor:
        """ "Decoding" in docs/format.md, written in the obvious way."""
        codes, words = self.scales.codes, self.scales.exceptions
        nibbles = torch.stack([codes & 15, codes >> 4], dim=-1).to(torch.int16).flatten(-2)
        planes = (nibbles + self.scales.bases[:, :, None]).to(torch.uint8)
        planes.view(-1)[self.plane_starts + (words & 0xFFFFFF)] = (words >> 24).to(torch.uint8)
        return planes

    def benchmark_decompress(self) -> None:
        self.out = self.kernel.decompress_nvfp4_csf_scales(self.scales, workspace=self.workspace).view(torch.uint8)

    def verify_decompress(self) -> torch.Tensor:
        return self.expression()

    def setup_decompress_routed(self) -> None:
        self.setup()
        num_active = 8
        rows = torch.zeros(len(self.planes), dtype=torch.int32)
        rows[:: len(self.planes) // num_active] = 1
        self.active = (rows > 0).to(self.device)
        starts = torch.cat([rows.new_zeros(1), rows.cumsum(0, dtype=torch.int32)])
        self.routing = {"expert_start": starts.to(self.device), "max_active": num_active}
        self.workspace.zero_()

    def benchmark_decompress_routed(self) -> None:
        self.out = self.kernel.decompress_nvfp4_csf_scales(self.scales, workspace=self.workspace, **self.routing)
        self.out = self.out.view(torch.uint8)

    def verify_decompress_routed(self) -> torch.Tensor:
        return torch.where(self.active[:, None, None], self.expression(), 0)

    def benchmark_compress(self) -> None:
        self.fixed, self.words = self.kernel.compress_nvfp4_csf_scales(self.planes)
        self.out = self.fixed[:, :16]

    def verify_compress(self) -> torch.Tensor:
        """The first rows' bases, found by counting the coverage of all 241."""
        rows = self.planes[:, :16].to(torch.int16)
        coverage = [((rows >= base) & (rows < base + 16)).sum(-1) for base in range(241)]
        return torch.stack(coverage).argmax(0).to(torch.uint8)
