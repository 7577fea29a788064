"""The GPU kernels without a GPU: interpreted on small problems, in a separate process."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("triton")
SUPPORT = Path(__file__).resolve().parent.parent / "support"

INTERPRETED = """
import dataclasses, importlib, sys
import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

def as_float(handle):  # the interpreter multiplies the bits of bf16 operands as integers
    if handle.dtype.scalar == tl.bfloat16:
        return (handle.data.astype(np.uint32) << 16).view(np.float32)
    return handle.data

def create_dot(self, a, b, d, *_):
    product = np.matmul(as_float(a), as_float(b), dtype=d.data.dtype)
    return interpreter.TensorHandle(product + d.data, d.dtype.scalar)

def create_fma(self, a, b, c):  # the interpreter rounds twice
    exact = a.data.astype(np.float64) * b.data.astype(np.float64) + c.data.astype(np.float64)
    return interpreter.TensorHandle(exact.astype(np.float32), tl.float32)

np.seterr(all="ignore")
interpreter.InterpreterBuilder.create_dot = create_dot
interpreter.InterpreterBuilder.create_fma = create_fma
interpreter.InterpreterBuilder.create_minnumf = lambda self, a, b: self.binary_op(a, b, np.fmin)  # Triton 3.6 keeps NaN
from kernels import get_local_kernel
from pathlib import Path
sys.path.insert(0, {support!r})
import interpreter as interpreter_faults
interpreter_faults.mend()
bundle = get_local_kernel(Path({variant!r}))
part = lambda name: importlib.import_module(f"{{bundle.__name__}}.{{name}}")
part("gemm.api")._run_on_device = part("gemm.dispatch").run_on_gpu
part("moe.reduction")._reduce_on_device = part("moe.reduction_triton").weighted_reduce_on_gpu
on_cpu = part("nvfp4.quantize")._act_quant_on_device
"""

SCENARIOS = """
import gemm_scenarios as table
chosen = [s for s in table.ON_CPU if s.tokens < 10 and s.depth < 200 and s.cols < 100]
for scenario in chosen[::4]:
    table.check_scenario(bundle, part("nvfp4.reference"), scenario, "cpu")

interpreter_faults.watch_memory(programs_apart=False)  # rows may have several owners

import malformed_routing
for name in malformed_routing.STARTS:
    for indices in ("none", "gather and scatter"):
        malformed_routing.check_expert_starts(bundle, "cpu", name, indices)

import poisoned
for gate, activation_format in ((True, "bf16"), (False, None)):
    poisoned.check_unused_values(bundle, "cpu", gate, activation_format, True, 48, 160)
"""

COMPRESSED = """
import fused_scenarios as fused

interpreter_faults.watch_memory(programs_apart=True)

def refuse(*_, **__):
    raise AssertionError("compressed scales were decoded for a kernel that reads them")

part("gemm.dispatch").decompress_nvfp4_csf_scales = refuse
for choice in fused.in_turn(fused.SMALL, 24):
    fused.check_scenario(bundle, choice, "cpu")

config = part("gemm.config")
config.PORTABLE = part("gemm.dispatch").PORTABLE = config.BlockConfig(64, 64, 16, max_cols=32)  # in several parts
long = {"op": "grouped", "activation": "w4a16_bf16", "gate": "silu", "requant": False, "routing": "uniform",
        "size": (2, 3), "shape": (80, 1184), "percent": 5, "kind": "any", "output": "float32"}
fused.check_scenario(bundle, long, "cpu")
long |= {"gate": "none", "shape": (16, 1184)}
fused.check_scenario(bundle, {**long, "percent": 100}, "cpu")

config.PORTABLE = part("gemm.dispatch").PORTABLE = config.BlockConfig(64, 64, 16)
part("gemm.kernels.tile_scales").GROUP_PAIRS = tl.constexpr(32)  # of 48 pairs of columns
fused.check_scenario(bundle, long, "cpu")
"""

SCALED = """
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])

def operand(codes, scales):  # [rows, K / 2] bytes and [rows, K / 16] unsigned E4M3 to [rows, K]
    assert scales.max() < 0x80, "the hardware knows no sign of a scale"
    values = E2M1[np.stack([codes & 15, codes >> 4], -1).reshape(len(codes), -1)]
    return values * torch.from_numpy(scales).view(torch.float8_e4m3fn).double().numpy().repeat(16, -1)

def create_dot_scaled(self, a, a_scales, a_format, b, b_scales, b_format, fast_math, a_pack, b_pack, acc):
    product = operand(a.data, a_scales.data) @ operand(b.data.T, b_scales.data).T
    return interpreter.TensorHandle((product + acc.data).astype(np.float32), tl.float32)

interpreter.InterpreterBuilder.create_dot_scaled = create_dot_scaled
launch = part("gemm.dispatch")
launch.choose_kernel = lambda gemm: "portable" if gemm.weight_only else "sm100_scaled"

import gemm_scenarios as table
reference = part("nvfp4.reference")
wanted = [s for s in table.BASE + table.PORTABLE if s.activation.startswith("w4a4")]
wanted += [table.replace(s, activation="w4a4_rowwise", layout=s.layout) for s in table.SHAPES if s.tokens < 20]
wanted += [s for s in table.ROUTINGS if s.activation.startswith("w4a4") and s.tokens < 20]
chosen = table.pairwise([s for s in wanted if s.depth < 200 and s.cols < 100])
for scenario in chosen:
    table.check_scenario(bundle, reference, scenario, "cpu")

