"""The checkpoint commands of ``finegrained-kernels``."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.table import Table

from finegrained_kernels import BundleIntegrityError, BundleUnavailableError
from finegrained_kernels import checkpoint as checkpoints
from finegrained_kernels.checkpoint.errors import printable
from finegrained_kernels.checkpoint.inspection import USABLE, InspectReport, ScaleStats
from finegrained_kernels.checkpoint.output import DEFAULT_JOBS
from finegrained_kernels.checkpoint.restoration import restored_bytes
from finegrained_kernels.checkpoint.verification import bytes_to_check

Source = Annotated[Path, typer.Argument(help="Directory to read. It is never changed.")]
Destination = Annotated[Path, typer.Argument(help="New or empty directory, or the one that an earlier run began.")]
Jobs = Annotated[int, typer.Option(help="Shards at a time.")]
Device = Annotated[str, typer.Option(help="Where scales are worked on, as cpu or cuda.")]
Include = Annotated[list[str] | None, typer.Option(help="Only tensors whose name matches this pattern; repeatable.")]
Exclude = Annotated[list[str] | None, typer.Option(help="Not these; repeatable.")]


def register(app: typer.Typer) -> None:
    """Add the commands to ``app``."""
    for command in (compress, verify, restore, inspect, quantize, push):
        app.command()(command)


def compress(
    source: Source,
    destination: Destination,
    layout: Annotated[str, typer.Option(help="hf: shards with their index; container: with a manifest.")] = "hf",
    include: Include = None,
    exclude: Exclude = None,
    family: Annotated[str | None, typer.Option(help="The container's name for the kind of model.")] = None,
    jobs: Jobs = DEFAULT_JOBS,
    device: Device = "cpu",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Report sizes from headers alone; write nothing.")] = False,
) -> None:
    """Compress the NVFP4 scales of a checkpoint, losslessly. Run it again to resume."""
    if dry_run:
        with _errors():
            plan = checkpoints.plan_compression(
                source, include=include or (), exclude=exclude or (), data_present=False
            )
        least, dense = plan.least_bytes, plan.dense_bytes
        typer.echo(f"{len(plan.selected)} of {len(plan.planes)} NVFP4 scales would be compressed")
        typer.echo(f"scales: {_size(dense)} -> {_size(least)} ({least / dense:.1%}) or more, by their exceptions")
        typer.echo(f"shards: {_size(plan.source_bytes)} -> {_size(plan.source_bytes - dense + least)} or more")
        return
    with _errors(), _progress("compress", _shard_bytes(source)) as progress:
        report = checkpoints.compress(
            source,
            destination,
            layout=layout,
            include=include or (),
            exclude=exclude or (),
            family=family,
            jobs=jobs,
            device=device,
            progress=progress,
        )
    if report.resumed:
        typer.echo(f"{report.resumed} of {report.shards} shards were finished already")
    before, after = report.dense_bytes, report.compressed_bytes
    share = f" ({after / before:.1%})" if before else ""
    typer.echo(f"{report.compressed} scales: {_size(before)} -> {_size(after)}{share}")
    for name, why in report.left_dense.items():
        typer.echo(f"left dense: {printable(name)}: {why}")


def verify(
    checkpoint: Source,
    against: Annotated[Path | None, typer.Option(help="The uncompressed source, to compare bit for bit.")] = None,
    jobs: Jobs = DEFAULT_JOBS,
    device: Device = "cpu",
) -> None:
    """Check a compressed checkpoint: structure, digests, pairing, config, and every scale decoded."""
    with _errors(), _progress("verify", bytes_to_check(checkpoint)) as progress:
        report = checkpoints.verify(checkpoint, against=against, jobs=jobs, device=device, progress=progress)
    for fault in report.faults:
        typer.echo(f"fault: {fault}")
    digests = "digests match" if report.has_digests else "no digests to compare with"
    compared = ", equal to the source" if report.compared else ""
    counts = f"{report.shards} shards, {report.tensors} tensors, {report.planes} compressed scales"
    typer.echo(f"{len(report.faults)} faults in {counts}" if report.faults else f"{counts}: {digests}{compared}")
    raise typer.Exit(bool(report.faults))


def restore(checkpoint: Source, destination: Destination, jobs: Jobs = DEFAULT_JOBS, device: Device = "cpu") -> None:
    """Write the original checkpoint again, every file bit for bit."""
    with _errors(), _progress("restore", restored_bytes(checkpoint)) as progress:
        report = checkpoints.restore(checkpoint, destination, jobs=jobs, device=device, progress=progress)
    typer.echo(f"{report.shards} shards, {_size(report.nbytes)}: every file has its original SHA-256")


def inspect(
    checkpoint: Annotated[str, typer.Argument(help="Directory or hub id.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
    revision: Annotated[str | None, typer.Option(help="Of the hub repository.")] = None,
) -> None:
    """Describe a checkpoint's scales, from headers alone."""
    with _errors():
        report = checkpoints.inspect(checkpoint, revision=revision)
    if as_json:
        typer.echo(json.dumps(report.to_json(), indent=2))
    else:
        _print_report(report)


