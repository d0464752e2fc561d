"""The attention functions that SGLang calls, and SGLang's conventions."""

import inspect
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.sglang_calls import draw, untouched

from flashlatte import flash_mla, kv_cache
from flashlatte.integrations.sglang import attention, fa3


@pytest.fixture(autouse=True)
def no_schedule_of_sglang(monkeypatch):
    """``get_mla_metadata`` keeps the function that it is given."""
    monkeypatch.setattr(attention, "_schedule_of_sglang", None)


def test_dense_decode_takes_tensors_as_schedule():
    q, rows = draw(2, 1, 4, 576).bfloat16(), draw(4, 64, 1, 576, seed=1)
    table, lengths = torch.tensor([[3, 1], [2, 0]], dtype=torch.int32), torch.tensor([70, 64], dtype=torch.int32)
    schedule, splits = attention.get_mla_metadata(untouched, lengths, 4, 1)
    assert splits is not None
    assert (schedule.shape, splits.shape) == ((1, 8), (3,))
    assert schedule.dtype == splits.dtype == torch.int32
    call = {"block_table": table, "cache_seqlens": lengths, "head_dim_v": 512, "softmax_scale": 0.1, "causal": True}
    meta = flash_mla.FlashMLASchedMeta()

    cache = rows.bfloat16()
    given = attention.flash_mla_with_kvcache(
        untouched, q=q, k_cache=cache, tile_scheduler_metadata=schedule, num_splits=splits, **call
    )
    expected = flash_mla.flash_mla_with_kvcache(q, cache, tile_scheduler_metadata=meta, **call)
    assert all(x.equal(y) for x, y in zip(given, expected, strict=True))

    # fp8, which SGLang stores as uint8 or e4m3, also with q in fp8.
    fp8, q8, scale = rows.clamp(-448, 448).to(torch.float8_e4m3fn), q.to(torch.float8_e4m3fn), torch.full((4,), 0.5)
    expected = flash_mla.flash_mla_with_kvcache(
        (q8.float() * 0.5).bfloat16(),
        fp8,
        tile_scheduler_metadata=meta,
        is_fp8_kvcache=True,
        descale_k=torch.tensor([0.5]),
        **call,
    )
    for cache in (fp8, fp8.view(torch.uint8)):
        given = attention.flash_mla_with_kvcache(
            untouched,
            q=q8,
            k_cache=cache,
            tile_scheduler_metadata=schedule,
            num_splits=splits,
            descale_q=scale,
            descale_k=scale,
            **call,
        )
        assert all(x.equal(y) for x, y in zip(given, expected, strict=True))


@pytest.mark.parametrize("draft_tokens", [1, 3])
def test_dense_decode_with_the_table_of_a_captured_graph(draft_tokens):
    """SGLang captures with lengths of 1 and the buffer's first column; a replay has longer lengths and more columns."""
    q, cache = draw(2, draft_tokens, 4, 576).bfloat16(), draw(12, 64, 1, 576, seed=1).bfloat16()
    buffer, lengths = torch.ones(4, 6, dtype=torch.int32), torch.ones(2, dtype=torch.int32)
    schedule, splits = attention.get_mla_metadata(untouched, lengths, 4, 1)
    captured: dict[str, Any] = {
        "q": q,
        "k_cache": cache,
        "block_table": buffer[:2, :1],
        "cache_seqlens": lengths,
        "head_dim_v": 512,
        "tile_scheduler_metadata": schedule,
        "num_splits": splits,
        "softmax_scale": 0.1,
        "causal": True,
    }
    attention.flash_mla_with_kvcache(untouched, **captured)

    table = torch.tensor([[3, 1, 7, 11, 5], [2, 0, 9, 4, 10]], dtype=torch.int32)
    buffer[:2, :5] = table
    lengths.copy_(torch.tensor([300, 65]))
    given = attention.flash_mla_with_kvcache(untouched, **captured)
    captured["block_table"] = table
    expected = attention.flash_mla_with_kvcache(untouched, **captured)
    assert all(x.equal(y) for x, y in zip(given, expected, strict=True))


