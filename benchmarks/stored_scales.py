"""How many bytes do the scales of real trained weights take, dense and compressed? Every byte is decoded and compared.

    LOCAL_KERNELS=kernels-community/finegrained-kernels=$PWD/build python benchmarks/stored_scales.py

The weights are the demo's. Nothing is timed: the sizes are the same on every machine.
"""

from __future__ import annotations

import argparse
import csv
from pathlib import Path

from harness import COLUMNS, cpu_environment

from finegrained_kernels import load
from finegrained_kernels.demo import find_weights, quantizable_weights, round_trip

RESULTS = Path(__file__).parent / "results" / "stored_scales.csv"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=RESULTS, help="the CSV file to write")
    out = parser.parse_args().out
    bundle = load()
    results = [round_trip(bundle, name, weight)[0] for name, weight in quantizable_weights(find_weights())]
    if wrong := [result.name for result in results if result.first_mismatch]:
        raise SystemExit(f"decoded bytes differ: {', '.join(wrong)}")
    sizes = {
        "dense": sum(result.dense_bytes for result in results),
        "csf": sum(result.csf_bytes for result in results),
        "csf_exceptions": sum(4 * result.num_exceptions for result in results),
    }
    rows = [
        dict.fromkeys(COLUMNS, "")
        | cpu_environment()
        | {"case": "minilm", "variant": variant, "condition": "warm", "bytes": size, "baseline": "dense"}
        for variant, size in sizes.items()
    ]
    with out.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    print(f"{len(results)} planes: {sizes['csf']:,} of {sizes['dense']:,} bytes, {sizes['csf'] / sizes['dense']:.1%}")


if __name__ == "__main__":
    main()