def quantize(
    source: Source,
    destination: Destination,
    include: Include = None,
    exclude: Exclude = None,
    scales: Annotated[str, typer.Option(help="amax: the plain rule; mse: of least squared error.")] = "amax",
    input_scale: Annotated[float | None, typer.Option(help="Write this input_scale beside every weight.")] = None,
    jobs: Jobs = DEFAULT_JOBS,
    device: Device = "cpu",
) -> None:
    """Quantize the linear layers of a BF16, F16 or F32 checkpoint to ModelOpt's NVFP4 layout."""
    with _errors(), _progress("quantize", _shard_bytes(source)) as progress:
        report = checkpoints.quantize(
            source,
            destination,
            include=include or (),
            exclude=exclude or (),
            scales=scales,
            input_scale=input_scale,
            jobs=jobs,
            device=device,
            progress=progress,
        )
    typer.echo(f"{report.quantized} weights: {_size(report.bytes_before)} -> {_size(report.bytes_after)}")


def push(
    checkpoint: Source,
    repo_id: Annotated[str, typer.Argument(help="Model repository, as org/name; made if need be.")],
    revision: Annotated[str | None, typer.Option(help="Branch to push to.")] = None,
    private: Annotated[bool, typer.Option("--private", help="If the repository is made.")] = False,
) -> None:
    """Upload a compressed checkpoint to the hub."""
    with _errors():
        typer.echo(checkpoints.push(checkpoint, repo_id, revision=revision, private=private))


@contextmanager
def _errors() -> Iterator[None]:
    try:
        yield
    except (checkpoints.CheckpointError, BundleIntegrityError, BundleUnavailableError, OSError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from error
    except KeyboardInterrupt as error:
        typer.echo("interrupted: run the same command again, and it goes on", err=True)
        raise typer.Exit(130) from error


@contextmanager
def _progress(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """A bar of bytes and their rate, on stderr, so that output can be piped."""
    columns = (TextColumn(what), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(file=sys.stderr)) as progress:
        task = progress.add_task(what, total=total)
        yield lambda count: progress.advance(task, count)


def _shard_bytes(root: Path) -> int:
    return sum(path.stat().st_size for path in root.rglob("*.safetensors"))


def _size(count: float) -> str:
    for unit, digits in (("B", 0), ("kB", 1), ("MB", 1), ("GB", 2)):
        if count < 1000 or unit == "GB":
            return f"{count:,.{digits}f} {unit}"
        count /= 1000
    raise AssertionError


def _print_report(report: InspectReport) -> None:
    # Names are a stranger's: brackets in them are no markup, and what is not printable does not reach the terminal.
    console = Console(width=None if sys.stdout.isatty() else 180, markup=False, emoji=False)
    table = Table(title=f"{printable(report.name)}: {report.layout}, {report.shards} shards, {report.tensors} tensors")
    texts = ("kind", "layer", "projection", "algorithm")
    for name in (*texts, "planes", "compressed", "plane", "dense", "stored", "exceptions"):
        table.add_column(name, justify="left" if name in texts else "right", no_wrap=name in texts)
    for stats in report.scales:
        table.add_row(*_row(stats))
    console.print(table)
    sizes = f"{_size(report.stored_bytes)} stored, {_size(report.dense_bytes)} with dense scales"
    console.print(f"tensors: {sizes}, {_size(report.least_bytes)} or more with all NVFP4 scales compressed")
    for other in report.others:
        console.print(f"{other.kind}: {other.weights} weights in {printable(other.format)}, {_size(other.nbytes)}")
    if report.kv_cache:
        console.print(f"KV cache: {printable(report.kv_cache)}")
    console.print(f"tensor-parallel sizes that work: {', '.join(map(str, report.tp_sizes)) or 'none'}")
    fits = ", ".join(f"{counts['stored']} x {gib} GiB" for gib, counts in report.fits.items())
    console.print(f"fits in {USABLE:.0%} of: {fits}")
    for fault in report.faults:
        console.print(f"fault: {fault}", style="red")


def _row(stats: ScaleStats) -> tuple[str, ...]:
    return (
        *map(printable, (stats.kind, stats.layer, stats.projection, stats.algorithm or "")),
        str(stats.planes),
        str(stats.compressed),
        f"{stats.rows} x {stats.cols}",
        _size(stats.dense_bytes),
        _size(stats.stored_bytes),
        "" if stats.exception_rate is None else f"{stats.exception_rate:.2%}",
    )
