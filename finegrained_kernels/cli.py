"""The ``finegrained-kernels`` command."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

import finegrained_kernels
from finegrained_kernels.checkpoint import commands as checkpoint_commands
from finegrained_kernels.checkpoint.tables import size_text
from finegrained_kernels.terminal import errors

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


class DemoDevice(StrEnum):
    """Where the demo runs."""

    CPU = "cpu"
    CUDA = "cuda"


STYLES = {"ok": "green", "note": "yellow", "fault": "bold red"}


def _show_version(asked: bool) -> None:
    if asked:
        typer.echo(f"finegrained-kernels {finegrained_kernels.__version__}")
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and stop.")
    ] = False,
) -> None:
    """Compress, verify and run NVFP4 checkpoints with their scales kept compressed, without losing a bit."""


@app.command()
def doctor() -> None:
    """Say what would run on this machine, and what to do about what would not. For bug reports, too."""
    from finegrained_kernels.doctor import findings

    console = Console(highlight=False)
    faults = 0
    table = Table.grid(padding=(0, 2), pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    with errors(), console.status("looking around"):
        for finding in findings():
            faults += finding.state == "fault"
            mark = f"[{STYLES[finding.state]}]{finding.state}"
            table.add_row(mark, finding.name, finding.found + (f"\n-> {finding.advice}" if finding.advice else ""))
    console.print(table)
    console.print("Nothing stands in the way." if not faults else f"Faults: {faults}. What to do is below each.")
    raise typer.Exit(faults > 0)


@app.command()
def demo(
    device: Annotated[
        DemoDevice | None, typer.Option(help="Default: the CPU, then also a CUDA GPU if there is one.")
    ] = None,
    no_model: Annotated[
        bool, typer.Option("--no-model", help="Leave out the whole model, which takes a minute or two.")
    ] = False,
) -> None:
    """Compress the NVFP4 scales of real trained weights, decode them through the bundle, and compare every byte."""
    from finegrained_kernels.demo import choose_devices, run

    with errors():
        exact = run(Console(highlight=False), choose_devices(device), with_model=not no_model)
    raise typer.Exit(not exact)


@app.command()
def tiny_model(directory: Annotated[Path, typer.Argument(help="Where to write it: new or empty.")]) -> None:
    """Write a small random language model to try things on: 14 MB, in bfloat16. What it generates is nonsense."""
    from finegrained_kernels.tiny_model import write

    with errors():
        write(directory)
    typer.echo(f"{directory}: {size_text(sum(path.stat().st_size for path in directory.iterdir()))}")


checkpoint_commands.register(app)
