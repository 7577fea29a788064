"""What all commands share: errors and Ctrl-C in one line, and a progress bar in bytes."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from finegrained_kernels import BundleIntegrityError, BundleUnavailableError
from finegrained_kernels.checkpoint import CheckpointError


@contextmanager
def errors(resumes: bool = False) -> Iterator[None]:
    """Print an error and exit with status 1, or with 130 after Ctrl-C, which raises KeyboardInterrupt only in here.

    ``resumes``: if the command is interrupted and run again, it continues where it was.
    """
    handler = signal.getsignal(signal.SIGINT)
    try:
        if handler is not signal.SIG_IGN:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        yield
    except BrokenPipeError:  # the reader of the output has closed it
        raise
    except (CheckpointError, BundleIntegrityError, BundleUnavailableError, ImportError, OSError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from error
    except KeyboardInterrupt as error:
        typer.echo("interrupted; run again to resume" if resumes else "interrupted", err=True)
        raise typer.Exit(130) from error
    finally:
        signal.signal(signal.SIGINT, handler)


@contextmanager
def progress(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """A progress bar in bytes, with their rate, on stderr if that is a terminal. It appears with the first byte, and so
    not before arguments are checked. It ends at 100 %, including what earlier runs had finished."""
    console = Console(file=sys.stderr)
    columns = (TextColumn(what), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task(what, total=total, visible=False)

        def advance(count: int) -> None:
            done = min(bar.tasks[0].completed + count, total)
            bar.update(task, completed=done, visible=True)

        yield advance
        if bar.tasks[0].visible:
            bar.update(task, completed=total)
