"""The GEMMs that several benchmarks run: shapes, weights, routed calls that check themselves, and the bundle.

All data comes from SEED.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

RESULTS = Path(__file__).parent / "results"
SEED = 0
TOP_K = 8
CASES = {  # experts, N output columns, K, gated
    "qwen_gate_up": (512, 640, 2560, True),
    "qwen_down": (512, 2560, 640, False),
    "glm_gate_up": (288, 2048, 4096, True),
    "glm_down": (288, 4096, 2048, False),
}
DENSE = "dense_4096"
"""The case of one weight."""

CHECKED_ROWS = 12
WEIGHT_GLOBAL = 1e-4
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


def pick_device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def load_bundle(directory: Path) -> ModuleType:
    """A built variant, imported from its directory; several processes may do this at the same time."""
    name = json.loads((directory / "metadata.json").read_text())["id"]
    spec = importlib.util.spec_from_file_location(
        name, directory / "__init__.py", submodule_search_locations=[str(directory)]
    )
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@functools.lru_cache(maxsize=1)
def get_bundle(directory: Path | None) -> ModuleType:
    """A built variant or, if ``directory`` is None, what users get."""
    if directory is not None:
        return load_bundle(directory)
    from finegrained_kernels import load

    return load()


def command_line(doc: str | None, out: Path) -> argparse.ArgumentParser:
    """The arguments that all these benchmarks have; `out` is the default of the CSV file that they write."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=out)
    parser.add_argument("--commit", help="for the commit column, where there is no git checkout")
    parser.add_argument("--bundle", type=Path, help="a built variant, where `kernels` is not installed")
    parser.add_argument("--tiny", action="store_true", help="small shapes: does it run?")
    return parser


def parse(parser: argparse.ArgumentParser) -> argparse.Namespace:
    arguments = parser.parse_args()
    if not (arguments.tiny or torch.cuda.is_available()):
        parser.error("real shapes need a CUDA device; --tiny runs without one")
    return arguments


