"""From a checked `Gemm` to one kernel launch: operands, configuration, outputs, grid."""

from __future__ import annotations

import dataclasses
from typing import Optional, cast

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
from .config import Config, choose_config, comes_whole, reads_compressed, scaled_tile, strip_cols
from .kernels.portable import portable_gemm_kernel
from .problem import Gemm, fault

ALIGNMENT = 16
TRITON_DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}
PORTABLE_TILE = {"BLOCK_N": 64, "BLOCK_K": 64, "BLOCK_T": 16}


def run_on_gpu(gemm: Gemm, config: Config | None = None) -> list[torch.Tensor]:
    """[out [S, N]], or [packed [S, N/2], scales [S, N/16]] with `quantize_output`. `config` overrides the table's."""
    check_memory(gemm)
    outputs = new_outputs(gemm)
    if not gemm.num_rows:
        return outputs
    with on_device(gemm.a.device):
        gemm = with_readable_scales(gemm)
        if uses_scaled_kernel(gemm):
            launch_scaled(gemm, outputs)
            return outputs
        operands, x_global, gather_idx = prepare_activations(gemm)
        arguments, constants = kernel_arguments(gemm, operands, x_global, gather_idx, outputs)
        if uses_tensor_core_kernel(gemm):
            launch_mma(gemm, config, operands, x_global, arguments, constants)
        else:
            launch_portable(gemm, operands, x_global, arguments, constants)
    return outputs


def check_memory(gemm: Gemm) -> None:
    """The kernels read weights and scales as 16-byte vectors of one dense block. They are never copied behind the
    caller's back: they are most of the memory there is."""
    scales = gemm.b_scales
    parts = scales.state_dict() if isinstance(scales, NVFP4CSFScales) else {"Bs": scales}
    for name, tensor in {"B": gemm.b, **parts}.items():
        if not tensor.is_contiguous():
            raise fault(name, "a contiguous tensor", f"strides {tensor.stride()}")
        if tensor.data_ptr() % ALIGNMENT:
            raise fault(name, f"{ALIGNMENT}-byte alignment", hex(tensor.data_ptr()))


def with_readable_scales(gemm: Gemm) -> Gemm:
    """`gemm`, its scales decoded into new memory if they are compressed and no kernel here reads them so: GPUs without
    the tensor-core kernel, rows that are not whole words of codes, rows too long for shared memory."""
    scales = gemm.b_scales
    reads_them = uses_tensor_core_kernel(gemm) and not uses_scaled_kernel(gemm) and reads_compressed(gemm.depth)
    if reads_them or not isinstance(scales, NVFP4CSFScales):
        return gemm
    return dataclasses.replace(gemm, b_scales=decompress_nvfp4_csf_scales(scales, expert_start=gemm.expert_start))


def aligned(a: torch.Tensor) -> torch.Tensor:
    """`a`, contiguous and aligned: copied if it is not."""
    a = a.contiguous()
    return a if a.data_ptr() % ALIGNMENT == 0 else a.clone()