def test_sparse_decode_over_v32_with_an_empty_table():
    q, cache = draw(2, 1, 4, 576).bfloat16(), kv_cache.pack(draw(2, 64, 1, 576, seed=1), "v32")
    indices = torch.randint(-1, 128, (2, 1, 64), generator=torch.Generator().manual_seed(2), dtype=torch.int32)
    lengths, empty = torch.tensor([60, 64], dtype=torch.int32), torch.empty(2, 0, dtype=torch.int32)
    schedule, splits = attention.get_mla_metadata(untouched, lengths, 4, 1, 4, True, 64)
    given = attention.flash_mla_with_kvcache(
        untouched,
        q=q,
        k_cache=cache,
        cache_seqlens=lengths,
        head_dim_v=512,
        tile_scheduler_metadata=schedule,
        num_splits=splits,
        softmax_scale=0.1,
        indices=indices,
        block_table=empty,
        is_fp8_kvcache=True,
        kv_format="V32",
    )
    meta = flash_mla.FlashMLASchedMeta()
    expected = flash_mla.flash_mla_with_kvcache(
        q, cache, None, None, 512, meta, softmax_scale=0.1, is_fp8_kvcache=True, indices=indices
    )
    assert all(x.equal(y) for x, y in zip(given, expected, strict=True))


@pytest.mark.parametrize(
    ("width", "options"),
    [
        (528, {"kv_format": "V41"}),
        (528, {}),
        (528, {"kv_format": "V32_NO_ROPE", "use_legacy": False}),
        (656, {"kv_format": "V41"}),
        (656, {"use_legacy": False}),
        (656, {"extra_k_cache": torch.zeros(1, 64, 1, 528, dtype=torch.uint8)}),
    ],
)
def test_sglang_runs_unsupported_calls(width, options):
    q, cache = torch.zeros(1, 1, 4, 576).bfloat16(), torch.zeros(1, 64, 1, width, dtype=torch.uint8)
    indices = torch.zeros(1, 1, 64, dtype=torch.int32)
    calls = []

    def original(*args: Any, **kwargs: Any) -> Any:
        calls.append(inspect.signature(attention.flash_mla_with_kvcache).bind(original, *args, **kwargs).arguments)
        return "theirs"

    given = {"q": q, "k_cache": cache, "indices": indices, "softmax_scale": 0.1, "topk_length": indices} | options
    rest: dict[str, Any] = dict.fromkeys(POSITIONAL)
    result = attention.flash_mla_with_kvcache(original, **given, **rest)
    assert result == "theirs"
    assert all(calls[0][name] is value for name, value in given.items())


@pytest.mark.parametrize("says_format", [True, False])
def test_sparse_decode_over_v32_without_rope(says_format):
    """The format is named, or implied by a schedule as tensors, as in SGLang's wrapper."""
    q, cache = draw(2, 1, 4, 512).bfloat16(), kv_cache.pack(draw(2, 64, 1, 512, seed=1), "v32_no_rope")
    indices = torch.randint(-1, 128, (2, 1, 64), generator=torch.Generator().manual_seed(2), dtype=torch.int32)
    lengths = torch.tensor([60, 64], dtype=torch.int32)
    schedule, splits = attention.get_mla_metadata(untouched, lengths, 4, 1, 4, True, 64)
    given = attention.flash_mla_with_kvcache(
        untouched,
        q,
        cache,
        torch.empty(2, 0, dtype=torch.int32),
        lengths,
        512,
        flash_mla.FlashMLASchedMeta() if says_format else schedule,
        None if says_format else splits,
        softmax_scale=0.1,
        is_fp8_kvcache=True,
        indices=indices,
        kv_format="V32_NO_ROPE" if says_format else None,
    )
    rows = kv_cache.unpack(cache, "v32_no_rope")
    expected = flash_mla.flash_mla_with_kvcache(
        q, rows, None, None, 512, flash_mla.FlashMLASchedMeta(), softmax_scale=0.1, indices=indices
    )
    for result, wanted in zip(given, expected, strict=True):
        torch.testing.assert_close(result, wanted)


POSITIONAL = ("block_table", "cache_seqlens", "head_dim_v", "tile_scheduler_metadata")


def test_a_schedule_without_lengths_is_sglangs_own():
    assert attention.get_mla_metadata(lambda: "theirs") == "theirs"


