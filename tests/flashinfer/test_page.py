"""Tables of a paged cache, writing to it, and ``concat_mla_k``."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flashlatte import flashinfer

COUNTS = st.lists(st.integers(0, 5), min_size=1, max_size=5)


def boundaries(counts):
    return torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()], dtype=torch.int32)


@given(lengths=st.lists(st.integers(0, 20), min_size=1, max_size=5), page_size=st.integers(1, 5))
def test_lengths(lengths, page_size):
    pages = boundaries([-(-length // page_size) for length in lengths])
    last = torch.tensor([(length - 1) % page_size + 1 for length in lengths], dtype=torch.int32)
    assert flashinfer.get_seq_lens(pages, last, page_size).tolist() == lengths


@given(counts=COUNTS, padding=st.integers(0, 3), in_place=st.booleans())
def test_batch_indices_and_positions(counts, padding, in_place):
    lengths = torch.tensor([count + index for index, count in enumerate(counts)])
    tokens = sum(counts) + padding
    buffers = [torch.full((tokens,), 99, dtype=torch.int32) for _ in range(2)] if in_place else [None, None]
    results = flashinfer.get_batch_indices_positions(boundaries(counts), lengths, tokens, *buffers)
    wanted = [(index, index + token) for index, count in enumerate(counts) for token in range(count)]
    assert list(zip(*(result.tolist() for result in results), strict=True)) == wanted + [(-1, 0)] * padding
    assert not in_place or all(result is buffer for result, buffer in zip(results, buffers, strict=True))


@given(counts=COUNTS, page_size=st.integers(1, 4), adjacent=st.booleans())
def test_append(counts, page_size, adjacent):
    """Request i has i tokens before the new ones. Nothing else is written."""
    lengths = [count + index for index, count in enumerate(counts)]
    pages = [-(-length // page_size) for length in lengths]
    generator = torch.Generator().manual_seed(0)
    indices = torch.randperm(sum(pages) + 2, generator=generator).int()
    ckv, kpe = (
        torch.randn(sum(counts) + 1, 16, generator=generator),
        torch.randn(sum(counts) + 1, 8, generator=generator),
    )
    cache = torch.zeros(sum(pages) + 2, page_size, 24)
    parts = (
        (cache[..., :16], cache[..., 16:]) if adjacent else (torch.zeros_like(cache[..., :16]), cache[..., 16:].clone())
    )
    requests, positions = flashinfer.get_batch_indices_positions(
        boundaries(counts), torch.tensor(lengths), sum(counts) + 1
    )
    last = torch.ones(len(counts), dtype=torch.int32)
    flashinfer.append_paged_mla_kv_cache(ckv, kpe, requests, positions, *parts, indices, boundaries(pages), last)
    wanted, token = torch.zeros_like(cache), 0
    for index, count in enumerate(counts):
        for position in range(index, index + count):
            page = indices[sum(pages[:index]) + position // page_size]
            wanted[page, position % page_size] = torch.cat((ckv[token], kpe[token]))
            token += 1
    assert torch.cat(parts, dim=-1).equal(wanted)


@pytest.mark.parametrize("adjacent", [True, False])
@pytest.mark.parametrize("dynamic", [None, pytest.param(True, id="symbolic sizes", marks=pytest.mark.full)])
def test_append_compiles_as_one_graph(adjacent, dynamic):
    rows, requests, positions = torch.randn(5, 24), torch.tensor([0, 0, 1, 1, 9]), torch.tensor([0, 1, 0, 2, 0])
    tables = (torch.tensor([0, 3, 1]), torch.tensor([0, 1, 3]), torch.ones(2, dtype=torch.int32))

    def append(ckv_cache, kpe_cache):
        new = (rows[:, :16], rows[:, 16:], requests, positions)
        flashinfer.append_paged_mla_kv_cache(*new, ckv_cache, kpe_cache, *tables)
        return ckv_cache.sum() + kpe_cache.sum()

    def caches():
        cache = torch.zeros(4, 2, 24)
        ckv_cache, kpe_cache = cache[..., :16], cache[..., 16:]
        return ckv_cache, kpe_cache if adjacent else kpe_cache.clone()

    wanted, actual = caches(), caches()
    torch.compiler.reset()
    total = append(*wanted)
    assert torch.compile(append, fullgraph=True, dynamic=dynamic, backend="aot_eager")(*actual).equal(total)
    assert all(one.equal(other) for one, other in zip(actual, wanted, strict=True))
    assert total != 0


def test_tokens_outside_the_pages_are_skipped():
    cache, rows = torch.zeros(4, 2, 24), torch.ones(5, 24)
    flashinfer.append_paged_mla_kv_cache(
        rows[:, :16],
        rows[:, 16:],
        torch.tensor([0, 0, 2, 1, -1]),
        torch.tensor([2, -1, 0, 0, 0]),
        cache[..., :16],
        cache[..., 16:],
        torch.tensor([0, 9], dtype=torch.int32),
        torch.tensor([0, 1, 2], dtype=torch.int32),
        torch.tensor([1, 1], dtype=torch.int32),
    )
    assert cache.eq(0).all()


@pytest.mark.parametrize("begin", [-1, 2**31 - 1])
def test_entries_outside_the_pages_are_skipped(begin):
    """The entry of the token's page is -1, or exceeds int32."""
    cache, rows = torch.zeros(4, 2, 24), torch.ones(1, 24)
    flashinfer.append_paged_mla_kv_cache(
        rows[:, :16],
        rows[:, 16:],
        torch.tensor([0], dtype=torch.int32),
        torch.tensor([0 if begin < 0 else 2], dtype=torch.int32),
        cache[..., :16],
        cache[..., 16:],
        torch.tensor([0, 1], dtype=torch.int32),
        torch.tensor([begin, 2], dtype=torch.int32),
        torch.tensor([1], dtype=torch.int32),
    )
    assert cache.eq(0).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("tokens", [0, 5])
