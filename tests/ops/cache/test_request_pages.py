"""Writes of tokens at positions of requests whose pages are in one list, against the slots of each token."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flashlatte import flashinfer, kv_cache
from flashlatte.runtime import machine

BACKEND = "portable" if machine.interpreting() else "reference"
# Run both without the interpreter (reference) and with it (kernel).
pytestmark = [pytest.mark.interpreter] if machine.interpreting() else []
PAGES = 5
ENDS = (-(2**63), -(2**31), -1, 0, 1, 2, 3, 7, 2**31 - 1)
BEYOND = (2**31, 2**62, 2**63 - 1)
INDEX_DTYPES = st.sampled_from([torch.int32, torch.int64])


def values(dtype):
    info = torch.iinfo(dtype)
    return st.sampled_from([value for value in (*ENDS, *BEYOND) if info.min <= value <= info.max])


def slot_of(request, position, indices, indptr, page_size):
    """Python's integers do not overflow."""
    if position < 0 or not 0 <= request < len(indptr) - 1:
        return -1
    entry = indptr[request] + position // page_size
    if not 0 <= entry < min(indptr[request + 1], len(indices)) or not 0 <= indices[entry] < PAGES:
        return -1
    return indices[entry] * page_size + position % page_size


@st.composite
def lists(draw):
    """Lists of the four arguments and their dtypes, most of which have entries that do not exist."""
    dtypes = [draw(INDEX_DTYPES) for _ in range(4)]
    ids, positions, indices, indptr = (st.one_of(st.integers(0, 6), values(dtype)) for dtype in dtypes)
    tokens = draw(st.integers(0, 6))
    many = st.lists(ids, min_size=tokens, max_size=tokens), st.lists(positions, min_size=tokens, max_size=tokens)
    found = [draw(many[0]), draw(many[1]), draw(st.lists(indices, max_size=6))]
    return [*found, draw(st.lists(indptr, min_size=1, max_size=4))], dtypes


def tensor(numbers, dtype, spread):
    x = torch.tensor(numbers, dtype=dtype)
    return x.repeat_interleave(3)[::3] if spread else x


@given(
    given_lists=lists(),
    page_size=st.integers(1, 3),
    dtype=st.sampled_from([torch.bfloat16, torch.float16]),
    adjacent=st.booleans(),
    spread=st.booleans(),
)
def test_every_index(given_lists, page_size, dtype, adjacent, spread):
    numbers, dtypes = given_lists
    ids, positions, indices, indptr = (tensor(*each, spread) for each in zip(numbers, dtypes, strict=True))
    slots = [
        slot_of(request, position, numbers[2], numbers[3], page_size)
        for request, position in zip(*numbers[:2], strict=True)
    ]
    # Of tokens with the same slot any may be written.
    last = {slot: token for token, slot in enumerate(slots)}
    kept = [token for token, slot in enumerate(slots) if last[slot] == token or slot < 0]
    ids, positions, slots = ids[kept], positions[kept], torch.tensor([slots[token] for token in kept], dtype=torch.long)
    rows = torch.randn(len(kept), 27, generator=torch.Generator().manual_seed(0)).to(dtype)[:, :24]
    cache = torch.zeros(PAGES, page_size, 1, 24, dtype=dtype)
    wanted = cache.clone()
    kv_cache.write(wanted, slots, rows, backend="reference")
    pages: dict[str, Any] = {"request_ids": ids, "page_indices": indices, "page_indptr": indptr}
    if adjacent:
        kv_cache.write(cache, positions, rows[:, :16], rope=rows[:, 16:], backend=BACKEND, **pages)
    else:
        for columns in (slice(16), slice(16, 24)):
            kv_cache.write(cache[..., columns], positions, rows[:, columns], backend=BACKEND, **pages)
    assert cache.equal(wanted)


def test_one_call_writes_both_parts(monkeypatch):
    calls = []
    monkeypatch.setattr("flashlatte.flashinfer.page.cache_write", lambda *args, **_: calls.append(args[0].shape))
    cache, rows, ints = torch.zeros(4, 2, 24), torch.ones(5, 24), torch.zeros(5, dtype=torch.int32)
    parts = rows[:, :16], rows[:, 16:], ints, ints, cache[..., :16], cache[..., 16:]
    flashinfer.append_paged_mla_kv_cache(*parts, ints, ints, ints)
    assert calls == [(4, 2, 24)]


INTS = torch.zeros(3, dtype=torch.int32)
VALID: dict[str, Any] = {"request_ids": INTS, "page_indices": INTS, "page_indptr": INTS}


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"request_ids": None}, ValueError, "^page_indices must be None without request_ids, got a tensor$"),
        ({"request_ids": INTS[:2]}, ValueError, r"^request_ids must have shape \[3\]"),
        ({"request_ids": INTS.float()}, TypeError, "^request_ids must be int32 or int64, got float32$"),
        ({"page_indices": None}, TypeError, "^page_indices must be a tensor, got NoneType$"),
        ({"page_indices": INTS[None]}, ValueError, r"^page_indices must have shape \[entries\]"),
        ({"page_indptr": INTS[:0]}, ValueError, r"^page_indptr must have shape \[b \+ 1\]"),
        ({"page_indptr": INTS.to("meta")}, ValueError, "^page_indptr must be on cpu"),
    ],
)
def test_errors_name_the_argument(change, error, message):
    with pytest.raises(error, match=message):
        kv_cache.write(torch.zeros(2, 4, 1, 8), INTS, torch.zeros(3, 8), **(VALID | change))


def test_formats_with_scales_take_slots():
    cache = kv_cache.allocate("v32", 2, 64)
    with pytest.raises(ValueError, match=r"^request_ids must be None for cache format v32, got a tensor$"):
        kv_cache.write(cache, INTS, torch.zeros(3, 576), **VALID)
    with pytest.raises(ValueError, match=r"^slot_mapping must not be longer than x \(2 tokens\), got 3$"):
        kv_cache.write(torch.zeros(2, 4, 1, 8), INTS, torch.zeros(2, 8), **VALID)
