"""Run the kernels of `moe_forward` and its side stream once on small cases, on a GPU, for compute-sanitizer.

`compute-sanitizer --tool memcheck python scripts/exercise_moe.py`, and the same with `--tool racecheck`. Racecheck only
sees shared memory; the comparisons, with a delayed side stream, show that streams do not race for the scratch.
"""

from __future__ import annotations

import dataclasses

import torch

from finegrained_kernels import load

NUM_EXPERTS, HIDDEN, INTERMEDIATE = 5, 128, 64


def make_layer(bundle, seed: int, scratch: torch.Tensor):
    """(dense experts, the same compressed)."""
    generator = torch.Generator("cuda").manual_seed(seed)

    def quantized(rows: int, cols: int):
        weight = torch.randn(NUM_EXPERTS, rows, cols, generator=generator, device="cuda") * 0.05
        return bundle.nvfp4_quantize_two_level(weight)

    gate_up, gate_up_scales, gate_up_global = quantized(2 * INTERMEDIATE, HIDDEN)
    down, down_scales, down_global = quantized(HIDDEN, INTERMEDIATE)
    dense = bundle.NVFP4Experts(gate_up, down, gate_up_scales, down_scales, gate_up_global, down_global)
    prepared = {
        name: bundle.prepare_nvfp4_csf_scales(
            *bundle.compress_nvfp4_csf_scales(scales), num_rows=scales.shape[1], num_cols=scales.shape[2]
        )
        for name, scales in (("gate_up_scales", gate_up_scales), ("down_scales", down_scales))
    }
    return dense, dataclasses.replace(dense, **prepared, scratch=scratch)


def main() -> None:
    bundle = load()
    scratches = [
        torch.full((NUM_EXPERTS * 3 * INTERMEDIATE * HIDDEN // 16,), 0x7F, dtype=torch.uint8, device="cuda")
        for _ in range(2)
    ]
    layers = [make_layer(bundle, seed, scratches[seed % 2]) for seed in range(4)]
    prefetcher = bundle.ScalePrefetcher([compressed for _, compressed in layers])
    for activation_format in (None, "bf16"):
        for num_tokens in (1, 7, 70):
            hidden = torch.randn(num_tokens, HIDDEN, device="cuda").to(torch.bfloat16)
            index = torch.randint(-1, NUM_EXPERTS + 1, (num_tokens, 3), device="cuda")
            call = (hidden, index, torch.rand(num_tokens, 3, device="cuda"))
            options = {"activation_format": activation_format}
            expected = [bundle.moe_forward(dense, *call, **options) for dense, _ in layers]
            for strategy in ("staged", "fused"):
                outputs = [bundle.moe_forward(layer, *call, **options, strategy=strategy) for _, layer in layers]
                prefetcher.prefetch(0, num_tokens, strategy)
                for i_layer in range(len(layers)):
                    if i_layer + 1 < len(layers):
                        prefetcher.prefetch(i_layer + 1, num_tokens, strategy)
                    torch.cuda._sleep(100_000)
                    outputs.append(prefetcher.forward(i_layer, *call, **options, strategy=strategy))
                for out, want in zip(outputs, 2 * expected, strict=True):
                    assert torch.equal(out, want), (activation_format, num_tokens, strategy)
    torch.cuda.synchronize()
    print("every MoE call ran, outputs equal to the dense layer's")


if __name__ == "__main__":
    main()
