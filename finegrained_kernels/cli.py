"""The ``finegrained-kernels`` command."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

import typer

import finegrained_kernels
from finegrained_kernels.checkpoint import commands as checkpoint_commands

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


@app.callback()
def _main() -> None:
    """NVFP4 expert layers with their scales kept compressed."""


@app.command("version")
def show_version() -> None:
    """Print this package's version and those it runs with, for a bug report."""
    typer.echo(f"finegrained-kernels {finegrained_kernels.__version__}")
    for package in ("kernels", "torch", "triton", "transformers"):
        try:
            typer.echo(f"{package} {version(package)}")
        except PackageNotFoundError:
            typer.echo(f"{package} not installed")


@app.command()
def demo() -> None:
    """Compress the NVFP4 scales of real trained weights, decode them through the bundle, and compare every byte."""
    from finegrained_kernels.demo import main

    raise typer.Exit(main())


checkpoint_commands.register(app)

if __name__ == "__main__":
    app()
