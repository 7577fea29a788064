"""Marlin, as vLLM 0.26.0 prepares and calls it for NVFP4 on Hopper, from the wheel's own libraries (prepare.py)."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

PEERS = Path(__file__).resolve().parent.parent / "local" / "peers"
# For sm_90, the wheel has only PTX of Marlin's MoE, which the driver compiles once, into a cache.
os.environ.setdefault("CUDA_CACHE_PATH", str(Path(tempfile.gettempdir()) / "peers_jit"))
os.environ.setdefault("CUDA_CACHE_MAXSIZE", str(4 << 30))
os.environ.setdefault("CUDA_MODULE_LOADING", "LAZY")  # in the libraries, what sm_90 does not select was zeroed

sys.path.append(str(PEERS))

import torch  # noqa: E402
import vllm_marlin as vllm  # type: ignore[import-not-found]  # noqa: E402  # prepare.py writes it

LIBRARIES = ("_C_stable_libtorch.abi3.so", "_moe_C_stable_libtorch.abi3.so")
UNPACKED = Path(tempfile.gettempdir()) / "peers_so"
GROUP = 16


def unpack() -> None:
    """Unpack the libraries from their archives; several processes may do this at the same time."""
    UNPACKED.mkdir(parents=True, exist_ok=True)
    for name in LIBRARIES:
        target, packed = UNPACKED / name, PEERS / f"{name}.xz"
        if target.exists():
            continue
        part = target.with_suffix(f".{os.getpid()}")
        with part.open("wb") as file:
            subprocess.run(["xz", "-dc", str(packed)], stdout=file, check=True)
        part.rename(target)


def load() -> None:
    """Register vLLM's operators with torch."""
    unpack()
    torch.cuda.init()  # then libcuda.so.1 and libcudart.so are loaded
    for name in LIBRARIES:
        torch.ops.load_library(str(UNPACKED / name))


def marlin_scales(scales: torch.Tensor, global_scale: torch.Tensor, size_n: int, size_k: int):
    """`permute_scales` of prepare_nvfp4_moe_layer_for_marlin: [E, N, K/16] -> [E, K/16, N], and the global scales."""
    scales = scales.to(torch.bfloat16)
    factor = vllm._nvfp4_compute_scale_factor(scales, torch.bfloat16)
    planes = []
    for plane in scales:
        permuted = vllm.marlin_permute_scales(s=plane.T, size_k=size_k, size_n=size_n, group_size=GROUP)
        planes.append(vllm.nvfp4_marlin_process_scales(permuted, scale_factor=factor, a_dtype=torch.bfloat16)[0])
    planes = torch.cat([plane.unsqueeze(0) for plane in planes], 0)
    return planes, vllm.nvfp4_marlin_process_global_scale(global_scale, torch.bfloat16) / factor


def resized(cache: torch.Tensor, *size: int) -> torch.Tensor:
    return cache.flatten()[: size[0] * size[1]].view(size)


