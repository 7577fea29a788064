"""Random calls of the bundle's functions, right and wrong ones, and the result of each."""

from __future__ import annotations

import dataclasses
import functools
import random
import re
from collections.abc import Callable

import torch

E, H, I, TOP_K = 4, 512, 128, 2  # noqa: E741
FP8 = torch.float8_e4m3fn
Call = Callable[[], object]


class Arguments:
    """Arguments of calls, right and wrong ones, drawn from a pool of tensors so that kinds of calls occur again."""

    def __init__(self, bundle, seed: int, device: str = "cpu") -> None:
        self.bundle, self.random, self.device = bundle, random.Random(seed), device
        self.generator = torch.Generator().manual_seed(seed)
        self.weights = {
            rows: [self.bytes(E, rows, cols) for _ in range(2)] for rows, cols in ((2 * I, H // 2), (H, I // 2))
        }
        self.planes = {rows: self.bytes(E, rows, cols) // 16 + 40 for rows, cols in ((2 * I, H // 16), (H, I // 16))}
        self.scales = {rows: planes.view(FP8) for rows, planes in self.planes.items()}
        self.compressed = {rows: self.compress(planes) for rows, planes in self.planes.items()}

    def compress(self, planes: torch.Tensor):
        wire = self.bundle.compress_nvfp4_csf_scales(planes)
        return self.bundle.prepare_nvfp4_csf_scales(*wire, num_rows=planes.shape[1], num_cols=planes.shape[2])

    def bytes(self, *shape: int) -> torch.Tensor:
        return torch.randint(0, 256, shape, dtype=torch.uint8, generator=self.generator).to(self.device)

    def rand(self, *shape: int) -> torch.Tensor:
        return torch.rand(shape, generator=self.generator).to(self.device)

    def pick(self, usual: object, *others: object) -> object:
        """`usual`, but one time in eight one of the others."""
        return self.random.choice(others) if self.random.random() < 1 / 8 else usual

    def strided(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same values with other strides."""
        return torch.stack([tensor, tensor], -1)[..., 0]

    def misaligned(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same values at an address that is not a multiple of 16."""
        memory = torch.empty(tensor.numel() + 16 // tensor.element_size(), dtype=tensor.dtype, device=tensor.device)
        shift = (-memory.data_ptr() % 16) // tensor.element_size() + 1
        return memory[shift : shift + tensor.numel()].view(tensor.shape).copy_(tensor)

    def varied(self, tensor: torch.Tensor) -> object:
        """`tensor`, or its values in another layout, or something else instead."""
        others = [self.strided(tensor), self.misaligned(tensor), torch.nn.Parameter(tensor, requires_grad=False)]
        elsewhere = "meta" if self.device == "cpu" else "cpu"
        others += [tensor.double(), tensor[:-1], tensor.to(elsewhere), tensor.unsqueeze(0), None, 3, "text", [1]]
        return self.pick(tensor, *others)

    def activations(self, rows: int, depth: int) -> torch.Tensor:
        dtype = self.pick(torch.bfloat16, torch.float16, torch.float32)
        return torch.randn(rows, depth, generator=self.generator).to(self.device, dtype)

    def options(self) -> dict:
        options = {"activation_format": self.pick("bf16", None, "fp8"), "b_global_scale": self.global_scale()}
        options["output_dtype"] = self.pick(None, torch.float32, torch.float16, torch.int8)
        return {name: value for name, value in options.items() if value is not None or self.random.random() < 0.5}

    def global_scale(self) -> object:
        return self.pick(
            None, 0.5, 0.0, -0.0, float("nan"), 1, self.rand(E), self.rand(1), self.rand(E)[::2], self.rand(3)
        )

    def gemm(self) -> Call:
        gate = self.random.random() < 0.5
        rows, depth = (2 * I, H) if gate else (H, I)
        tokens = self.random.choice((1, 2, 3, 40))
        B, scales = self.random.choice(self.weights[rows]), self.random.choice((self.scales, self.compressed))[rows]
        options = self.options() | {"gate": gate}
        if gate:
            options |= {"swiglu_limit": self.pick(None, 7.0, 0.0, -0.0, True), "swiglu_alpha": self.pick(None, 1.7, 1)}
        kind = self.random.choice(("matmul_2d", "matmul_batched", "matmul_grouped"))
        if kind == "matmul_2d":
            B, scales = B[0], self.scales[rows][0]
            options["b_global_scale"] = self.pick(self.rand(1), 2.0, None, self.rand(3))
        elif kind == "matmul_batched":
            options["expert_ids"] = self.varied(
                torch.randint(0, E, (tokens,), generator=self.generator).to(self.device)
            )
        else:
            start = torch.tensor([0, *sorted(self.random.randrange(tokens + 1) for _ in range(E - 1)), tokens]).int()
            options["expert_start"] = self.varied(start.to(self.device))
            index = torch.randperm(tokens, generator=self.generator).int().to(self.device)
            options["gather_idx"], options["scatter_idx"] = (
                self.pick(None, index),
                self.pick(None, index, index.flip(0)),
            )
        if isinstance(scales, torch.Tensor):
            scales = self.varied(scales)
        A = self.varied(self.activations(tokens, depth))
        return functools.partial(getattr(self.bundle, kind), A, self.varied(B), None, scales, **options)

    def decompress(self) -> Call:
        rows = self.random.choice(list(self.compressed))
        scales = self.pick(self.compressed[rows], None, self.scales[rows])
        size = self.planes[rows].numel()
        large, small = (torch.zeros(n, dtype=torch.uint8, device=self.device) for n in (size + 64, size // 2))
        workspace = self.pick(large, None, small)
        shift = self.pick(0, 1, 2, 8)
        if workspace is not None:
            workspace = self.varied(workspace[shift:])
        start = self.pick(None, self.varied(torch.arange(E + 1, dtype=torch.int32, device=self.device)))
        options = {"workspace": workspace, "expert_start": start, "max_active": self.pick(None, 2, 2.0, True, -1)}
        return functools.partial(self.bundle.decompress_nvfp4_csf_scales, scales, **options)

    def routing(self, tokens: int) -> tuple:
        index = torch.randint(-1, E, (tokens, TOP_K), generator=self.generator)
        index = self.varied(index.to(self.device, self.pick(torch.int32, torch.int64)))
        return index, self.varied(self.rand(tokens, TOP_K))

    def schedule(self) -> Call:
        index, _ = self.routing(self.random.choice((1, 3, 40)))
        return functools.partial(self.bundle.compute_grouped_scheduling, index, E, self.pick(TOP_K, 3, 0, 1))

    def reduce(self) -> Call:
        tokens = self.random.choice((1, 3, 40))
        rows = self.varied(self.activations(tokens * TOP_K, H))
        return functools.partial(self.bundle.weighted_reduce, rows, *self.routing(tokens), E)

    def layer(self) -> Call:
        gate_up, down = self.random.choice(self.weights[2 * I]), self.random.choice(self.weights[H])
        experts = self.bundle.NVFP4Experts(
            gate_up, down, self.scales[2 * I], self.scales[H], self.rand(E), self.rand(E),
            down_input_global=self.pick(None, self.rand(1)),
        )  # fmt: skip
        if self.random.random() < 0.5:
            some = {"gate_up_scales": self.compressed[2 * I], "down_scales": self.compressed[H]}
            size = sum(planes.numel() for planes in self.planes.values())
            scratch = self.pick(None, torch.zeros(size, dtype=torch.uint8, device=self.device))
            experts = dataclasses.replace(experts, **some, scratch=scratch)
        tokens = self.random.choice((0, 1, 3, 40))
        x = self.varied(self.activations(tokens, H))
        options = {
            "activation_format": self.pick("bf16", None, "fp8"),
            "strategy": self.pick("fused", None, "staged", "no"),
        }
        return functools.partial(self.bundle.moe_forward, experts, x, *self.routing(tokens), **options)

    def call(self) -> Call:
        return self.random.choice(
            (self.gemm, self.gemm, self.decompress, self.schedule, self.reduce, self.layer, self.layer)
        )()


def bytes_of(result: object, most: int | None) -> object:
    """Dtype, shape, strides and the first `most` bytes of every tensor."""
    if isinstance(result, (tuple, list)):
        return tuple(bytes_of(one, most) for one in result)
    assert isinstance(result, torch.Tensor)
    bytes_ = result.contiguous().flatten()[:most].view(torch.uint8).cpu().numpy().tobytes() if result.numel() else b""
    return result.dtype, result.shape, result.stride(), bytes_[:most]


def outcome(call: Call, most: int | None = None) -> object:
    try:
        return bytes_of(call(), most)
    except Exception as error:
        return type(error), re.sub(r"0x[0-9a-f]+", "0x", str(error))
