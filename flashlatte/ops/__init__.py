"""The operations, one folder each. Importing an operation registers its implementations."""

import importlib
import pkgutil


def load() -> None:
    """Import every operation, so that ``dispatch.operations`` lists all."""
    for module in pkgutil.iter_modules(__path__):
        importlib.import_module(f"{__name__}.{module.name}")