def test_unsupported_calls_get_sglangs_schedule():
    """FlashLatte's schedule is zeros, with which SGLang's kernel would compute nothing."""
    lengths, cache = torch.tensor([70, 64], dtype=torch.int32), torch.zeros(2, 64, 1, 528, dtype=torch.uint8)
    indices, q = torch.zeros(2, 3, 64, dtype=torch.int32), torch.zeros(2, 3, 4, 512).bfloat16()
    calls: list[Any] = []

    def their_metadata(*args: Any) -> Any:
        calls.append(args)
        return "schedule", "splits"

    schedule, splits = attention.get_mla_metadata(their_metadata, lengths, 12, 1, 4, True, 64)
    assert not calls
    taken: dict[str, Any] = {}

    def original(*args: Any, **kwargs: Any) -> Any:
        taken.update(inspect.signature(attention.flash_mla_with_kvcache).bind(original, *args, **kwargs).arguments)

    call = {"num_splits": splits, "is_fp8_kvcache": True, "indices": indices, "kv_format": "V41"}
    attention.flash_mla_with_kvcache(original, q, cache, None, lengths, 512, schedule, **call)
    assert (taken["tile_scheduler_metadata"], taken["num_splits"]) == ("schedule", "splits")
    assert calls[0][0] is lengths
    assert calls[0][1:] == (12, 1, 4, True, 64)


def test_an_earlier_sglang_gets_only_supported_arguments():
    def original(q: Any, k_cache: Any, block_table: Any, cache_seqlens: Any, head_dim_v: Any, *rest: Any) -> Any:
        assert len(rest) == 13  # to extra_topk_length: neither kv_format nor use_legacy
        return "theirs"

    q, cache = torch.zeros(1, 1, 4, 512).bfloat16(), torch.zeros(1, 64, 1, 528, dtype=torch.uint8)
    indices = torch.zeros(1, 1, 64, dtype=torch.int32)
    assert attention.flash_mla_with_kvcache(original, q, cache, None, None, 512, None, indices=indices) == "theirs"


def test_sparse_prefill_gives_statistics_of_base_2():
    q, kv = draw(3, 4, 576).bfloat16(), draw(40, 1, 576, seed=1).bfloat16()
    indices = torch.tensor([[[0, 5, 39, -1]], [[7, 7, 8, 9]], [[-1, 40, -1, -1]]], dtype=torch.int32)
    out, max_logits, lse = attention.flash_mla_sparse_fwd(untouched, q=q, kv=kv, indices=indices, sm_scale=0.05)
    for row in range(2):
        chosen = [index for index in indices[row, 0].tolist() if 0 <= index < 40]
        scores = q[row].double() @ kv[chosen, 0].double().T * 0.05 / math.log(2)  # [heads, chosen], base 2
        assert torch.allclose(max_logits[row].double(), scores.amax(dim=1), atol=1e-2)
        assert torch.allclose(lse[row].double(), (2**scores).sum(dim=1).log2(), atol=1e-2)
        weights = 2 ** (scores - lse[row].double()[:, None])
        assert torch.allclose(out[row].double(), weights @ kv[chosen, 0, :512].double(), atol=3e-2)
    assert lse[2].eq(math.inf).all()
    assert max_logits[2].eq(-math.inf).all()
    assert out[2].eq(0).all()
    original: Any = lambda *args, **kwargs: kwargs  # noqa: E731
    new = attention.flash_mla_sparse_fwd(original, q, kv, indices, 0.05, use_legacy=False)
    assert new == {"use_legacy": False}


@pytest.mark.parametrize("rows", [None, 3, 5])
def test_sparse_prefill_of_few_heads_is_of_these_heads(rows, monkeypatch):
    q, kv, sink = draw(3, 4, 576).bfloat16(), draw(40, 1, 576, seed=1).bfloat16(), draw(4, seed=2)
    slots = torch.randint(0, 40, (3, 8), generator=torch.Generator().manual_seed(3), dtype=torch.int32)
    lengths = None if rows is None else torch.tensor([8, 2, 5, 1, 1], dtype=torch.int32)[:rows]
    heads, ours = [], flash_mla.flash_mla_sparse_fwd
    monkeypatch.setattr(
        flash_mla, "flash_mla_sparse_fwd", lambda q, *rest: (heads.append(q.shape[1]), ours(q, *rest))[1]
    )
    out = attention.forward_flashmla_sparse(
        Dsa(),
        q_all=q,
        kv_cache=kv,
        v_head_dim=512,
        page_table_1=slots,
        sm_scale=0.05,
        topk_length=lengths,
        attn_sink=sink,
    )
    assert heads == [4]
    for row in range(3):
        chosen = slots[row, : lengths[row] if rows == 3 and lengths is not None else None].tolist()
        scores = torch.cat((q[row].double() @ kv[chosen, 0].double().T * 0.05, sink.double()[:, None]), dim=1)
        expected = scores.softmax(dim=1)[:, :-1] @ kv[chosen, 0, :512].double()
        assert torch.allclose(out[row].double(), expected, atol=1e-2)


class Dsa:
    """The attributes of SGLang's ``dsa`` backend that are read."""

    dsa_index_kpool, num_splits = 1, 0


