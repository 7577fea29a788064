"""humming-kernels 0.1.10, the version that vLLM 0.26.0 requires, as vLLM's `moe_backend="humming"` and its NVFP4 linear
call it: W4A16 with warpgroup products, compiled by nvrtc where it runs, for which CUDA's compiler must be there."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
import types
from pathlib import Path

SITE = Path(__file__).resolve().parent.parent / "local" / "peers" / "humming_site"
os.environ.setdefault("HUMMING_CACHE_DIR", f"{tempfile.gettempdir()}/humming/cache/")
os.environ.setdefault("HUMMING_TMP_DIR", f"{tempfile.gettempdir()}/humming/tmp/")
os.environ.setdefault("HUMMING_DISABLE_PARALLEL_BUILD", "1")
for name in ("HUMMING_CACHE_DIR", "HUMMING_TMP_DIR"):
    Path(os.environ[name]).mkdir(parents=True, exist_ok=True)
LINKS = Path(os.environ["HUMMING_TMP_DIR"], "lib")  # for its -lcuda, if there is only libcuda.so.1
LINKS.mkdir(exist_ok=True)
drivers = ("/usr/local/nvidia/lib64", "/usr/local/nvidia/lib", "/usr/lib/x86_64-linux-gnu", "/usr/lib64")
found = [Path(path, "libcuda.so.1") for path in drivers if Path(path, "libcuda.so.1").exists()]
if found and not (LINKS / "libcuda.so").is_symlink():
    with contextlib.suppress(FileExistsError):
        (LINKS / "libcuda.so").symlink_to(found[0])
known = (str(LINKS), "/usr/local/cuda/lib64/stubs", "/usr/local/cuda/targets/x86_64-linux/lib/stubs")
libraries = [path for path in known if os.path.isdir(path)]
os.environ["LIBRARY_PATH"] = ":".join([*libraries, *filter(None, [os.environ.get("LIBRARY_PATH")])])
runtime = [path for entry in sys.path for path in [f"{entry}/nvidia/cu13/lib"] if os.path.isdir(path)]
runtime += [path for path in ("/usr/local/cuda/lib64",) if os.path.isdir(path)]  # nvrtc finds its builtins there
os.environ["LD_LIBRARY_PATH"] = ":".join([*filter(None, [os.environ.get("LD_LIBRARY_PATH")]), *runtime])
sys.path.append(str(SITE))
os.environ["PYTHONPATH"] = ":".join([*filter(None, [os.environ.get("PYTHONPATH")]), str(SITE)])

import torch  # noqa: E402

LARGEST = {"indexed": 65408, "dense": 8128}  # the last row count of vllm's list of configurations, good from there on


def parts():
    from humming import dtypes
    from humming.config import WeightScaleType
    from humming.kernel.humming import HummingKernel
    from humming.layer import HummingLayerMeta, HummingMethod
    from humming.schema import HummingWeightSchema
    from humming.tune import get_heuristics_config

    return types.SimpleNamespace(
        dtypes=dtypes, WeightScaleType=WeightScaleType, HummingKernel=HummingKernel, HummingLayerMeta=HummingLayerMeta,
        HummingMethod=HummingMethod, HummingWeightSchema=HummingWeightSchema,
        get_heuristics_config=get_heuristics_config,
    )  # fmt: skip


def schema(h):
    """The schema that its compressed-tensors and modelopt loaders make for NVFP4 with one global scale per expert."""
    return h.HummingWeightSchema(
        b_dtype=h.dtypes.float4e2m1, bs_dtype=h.dtypes.float8e4m3, weight_scale_group_size=16,
        weight_scale_type=h.WeightScaleType.GROUP_TENSOR,
    )  # fmt: skip


def prepare_meta(h, layer, size_n, size_k, experts, name):
    return h.HummingMethod.prepare_layer_meta(
        layer, shape_n=size_n, shape_k=size_k, weight_schema=schema(h), num_experts=experts or None,
        torch_dtype=torch.bfloat16, sublayer_name=name,
    )  # fmt: skip


def tuning(h, meta, rows: int, gemm_type: str) -> dict:
    return h.get_heuristics_config(meta, shape_m=min(rows, LARGEST[gemm_type]), gemm_type=gemm_type)


def compute(gemm_type: str) -> str:
    return json.dumps({"use_batch_invariant": False, "use_f16_accum": False, "gemm_type": gemm_type})


def compile_layer(sizes, rows: int, experts: int) -> None:
    """Compile the kernels of these (N, K) for this many routed rows into the cache."""
    h, gemm_type = parts(), "indexed" if experts else "dense"
    for size_n, size_k in sizes:
        meta = prepare_meta(h, torch.nn.Module(), size_n, size_k, experts, "")
        h.HummingKernel.prepare_kernels(meta.to_str(), compute(gemm_type), json.dumps(tuning(h, meta, rows, gemm_type)))


class Base:
    def __init__(self, device) -> None:
        self.h, self.layer = parts(), torch.nn.Module()
        self.layer.register_buffer("locks", torch.zeros(1024, dtype=torch.int32, device=device))

    def add(self, name, packed, scales, global_scale, experts) -> None:
        size_n, size_k = packed.shape[-2], packed.shape[-1] * 2
        meta = prepare_meta(self.h, self.layer, size_n, size_k, experts, name)
        tensors = {
            meta.weight_name: packed.view(torch.int32), meta.weight_scale_name: scales,
            meta.global_scale_name: global_scale.float().reshape(-1),
        }  # fmt: skip
        for key, tensor in tensors.items():
            setattr(self.layer, key, torch.nn.Parameter(tensor, requires_grad=False))
        self.h.HummingMethod.transform_humming_layer(self.layer, name)

    def run(self, name, inputs, outputs, rows, gemm_type, **options) -> torch.Tensor:
        meta = self.layer.humming_metas[name]
        key = (name, rows)
        if key not in self.tunings:
            self.tunings[key] = json.dumps(tuning(self.h, meta, rows, gemm_type))
        return self.h.HummingMethod.forward_layer(
            self.layer, inputs=inputs, outputs=outputs, compute_config=compute(gemm_type),
            tuning_config=self.tunings[key], sublayer_name=name, **options,
        )  # fmt: skip


class Layer(Base):
    """HummingIndexedExperts.apply."""

    def __init__(self, shape, dense, top_k, align) -> None:
        super().__init__(dense.gate_up.device)
        self.shape, self.top_k, self.align_block_size, self.tunings = shape, top_k, align, {}
        self.add("w13", dense.gate_up, dense.gate_up_scales, dense.gate_up_global, shape.experts)
        self.add("w2", dense.down, dense.down_scales, dense.down_global, shape.experts)

    def align(self, ids):
        rows = ids.numel()
        block = tuning(self.h, self.layer.humming_metas["w13"], rows, "indexed")["block_shape"][0]
        return self.align_block_size(ids, block, self.shape.experts, None, ignore_invalid_experts=True)

    def caches(self, tokens):
        rows, options = tokens * self.top_k, {"dtype": torch.bfloat16, "device": self.layer.locks.device}
        sizes = (2 * self.shape.inner, self.shape.inner, self.shape.hidden)
        return [torch.empty(rows, size, **options) for size in sizes]

    def gemms(self, hidden, aligned, caches):
        rows = len(hidden) * self.top_k
        names = ("sorted_ids", "expert_ids", "num_tokens_padded")
        options = dict(zip(names, aligned, strict=False)) | {"valid_shape_m": rows}
        self.run("w13", hidden, caches[0], rows, "indexed", top_k=self.top_k, **options)
        torch.ops._C.silu_and_mul(caches[1], caches[0])
        self.run("w2", caches[1], caches[2], rows, "indexed", top_k=1, **options)
        return caches[2]

    def layer_call(self, hidden, ids, weights, caches):
        from humming import ops

        rows = self.gemms(hidden, self.align(ids), caches)
        output = torch.empty_like(hidden)
        return ops.moe_fused_mul_sum(rows.view(*ids.shape, -1), weights, output, ids, None)


class Linear(Base):
    def __init__(self, packed, scales, global_scale) -> None:
        super().__init__(packed.device)
        self.tunings = {}
        self.add("", packed, scales, global_scale, 0)

    def __call__(self, x):
        return self.run("", x, None, len(x), "dense")
