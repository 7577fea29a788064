"""Load an NVFP4 mixture-of-experts model, generate text, and compare ways to keep its scales.

    python examples/generate.py PATH_OR_HUB_ID [--device cuda] [--strategies dense staged fused] [--tokens 64]

PATH_OR_HUB_ID is a ModelOpt or compressed-tensors checkpoint, with compressed scales or dense ones; to make one, see
docs/checkpoints.md. Prints the bytes of scales and the tokens per second of each strategy, and whether all generate the
same tokens.
"""

from __future__ import annotations

import argparse
import time
import warnings

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from finegrained_kernels.integrations.transformers import NVFP4CSFConfig, nvfp4_experts

PROMPT = "A mixture of experts is"


def load(path: str, strategy: str, device: str):
    config = NVFP4CSFConfig(scale_strategy=strategy)
    with (
        warnings.catch_warnings()
    ):  # transformers says that the checkpoint has a config already: it has, they are merged
        warnings.filterwarnings("ignore", message="You passed `quantization_config`")
        return AutoModelForCausalLM.from_pretrained(path, quantization_config=config).to(device)


def prompt(path: str, device: str) -> torch.Tensor:
    """Token ids `[1, length]`: of PROMPT, or arbitrary ones if there is no tokenizer."""
    try:
        ids = AutoTokenizer.from_pretrained(path)(PROMPT).input_ids
    except (OSError, ValueError, AttributeError):
        ids = []
    return torch.tensor([ids or list(range(1, 9))], device=device)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--strategies", nargs="+", default=["dense", "staged", "fused"])
    parser.add_argument("--tokens", type=int, default=64)
    args = parser.parse_args(arguments)
    ids = prompt(args.path, args.device)
    generated = {}
    for strategy in args.strategies:
        model = load(args.path, strategy, args.device)
        model.generate(ids, max_new_tokens=2, do_sample=False)  # kernels are compiled by their first call
        begin = time.perf_counter()
        out = model.generate(ids, max_new_tokens=args.tokens, min_new_tokens=args.tokens, do_sample=False)
        generated[strategy] = out[0, ids.shape[1] :].tolist()  # waits for the device
        seconds = time.perf_counter() - begin
        layers = nvfp4_experts(model)
        scales = sum(layer.scale_bytes for layer in layers)
        workspace = layers[0].experts.scratch
        workspace = 0 if workspace is None else workspace.nbytes
        print(
            f"{strategy:8} scales {scales / 1e6:10.3f} MB, workspace {workspace / 1e6:8.3f} MB, "
            f"{args.tokens / seconds:8.1f} tokens/s"
        )
        del model, layers
    same = len({tuple(tokens) for tokens in generated.values()}) == 1
    print("all generate the same tokens" if same else f"different tokens: {generated}")
    if not same:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