def new_outputs(gemm: Gemm) -> list[torch.Tensor]:
    rows, cols, device = gemm.num_rows, gemm.num_cols, gemm.a.device
    if not gemm.quantize_output:
        return [torch.empty(rows, cols, dtype=gemm.output_dtype, device=device)]
    packed = torch.empty(rows, cols // 2, dtype=torch.uint8, device=device)
    return [packed, torch.empty(rows, cols // GROUP, dtype=torch.float8_e4m3fn, device=device)]


def prepare_activations(gemm: Gemm) -> tuple[torch.Tensor, Optional[torch.Tensor], Optional[torch.Tensor]]:
    """(operands [rows, K] bf16 or fp16, their globals, the gather that is left to do).

    W4A16 uses `a` as it is. W4A4 multiplies exact bf16 code * scale, made here in one pass over the activations; only a
    global of each expert makes it expand the routed rows first, since one source row then has several quantizations.
    """
    a = aligned(gemm.a)
    if gemm.weight_only:
        return a, None, gemm.gather_idx
    if gemm.a_scales is not None:
        return expanded_operands(a, gemm.a_scales), gemm.a_global, gemm.gather_idx
    a_global, row_index, gather_idx = quantizer_rows(gemm)
    operands, x_global = quantized_operands(a, a_global, row_index)
    return operands, x_global, gather_idx


def packed_activations(
    gemm: Gemm,
) -> tuple[torch.Tensor, torch.Tensor, Optional[torch.Tensor], Optional[torch.Tensor]]:
    """W4A4 as block-scaled products read it: (packed [rows, K/2], scales [rows, K/16], their globals, the gather that
    is left to do)."""
    if gemm.a_scales is not None:
        return aligned(gemm.a), gemm.a_scales.contiguous(), gemm.a_global, gemm.gather_idx
    a_global, row_index, gather_idx = quantizer_rows(gemm)
    packed, scales, row_global = quantize_rows(gemm.a, a_global, row_index)
    return packed, scales, row_global[:, 0] if a_global is None else a_global, gather_idx


def quantizer_rows(gemm: Gemm) -> tuple[Optional[torch.Tensor], Optional[torch.Tensor], Optional[torch.Tensor]]:
    """(global of the rows to quantize, None for their own; the source of each, None for all; the gather left to do)."""
    if gemm.a_global is None or gemm.a_global.ndim == 2 or len(gemm.a_global) == 1:
        return gemm.a_global, None, gemm.gather_idx
    return gemm.a_global[row_experts(gemm)], gemm.gather_idx, None


def row_experts(gemm: Gemm) -> torch.Tensor:
    """The expert [S] of each routed row, clamped into range (rows of no expert multiply no weights)."""
    if gemm.expert_ids is not None:
        return gemm.expert_ids.long().clamp(0, gemm.num_experts - 1)
    if gemm.expert_start is None:
        return torch.zeros(gemm.num_rows, dtype=torch.int64, device=gemm.a.device)
    return expert_of_rows(gemm.expert_start, gemm.num_experts, gemm.num_rows)


def kernel_arguments(gemm: Gemm, operands, x_global, gather_idx, outputs) -> tuple[tuple, dict]:
    """What every kernel takes after activations, weights and scales, in order, and the compile-time constants."""
    per_row = x_global is not None and len(x_global) != 1 and not is_per_expert(gemm, x_global)
    scales_out = outputs[1].view(torch.uint8) if gemm.quantize_output else None
    strides = (
        gemm.b_global.stride(0),
        gemm.b_global.stride(1) if gemm.gate else 0,
        0 if x_global is None or len(x_global) == 1 else 1,
        0 if gemm.output_global is None or len(gemm.output_global) == 1 else 1,
    )
    arguments = (
        gemm.b_global, outputs[0], scales_out, gemm.output_global,
        gemm.expert_start, gemm.expert_ids, gather_idx, gemm.scatter_idx,
        gemm.num_rows, operands.shape[0], gemm.num_experts, strides,
        (gemm.alpha, float("inf") if gemm.limit is None else gemm.limit),
    )  # fmt: skip
    constants = {
        "N": gemm.num_cols,
        "K": gemm.depth,
        "GATE": gemm.gate,
        "HAS_LIMIT": gemm.limit is not None,
        "SWIZZLED": isinstance(gemm.b_scales, torch.Tensor) and gemm.b_scales.ndim == 5,
        "X_GLOBAL_PER_ROW": per_row,
        "ROUNDED": TRITON_DTYPES[gemm.output_dtype],
        "BLOCK_E": next_power_of_2(gemm.num_experts + 1),
    }
    return arguments, constants


def is_per_expert(gemm: Gemm, x_global: torch.Tensor) -> bool:
    """Whether the kernel reads one activation global an expert: packed activations with a 1-D [E] global."""
    return gemm.a_scales is not None and x_global.ndim == 1


def uses_tensor_core_kernel(gemm: Gemm) -> bool:
    """sm_89 and later (E4M3 conversion), rows of scale bytes that are whole 32-bit words."""
    if torch.version.hip or gemm.a.device.type != "cuda":
        return False
    return torch.cuda.get_device_capability(gemm.a.device) >= (8, 9) and gemm.depth % 64 == 0


def uses_scaled_kernel(gemm: Gemm) -> bool:
    """W4A4 where tensor cores multiply block-scaled NVFP4: sm_100 and its successors, sm_120."""
    if torch.version.hip or gemm.a.device.type != "cuda" or gemm.weight_only:
        return False
    return torch.cuda.get_device_capability(gemm.a.device)[0] in (10, 12)


def scale_operands(gemm: Gemm, config: Config) -> tuple[torch.Tensor, ...]:
    """Scales as the tensor-core kernels take them: bytes in pairs or words, or the four tensors of the compressed
    form."""
    scales = gemm.b_scales
    if isinstance(scales, NVFP4CSFScales):
        return scales.bases, scales.codes.view(torch.int32), scales.exceptions, scales.exception_offsets
    whole = scales.ndim < 5 and comes_whole(config, gemm.depth, result_bytes(gemm))
    return (scales.view(torch.int64 if whole else torch.int16),)


def dense_scales(gemm: Gemm) -> torch.Tensor:
    """Their bytes, for kernels that read no compressed ones: `with_readable_scales` has decoded those."""
    return cast(torch.Tensor, gemm.b_scales).view(torch.uint8)


def launch_mma(gemm: Gemm, config: Config | None, operands, x_global, arguments: tuple, constants: dict):
    """Launch on tensor cores. With a `config` of the caller's, a tuner's, returns the compiled kernel."""
    from .kernels.mma import nvfp4_gemm_kernel  # Gluon exists for NVIDIA builds of Triton
    from .kernels.sm90_wgmma import nvfp4_wgmma_kernel, permute_tokens

    is_tuning = config is not None
    if config is None:
        rows = gemm.num_rows if gemm.expert_ids is None else min(gemm.num_rows, gemm.num_experts)  # a row, a tile
        compressed = isinstance(gemm.b_scales, NVFP4CSFScales)
        config = choose_config(
            gemm.a.device, gemm.b.shape[1], gemm.depth, rows, gemm.num_experts, result_bytes(gemm), compressed
        )
    tiles = max_row_tiles(gemm, config.block_t) * cdiv(gemm.b.shape[1], config.block_n)
    grid = min(tiles, num_sms(gemm.a.device) * config.programs_per_sm)
    groups = config.block_k // GROUP
    if config.warpgroup:
        operands = permute_tokens(operands, groups)
    kernel = nvfp4_wgmma_kernel if config.warpgroup else nvfp4_gemm_kernel
    constants |= {"BLOCK_N": config.block_n, "GROUPS": groups, "BLOCK_T": config.block_t, "STAGES": config.num_stages}
    constants["BLOCK_E"] = next_power_of_2(max(gemm.num_experts, 2))  # here of experts, not of where they start
    constants["num_warps"] = config.num_warps
    if not config.warpgroup:
        compressed = isinstance(gemm.b_scales, NVFP4CSFScales)
        constants["COLS"] = strip_cols(config, gemm.depth) if compressed else gemm.depth // GROUP
        constants["BURST"] = config.chunks_at_once
    if config.max_registers:
        constants["maxnreg"] = config.max_registers
    arguments = (operands, x_global, gemm.b.view(torch.int64), scale_operands(gemm, config), *arguments)
    if is_tuning:
        forgo_plan()
        return kernel[(grid,)](*arguments, **constants)
    return bind(kernel, **constants)((grid,), *arguments)


def result_bytes(gemm: Gemm) -> int:
    """Bytes of results, before they are requantized, that a weight row has for a routed row."""
    return gemm.output_dtype.itemsize // (2 if gemm.gate else 1)


def max_row_tiles(gemm: Gemm, block_t: int) -> int:
    """No routing of these rows makes more row tiles: every group may end in a tile that is not full."""
    rows = gemm.num_rows
    if gemm.expert_ids is not None:
        return rows
    groups = 1 if gemm.expert_start is None else min(rows, gemm.num_experts + 1)
    return min(rows, cdiv(rows, block_t) + groups)


def launch_scaled(gemm: Gemm, outputs: list[torch.Tensor]) -> None:
    from .kernels.sm100_scaled import scaled_gemm_kernel

    packed, scales, x_global, gather_idx = packed_activations(gemm)
    arguments, constants = kernel_arguments(gemm, packed, x_global, gather_idx, outputs)
    tile = scaled_tile(gemm.num_rows / gemm.num_experts if gemm.expert_ids is None else 1)
    grid = (max_row_tiles(gemm, tile["BLOCK_T"]), cdiv(gemm.b.shape[1], tile["BLOCK_N"]))
    bind(scaled_gemm_kernel, **constants, **tile)(
        grid, packed.view(torch.uint8), scales.view(torch.uint8), x_global, gemm.b.view(torch.uint8),
        dense_scales(gemm), *arguments,
    )  # fmt: skip


def launch_portable(gemm: Gemm, operands, x_global, arguments: tuple, constants: dict) -> None:
    grid = (max_row_tiles(gemm, PORTABLE_TILE["BLOCK_T"]), cdiv(gemm.num_cols, PORTABLE_TILE["BLOCK_N"]))
    bind(portable_gemm_kernel, **constants, **PORTABLE_TILE)(
        grid, operands, x_global, gemm.b.view(torch.uint8), dense_scales(gemm), *arguments
    )
