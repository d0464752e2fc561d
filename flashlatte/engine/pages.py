"""Pages of a cache: who holds them, and which hold the start of a prompt that was seen before.

A page belongs to whoever references it. A full page is also *known*, by a key chained over its tokens and all before
them, so that a later request that begins alike takes a reference instead of computing it. When the last reference goes,
a known page stays until its place is needed: the page that was let go longest ago is forgotten first.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass
class _Page:
    """``key``, ``parent``, ``tokens``: of a known page; its chain's key, the key before it, and its own tokens."""

    references: int = 0
    key: bytes | None = None
    parent: bytes = b""
    tokens: tuple[int, ...] = ()


class PagePool:
    """The pages of one cache (or of one copy of it, on the host): one model's, in one format.

    Args:
        num_pages: pages of the cache.
        page_size: tokens in a page.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self._pages = [_Page() for _ in range(num_pages)]
        self._blank = list(range(num_pages - 1, -1, -1))  # without references, not known
        self._idle: OrderedDict[int, None] = OrderedDict()  # without references, known: the first is forgotten first
        self._known: dict[bytes, int] = {}
        self._forgotten = 0  # times that all was

    @property
    def available(self) -> int:
        """Pages that ``allocate`` can give: blank ones, and known ones that nobody references."""
        return len(self._blank) + len(self._idle)

    @property
    def in_use(self) -> int:
        """Pages that somebody references, each counted once."""
        return self.num_pages - self.available

    def references(self, page: int) -> int:
        return self._pages[page].references

    def root(self, salt: str = "") -> bytes:
        """The key before a request's first page. Requests with different salts never share a page."""
        return hashlib.sha256(repr((salt, self._forgotten)).encode()).digest()

    def forget_all(self) -> None:
        """Match no page that is known by now, nor any that a request which began before makes known later."""
        self._forgotten += 1

    def match(self, tokens: Sequence[int], salt: str = "") -> list[int]:
        """The known pages that hold the longest start of ``tokens``, in order. They are not referenced yet."""
        found: list[int] = []
        parent = self.root(salt)
        for begin in range(0, len(tokens) - self.page_size + 1, self.page_size):
            chunk = tuple(tokens[begin : begin + self.page_size])
            key = _chained(parent, chunk)
            number = self._known.get(key)
            if number is None:
                break
            page = self._pages[number]
            # Two chains with one key would serve somebody else's tokens: the tokens themselves decide.
            if page.tokens != chunk or page.parent != parent:
                break
            found.append(number)
            parent = key
        return found

    def forget(self, pages: Sequence[int]) -> None:
        """Match none of these pages any more, as what they hold is wrong. Their references stay."""
        for number in pages:
            if self._pages[number].key is not None:
                self._forget(number)

    def take(self, pages: Sequence[int]) -> None:
        """Reference pages that are in use or known."""
        for number in pages:
            page = self._pages[number]
            if page.references == 0:
                if page.key is None:
                    raise ValueError(f"pages must be in use or known, got {number}, which is blank")
                del self._idle[number]
            page.references += 1

    def allocate(self, count: int) -> list[int] | None:
        """``count`` pages for new tokens, referenced once each; None, and nothing changes, if there are not so many."""
        if count > self.available:
            return None
        pages = []
        for _ in range(count):
            if self._blank:
                number = self._blank.pop()
            else:
                number, _ = self._idle.popitem(last=False)
                self._forget(number)
            self._pages[number].references = 1
            pages.append(number)
        return pages

    def release(self, pages: Sequence[int]) -> None:
        """Drop a reference of each of a request's pages, given in the order of its tokens.

        The last page is the first to be forgotten: a chain is of use from its start only.
        """
        for number in reversed(pages):
            page = self._pages[number]
            if page.references < 1:
                raise ValueError(f"pages must be in use, got {number}, which nobody references")
            page.references -= 1
            if page.references == 0:
                if page.key is None:
                    self._blank.append(number)
                else:
                    self._idle[number] = None

    def release_all(self) -> None:
        """Drop all references, also those of a change that was interrupted. Known pages stay known."""
        for page in self._pages:
            page.references = 0
        self._known = {page.key: number for number, page in enumerate(self._pages) if page.key is not None}
        self._idle = OrderedDict.fromkeys(self._known.values())
        self._blank = [number for number in range(self.num_pages - 1, -1, -1) if number not in self._idle]

    def seal(self, page: int, parent: bytes, tokens: Sequence[int]) -> bytes:
        """Make a full page known; returns the key that the next page's chain goes on from.

        Of two pages with the same tokens the first is the known one.
        """
        if len(tokens) != self.page_size:
            raise ValueError(f"tokens must fill a page of {self.page_size}, got {len(tokens)}")
        entry = self._pages[page]
        if entry.references < 1:
            raise ValueError(f"page must be in use, got {page}, which nobody references")
        chunk = tuple(tokens)
        key = _chained(parent, chunk)
        if entry.key is None and key not in self._known:
            # The key comes last: a page with a key is known, wherever this is interrupted.
            entry.parent, entry.tokens, entry.key = parent, chunk, key
            self._known[key] = page
        return key

    def _forget(self, number: int) -> None:
        page = self._pages[number]
        assert page.key is not None
        del self._known[page.key]
        page.key, page.parent, page.tokens = None, b"", ()


def _chained(parent: bytes, tokens: tuple[int, ...]) -> bytes:
    return hashlib.sha256(parent + array("q", tokens).tobytes()).digest()
