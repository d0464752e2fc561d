"""Reference-counted pages of a cache, and the prefix cache over them.

A full page can be *registered* under a hash that is chained over its tokens and all tokens before them, so that a later
request with the same beginning references the page instead of computing it. A registered page without references stays
until its memory is needed. The page that was released first is evicted first.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass
class _Page:
    """``key``, ``parent``, ``tokens``: a registered page's hash, the hash of the page before it, and its tokens."""

    references: int = 0
    key: bytes | None = None
    parent: bytes = b""
    tokens: tuple[int, ...] = ()


class PagePool:
    """The pages of one cache, or of its copy on the host.

    Args:
        num_pages: pages of the cache.
        page_size: tokens in a page.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self._pages = [_Page() for _ in range(num_pages)]
        # Pages without references, not registered and registered; the first registered one is evicted first.
        self._free = list(range(num_pages - 1, -1, -1))
        self._evictable: OrderedDict[int, None] = OrderedDict()
        self._registered: dict[bytes, int] = {}
        self._generation = 0  # number of calls of invalidate_all

    @property
    def available(self) -> int:
        """Number of pages without references, which ``allocate`` can return."""
        return len(self._free) + len(self._evictable)

    @property
    def in_use(self) -> int:
        """Number of pages with references."""
        return self.num_pages - self.available

    def references(self, page: int) -> int:
        return self._pages[page].references

    def keys(self, pages: Sequence[int]) -> list[bytes]:
        """The hashes of registered pages."""
        return [key for page in pages if (key := self._pages[page].key) is not None]

    def root_hash(self, cache_salt: str = "") -> bytes:
        """The hash before a request's first page. Requests with different salts never share a page."""
        return hashlib.sha256(repr((cache_salt, self._generation)).encode()).digest()

    def invalidate_all(self) -> None:
        """Stop matching all registered pages, and those that unfinished requests register later."""
        self._generation += 1

    def match(self, tokens: Sequence[int], cache_salt: str = "") -> list[int]:
        """The registered pages of the longest prefix of ``tokens``, in order. This adds no reference."""
        found: list[int] = []
        parent = self.root_hash(cache_salt)
        for begin in range(0, len(tokens) - self.page_size + 1, self.page_size):
            chunk = tuple(tokens[begin : begin + self.page_size])
            key = _page_hash(parent, chunk)
            number = self._registered.get(key)
            if number is None:
                break
            page = self._pages[number]
            # Compare the tokens too, because hashes may collide.
            if page.tokens != chunk or page.parent != parent:
                break
            found.append(number)
            parent = key
        return found

    def unregister(self, pages: Sequence[int]) -> None:
        """Stop matching these pages because their contents are wrong. Their references stay."""
        for number in pages:
            if self._pages[number].key is not None:
                self._evict(number)

    def acquire(self, pages: Sequence[int]) -> None:
        """Add a reference to each page. They must be in use or registered."""
        for number in pages:
            page = self._pages[number]
            if page.references == 0:
                if page.key is None:
                    raise ValueError(f"pages must be in use or registered, got {number}, which is neither")
                del self._evictable[number]
            page.references += 1

    def allocate(self, count: int) -> list[int] | None:
        """``count`` pages with one reference each; None, without a change, if fewer are available."""
        if count > self.available:
            return None
        pages = []
        for _ in range(count):
            if self._free:
                number = self._free.pop()
            else:
                number, _ = self._evictable.popitem(last=False)
                self._evict(number)
            self._pages[number].references = 1
            pages.append(number)
        return pages

    def release(self, pages: Sequence[int]) -> None:
        """Remove one reference from each of a request's pages, which are passed in the order of its tokens.

        The last page is evicted first, because a page can be matched only after all pages before it.
        """
        for number in reversed(pages):
            page = self._pages[number]
            if page.references < 1:
                raise ValueError(f"pages must be in use, got {number}, which has no references")
            page.references -= 1
            if page.references == 0:
                if page.key is None:
                    self._free.append(number)
                else:
                    self._evictable[number] = None

    def release_all(self) -> None:
        """Remove all references, also after an interrupted change. Registered pages stay registered."""
        for page in self._pages:
            page.references = 0
        self._registered = {page.key: number for number, page in enumerate(self._pages) if page.key is not None}
        self._evictable = OrderedDict.fromkeys(self._registered.values())
        self._free = [number for number in range(self.num_pages - 1, -1, -1) if number not in self._evictable]

    def register(self, page: int, parent: bytes, tokens: Sequence[int]) -> bytes:
        """Register a full page; returns its hash, which is the ``parent`` of the next page.

        Of two pages with the same hash the first is registered.
        """
        if len(tokens) != self.page_size:
            raise ValueError(f"tokens must fill a page of {self.page_size}, got {len(tokens)}")
        entry = self._pages[page]
        if entry.references < 1:
            raise ValueError(f"page must be in use, got {page}, which has no references")
        chunk = tuple(tokens)
        key = _page_hash(parent, chunk)
        if entry.key is None and key not in self._registered:
            # The key is set last, so that a page with a key is complete wherever this is interrupted.
            entry.parent, entry.tokens, entry.key = parent, chunk, key
            self._registered[key] = page
        return key

    def _evict(self, number: int) -> None:
        page = self._pages[number]
        assert page.key is not None
        del self._registered[page.key]
        page.key, page.parent, page.tokens = None, b"", ()


def _page_hash(parent: bytes, tokens: tuple[int, ...]) -> bytes:
    return hashlib.sha256(parent + array("q", tokens).tobytes()).digest()
