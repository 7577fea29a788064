"""The program ``finegrained-kernels``, which is also ``python -m finegrained_kernels``."""

import os


def main() -> None:
    """Handle Ctrl-C first, then import everything else, which takes seconds."""
    try:
        import signal

        # A shell makes its background jobs ignore Ctrl-C, and Python respects that.
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, _leave)
    except KeyboardInterrupt:
        _leave()
    import warnings

    # torch warns about this, but we use torch without numpy.
    warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
    from finegrained_kernels.cli import app

    try:
        app(prog_name="finegrained-kernels")
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # everything is done, but Python takes a while to exit


def _leave(*_: object) -> None:
    """Exit at once and without a traceback, because nothing has begun yet. Commands handle Ctrl-C themselves."""
    os.write(2, b"\ninterrupted\n" if os.isatty(2) else b"interrupted\n")
    os._exit(130)


if __name__ == "__main__":
    main()
