"""The checkpoint commands of ``finegrained-kernels``."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from finegrained_kernels import checkpoint as checkpoints
from finegrained_kernels.checkpoint.errors import printable
from finegrained_kernels.checkpoint.inspection import USABLE, InspectReport
from finegrained_kernels.checkpoint.output import DEFAULT_JOBS
from finegrained_kernels.checkpoint.restoration import restored_bytes
from finegrained_kernels.checkpoint.tables import common_algorithm, count_text, scales_table, size_text
from finegrained_kernels.checkpoint.verification import bytes_to_check
from finegrained_kernels.terminal import errors, progress

Source = Annotated[Path, typer.Argument(help="Directory to read. It is never changed.")]
Destination = Annotated[Path, typer.Argument(help="New or empty directory, or the one that an earlier run began.")]
Jobs = Annotated[int, typer.Option(help="Shards at a time.")]
Device = Annotated[str, typer.Option(help="Device that computes: cpu, cuda or cuda:1.")]
Include = Annotated[list[str] | None, typer.Option(help="Only tensors whose name matches this pattern; repeatable.")]
Exclude = Annotated[list[str] | None, typer.Option(help="No tensors whose name matches this pattern; repeatable.")]


class Layout(StrEnum):
    """How a compressed checkpoint is laid out on disk."""

    HF = "hf"
    CONTAINER = "container"


class ScaleRule(StrEnum):
    """How `quantize` chooses block scales."""

    AMAX = "amax"
    MSE = "mse"


class Format(StrEnum):
    """What `quantize` writes."""

    MODELOPT = "modelopt"
    COMPRESSED_TENSORS = "compressed-tensors"


_MOST_LINES = 20
"""How many lines of one kind are printed. Of the others, only the number is."""


def register(app: typer.Typer) -> None:
    """Add the commands to ``app``."""
    commands: dict[Callable[..., None], bool] = {
        compress: True,
        verify: False,
        restore: True,
        inspect: False,
        quantize: True,
        push: False,
    }
    for command, resumes in commands.items():
        app.command()(errors(resumes)(command))


def compress(
    source: Source,
    destination: Destination,
    layout: Annotated[
        Layout, typer.Option(help="hf: shards with their index; container: with a manifest.")
    ] = Layout.HF,
    include: Include = None,
    exclude: Exclude = None,
    family: Annotated[
        str | None, typer.Option(help="Model family in the container; else config.json's model_type.")
    ] = None,
    jobs: Jobs = DEFAULT_JOBS,
    device: Device = "cpu",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Report sizes from headers alone; write nothing.")] = False,
) -> None:
    """Compress the NVFP4 scales of a checkpoint, losslessly. Run it again to resume."""
    if dry_run:
        plan = checkpoints.plan_compression(source, include=include or (), exclude=exclude or (), data_present=False)
        least, dense = plan.least_bytes, plan.dense_bytes
        chosen = count_text(len(plan.selected), "scale")
        typer.echo(
            f"{chosen} of {len(plan.planes)} would be compressed: {size_text(dense)} -> {size_text(least)} or more"
        )
        shrunk = plan.source_bytes - dense + least
        saved = f"at most {1 - shrunk / plan.source_bytes:.1%} less: exceptions add to it"
        typer.echo(f"the checkpoint: {size_text(plan.source_bytes)} -> {size_text(shrunk)} or more ({saved})")
        return
    with progress("compress", _shard_bytes(source)) as advance:
        report = checkpoints.compress(
            source,
            destination,
            layout=layout,
            include=include or (),
            exclude=exclude or (),
            family=family,
            jobs=jobs,
            device=device,
            progress=advance,
        )
    if report.resumed:
        typer.echo(f"{report.resumed} of {count_text(report.shards, 'shard')} had been finished before")
    before, after = report.dense_bytes, report.compressed_bytes
    share = f" ({after / before:.1%})" if before else ""
    typer.echo(f"{count_text(report.compressed, 'scale')}: {size_text(before)} -> {size_text(after)}{share}")
    whole = _shard_bytes(source)
    typer.echo(f"the checkpoint: {size_text(whole)} -> {size_text(_shard_bytes(destination))}")
    _print_first("left dense", [f"{printable(name)}: {why}" for name, why in report.left_dense.items()], "scale")
    found = checkpoints.inspect(source)
    for other in found.others:
        typer.echo(
            f"left as they are: {count_text(other.weights, 'weight')} of {other.kind}, {printable(other.format)}"
        )
    _print_first("fault of the source", found.faults, "fault")


def verify(
    checkpoint: Source,
    against: Annotated[Path | None, typer.Option(help="The uncompressed source, to compare bit for bit.")] = None,
    jobs: Jobs = DEFAULT_JOBS,
    device: Device = "cpu",
) -> None:
    """Check a compressed checkpoint: structure, digests, pairing, config, and every scale decoded."""
    with progress("verify", bytes_to_check(checkpoint)) as advance:
        report = checkpoints.verify(checkpoint, against=against, jobs=jobs, device=device, progress=advance)
    faults = sorted(report.faults, key=lambda fault: (fault.file, fault.tensor or "", fault.message))
    _print_first("fault", faults, "fault")
    counted = [count_text(report.shards, "shard"), count_text(report.tensors, "tensor")]
    counts = ", ".join([*counted, count_text(report.planes, "compressed scale")])
    digests = "digests match" if report.has_digests else "no digests to compare with"
    compared = ", equal to the source" if report.compared else ""
    typer.echo(f"{count_text(len(faults), 'fault')} in {counts}" if faults else f"{counts}: {digests}{compared}")
    if not report.planes and not faults:
        typer.echo("not compressed: there is nothing here that compress made", err=True)
    raise typer.Exit(bool(faults) or not report.planes)


def restore(checkpoint: Source, destination: Destination, jobs: Jobs = DEFAULT_JOBS, device: Device = "cpu") -> None:
    """Write the original checkpoint again, every file bit for bit."""
    with progress("restore", restored_bytes(checkpoint)) as advance:
        report = checkpoints.restore(checkpoint, destination, jobs=jobs, device=device, progress=advance)
    typer.echo(f"{count_text(report.shards, 'shard')}, {size_text(report.nbytes)}: every file has its original SHA-256")


def inspect(
    checkpoint: Annotated[str, typer.Argument(help="Directory or hub id.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
    layers: Annotated[bool, typer.Option("--layers", help="List every layer by itself.")] = False,
    plot: Annotated[Path | None, typer.Option(help="Also draw it to this file (needs matplotlib).")] = None,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit, of a hub id.")] = None,
) -> None:
    """Describe a checkpoint's scales, from headers alone."""
    report = checkpoints.inspect(checkpoint, revision=revision)
    if plot is not None:
        from finegrained_kernels.checkpoint.plot import draw

        draw(report, plot)
    if as_json:
        typer.echo(json.dumps(report.to_json(), indent=2))
    else:
        _print_report(report, layers)


