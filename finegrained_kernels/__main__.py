"""The program ``finegrained-kernels``, which is also ``python -m finegrained_kernels``."""

import os


def main() -> None:
    """Answer Ctrl-C first, then import all the rest, which takes seconds."""
    try:
        import signal

        # A shell lets its background jobs ignore Ctrl-C, and Python leaves it at that.
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, _leave)
    except KeyboardInterrupt:
        _leave()
    import warnings

    # torch warns of this; we use torch without numpy.
    warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
    from finegrained_kernels.cli import app

    try:
        app(prog_name="finegrained-kernels")
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # all is done, but Python takes a while to end


def _leave(*_: object) -> None:
    """End at once, without a traceback, as nothing has begun yet. Commands handle Ctrl-C themselves."""
    os.write(2, b"\ninterrupted\n" if os.isatty(2) else b"interrupted\n")
    os._exit(130)


if __name__ == "__main__":
    main()
