"""A byte-level tokenizer, which needs no file."""

from __future__ import annotations

import string

_READABLE = frozenset((string.ascii_letters + " ").encode())


class ByteTokenizer:
    """A token is a byte; three special tokens follow."""

    bos_token_id = 256
    eos_token_id = 257
    pad_token_id = 258
    vocabulary = 259
    # A model of random weights writes any byte as soon as another, and most are no text.
    unreadable = tuple(token for token in range(vocabulary) if token not in _READABLE)

    def encode(self, data: bytes) -> list[int]:
        """Token ids, the first of which is the beginning of a sequence."""
        return [self.bos_token_id, *data]

    def decode(self, ids: list[int]) -> bytes:
        """The bytes of token ids, without the special tokens."""
        return bytes(token for token in ids if token < 256)
