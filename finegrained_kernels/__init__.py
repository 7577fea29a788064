"""Host side of finegrained-kernels: loads the kernels-hub bundle and works with checkpoints, models and reports.

The kernels themselves are the bundle, which :func:`load` returns. Nothing here imports the bundle's source, so that
this package and a model that calls ``kernels.get_kernel`` always mean the same code.
"""

TYPE_CHECKING = False  # typing's own takes longer to import than all the rest of this module
if TYPE_CHECKING:
    from finegrained_kernels.loader import BundleIntegrityError, BundleUnavailableError, load

__version__ = "0.1.0"
__all__ = ["BundleIntegrityError", "BundleUnavailableError", "load"]


def __getattr__(name: str) -> object:
    """Import torch, which takes seconds, with the first use of what needs it. The program is in this package: until its
    first line has run, Ctrl-C would end in a traceback."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from finegrained_kernels import loader

    globals().update({name: getattr(loader, name) for name in __all__})
    return globals()[name]
