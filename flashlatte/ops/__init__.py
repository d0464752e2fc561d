"""The operations, one folder each. An operation registers its implementations when it is imported."""

import importlib
import pkgutil


def load() -> None:
    """Import every operation, so that ``dispatch.operations`` knows them all."""
    for module in pkgutil.iter_modules(__path__):
        importlib.import_module(f"{__name__}.{module.name}")
