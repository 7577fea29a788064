"""Host side of finegrained-kernels: loads the kernels-hub bundle and works with checkpoints, models and reports.

The kernels themselves are the bundle, which :func:`load` returns. Nothing here imports the bundle's source, so that
this package and a model that calls ``kernels.get_kernel`` always mean the same code.
"""

from finegrained_kernels.loader import BundleIntegrityError, BundleUnavailableError, load

__version__ = "0.1.0"
__all__ = ["BundleIntegrityError", "BundleUnavailableError", "load"]
