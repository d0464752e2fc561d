"""Empty inputs give empty results without a launch."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
from support.marks import mostly_full

from flashlatte import (
    dense_decode,
    dense_prefill,
    index_convert,
    index_gather,
    index_logits,
    index_quantize,
    index_query,
    index_query_mxfp4,
    index_select,
    kv_cache,
    merge_states,
    ops,
    paged_attention,
    paged_index_logits,
    paged_index_select,
    sparse_attention,
    sparse_decode,
    sparse_index_logits,
    sparse_prefill,
    topk,
)
from flashlatte.kv_cache.index_formats import index_format
from flashlatte.ops.cache_gather import cache_gather
from flashlatte.ops.cache_write import cache_write
from flashlatte.ops.index_weights import index_weights
from flashlatte.ops.mhc import mhc_post, mhc_pre
from flashlatte.ops.norm_rope import latent_rows, rotate_heads
from flashlatte.ops.norm_rope.rotary import Rotary
from flashlatte.runtime import dispatch

BF16, I32 = torch.bfloat16, torch.int32


def ints(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=I32)


def empty_dense_decode(batch: int = 0, s_q: int = 2, **options):
    q, cache = torch.ones(batch, s_q, 4, 24, dtype=BF16), torch.ones(3, 8, 2, 24, dtype=BF16)
    return dense_decode(q, cache, ints(batch, 5 * batch), ints(batch), head_dim_v=16, **options)


def empty_sparse_decode(batch: int = 0, s_q: int = 2, **options):
    q, cache = torch.ones(batch, s_q, 4, 576, dtype=BF16), kv_cache.allocate("v32", 3, 8)
    extra = {"extra_k_cache": kv_cache.allocate("v32", 2, 5), "extra_indices": ints(batch, s_q, 7)}
    return sparse_decode(q, cache, ints(batch, s_q, 6), topk_length=ints(batch), **extra, **options)


def empty_sparse_attention(s_kv: int = 9, topk: int = 5):
    q, kv = torch.ones(0, 4, 24, dtype=BF16), torch.ones(s_kv, 1, 24, dtype=BF16)
    return sparse_attention(q, kv, ints(0, 1, topk), d_v=16, topk_length=ints(0))


def empty_sparse_prefill(s_kv: int = 9, topk: int = 5):
    q, kv = torch.ones(0, 4, 24, dtype=BF16), torch.ones(s_kv, 1, 24, dtype=BF16)
    return sparse_prefill(q, kv, ints(0, 1, topk), d_v=16, topk_length=ints(0))


def empty_dense_prefill(batch: int = 0, keys: int = 0, **options):
    shapes = ((0, 4, 24), (keys, 2, 24), (keys, 2, 16))
    q, k, v = (torch.ones(shape, dtype=BF16) for shape in shapes)
    return dense_prefill(q, k, v, ints(batch + 1), ints(batch + 1), 0, keys, **options)


def empty_paged_attention(batch: int = 0, **options):
    q, cache = torch.ones(0, 4, 24, dtype=BF16), torch.ones(3, 8, 2, 24, dtype=BF16)
    return paged_attention(q, cache, cache, ints(batch, 5), ints(batch), ints(batch + 1), **options)


def empty_merge(*rows: int):
    return merge_states([torch.ones(*rows, 8)] * 3, [torch.ones(rows)] * 3)


def empty_write():
    cache = kv_cache.allocate("v32", 3, 8)
    cache_write(cache, ints(0), torch.ones(0, 576))
    cache_write(cache, ints(0), torch.ones(4, 512), rope=torch.ones(4, 64))
    return (cache[:0],)


def empty_gather(batch: int):
    cache = kv_cache.allocate("model1", 3, 8)
    return (cache_gather(cache, ints(batch, batch), ints(batch + 1), total_tokens=0),)


def empty_conversion():
    return (kv_cache.to_cache_indices(ints(0, 6), ints(0, 0), 8),)


def empty_streams():
    streams, numbers = torch.ones(0, 4, 8), torch.ones(0, 24)
    shares, mixture, seen = mhc_pre(streams, numbers, torch.ones(24), torch.ones(3))
    return shares, mixture, seen, mhc_post(seen, streams, shares, mixture)


def empty_rows():
    rotary = Rotary(torch.ones(16, 8), torch.zeros(0, dtype=torch.int64), True)
    rows, q_out = latent_rows(
        torch.ones(0, 32),
        torch.ones(24),
        rotary,
        1e-6,
        q_a=torch.ones(0, 40),
        q_weight=torch.ones(40),
        cache=kv_cache.allocate("bf16", 2, 4, head_dim=32),
        slot_mapping=ints(0),
    )
    heads = torch.ones(0, 4, 8)
    rotate_heads(heads, rotary, heads)
    return rows, q_out, heads


def index_cache() -> torch.Tensor:
    return kv_cache.allocate(index_format("index_bf16", 32), 3, 8)


def empty_index_quantize(**options):
    cache = index_cache()
    index_quantize(cache, ints(0), torch.ones(4, 32), **options)
    return (cache[:0],)


def empty_index_gather(batch: int = 2, tokens: int = 0, **options):
    keys, scales = index_gather(index_cache(), ints(batch, 3), ints(batch + 1), tokens, head_dim=32, **options)
    assert scales is None
    return (keys,)


def empty_index_query(**options):
    q, weights = torch.ones(0, 4, 32, dtype=BF16), torch.ones(0, 4)
    return *index_query(q, weights, **options), *index_query_mxfp4(q, weights, **options)


def empty_index_logits(rows: int = 0, keys: int = 9, **options):
    q, k = torch.ones(rows, 4, 32, dtype=BF16), torch.ones(keys, 32, dtype=BF16)
    return (index_logits(q, k, torch.ones(rows, 4), ints(rows), ints(rows), **options),)


def empty_sparse_logits(rows: int = 0, keys: int = 9, **options):
    q, k = torch.ones(rows, 4, 32, dtype=BF16), torch.ones(keys, 32, dtype=BF16)
    blocks = ints(rows, 5)
    return (sparse_index_logits(q, k, torch.ones(rows, 4), blocks, blocks + 4, block_size=4, **options),)


def empty_index_select(rows: int = 0, keys: int = 9, **options):
    q, k = torch.ones(rows, 4, 32, dtype=BF16), torch.ones(keys, 32, dtype=BF16)
    return (index_select(q, k, torch.ones(rows, 4), ints(rows), ints(rows), 5, **options),)


def empty_paged_logits(pages: int = 3, **options):
    q = torch.ones(0, 2, 4, 32, dtype=BF16)
    return (paged_index_logits(q, index_cache(), torch.ones(0, 4), ints(0), ints(0, pages), **options),)


def empty_paged_select(pages: int = 3, **options):
    q = torch.ones(0, 2, 4, 32, dtype=BF16)
    table = ints(0, pages)
    return (paged_index_select(q, index_cache(), torch.ones(0, 4), ints(0), table, 5, slots=True, **options),)


def empty_topk(rows: int = 0, width: int = 9, **options):
    return topk(torch.ones(rows, width), 5, end=ints(rows), return_values=True, **options)


def empty_index_convert(pages: int = 3, **options):
    return (index_convert(ints(0, 6), ints(0, pages), 8, **options),)


Call = tuple[Callable, tuple[tuple[int, ...], ...]]

# These take ``backend``.
INDEXER: dict[str, Call] = {
    "index_quantize": (empty_index_quantize, ((0, 8, 1, 32),)),
    "index_gather": (empty_index_gather, ((0, 32),)),
    "index_gather, no requests": (functools.partial(empty_index_gather, 0, 5), ((5, 32),)),
    "index_query": (empty_index_query, ((0, 4, 32), (0, 4), (0, 4, 16), (0, 4, 1), (0, 4))),
    "index_logits": (empty_index_logits, ((0, 9),)),
    "index_logits, no keys": (functools.partial(empty_index_logits, 3, 0), ((3, 0),)),
    "sparse_index_logits": (empty_sparse_logits, ((0, 20),)),
    "sparse_index_logits, no keys": (functools.partial(empty_sparse_logits, 3, 0), ((3, 20),)),
    "index_select": (empty_index_select, ((0, 5),)),
    "index_select, no keys": (functools.partial(empty_index_select, 3, 0), ((3, 5),)),
    "paged_index_logits": (empty_paged_logits, ((0, 24),)),
    "paged_index_logits, no pages": (functools.partial(empty_paged_logits, 0), ((0, 0),)),
    "paged_index_select": (empty_paged_select, ((0, 5),)),
    "paged_index_select, no pages": (functools.partial(empty_paged_select, 0), ((0, 5),)),
    "topk": (empty_topk, ((0, 5), (0, 5))),
    "topk, no columns": (functools.partial(empty_topk, 3, 0), ((3, 5), (3, 5))),
    "index_convert": (empty_index_convert, ((0, 6),)),
    "index_convert, no pages": (functools.partial(empty_index_convert, 0), ((0, 6),)),
}

CALLS: dict[str, Call] = INDEXER | {
    "dense_decode, no requests": (empty_dense_decode, ((0, 2, 4, 16), (0, 4, 2))),
    "dense_decode, no queries": (lambda: empty_dense_decode(3, 0), ((3, 0, 4, 16), (3, 4, 0))),
    "sparse_decode, no requests": (empty_sparse_decode, ((0, 2, 4, 512), (0, 4, 2))),
    "sparse_decode, no queries": (lambda: empty_sparse_decode(3, 0), ((3, 0, 4, 512), (3, 4, 0))),
    "sparse_attention": (empty_sparse_attention, ((0, 4, 16), (0, 4))),
    "sparse_attention, no keys": (lambda: empty_sparse_attention(0, 0), ((0, 4, 16), (0, 4))),
    "sparse_prefill": (empty_sparse_prefill, ((0, 4, 16), (0, 4), (0, 4))),
    "sparse_prefill, no keys": (lambda: empty_sparse_prefill(0, 0), ((0, 4, 16), (0, 4), (0, 4))),
    "dense_prefill, no requests": (empty_dense_prefill, ((0, 4, 16), (0, 4))),
    "dense_prefill, no queries": (lambda: empty_dense_prefill(3, 5), ((0, 4, 16), (0, 4))),
    "paged_attention, no requests": (empty_paged_attention, ((0, 4, 24), (0, 4))),
    "paged_attention, no queries": (lambda: empty_paged_attention(3), ((0, 4, 24), (0, 4))),
    "merge_states": (lambda: empty_merge(0, 4), ((0, 4, 8), (0, 4))),
    "merge_states, no heads": (lambda: empty_merge(5, 0), ((5, 0, 8), (5, 0))),
    "cache_write": (empty_write, ((0, 8, 1, 656),)),
    "cache_gather, no requests": (lambda: empty_gather(0), ((0, 512),)),
    "cache_gather, no tokens": (lambda: empty_gather(2), ((0, 512),)),
    "to_cache_indices": (empty_conversion, ((0, 6),)),
    "index_weights": (lambda: (index_weights(torch.ones(0, 8), torch.ones(4, 8)),), ((0, 4),)),
    "mhc": (empty_streams, ((0, 4), (0, 4, 4), (0, 8), (0, 4, 8))),
    "norm_rope": (empty_rows, ((0, 32), (0, 40), (0, 4, 8))),
}


@pytest.fixture
def nothing_runs(monkeypatch):
    ops.load()  # an import would define operations meanwhile

    def fail(operation: str, backend: str) -> None:
        raise AssertionError(f"{operation} ran on {backend}")

    monkeypatch.setattr(dispatch, "implementation", fail)


@pytest.mark.parametrize("name", CALLS)
def test_empty_in_empty_out(nothing_runs, name):
    call, shapes = CALLS[name]
    assert tuple(tuple(result.shape) for result in call()) == shapes


@pytest.mark.parametrize(
    "name", mostly_full(CALLS, "dense_decode, no requests", "sparse_prefill", "cache_gather, no tokens", "merge_states")
)
def test_compiled(nothing_runs, name):
    call, shapes = CALLS[name]
    torch.compiler.reset()
    results = torch.compile(call, backend="eager", fullgraph=True)()
    assert tuple(tuple(result.shape) for result in results) == shapes


def test_a_step_without_requests_between_others_when_compiled():
    torch.compiler.reset()
    compiled = torch.compile(dense_decode, backend="eager", fullgraph=True)
    cache = torch.ones(3, 8, 1, 24, dtype=BF16)
    for batch in (2, 0, 3):
        table, lengths = ints(batch, 2), torch.full((batch,), 9, dtype=I32)
        out, lse = compiled(torch.ones(batch, 1, 4, 24, dtype=BF16), cache, table, lengths, head_dim_v=16)
        torch.testing.assert_close(out, torch.ones(batch, 1, 4, 16, dtype=BF16))
        assert lse.shape == (batch, 4, 1)


def test_given_outputs_are_returned(nothing_runs):
    out, lse = torch.empty(0, 2, 4, 16, dtype=BF16), torch.empty(0, 4, 2)
    assert empty_dense_decode(out=out, lse=lse) == (out, lse)
    out = torch.empty(0, 4, 16, dtype=BF16)
    assert empty_dense_prefill(out=out)[0] is out


def test_wrong_arguments_of_an_empty_call_are_errors():
    with pytest.raises(ValueError, match=r"^backend must be one of hopper, portable, reference or None, got 'mine'$"):
        empty_dense_decode(backend="mine")
    with pytest.raises(ValueError, match=r"^out must have shape \[0, 2, 4, 16\]"):
        empty_dense_decode(out=torch.empty(1, 2, 4, 16, dtype=BF16))


@pytest.mark.parametrize("name", INDEXER)
def test_an_indexers_empty_call_checks_its_backend(name):
    with pytest.raises(ValueError, match=r"^backend must be one of hopper, portable, reference or None, got 'mine'$"):
        INDEXER[name][0](backend="mine")


def test_nothing_is_chosen_where_there_is_nothing(nothing_runs):
    indices, values = empty_topk(3, 0)
    for chosen in (indices, *empty_index_select(3, 0)):
        assert (chosen == -1).all()
    for missing in (values, *empty_index_logits(3, 0, max_keys=2)):
        assert (missing == -torch.inf).all()


def test_arguments_of_an_empty_selection_are_checked():
    q, k, weights = torch.ones(0, 4, 32, dtype=BF16), torch.ones(9, 32, dtype=BF16), torch.ones(0, 4)
    with pytest.raises(TypeError, match=r"^weights must be float32, got bfloat16$"):
        index_select(q, k, weights.bfloat16(), ints(0), ints(0), 5)
    with pytest.raises(TypeError, match=r"^k must be float32 if and only if q is, got float32$"):
        index_select(q, k.float(), weights, ints(0), ints(0), 5)
    with pytest.raises(ValueError, match=r"^k must be at most 4096, got 5000$"):
        index_select(q, k, weights, ints(0), ints(0), 5000)
    with pytest.raises(TypeError, match=r"^key_end must be int32 or int64, got float32$"):
        index_select(q.new_ones(3, 4, 32), k[:0], torch.ones(3, 4), ints(3), torch.ones(3), 5)
    with pytest.raises(TypeError, match=r"^q must be float32 if and only if the index keys are"):
        paged_index_select(torch.ones(0, 2, 4, 32), index_cache(), weights, ints(0), ints(0, 3), 5)
    with pytest.raises(TypeError, match=r"^slot_mapping must be int32 or int64, got float32$"):
        index_quantize(index_cache(), torch.ones(0), torch.ones(4, 32))


def test_gradients_of_an_empty_prefill_are_zero(nothing_runs):
    q, k, v = (torch.ones(shape, requires_grad=True) for shape in ((0, 4, 24), (5, 2, 24), (5, 2, 16)))
    out, lse = dense_prefill(q, k, v, ints(2), torch.tensor([0, 5], dtype=I32), 0, 5)
    (out.sum() + lse.sum()).backward()
    assert q.grad is not None
    assert q.grad.shape == q.shape
    for x in (k, v):
        assert x.grad is not None
        assert not x.grad.any()


def test_no_requests_and_positions_of_none():
    slots = kv_cache.to_cache_indices(ints(4, 6), ints(0, 3), 8, request_ids=ints(4))
    assert slots.tolist() == [[-1] * 6] * 4
