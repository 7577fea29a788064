"""From a checked `Gemm` to one kernel launch: operands, configuration, outputs, grid."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple, Optional, cast

import torch
import triton.language as tl

from ..csf.decode import decompress_nvfp4_csf_scales
from ..csf.scales import NVFP4CSFScales
from ..device import cdiv, next_power_of_2, num_sms, on_device
from ..expert_start import expert_of_rows
from ..launching import bind
from ..nvfp4.quantize_triton import expanded_operands, quantize_rows, quantized_operands
from ..nvfp4.reference import GROUP
from ..recording import forgo_plan
from .ahead import is_plain, launch_ahead, unpacks_ahead
from .capability import BLOCK_SCALED, TENSOR_CORE, kernel_of, reads_compressed_on
from .config import PORTABLE, BlockConfig, choose_config, plan_blocks, scaled_config
from .kernels.operands import Epilogue, Routing, Scales, Shape, Weight
from .kernels.portable import portable_gemm_kernel
from .problem import Gemm, fault
from .smem_plan import Config, comes_whole, plan_tile
from .split import SplitConfig, choose_split, plan_split

ALIGNMENT = 16
TRITON_DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}
EARLY_TOKENS = 128
"""From this many tokens per tile on, `nvfp4_split_kernel` may begin before its tokens are permuted, and waits for them
itself. With fewer tokens that is slower."""
MMA_REGISTERS = 128
"""Registers per thread of `nvfp4_split_kernel` without warpgroups. By itself the assembler takes fewer, and spills."""


def run_on_gpu(gemm: Gemm, config: Config | BlockConfig | None = None) -> list[torch.Tensor]:
    """[out [S, N]], or [packed [S, N/2], scales [S, N/16]] with `quantize_output`. `config` overrides the chosen tile;
    a BlockConfig selects the portable kernel, which runs everywhere."""
    check_memory(gemm)
    outputs = new_outputs(gemm)
    if not gemm.num_rows:
        return outputs
    with on_device(gemm.a.device):
        if config is None and run_one_weight(gemm, outputs):
            return outputs
        if isinstance(config, BlockConfig):
            launch_portable(gemm, config, prepare_activations(gemm), outputs)
            return outputs
        kernel, gemm = choose_kernel(gemm), with_readable_scales(gemm)
        if kernel == TENSOR_CORE:
            launch_mma(gemm, config, prepare_activations(gemm), outputs)
        elif kernel == BLOCK_SCALED:
            launch_scaled(gemm, outputs)
        else:
            launch_portable(gemm, PORTABLE, prepare_activations(gemm), outputs)
    return outputs


def run_one_weight(gemm: Gemm, outputs: list[torch.Tensor]) -> bool:
    """Run a GEMM with one weight and rows that are not routed on a kernel made for that, if this device has one."""
    is_routed = gemm.expert_ids is not None or gemm.expert_start is not None
    if gemm.num_experts > 1 or is_routed or gemm.gather_idx is not None or gemm.scatter_idx is not None:
        return False
    device, weight_rows = gemm.a.device, gemm.b.shape[1]
    if is_plain(gemm) and unpacks_ahead(device, weight_rows, gemm.depth, gemm.num_rows):
        launch_ahead(gemm, aligned(gemm.a), outputs[0])
        return True
    split = choose_split(device, weight_rows, gemm.depth, gemm.num_rows)
    if split is not None:
        launch_split(gemm, split, prepare_activations(gemm), outputs)
    return split is not None


def check_memory(gemm: Gemm) -> None:
    """Raise ValueError unless weights and scales are contiguous and aligned, because kernels read them as 16-byte
    vectors. They are not copied behind the caller's back: they take most of the memory."""
    scales = gemm.b_scales
    parts = scales.state_dict() if isinstance(scales, NVFP4CSFScales) else {"Bs": scales}
    for name, tensor in {"B": gemm.b, **parts}.items():
        if not tensor.is_contiguous():
            raise fault(name, "a contiguous tensor", f"strides {tensor.stride()}")
        if tensor.data_ptr() % ALIGNMENT:
            raise fault(name, f"{ALIGNMENT}-byte alignment", hex(tensor.data_ptr()))


def with_readable_scales(gemm: Gemm) -> Gemm:
    """`gemm`, with its scales decoded into new memory if they are compressed and its kernel does not read them
    directly."""
    is_read = reads_compressed_on(gemm.a.device, gemm.depth, gemm.weight_only)
    if is_read or not isinstance(gemm.b_scales, NVFP4CSFScales):
        return gemm
    scales = decompress_nvfp4_csf_scales(gemm.b_scales, expert_start=gemm.expert_start)
    return dataclasses.replace(gemm, b_scales=scales)


