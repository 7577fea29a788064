"""The host side of finegrained-kernels: loads the bundle from the kernels hub, and works with checkpoints and models.

The kernels themselves are in the bundle, which :func:`load` returns. Nothing here imports the bundle's source, so this
package and a model that calls ``kernels.get_kernel`` always run the same code.
"""

TYPE_CHECKING = False  # importing typing would take longer than the rest of this module
if TYPE_CHECKING:
    from finegrained_kernels.loader import BundleIntegrityError, BundleUnavailableError, load

__version__ = "0.1.0"
__all__ = ["BundleIntegrityError", "BundleUnavailableError", "load"]


def __getattr__(name: str) -> object:
    """Import torch, which takes seconds, only when something that needs it is used. The program is in this package, and
    until its first line has run, Ctrl-C would print a traceback."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from finegrained_kernels import loader

    globals().update({name: getattr(loader, name) for name in __all__})
    return globals()[name]
