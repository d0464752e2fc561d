"""Conversion of packed requests to padded rows, and back."""

from flashlatte.ops.pack_seq.api import pack_seq, unpack_seq

__all__ = ["pack_seq", "unpack_seq"]