def test_concat_mla_k(dtype, tokens):
    generator = torch.Generator().manual_seed(0)
    nope, rope = (torch.randn(tokens, heads, width, generator=generator) for heads, width in ((3, 16), (1, 8)))
    nope, rope, k = nope.to(dtype), rope.to(dtype), torch.zeros(tokens, 3, 32).to(dtype)[..., :24]
    flashinfer.concat_mla_k(k, nope, rope, backend="cake")
    wanted = torch.cat((nope.float(), rope.float().expand(-1, 3, -1)), dim=-1)
    assert k.float().equal(wanted)


def test_refusals():
    nope, rope = torch.zeros(5, 3, 16).bfloat16(), torch.zeros(5, 1, 8).bfloat16()
    with pytest.raises(ValueError, match=r"k must have shape \[5, 3, 24\]"):
        flashinfer.concat_mla_k(torch.zeros(5, 3, 25).bfloat16(), nope, rope)
    with pytest.raises(ValueError, match=r"backend must be one of default, cake, hopper"):
        flashinfer.concat_mla_k(torch.zeros(5, 3, 24).bfloat16(), nope, rope, backend="cutile")
    with pytest.raises(ValueError, match=r"k_rope must have shape \[5, 1, rope\]"):
        flashinfer.concat_mla_k(torch.zeros(5, 3, 24).bfloat16(), nope, nope)
    with pytest.raises(ValueError, match=r"kv_last_page_len must have shape \[1\]"):
        flashinfer.get_seq_lens(torch.zeros(2, dtype=torch.int32), torch.zeros(2, dtype=torch.int32), 4)
    with pytest.raises(ValueError, match="kpe_cache must not be an expanded tensor"):
        flashinfer.append_paged_mla_kv_cache(
            torch.ones(1, 16),
            torch.ones(1, 8),
            torch.zeros(1, dtype=torch.int32),
            torch.zeros(1, dtype=torch.int32),
            torch.zeros(4, 2, 16),
            torch.zeros(1, 2, 8).expand(4, 2, 8),
            torch.zeros(2, dtype=torch.int32),
            torch.tensor([0, 2], dtype=torch.int32),
            torch.ones(1, dtype=torch.int32),
        )