def aligned(a: torch.Tensor) -> torch.Tensor:
    """`a`, copied if it is not contiguous and aligned."""
    a = a.contiguous()
    return a if a.data_ptr() % ALIGNMENT == 0 else a.clone()


def new_outputs(gemm: Gemm) -> list[torch.Tensor]:
    rows, cols, device = gemm.num_rows, gemm.num_cols, gemm.a.device
    if not gemm.quantize_output:
        return [torch.empty(rows, cols, dtype=gemm.output_dtype, device=device)]
    packed = torch.empty(rows, cols // 2, dtype=torch.uint8, device=device)
    return [packed, torch.empty(rows, cols // GROUP, dtype=torch.float8_e4m3fn, device=device)]


class PreparedActivations(NamedTuple):
    """The activations that a kernel multiplies, rows by K (or K/2 packed), and how it finds its rows."""

    values: torch.Tensor
    scales: Optional[torch.Tensor]  # if values are packed
    global_scale: Optional[torch.Tensor]
    gather_idx: Optional[torch.Tensor]  # the gather that is left to do


def prepare_activations(gemm: Gemm) -> PreparedActivations:
    """Values in bf16 or fp16 [rows, K].

    W4A16 uses `a` as it is. W4A4 multiplies exact bf16 code * scale, computed here in one pass over the activations. If
    each expert has its own global, routed rows are gathered first, because a source row is then quantized in several
    ways.
    """
    a = aligned(gemm.a)
    if gemm.weight_only:
        return PreparedActivations(a, None, None, gemm.gather_idx)
    if gemm.a_scales is not None:
        return PreparedActivations(expanded_operands(a, gemm.a_scales), None, gemm.a_global, gemm.gather_idx)
    a_global, row_index, gather_idx = quantizer_rows(gemm)
    operands, x_global = quantized_operands(a, a_global, row_index)
    return PreparedActivations(operands, None, x_global, gather_idx)


def packed_activations(gemm: Gemm) -> PreparedActivations:
    """W4A4 activations for block-scaled products: packed values [rows, K/2], with scales [rows, K/16]."""
    if gemm.a_scales is not None:
        return PreparedActivations(aligned(gemm.a), gemm.a_scales.contiguous(), gemm.a_global, gemm.gather_idx)
    a_global, row_index, gather_idx = quantizer_rows(gemm)
    packed, scales, row_global = quantize_rows(gemm.a, a_global, row_index)
    return PreparedActivations(packed, scales, row_global[:, 0] if a_global is None else a_global, gather_idx)


def quantizer_rows(gemm: Gemm) -> tuple[Optional[torch.Tensor], Optional[torch.Tensor], Optional[torch.Tensor]]:
    """(global of the rows to quantize, or None to compute it per row; the source of each row, or None for all rows in
    order; the gather that is left to do)."""
    if gemm.a_global is None or gemm.a_global.ndim == 2 or len(gemm.a_global) == 1:
        return gemm.a_global, None, gemm.gather_idx
    return gemm.a_global[row_experts(gemm)], gemm.gather_idx, None


def row_experts(gemm: Gemm) -> torch.Tensor:
    """The expert of each routed row, [S], clamped into range (rows without an expert multiply no weights)."""
    if gemm.expert_ids is not None:
        return gemm.expert_ids.long().clamp(0, gemm.num_experts - 1)
    if gemm.expert_start is None:
        return torch.zeros(gemm.num_rows, dtype=torch.int64, device=gemm.a.device)
    return expert_of_rows(gemm.expert_start, gemm.num_experts, gemm.num_rows)


def kernel_arguments(gemm: Gemm, activations: PreparedActivations, outputs: list[torch.Tensor]) -> tuple:
    """The arguments that every kernel takes after activations and weight, in order, except its compile-time
    constants."""
    x_global = activations.global_scale
    epilogue = Epilogue(
        x_global=x_global,
        x_expert_stride=1 if is_per_row(gemm, x_global) or is_per_expert(gemm, x_global) else 0,
        w_global=gemm.b_global,
        w_expert_stride=gemm.b_global.stride(0),
        w_half_stride=gemm.b_global.stride(1) if gemm.gate else 0,
        alpha=gemm.alpha,
        limit=float("inf") if gemm.limit is None else gemm.limit,
        out=outputs[0],
        out_scales=outputs[1].view(torch.uint8) if gemm.quantize_output else None,
        out_global=gemm.output_global,
        out_expert_stride=0 if gemm.output_global is None or len(gemm.output_global) == 1 else 1,
    )
    routing = Routing(gemm.expert_start, gemm.expert_ids, activations.gather_idx, gemm.scatter_idx)
    return routing, epilogue, gemm.num_rows, activations.values.shape[0], gemm.num_experts


def kernel_shape(gemm: Gemm, x_global: Optional[torch.Tensor]) -> Shape:
    """The kernel's `Shape`. `x_global` is the activations' global."""
    return Shape(
        N=gemm.num_cols,
        K=gemm.depth,
        C=gemm.depth // GROUP,
        GATE=gemm.gate,
        HAS_LIMIT=gemm.limit is not None,
        SWIZZLED=isinstance(gemm.b_scales, torch.Tensor) and gemm.b_scales.ndim == 5,
        COMPRESSED=isinstance(gemm.b_scales, NVFP4CSFScales),
        GLOBAL_PER_ROW=is_per_row(gemm, x_global),
        ROUNDED=TRITON_DTYPES[gemm.output_dtype],
        BLOCK_E=next_power_of_2(max(gemm.num_experts, 2)),
    )


def is_per_row(gemm: Gemm, x_global: Optional[torch.Tensor]) -> bool:
    """Whether the kernel reads one activation global for each row. A single row with a global of its own counts as one
    of several, so that it needs no other kernel."""
    if x_global is None or is_per_expert(gemm, x_global):
        return False
    return gemm.a_global is None or len(gemm.a_global) > 1


def is_per_expert(gemm: Gemm, x_global: Optional[torch.Tensor]) -> bool:
    """Whether the kernel reads one activation global for each expert: for packed activations with a 1-D [E] global."""
    return gemm.a_scales is not None and x_global is not None and x_global.ndim == 1 and len(x_global) > 1


def choose_kernel(gemm: Gemm) -> str:
    return kernel_of(gemm.a.device, gemm.depth, gemm.weight_only)


def tensor_core_weight(gemm: Gemm, has_strip: bool) -> Weight:
    """Codes in words of a group; scales compressed, or in words of 8 if they go to a strip, or in pairs."""
    scales = gemm.b_scales
    if isinstance(scales, NVFP4CSFScales):
        codes = scales.codes.view(torch.int32)
        operands = Scales(None, scales.bases, codes, scales.exceptions, scales.exception_offsets)
    else:
        operands = Scales(scales.view(torch.int64 if has_strip else torch.int16))
    return Weight(gemm.b.view(torch.int64), operands)


def byte_weight(gemm: Gemm, scratch_bytes: int) -> Weight:
    """For kernels in Triton: codes as bytes, and for compressed scales the memory into which they are decoded."""
    codes, scales = gemm.b.view(torch.uint8), gemm.b_scales
    if not isinstance(scales, NVFP4CSFScales):
        return Weight(codes, Scales(scales.view(torch.uint8)))
    scratch = torch.empty(scratch_bytes, dtype=torch.uint8, device=gemm.a.device)
    return Weight(codes, Scales(**scales.state_dict()), scratch)


def launch_mma(
    gemm: Gemm, config: Config | None, activations: PreparedActivations, outputs: list[torch.Tensor]
) -> object:
    """Launch on tensor cores. If the caller, which is a tuner, passes a `config`, returns the compiled kernel."""
    from .kernels.mma import nvfp4_gemm_kernel  # Gluon exists for NVIDIA builds of Triton
    from .kernels.sm90_wgmma import nvfp4_wgmma_kernel, permute_tokens

    is_tuning = config is not None
    compressed = isinstance(gemm.b_scales, NVFP4CSFScales)
    if config is None:
        rows = gemm.num_rows if gemm.expert_ids is None else min(gemm.num_rows, gemm.num_experts)  # or a tile per row
        config = choose_config(
            gemm.a.device, gemm.b.shape[1], gemm.depth, rows, gemm.num_experts, result_bytes(gemm), compressed
        )
    has_strip = compressed or brings_whole_scales(gemm, config)
    plan = plan_tile(config, gemm.num_cols, gemm.depth, gemm.gate, has_strip=has_strip, compressed=compressed)
    grid = min(max_row_tiles(gemm, plan.BLOCK_T) * plan.N_TILES, num_sms(gemm.a.device) * config.programs_per_sm)
    kernel, x = nvfp4_gemm_kernel, activations.values
    if config.warpgroup:
        kernel, x = nvfp4_wgmma_kernel, permute_tokens(x, plan.GROUPS)
    arguments = (x, tensor_core_weight(gemm, has_strip), *kernel_arguments(gemm, activations, outputs))
    shape = kernel_shape(gemm, activations.global_scale)
    constants: dict[str, Any] = {"SHAPE": shape, "TILE": plan, "num_warps": config.num_warps}
    if config.max_registers:
        constants["maxnreg"] = config.max_registers
    if is_tuning:
        forgo_plan()
        return kernel[(grid,)](*arguments, **constants)
    return bind(kernel, **constants)((grid,), *arguments)


def launch_split(
    gemm: Gemm, config: SplitConfig, activations: PreparedActivations, outputs: list[torch.Tensor]
) -> None:
    """Launch the kernel for one weight, with one tile per cluster."""
    from .kernels.sm90_split import nvfp4_split_kernel  # Gluon exists for NVIDIA builds of Triton
    from .kernels.sm90_wgmma import permute_tokens

    compressed = isinstance(gemm.b_scales, NVFP4CSFScales)
    plan = plan_split(config, gemm.num_cols, gemm.depth, gemm.gate, compressed)
    assert plan is not None, config  # ensured by `choose_split`
    x = permute_tokens(activations.values, plan.GROUPS) if plan.WARPGROUP else activations.values
    constants = {"SHAPE": kernel_shape(gemm, activations.global_scale), "TILE": plan, "num_warps": config.num_warps}
    if not plan.WARPGROUP:
        constants["maxnreg"] = MMA_REGISTERS
    elif plan.BLOCK_T >= EARLY_TOKENS:
        constants["launch_pdl"] = True
    kernel = bind(nvfp4_split_kernel, cluster=plan.PROGRAMS, **constants)
    weight = tensor_core_weight(gemm, has_strip=compressed)
    kernel(
        (cdiv(gemm.num_rows, plan.BLOCK_T) * plan.N_TILES,), x, weight, *kernel_arguments(gemm, activations, outputs)
    )


def brings_whole_scales(gemm: Gemm, config: Config) -> bool:
    """Whether a tile's dense scales go to a strip, all at once."""
    is_dense = isinstance(gemm.b_scales, torch.Tensor) and gemm.b_scales.ndim < 5
    return is_dense and comes_whole(config, gemm.depth, result_bytes(gemm))


def result_bytes(gemm: Gemm) -> int:
    """Bytes of one value of the result before it is requantized, for each weight row."""
    return gemm.output_dtype.itemsize // (2 if gemm.gate else 1)


def max_row_tiles(gemm: Gemm, block_t: int) -> int:
    """An upper bound on row tiles for any routing of these rows: every expert's rows may end in a tile that is not
    full."""
    rows = gemm.num_rows
    if gemm.expert_ids is not None:
        return rows
    groups = 1 if gemm.expert_start is None else min(rows, gemm.num_experts + 1)
    return min(rows, cdiv(rows, block_t) + groups)


def launch_scaled(gemm: Gemm, outputs: list[torch.Tensor]) -> None:
    from .kernels.sm100_scaled import scaled_gemm_kernel

    activations = packed_activations(gemm)
    config = scaled_config(gemm.num_rows / gemm.num_experts if gemm.expert_ids is None else 1, gemm.gate)
    x = activations.values.view(torch.uint8), cast(torch.Tensor, activations.scales).view(torch.uint8)
    launch_blocks(scaled_gemm_kernel, gemm, config, x, activations, outputs)


def launch_portable(
    gemm: Gemm, config: BlockConfig, activations: PreparedActivations, outputs: list[torch.Tensor]
) -> None:
    launch_blocks(portable_gemm_kernel, gemm, config, (activations.values,), activations, outputs)


def launch_blocks(
    kernel: Any,
    gemm: Gemm,
    config: BlockConfig,
    x: tuple[torch.Tensor, ...],
    activations: PreparedActivations,
    outputs: list[torch.Tensor],
) -> None:
    """Launch a kernel in Triton on a persistent grid: each program has a scratch, which must not grow with the
    weights."""
    tile = plan_blocks(config, gemm.num_cols, gemm.depth, isinstance(gemm.b_scales, NVFP4CSFScales))
    tiles = max_row_tiles(gemm, tile.BLOCK_T) * tile.N_TILES
    programs = min(tiles, num_sms(gemm.a.device) * config.programs_per_sm)
    weight = byte_weight(gemm, programs * tile.COLS * tile.HALF * (2 if gemm.gate else 1))
    shape = kernel_shape(gemm, activations.global_scale)
    bind(kernel, SHAPE=shape, TILE=tile, num_warps=config.num_warps)(
        (programs,), *x, weight, *kernel_arguments(gemm, activations, outputs)
    )
