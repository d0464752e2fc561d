"""The page pool compared with a simple model."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from support.engine_machine import run_long

from flashlatte.engine.pages import PagePool


def allocate(pool, count):
    pages = pool.allocate(count)
    assert pages is not None
    return pages


def fill(pool, tokens, cache_salt=""):
    """Allocate pages for ``tokens``, and seal all full ones."""
    pages = allocate(pool, len(tokens) // pool.page_size)
    chain = pool.root_hash(cache_salt)
    for number, page in enumerate(pages):
        begin = number * pool.page_size
        chain = pool.register(page, chain, tokens[begin : begin + pool.page_size])
    return pages


def test_the_longest_cached_prefix_is_found():
    pool = PagePool(8, 2)
    pages = fill(pool, [1, 2, 3, 4, 5, 6])
    assert pool.match([1, 2, 3, 4, 9, 9]) == pages[:2]
    assert pool.match([1, 2, 3]) == pages[:1]
    assert pool.match([3, 4]) == []


def test_other_salts_match_nothing():
    pool = PagePool(8, 2)
    fill(pool, [1, 2], cache_salt="a")
    assert pool.match([1, 2], cache_salt="b") == []
    assert len(pool.match([1, 2], cache_salt="a")) == 1


def test_pages_are_evicted_in_the_order_of_release_and_chains_from_their_end():
    pool = PagePool(4, 1)
    first, second = fill(pool, [1, 2]), fill(pool, [3, 4])
    pool.release(first)
    pool.release(second)
    pool.allocate(1)
    assert pool.match([1, 2]) == first[:1]
    assert pool.match([3, 4]) == second


def test_a_page_in_use_is_never_allocated_again():
    pool = PagePool(2, 1)
    fill(pool, [1, 2])
    assert pool.allocate(1) is None
    assert pool.available == 0


def test_a_hash_collision_never_matches_other_tokens(monkeypatch):
    monkeypatch.setattr("flashlatte.engine.pages._page_hash", lambda parent, tokens: b"the same")
    pool = PagePool(4, 1)
    fill(pool, [1])
    assert pool.match([2]) == []


def test_errors_name_the_argument():
    pool = PagePool(2, 2)
    with pytest.raises(ValueError, match="pages must be in use, got 1"):
        pool.release([1])
    with pytest.raises(ValueError, match="pages must be in use or registered, got 0"):
        pool.acquire([0])
    (page,) = allocate(pool, 1)
    with pytest.raises(ValueError, match="tokens must fill a page of 2, got 1"):
        pool.register(page, pool.root_hash(), [1])


class Pool(RuleBasedStateMachine):
    """Holders take, allocate, seal and release pages; the model counts references."""

    @initialize(pages=st.integers(1, 8), page_size=st.integers(1, 3))
    def start(self, pages, page_size):
        self.pool = PagePool(pages, page_size)
        self.holders = []
        self.content = {}

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=9))
    def hold(self, tokens):
        size = self.pool.page_size
        tokens = tokens[: len(tokens) // size * size]
        found = self.pool.match(tokens)
        self.pool.acquire(found)
        available = self.pool.available
        more = self.pool.allocate(len(tokens) // size - len(found))
        if more is None:
            assert available < len(tokens) // size - len(found)
            self.pool.release(found)
            return
        chain = self.pool.root_hash()
        for number, page in enumerate(found + more):
            chunk = tokens[number * size : number * size + size]
            if number < len(found):
                assert self.content[page] == tokens[: (number + 1) * size]
            else:
                self.content[page] = tokens[: (number + 1) * size]
            chain = self.pool.register(page, chain, chunk)
        self.holders.append(found + more)

    @precondition(lambda self: bool(getattr(self, "holders", None)))
    @rule(data=st.data())
    def let_go(self, data):
        number = data.draw(st.integers(0, len(self.holders) - 1))
        self.pool.release(self.holders.pop(number))

    @invariant()
    def references_are_those_of_the_holders(self):
        if not hasattr(self, "pool"):
            return
        held = [page for pages in self.holders for page in pages]
        for page in range(self.pool.num_pages):
            assert self.pool.references(page) == held.count(page)
        assert self.pool.in_use == len(set(held))


TestPool = Pool.TestCase
TestPool.settings = settings(stateful_step_count=30)


@pytest.mark.full
def test_a_hundred_thousand_steps():
    run_long(Pool, 100_000, examples=900)
