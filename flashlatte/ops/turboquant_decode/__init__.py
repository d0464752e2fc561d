"""Attention of a few query tokens a request over the pages of a TurboQuant cache."""

from flashlatte.ops.turboquant_decode.api import turboquant_decode

__all__ = ["turboquant_decode"]