class Weights:
    """Packed weights [E, rows, K/2] and their scales [E, rows, K/16], next to each other in one block of memory."""

    def __init__(self, shape: tuple[int, int, int, bool], device: str, *, fill: bool = True) -> None:
        self.experts, self.cols, self.depth, self.gate = shape
        self.rows = self.cols * (2 if self.gate else 1)
        self.expert_bytes = self.rows * (self.depth // 2 + self.depth // 16)
        self.memory = torch.empty(self.experts * self.expert_bytes, dtype=torch.uint8, device=device)
        packed, scales = self.memory.split([self.experts * self.rows * self.depth // n for n in (2, 16)])
        self.packed = packed.view(self.experts, self.rows, -1)
        self.scales = scales.view(self.experts, self.rows, -1).view(torch.float8_e4m3fn)
        self.b_global = torch.full((self.experts,), WEIGHT_GLOBAL, device=device)
        if fill:
            generator = torch.Generator(device).manual_seed(SEED)
            packed.random_(0, 256, generator=generator)
            scales.random_(
                0x58, 0x78, generator=generator
            )  # 16 to 240: exponents as close as trained weights have them

    def dequantized(self, expert: int | slice, dtype: torch.dtype) -> torch.Tensor:
        """code * scale [.., rows, K], which is exact even in bf16."""
        values = torch.tensor(E2M1, dtype=dtype, device=self.memory.device)
        pairs = torch.stack([values.repeat(16), values.repeat_interleave(16)], -1)  # by byte: low nibble, high nibble
        codes = pairs[self.packed[expert].int()].flatten(-2)
        return (codes.unflatten(-1, (-1, 16)) * self.scales[expert].to(dtype).unsqueeze(-1)).flatten(-2)


@dataclasses.dataclass
class Call:
    """One way to run a GEMM, and its routed rows: the row of x, the expert, and the row of the output."""

    run: Callable[[], torch.Tensor]
    sources: torch.Tensor
    experts: torch.Tensor
    targets: torch.Tensor


class Problem:
    """Activations of `tokens` tokens, routed, for one weight stack."""

    def __init__(self, bundle, case: str, weights: Weights, tokens: int) -> None:
        self.bundle, self.weights, self.tokens = bundle, weights, tokens
        device = weights.memory.device
        generator = torch.Generator().manual_seed(SEED + tokens)
        self.from_tokens = case.endswith("gate_up") or case == DENSE
        self.top_k = 1 if case == DENSE else TOP_K
        choices = torch.rand(tokens, weights.experts, generator=generator).topk(self.top_k).indices.int().to(device)
        self.ids = choices.flatten()
        self.active = len(self.ids.unique())
        rows = tokens if self.from_tokens else tokens * self.top_k
        generator = torch.Generator(device).manual_seed(SEED + tokens)
        self.x = torch.randn(rows, weights.depth, generator=generator, dtype=torch.bfloat16, device=device)
        self.start, self.gather, self.scatter = bundle.compute_grouped_scheduling(choices, weights.experts, self.top_k)
        self.slots = torch.arange(len(self.ids), device=device)

    @property
    def moved(self) -> int:
        return self.active * self.weights.expert_bytes

    def call(self, variant: str, scales: Any = None) -> Call:
        """`scales` replace the weights' own, for all experts."""
        weights = self.weights
        arguments = [self.x, weights.packed, None, weights.scales if scales is None else scales]
        options = {"b_global_scale": weights.b_global, "gate": weights.gate}
        if variant != "w4a4":
            options["activation_format"] = "bf16"
        slots, token_of = self.slots, self.slots // self.top_k
        if self.top_k == 1:
            arguments[1], arguments[3] = weights.packed[0], weights.scales[0]
            options["b_global_scale"] = weights.b_global[0]
            run = functools.partial(self.bundle.matmul_2d, *arguments, **options)
            return Call(run, slots, self.ids, slots)
        if variant == "w4a16_batched":
            options |= {"expert_ids": self.ids, "gather_idx": token_of.int() if self.from_tokens else None}
            run = functools.partial(self.bundle.matmul_batched, *arguments, **options)
            return Call(run, token_of if self.from_tokens else slots, self.ids, slots)
        options["expert_start"] = self.start
        options |= {"gather_idx": self.gather} if self.from_tokens else {"scatter_idx": self.scatter}
        run = functools.partial(self.bundle.matmul_grouped, *arguments, **options)
        sources, targets = (self.gather, slots) if self.from_tokens else (slots, self.scatter)
        return Call(run, sources, self.ids[self.scatter], targets)

    def checked_call(self, variant: str) -> Callable[[], torch.Tensor]:
        call = self.call(variant)
        out = call.run()
        for row in self.sample():
            x = self.x[call.sources[row]].unsqueeze(0)
            sums = self.float64_sums(x, int(call.experts[row]), quantized=variant == "w4a4")
            self.check(out[call.targets[row]], self.activated(sums), f"{variant}, routed row {row}")
        return call.run

    def sample(self) -> list[int]:
        return torch.linspace(0, len(self.slots) - 1, min(len(self.slots), CHECKED_ROWS)).round().int().tolist()

    def float64_sums(self, x: torch.Tensor, expert: int, *, quantized: bool = False) -> torch.Tensor:
        """x [1, K] times an expert's weights, [rows]."""
        values = x.double()
        if quantized:
            packed, scales, x_global = self.bundle.nvfp4_act_quant(x)
            low_high = torch.stack([packed & 15, packed >> 4], -1).flatten(-2).int()
            codes = torch.tensor(E2M1, dtype=torch.float64, device=x.device)[low_high]
            values = codes * scales.double().repeat_interleave(16, -1) * x_global.double()
        return (self.weights.dequantized(expert, torch.float64) @ values[0]) * float(self.weights.b_global[expert])

    def activated(self, sums: torch.Tensor) -> torch.Tensor:
        if not self.weights.gate:
            return sums
        gate, up = sums.chunk(2)
        return gate * torch.sigmoid(gate) * up

    @staticmethod
    def check(actual: torch.Tensor, expected: torch.Tensor, name: str) -> None:
        """Compare up to the rounding of bf16, and 1e-3 of a row's size for the error of float32 sums in which terms
        cancel."""
        allowed = 2.0**-8 * expected.abs() + 1e-3 * expected.square().mean().sqrt()
        error = (actual.double() - expected).abs()
        assert bool((error <= allowed).all()), f"{name}: {(error / allowed).max():.3g} x the allowed error"