def quantize(
    source: Source,
    destination: Destination,
    include: Include = None,
    exclude: Exclude = None,
    scales: Annotated[
        ScaleRule, typer.Option(help="amax: from the largest of 16 weights; mse: of least squared error.")
    ] = ScaleRule.AMAX,
    input_scale: Annotated[float | None, typer.Option(help="Write this input scale beside every weight.")] = None,
    format: Annotated[
        Format, typer.Option(help="Names of tensors and config.json: ModelOpt's, or llm-compressor's.")
    ] = Format.MODELOPT,
    jobs: Jobs = DEFAULT_JOBS,
    device: Device = "cpu",
) -> None:
    """Quantize the linear layers of a BF16, F16 or F32 checkpoint to NVFP4."""
    with progress("quantize", _shard_bytes(source)) as advance:
        report = checkpoints.quantize(
            source,
            destination,
            include=include or (),
            exclude=exclude or (),
            scales=scales,
            input_scale=input_scale,
            format=format,
            jobs=jobs,
            device=device,
            progress=advance,
        )
    typer.echo(
        f"{count_text(report.quantized, 'weight')}: {size_text(report.bytes_before)} -> {size_text(report.bytes_after)}"
    )


def push(
    checkpoint: Source,
    repo_id: Annotated[str, typer.Argument(help="Model repository, as org/name; created if it is missing.")],
    revision: Annotated[str | None, typer.Option(help="Branch to push to.")] = None,
    private: Annotated[bool, typer.Option("--private", help="Make it private, if it is created.")] = False,
) -> None:
    """Upload a compressed checkpoint to the hub."""
    typer.echo(checkpoints.push(checkpoint, repo_id, revision=revision, private=private))


def _print_first(title: str, lines: Sequence[object], what: str) -> None:
    for line in lines[:_MOST_LINES]:
        typer.echo(f"{title}: {line}")
    if len(lines) > _MOST_LINES:
        typer.echo(f"and {count_text(len(lines) - _MOST_LINES, f'more {what}')}")


def _shard_bytes(root: Path) -> int:
    return sum(path.stat().st_size for path in root.rglob("*.safetensors"))


def _print_report(report: InspectReport, layers: bool) -> None:
    # Names come from strangers. Brackets in them are not markup, and unprintable characters must not reach the
    # terminal.
    console = Console(highlight=False, markup=False, emoji=False)
    counts = f"{count_text(report.shards, 'shard')}, {count_text(report.tensors, 'tensor')}"
    common = common_algorithm(report.scales)
    console.print(f"{printable(report.name)}: {report.layout}, {counts}" + (f", {printable(common)}" if common else ""))
    sizes = f"{size_text(report.stored_bytes)} stored"
    if report.scales:
        console.print(scales_table(report.scales, layers))
        sizes += f", {size_text(report.dense_bytes)} with dense scales"
        sizes += f", {size_text(report.least_bytes)} or more with all NVFP4 scales compressed"
    else:
        console.print("NVFP4 scales: none; to make some: finegrained-kernels quantize")
    console.print(f"tensors: {sizes}")
    for other in report.others:
        weights = count_text(other.weights, "weight")
        console.print(f"{other.kind}: {weights} in {printable(other.format)}, {size_text(other.nbytes)}")
    if report.kv_cache:
        console.print(f"KV cache: {printable(report.kv_cache)}")
    if report.scales:
        console.print(f"tensor-parallel sizes that work: {', '.join(map(str, report.tp_sizes)) or 'none'}")
    fits = ", ".join(f"{counts['stored']} x {gib} GiB" for gib, counts in report.fits.items())
    console.print(f"GPUs that hold it, with {USABLE:.0%} of their memory: {fits}")
    for fault in report.faults[:_MOST_LINES]:
        console.print(f"fault: {fault}", style="red")
    if len(report.faults) > _MOST_LINES:
        console.print(f"and {count_text(len(report.faults) - _MOST_LINES, 'more fault')}", style="red")
