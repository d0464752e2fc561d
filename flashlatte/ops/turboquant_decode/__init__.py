"""Attention of a few query tokens per request over a TurboQuant cache."""

from flashlatte.ops.turboquant_decode.api import turboquant_decode

__all__ = ["turboquant_decode"]
