"""Gather of keys and values of several requests from a TurboQuant cache."""

from flashlatte.ops.turboquant_gather.api import turboquant_gather

__all__ = ["turboquant_gather"]
