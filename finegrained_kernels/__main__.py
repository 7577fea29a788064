"""``python -m finegrained_kernels``: the ``finegrained-kernels`` command."""

from finegrained_kernels.cli import app

app(prog_name="finegrained-kernels")
