"""Write of new keys and values to a TurboQuant cache."""

from flashlatte.ops.turboquant_store.api import turboquant_store

__all__ = ["turboquant_store"]