class Layer:
    """fused_marlin_moe on prepared weights."""

    def __init__(self, shape, dense, top_k: int) -> None:
        self.shape, self.top_k = shape, top_k
        perm = torch.empty(0, dtype=torch.int, device="cuda")
        hidden, inner = shape.hidden, shape.inner
        self.w13 = vllm._repack_marlin_experts(dense.gate_up, 2 * inner, hidden, perm, False)
        self.w2 = vllm._repack_marlin_experts(dense.down, hidden, inner, perm, False)
        self.w13_scale, self.w13_global = marlin_scales(dense.gate_up_scales, dense.gate_up_global, 2 * inner, hidden)
        self.w2_scale, self.w2_global = marlin_scales(dense.down_scales, dense.down_global, hidden, inner)
        self.workspace = vllm.marlin_make_workspace_new(self.w13.device, 4)

    def block_size(self, tokens: int) -> int:
        for block_size_m in [8, 16, 32, 48, 64]:
            if tokens * self.top_k / self.shape.experts / block_size_m < 0.9:
                break
        return block_size_m

    def align(self, ids: torch.Tensor):
        return vllm.moe_align_block_size(
            ids, self.block_size(len(ids)), self.shape.experts, None, ignore_invalid_experts=True
        )

    def caches(self, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Made ahead, as vllm's workspace manager does."""
        rows, options = tokens * self.top_k, {"dtype": torch.bfloat16, "device": "cuda"}
        widest = max(2 * self.shape.inner, self.shape.hidden)
        return torch.empty(rows * widest, **options), torch.empty(rows, self.shape.inner, **options)

    def gemms(self, hidden: torch.Tensor, weights: torch.Tensor, aligned, caches) -> torch.Tensor:
        """Both GEMMs, with the activation between them; weighted rows [tokens * top_k, hidden]."""
        tokens, (size_k, size_n) = len(hidden), (self.shape.hidden, self.shape.inner)
        rows, block = tokens * self.top_k, self.block_size(tokens)
        shared = {
            "moe_block_size": block, "b_q_type": vllm.FLOAT4_E2M1F, "is_k_full": True, "use_atomic_add": False,
            "use_fp32_reduce": True, "is_zp_float": False,
        }  # fmt: skip
        up = vllm.moe_wna16_marlin_gemm(
            hidden, resized(caches[0], rows, 2 * size_n), self.w13, None, self.w13_scale, None, self.w13_global,
            None, None, None, self.workspace, *aligned, weights, top_k=self.top_k, mul_topk_weights=False,
            size_m=tokens, size_n=2 * size_n, size_k=size_k, **shared,
        )  # fmt: skip
        torch.ops._C.silu_and_mul(caches[1], up.view(-1, 2 * size_n))
        return vllm.moe_wna16_marlin_gemm(
            caches[1], resized(caches[0], rows, size_k), self.w2, None, self.w2_scale, None, self.w2_global,
            None, None, None, self.workspace, *aligned, weights, top_k=1, mul_topk_weights=True,
            size_m=rows, size_n=size_k, size_k=size_n, **shared,
        )  # fmt: skip

    def layer(self, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, caches) -> torch.Tensor:
        rows = self.gemms(hidden, weights, self.align(ids), caches)
        output = torch.empty_like(hidden)
        vllm.moe_sum(rows.view(-1, self.top_k, self.shape.hidden), output)
        return output


class Linear:
    """apply_fp4_marlin_linear on a weight that prepare_fp4_layer_for_marlin took (no padding at these sizes)."""

    def __init__(self, packed: torch.Tensor, scales: torch.Tensor, global_scale: torch.Tensor) -> None:
        self.size_n, self.size_k = packed.shape[0], packed.shape[1] * 2
        self.workspace = vllm.marlin_make_workspace_new(packed.device)
        perm = torch.empty(0, dtype=torch.int, device=packed.device)
        self.weight = vllm.gptq_marlin_repack(
            packed.view(torch.int32).T.contiguous(), perm, self.size_k, self.size_n, 4, False
        )
        permuted = vllm.marlin_permute_scales(
            s=scales.T.contiguous().to(torch.bfloat16), size_k=self.size_k, size_n=self.size_n, group_size=GROUP
        )
        self.scales, factor = vllm.nvfp4_marlin_process_scales(permuted, a_dtype=torch.bfloat16)
        self.global_scale = vllm.nvfp4_marlin_process_global_scale(global_scale, torch.bfloat16) / factor

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return vllm.marlin_gemm(
            a=x, c=None, b_q_weight=self.weight, b_bias=None, b_scales=self.scales, a_scales=None,
            global_scale=self.global_scale, b_zeros=None, g_idx=None, perm=None, workspace=self.workspace,
            b_q_type=vllm.FLOAT4_E2M1F, size_m=x.shape[0], size_n=self.size_n, size_k=self.size_k,
            use_atomic_add=False, use_fp32_reduce=True,
        )  # fmt: skip
