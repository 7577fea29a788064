"""``finegrained-kernels tiny-model``: writes a small random language model to try things on.

It is a mixture of experts in bfloat16, with a tokenizer for plain bytes. What it generates is nonsense, but its weights
resemble trained ones in what matters here: rows have different magnitudes, and now and then a group is far above its
row, so that its scale becomes an exception.
"""

from __future__ import annotations

from pathlib import Path

import torch

CONFIG = {
    "vocab_size": 256,
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 1024,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 128,
    "intermediate_size": 512,
    "norm_topk_prob": True,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
OUTLIERS = 0.005
"""The share of groups of 16 weights that are 64 times as large as the rest of their row."""


def trained_like(shape: torch.Size, generator: torch.Generator) -> torch.Tensor:
    """Random weights `[..., N, K]` in float32 whose rows, and a few groups of 16 along K, differ in magnitude."""
    weight = torch.randn(shape, generator=generator) / shape[-1] ** 0.5
    rows = torch.randn((*shape[:-1], 1), generator=generator).mul(0.5).exp()
    groups = torch.rand((*shape[:-1], shape[-1] // 16), generator=generator) < OUTLIERS
    return weight * rows * torch.where(groups.repeat_interleave(16, dim=-1), 64.0, 1.0)


def write(directory: str | Path, seed: int = 0) -> None:
    """Write the model (14 MB) to `directory`, as `save_pretrained` does. The same seed gives the same weights.

    Raises:
        FileExistsError: the directory is not new or empty.
        ImportError: transformers is not installed.
    """
    directory = Path(directory)
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise FileExistsError(f"{directory}: expected a new or empty directory")
    try:
        from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast
    except ImportError as error:
        raise ImportError(f"{error}; pip install transformers accelerate") from error

    generator = torch.Generator().manual_seed(seed)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3_moe", **CONFIG), dtype=torch.bfloat16)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                values = trained_like(parameter.shape, generator)
                parameter.copy_(values * parameter.shape[-1] ** 0.5 if "embed" in name else values)
    model.save_pretrained(directory)
    PreTrainedTokenizerFast(tokenizer_object=byte_tokenizer()).save_pretrained(directory)


def byte_tokenizer():  # type: ignore[no-untyped-def]  # from the tokenizers package, which only this needs
    """A token for each byte."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer
