"""The ``finegrained-kernels`` command."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

import finegrained_kernels
from finegrained_kernels.checkpoint import commands as checkpoint_commands

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
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
    with console.status("looking around"):
        for finding in findings():
            faults += finding.state == "fault"
            mark = f"[{STYLES[finding.state]}]{finding.state}"
            table.add_row(mark, finding.name, finding.found + (f"\n-> {finding.advice}" if finding.advice else ""))
    console.print(table)
    console.print("Nothing stands in the way." if not faults else f"Faults: {faults}. What to do is below each.")
    raise typer.Exit(faults > 0)


@app.command()
def demo() -> None:
    """Compress the NVFP4 scales of real trained weights, decode them through the bundle, and compare every byte."""
    from finegrained_kernels.demo import main

    raise typer.Exit(main())


checkpoint_commands.register(app)

if __name__ == "__main__":
    app()
