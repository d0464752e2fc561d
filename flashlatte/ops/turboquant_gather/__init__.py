"""Keys and values of several requests out of a TurboQuant cache."""

from flashlatte.ops.turboquant_gather.api import turboquant_gather

__all__ = ["turboquant_gather"]