problem = table.build(bundle, reference, table.Scenario(activation="w4a4_packed", gate="silu"), "cpu")
a, b, a_scales, b_scales = problem.args
want = bundle.matmul_grouped(*problem.args, **problem.options)
for codes, scales in ((a, a_scales), (b, b_scales)):  # a group's sign may be its scale's or its codes'
    negative = torch.rand(scales.shape) < 0.5
    scales.view(torch.uint8)[negative] ^= 0x80
    codes.view(*scales.shape, 8)[negative] ^= 0x88
assert torch.equal(bundle.matmul_grouped(*problem.args, **problem.options), want)

import poisoned
poisoned.check_unused_values(bundle, "cpu", True, None, True, 48, 160)
"""

SCALED_COMPRESSED = f"""
{SCALED.partition("import gemm_scenarios")[0]}
{COMPRESSED.partition("for choice")[0]}
w4a4 = tuple(name for name in fused.SMALL["activation"] if name.startswith("w4a4"))
for choice in fused.in_turn(fused.SMALL | {{"activation": w4a4}}, 24):
    fused.check_scenario(bundle, choice, "cpu")

choose = launch.scaled_config
launch.scaled_config = lambda *rows_and_gate: dataclasses.replace(choose(*rows_and_gate), max_cols=32)
long = {{"op": "grouped", "activation": "w4a4_rowwise", "gate": "silu", "requant": False, "routing": "uniform",
        "size": (2, 3), "shape": (80, 1184), "percent": 5, "kind": "any", "output": "float32"}}
fused.check_scenario(bundle, long, "cpu")
fused.check_scenario(bundle, {{**long, "percent": 100, "gate": "none", "shape": (16, 1184)}}, "cpu")
"""

QUANTIZER = """
quant = part("nvfp4.quantize_triton")
VALUES = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
BORDERS = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5])
GLOBALS = [0.01, 1.0, 0.1 * 2**-70, 0.3 * 2**70, 3e38, 1e-38, 3e-44, 1.5e-45, 0.0, -0.0, -0.01, torch.inf, -torch.inf,
           torch.nan]  # fmt: skip

def equal(got, want):
    return torch.equal(got.isnan(), want.isnan()) and torch.equal(got[~got.isnan()], want[~want.isnan()])

def check(x, global_scale, index=None):
    source = x if index is None else torch.where(((index >= 0) & (index < len(x)))[:, None], x[index % len(x)], 0)
    packed, scales, row_global = on_cpu(source, global_scale)
    got = quant.quantize_rows(x, global_scale, index)
    assert torch.equal(got[0], packed) and equal(got[1].float(), scales.float()) and equal(got[2], row_global)
    assert bool((got[1].view(torch.uint8) <= 0x7F).all()), "NaN is 0x7F"
    codes = torch.stack([packed & 15, packed >> 4], -1).flatten(-2).int()
    sign = torch.where(codes > 7, -1.0, 1.0)
    want = (VALUES[codes & 7] * sign * scales.float().repeat_interleave(16, -1)).bfloat16()
    for operands in quant.quantized_operands(x, global_scale, index)[0], quant.expanded_operands(packed, scales):
        numbers = ~want.isnan()
        assert equal(operands, want) and torch.equal(operands[numbers].signbit(), want[numbers].signbit())

torch.manual_seed(0)
for depth, rows, magnitude in (  # one block of k and several, whole ones and not, all or some held in registers
    (16, 33, 1e-30), (48, 6, 1e-3), (192, 6, 1.0), (272, 33, 1.0), (1040, 9, 1e4),
):  # fmt: skip
    x = torch.randn(rows, depth) * magnitude
    x[1, :16] = 0
    x[2] = 0
    x[3, 5] = torch.nan
    x[4, 7] = torch.inf
    for scale in (None, torch.tensor(0.01), torch.rand(rows, 1)):
        check(x, scale)
    index = torch.tensor([3, -1, 0, rows, 5, 5], dtype=torch.int32)
    check(x, None, index)
    check(x, torch.rand(6, 1), index)

quant.row_tile = lambda depth: {"BLOCK_R": (1 << 16) // depth, "BLOCK_K": depth}  # fewer and larger programs
bits = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)
of_bf16 = bits.view(torch.bfloat16)
is_subnormal = of_bf16.abs() < 2.0**-126  # the interpreter misreads those of bf16
for everything in of_bf16.masked_fill(is_subnormal, 0), of_bf16.float(), bits.view(torch.float16):
    check(everything[torch.randperm(1 << 16)].view(-1, 256), None)
    for global_scale in (None, *GLOBALS):
        check(everything.view(-1, 256), global_scale if global_scale is None else torch.tensor(global_scale))

for global_scale in (2.0**-117, 1e-20, 0.011, 0.7, 3e5, 1e25):  # float32 next to where a code changes
    amax = (torch.rand(8192, 1) * 2000 + 4) * global_scale
    step = on_cpu(amax.expand(-1, 16), torch.tensor(global_scale))[1].float() * global_scale
    x = torch.cat([amax, step * BORDERS, -step * BORDERS, step], -1)
    x = (x.view(torch.int32) + torch.randint(-2, 3, x.shape, dtype=torch.int32)).view(torch.float32)
    check(x.view(-1, 64), torch.tensor(global_scale))
"""


@pytest.mark.parametrize(
    "body",
    [QUANTIZER, SCENARIOS, COMPRESSED, SCALED, SCALED_COMPRESSED],
    ids=["quantizer", "scenarios", "compressed", "block-scaled", "block-scaled, compressed"],
)
def test_interpreted_kernels_match(bundle_dir, run_python, body):
    prelude = INTERPRETED.format(support=str(SUPPORT), variant=str(bundle_dir))
    run_python(prelude + body, TRITON_INTERPRET="1", PYTHONPATH=str(SUPPORT))