def fa3_call(slots=192, dtype=torch.bfloat16):
    """Three tokens with SGLang's padding: more lengths than tokens, rows padded with -1."""
    q = draw(3, 4, 576).to(dtype)
    chosen = torch.randint(0, slots, (3, 64), generator=torch.Generator().manual_seed(2), dtype=torch.int32)
    lengths = torch.tensor([64, 40, 3, 9, 9], dtype=torch.int32)
    chosen[torch.arange(64) >= lengths[:3, None]] = -1
    return {
        "q_rope": q[..., 512:],
        "kv_cache": draw(slots, 1, 576, seed=1).to(dtype),
        "v_head_dim": 512,
        "q_nope": q[..., :512],
        "page_table": chosen,
        "cache_seqlens": lengths,
        "cu_seqlens_q": torch.arange(6, dtype=torch.int32),
        "cu_seqlens_k": lengths,
        "max_seqlen_q": 1,
        "sm_scale": 0.05,
        "logit_cap": 0.0,
        "page_size": 1,
    }


@pytest.mark.parametrize("slots", [192, 101])
@pytest.mark.parametrize("num_splits", [0, 1])
def test_decode_that_sglang_gives_to_flash_attention(slots, num_splits):
    backend, call = Dsa(), fa3_call(slots)
    backend.num_splits = num_splits
    call["page_table"][0, 7] = slots  # beyond the pool: no token
    out = fa3.forward_fa3(untouched, backend, **call)
    assert out.shape == (3, 4, 512)
    query = torch.cat((call["q_nope"], call["q_rope"]), dim=-1).double()
    for row, indices in enumerate(call["page_table"].tolist()):
        keys = call["kv_cache"][[index for index in indices if 0 <= index < slots], 0].double()
        weights = (query[row] @ keys.T * 0.05).softmax(dim=1)
        assert torch.allclose(out[row].double(), weights @ keys[:, :512], atol=1e-2)


def test_both_parts_of_the_queries_are_read_in_place(monkeypatch):
    """SGLang's latent part is the transposed result of a product, its rotated part the end of the projected queries."""
    call, given = fa3_call(), []
    expected = fa3.forward_fa3(untouched, Dsa(), **call)
    call["q_nope"] = call["q_nope"].transpose(0, 1).contiguous().transpose(0, 1)
    call["q_rope"] = torch.cat((torch.full((3, 4, 128), torch.nan), call["q_rope"]), dim=-1).bfloat16()[..., 128:]
    real = fa3.sparse_decode

    def recorded(q, *arguments, q_rope, **options):
        given.append((q.data_ptr(), q.stride(), q_rope.data_ptr(), q_rope.stride()))
        return real(q, *arguments, q_rope=q_rope, **options)

    monkeypatch.setattr(fa3, "sparse_decode", recorded)
    assert fa3.forward_fa3(untouched, Dsa(), **call).equal(expected)
    nope, rope = (call[name].unsqueeze(1) for name in ("q_nope", "q_rope"))
    assert given == [(nope.data_ptr(), nope.stride(), rope.data_ptr(), rope.stride())]


def test_decode_of_an_sglang_without_pooled_keys():
    call = fa3_call()
    earlier = fa3.forward_fa3(untouched, SimpleNamespace(num_splits=0), **call)
    assert earlier.equal(fa3.forward_fa3(untouched, Dsa(), **call))


@pytest.mark.parametrize(
    "change",
    [
        {"page_size": 64},
        {"max_seqlen_q": 2},
        {"logit_cap": 30.0},
        {"kv_cache": torch.zeros(192, 1, 576).to(torch.float8_e4m3fn)},
        {"kv_cache": torch.zeros(192, 1, 512, dtype=torch.bfloat16)},
        {"cache_seqlens": torch.ones(2, dtype=torch.int32)},
    ],
)
def test_flash_attention_runs_other_decode_calls(change):
    calls = []

    def original(*args: Any, **kwargs: Any) -> Any:
        calls.append(inspect.signature(fa3.forward_fa3).bind(original, *args, **kwargs).arguments)
        return "theirs"

    given = fa3_call() | change
    assert fa3.forward_fa3(original, Dsa(), **given) == "theirs"
    assert all(calls[0][name] is value for name, value in given.items())


def test_flash_attention_runs_pooled_keys():
    backend = Dsa()
    backend.dsa_index_kpool = 2
    original: Any = lambda *args: "theirs"  # noqa: E731
    assert fa3.forward_fa3(original, backend, **fa3_call()) == "theirs"
