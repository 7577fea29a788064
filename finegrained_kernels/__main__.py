"""``python -m finegrained_kernels``: the ``finegrained-kernels`` command."""

from finegrained_kernels.cli import app

if __name__ == "__main__":
    app(prog_name="finegrained-kernels")
