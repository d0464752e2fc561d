"""Page copies of the Triton kernel, in Triton's interpreter, compared with copies of one page at a time."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.allocations import recorded_bytes

from flashlatte import kv_cache
from flashlatte.ops.cache_copy import api, copy_blocks, portable, swap_blocks

pytestmark = pytest.mark.interpreter

PAGES = st.lists(st.integers(-2, 7), min_size=1, max_size=6)


def random_bytes(*shape, seed=0):
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def copied(source, target, pairs):
    """``target`` after copying the pairs whose pages exist, with all reads before the writes."""
    result = target.clone()
    for src, dst in pairs:
        if 0 <= src < source.shape[0] and 0 <= dst < target.shape[0]:
            result[dst] = source[src]
    return result


@given(
    src=PAGES,
    dst=st.permutations(range(-2, 7)),
    width=st.sampled_from([1, 3, 8, 656, 2100]),
    gap=st.sampled_from([0, 1, 16]),
    dtype=st.sampled_from([torch.int32, torch.int64]),
    seed=st.integers(0, 2**32),
)
def test_pairs_on_the_device_of_which_some_do_not_exist(src, dst, width, gap, dtype, seed):
    memory = random_bytes(6, 5 * width + gap, seed=seed)
    cache = memory[:, : 5 * width].unflatten(1, (5, width))
    other = random_bytes(5, 5, width, seed=seed + 1)
    pairs = list(zip(src, dst, strict=False))
    sources, targets = (torch.tensor(one, dtype=dtype) for one in zip(*pairs, strict=True))

    expected = copied(cache, other, pairs)
    api._copy_pages(cache, other, sources, targets, True, "portable")
    assert other.equal(expected)

    between_pages = memory[:, 5 * width :].clone()
    expected = copied(cache, cache, pairs)
    api._copy_pages(None, cache, sources, targets, False, "portable")
    assert cache.equal(expected)
    assert memory[:, 5 * width :].equal(between_pages)


@given(src=PAGES, dst=st.permutations(range(-2, 7)), disjoint=st.booleans())
def test_the_reference_skips_pairs_that_do_not_exist(src, dst, disjoint):
    cache = random_bytes(6, 2, 3)
    pairs = list(zip(src, dst, strict=False))
    expected = copied(cache, cache, pairs)
    sources, targets = (torch.tensor(one) for one in zip(*pairs, strict=True))
    api._copy_pages(None, cache, sources, targets, disjoint, "reference")
    assert cache.equal(expected)


@pytest.mark.parametrize("name", kv_cache.FORMAT_NAMES)
def test_every_format(name):
    layout = kv_cache.get_format(name)
    rows = torch.randn(5, 3, 1, layout.head_dim, generator=torch.Generator().manual_seed(0))
    cache, other = kv_cache.pack(rows, name), kv_cache.allocate(name, 4, 3)
    before = kv_cache.unpack(cache, cache_format=name)
    swap_blocks(cache, other, [4, 0], [1, 3], backend="portable")
    assert kv_cache.unpack(other, cache_format=name)[[1, 3]].equal(before[[4, 0]])
    copy_blocks(cache, [0, 1, 2], [1, 0, 4], backend="portable")
    assert kv_cache.unpack(cache, cache_format=name).equal(before[[1, 0, 2, 3, 2]])


def test_scratch_is_bounded_and_pages_go_through_it_in_slices(monkeypatch):
    monkeypatch.setattr(portable, "SCRATCH_BYTES", 4 * 48)
    cache = random_bytes(8, 7, 20)
    order = [3, 0, 1, 2]
    expected = copied(cache, cache, list(zip(order, range(4), strict=True)))
    sizes = recorded_bytes(monkeypatch)
    copy_blocks(cache, order, [0, 1, 2, 3], backend="portable")
    assert sizes
    assert max(sizes) <= 4 * 48
    assert cache.equal(expected)


def test_heads_before_tokens_are_one_piece():
    cache = random_bytes(4, 2, 3, 5).transpose(1, 2)
    other = random_bytes(4, 2, 3, 5, seed=1).transpose(1, 2)
    expected = copied(cache, other, [(0, 2)])
    swap_blocks(cache, other, [0], [2], backend="portable")
    assert other.equal(expected)


def test_pages_in_pieces_are_refused_and_left_to_the_reference():
    cache = random_bytes(4, 3, 6)[..., :5]
    with pytest.raises(ValueError, match="it takes caches on one GPU or in pinned host memory, with contiguous pages"):
        copy_blocks(cache, [0], [1], backend="portable")
    copy_blocks(cache, [0], [1])
    assert cache[1].equal(cache[0])
    with pytest.raises(ValueError, match="it takes caches on one GPU"):
        swap_blocks(cache, cache.clone(), [0], [1], backend="portable")


def test_pages_without_numbers_are_copied():
    cache = torch.empty(3, 4, 0)
    copy_blocks(cache, [0], [1], backend="portable")
    swap_blocks(cache, cache.clone(), [0], [1], backend="portable")
