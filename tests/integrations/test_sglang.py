"""The functions that SGLang calls here, its conventions, and their registration."""

import ast
import importlib.util
import inspect
import logging
import math
import sys
import types
from enum import Enum
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flashlatte import deep_gemm, flash_mla, kv_cache
from flashlatte.integrations import sglang
from flashlatte.integrations.sglang import attention, fa3, hooks, indexer
from flashlatte.integrations.sglang.stand_in import provide_flash_mla


def draw(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def untouched(*args, **kwargs):
    raise AssertionError("SGLang's own function was called")


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

    # fp8, which SGLang keeps as bytes or as numbers, with q in fp8 too.
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
        (528, {"kv_format": "V32_NO_ROPE"}),
        (528, {}),
        (656, {"kv_format": "V41"}),
        (656, {"use_legacy": False}),
        (656, {"extra_k_cache": torch.zeros(1, 64, 1, 528, dtype=torch.uint8)}),
    ],
)
def test_what_is_not_served_stays_sglangs(width, options):
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


POSITIONAL = ("block_table", "cache_seqlens", "head_dim_v", "tile_scheduler_metadata")


def test_a_schedule_without_lengths_is_sglangs_own():
    assert attention.get_mla_metadata(lambda: "theirs") == "theirs"


def test_what_stays_sglangs_has_sglangs_schedule():
    """Ours is zeros, with which SGLang's kernel would compute nothing."""
    lengths, cache = torch.tensor([70, 64], dtype=torch.int32), torch.zeros(2, 64, 1, 528, dtype=torch.uint8)
    indices, q = torch.zeros(2, 3, 64, dtype=torch.int32), torch.zeros(2, 3, 4, 512).bfloat16()
    asked: list[Any] = []

    def their_metadata(*args: Any) -> Any:
        asked.append(args)
        return "schedule", "splits"

    schedule, splits = attention.get_mla_metadata(their_metadata, lengths, 12, 1, 4, True, 64)
    assert not asked
    taken: dict[str, Any] = {}

    def original(*args: Any, **kwargs: Any) -> Any:
        taken.update(inspect.signature(attention.flash_mla_with_kvcache).bind(original, *args, **kwargs).arguments)

    call = {"num_splits": splits, "is_fp8_kvcache": True, "indices": indices, "kv_format": "V32_NO_ROPE"}
    attention.flash_mla_with_kvcache(original, q, cache, None, lengths, 512, schedule, **call)
    assert (taken["tile_scheduler_metadata"], taken["num_splits"]) == ("schedule", "splits")
    assert asked[0][0] is lengths
    assert asked[0][1:] == (12, 1, 4, True, 64)


def test_an_earlier_sglang_is_given_what_it_takes():
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
    """What SGLang's ``dsa`` backend says of itself."""

    dsa_index_kpool, num_splits = 1, 0


def fa3_call(slots=192, dtype=torch.bfloat16):
    """Three tokens over their slots, as SGLang pads them: lengths for more tokens than there are, -1 behind a row's."""
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
def test_decode_of_another_kind_stays_flash_attentions(change):
    calls = []

    def original(*args: Any, **kwargs: Any) -> Any:
        calls.append(inspect.signature(fa3.forward_fa3).bind(original, *args, **kwargs).arguments)
        return "theirs"

    given = fa3_call() | change
    assert fa3.forward_fa3(original, Dsa(), **given) == "theirs"
    assert all(calls[0][name] is value for name, value in given.items())


def test_pooled_keys_stay_flash_attentions():
    backend = Dsa()
    backend.dsa_index_kpool = 2
    original: Any = lambda *args: "theirs"  # noqa: E731
    assert fa3.forward_fa3(original, backend, **fa3_call()) == "theirs"


def chosen_columns(scores, starts, lengths, k):
    """Of each row the best columns, counted from its start, in ascending order and filled with -1."""
    rows = []
    for row, start, length in zip(scores, starts, lengths, strict=True):
        taken = sorted(row[start : start + length].topk(min(k, length)).indices.tolist())
        rows.append(taken + [-1] * (k - len(taken)))
    return rows


def test_top_k_of_rows_that_begin_anywhere():
    scores, starts, lengths = draw(3, 50), [0, 7, 20], [50, 3, 30]
    row_starts, row_lengths = torch.tensor(starts, dtype=torch.int32), torch.tensor(lengths, dtype=torch.int32)
    ours = SimpleNamespace(is_sgl_kernel=lambda: True)
    indices = indexer.topk_func(untouched, ours, scores, row_lengths, 8, row_starts=row_starts)
    expected = chosen_columns(scores, starts, lengths, 8)
    assert indices.tolist() == expected
    assert indexer.topk_func(untouched, ours, scores, row_lengths, 8).tolist() == chosen_columns(
        scores, [0, 0, 0], lengths, 8
    )
    other = SimpleNamespace(is_sgl_kernel=lambda: False)
    original: Any = lambda *args, **kwargs: "theirs"  # noqa: E731
    assert indexer.topk_func(original, other, scores, row_lengths, 8) == "theirs"

    out, offsets = torch.empty(3, 8, dtype=torch.int32), torch.tensor([0, 7, 100], dtype=torch.int32)
    call = {"out_offsets": offsets, "out_indices": out, "row_starts": row_starts}
    indexer.topk_transform_ragged_v2(untouched, scores, row_lengths, **call)
    shifted = [[i + offset if i >= 0 else -1 for i in row] for row, offset in zip(expected, (0, 7, 100), strict=True)]
    assert out.tolist() == shifted


def test_top_k_as_slots_of_pages():
    scores, lengths = draw(2, 12), [12, 3]
    seq_lens = torch.tensor(lengths, dtype=torch.int32)
    table = torch.tensor([[9, 2, 5], [4, 0, 0]], dtype=torch.int32)
    columns = chosen_columns(scores, [0, 0], lengths, 4)
    slots = [
        [int(table[row, i // 4]) * 4 + i % 4 if i >= 0 else -1 for i in taken] for row, taken in enumerate(columns)
    ]
    out, raw = torch.empty(2, 4, dtype=torch.int32), torch.empty(2, 4, dtype=torch.int32)
    indexer.topk_transform_paged_v2(untouched, scores, seq_lens, table, out, 4, None)
    assert out.tolist() == slots
    indexer.topk_transform_paged_v2(untouched, scores, seq_lens, table, out, 4, None, raw)
    assert (out.tolist(), raw.tolist()) == (slots, columns)
    indexer.topk_transform_paged_v2(untouched, scores, seq_lens, None, out, 4, None, raw.fill_(7))
    assert out.tolist() == raw.tolist() == columns


def test_top_k_of_a_prefill_as_slots():
    """Three requests of 2, 0 and 3 rows over keys of 10, 4 and 20 tokens that lie one after the other."""
    scores, starts, lengths = draw(5, 34), [0, 0, 14, 14, 14], [9, 10, 18, 19, 3]
    scores[:2, 10:], scores[2:, :14] = torch.nan, torch.nan  # of other requests
    row_starts, row_lengths = torch.tensor(starts, dtype=torch.int32), torch.tensor(lengths, dtype=torch.int32)
    table = 1000 + torch.randperm(3 * 20, generator=torch.Generator().manual_seed(1)).view(3, 20).int()
    first_rows = torch.tensor([0, 2, 2, 5], dtype=torch.int32)
    requests = [0, 0, 2, 2, 2]
    columns = chosen_columns(scores, starts, lengths, 8)
    expected = [[int(table[b, i]) if i >= 0 else -1 for i in row] for b, row in zip(requests, columns, strict=True)]
    prefill = partial(indexer.fast_topk_transform_fused, untouched, scores, row_lengths, topk=8, row_starts=row_starts)
    slots = prefill(page_table_size_1=table, cu_seqlens_q=first_rows)
    assert (slots.dtype, slots.tolist()) == (torch.int32, expected)
    # A long prefill comes in pieces, each of whose rows has a table of its own.
    assert prefill(page_table_size_1=table[requests], cu_seqlens_q=torch.arange(6)).tolist() == expected


@pytest.mark.parametrize("with_starts", [False, True])
def test_the_best_of_rows_as_places_in_the_batch(with_starts):
    scores, starts, lengths = (
        torch.randn(4, 60, generator=torch.Generator().manual_seed(2)),
        [0, 7, 20, 3],
        [60, 30, 4, 0],
    )
    starts = starts if with_starts else [0] * 4
    offsets = [100, 0, 2000, 7]
    columns = chosen_columns(scores, starts, lengths, 8)
    expected = [[offset + i if i >= 0 else -1 for i in row] for offset, row in zip(offsets, columns, strict=True)]
    places = indexer.fast_topk_transform_ragged_fused(
        untouched,
        score=scores,
        lengths=torch.tensor(lengths, dtype=torch.int32),
        topk_indices_offset=torch.tensor(offsets, dtype=torch.int32),
        topk=8,
        row_starts=torch.tensor(starts, dtype=torch.int32) if with_starts else None,
    )
    assert (places.dtype, places.tolist()) == (torch.int32, expected)


def test_more_than_our_top_k_takes_stays_sglangs():
    called: list[Any] = []
    original: Any = lambda *args: called.append(args)  # noqa: E731
    out = torch.empty(1, 5000, dtype=torch.int32)
    scores, lengths = torch.zeros(1, 6000), torch.tensor([6000])
    indexer.topk_transform_paged_v2(original, scores, lengths, None, out, 1, None)
    assert called[0][3] is out
    starts = torch.tensor([0, 1])
    indexer.fast_topk_transform_fused(original, scores, lengths, out, starts, 5000)
    assert called[1][3:] == (starts, 5000, None)
    indexer.fast_topk_transform_ragged_fused(original, scores, lengths, starts[:1], 5000)
    assert called[2][3:] == (5000, None)


@pytest.mark.parametrize("error", [ModuleNotFoundError, OSError, RuntimeError])
def test_what_the_indexer_is_resolved_to(error):
    """SGLang's choice, which is DeepGEMM's hooked function or what a flag names; ours where DeepGEMM is not there."""

    def no_deep_gemm() -> Any:
        raise error("deep_gemm")

    for resolve, ours in (
        (indexer.resolve_fp8_mqa_logits_fn, deep_gemm.fp8_mqa_logits),
        (indexer.resolve_fp8_paged_mqa_logits_fn, deep_gemm.fp8_paged_mqa_logits),
        (indexer.resolve_paged_mqa_logits_metadata_fn, deep_gemm.get_paged_mqa_logits_metadata),
    ):
        assert resolve(lambda: untouched) is untouched
        assert resolve(no_deep_gemm) is ours


def test_a_schedule_that_another_kernel_may_read_is_deep_gemms(monkeypatch):
    lengths, schedule = torch.tensor([[9]], dtype=torch.int32), torch.ones(5, 2, dtype=torch.int32)
    original: Any = lambda *args: schedule  # noqa: E731
    assert indexer.get_paged_mqa_logits_metadata(untouched, lengths, 64, 4).eq(0).all()
    monkeypatch.setattr(indexer.machine, "compute_capability", lambda device: (10, 0))
    assert indexer.get_paged_mqa_logits_metadata(original, lengths, 64, 4) is schedule

    def no_deep_gemm() -> Any:
        raise ModuleNotFoundError("deep_gemm")

    with pytest.raises(ModuleNotFoundError):
        indexer.resolve_paged_mqa_logits_metadata_fn(no_deep_gemm)


class Registry:
    """SGLang's registry as a plugin sees it."""

    def __init__(self):
        self.hooks = {}

    def register(self, target, hook, hook_type):
        assert target not in self.hooks
        self.hooks[target] = (hook, hook_type)


HookType = Enum("HookType", ["BEFORE", "AFTER", "AROUND", "REPLACE"])


@pytest.fixture
def fake_sglang(monkeypatch):
    """Modules with something at every place that is hooked, and without ``flash_mla``."""
    monkeypatch.setattr(sglang, "_registered", set())
    monkeypatch.setitem(sys.modules, "flash_mla", None)
    for name in ("flash_mla.flash_mla_interface", "flash_mla.fused_norm_rope_attn_rope_cast"):
        monkeypatch.setitem(sys.modules, name, None)
    for hook in hooks.HOOKS:
        path, _, attribute = hook.target.rpartition(".")
        parts = path.split(".")
        for end in range(1, len(parts) + 1):
            name = ".".join(parts[:end])
            if name not in sys.modules:
                module = types.ModuleType(name)
                module.__path__ = []
                monkeypatch.setitem(sys.modules, name, module)
                if end > 1:
                    setattr(sys.modules[".".join(parts[: end - 1])], parts[end - 1], module)
        setattr(sys.modules[path], attribute, untouched)


def test_every_hook_is_registered_once(fake_sglang, caplog):
    registry = Registry()
    sglang.register_hooks(registry, HookType)
    sglang.register_hooks(registry, HookType)
    assert set(registry.hooks) == {hook.target for hook in hooks.HOOKS}
    assert registry.hooks["deep_gemm.fp8_mqa_logits"] == (deep_gemm.fp8_mqa_logits, HookType.REPLACE)
    decode = "sglang.kernels.ops.attention.flash_mla_interface.flash_mla_with_kvcache"
    assert registry.hooks[decode] == (attention.flash_mla_with_kvcache, HookType.AROUND)
    assert not caplog.records


def test_what_an_sglang_lacks_is_passed_over_and_named(fake_sglang, monkeypatch, caplog):
    for module in ("sglang.kernels.ops.attention.flash_mla_interface", "sgl_kernel.flash_mla"):
        monkeypatch.delattr(sys.modules[module], "flash_mla_sparse_fwd")
    monkeypatch.setitem(sys.modules, "deep_gemm", None)
    registry = Registry()
    sglang.register_hooks(registry, HookType)
    assert len(registry.hooks) == len(hooks.HOOKS) - 7
    assert [record.getMessage() for record in caplog.records] == [
        "FlashLatte: this SGLang does not have sglang.kernels.ops.attention.flash_mla_interface.flash_mla_sparse_fwd, "
        "which is not served."
    ]


def test_a_deep_gemm_that_cannot_be_imported_is_passed_over(fake_sglang, monkeypatch, tmp_path, caplog):
    (tmp_path / "deep_gemm.py").write_text("raise RuntimeError('no CUDA_HOME')\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "deep_gemm")
    registry = Registry()
    sglang.register_hooks(registry, HookType)
    assert set(registry.hooks) == {hook.target for hook in hooks.HOOKS if not hook.target.startswith("deep_gemm.")}
    assert not caplog.records


def test_what_stands_elsewhere_in_an_earlier_sglang_is_served(fake_sglang, monkeypatch, caplog):
    monkeypatch.delitem(sys.modules, "sglang.kernels.ops.attention.flash_mla_interface")
    monkeypatch.delitem(sys.modules, "sglang.kernels.ops.attention.dsv4.topk")
    monkeypatch.delitem(sys.modules, "sglang.srt.layers.attention.dsa.utils")
    for parent, name in (("sglang.kernels.ops", "attention"), ("sglang.srt.layers.attention.dsa", "utils")):
        monkeypatch.delattr(sys.modules[parent], name)
    registry = Registry()
    sglang.register_hooks(registry, HookType)
    assert {
        "sgl_kernel.flash_mla.flash_mla_with_kvcache",
        "sgl_kernel.flash_mla.flash_mla_sparse_fwd",
        "sglang.jit_kernel.dsv4.topk.topk_transform_512_v2",
    } <= set(registry.hooks)
    assert not caplog.records


def test_without_sglang_nothing_happens(monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "sglang", None)
    sglang.register()
    assert "nothing is registered" in caplog.text


def test_without_a_gpu_nothing_is_registered(fake_sglang, monkeypatch, caplog):
    registry: Any = types.ModuleType("sglang.srt.plugins.hook_registry")
    registry.HookRegistry, registry.HookType = Registry(), HookType
    monkeypatch.setitem(sys.modules, registry.__name__, registry)
    monkeypatch.setitem(sys.modules, "sglang.srt.plugins", types.ModuleType("sglang.srt.plugins"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    caplog.set_level(logging.INFO)
    sglang.register()
    assert not registry.HookRegistry.hooks
    assert "no NVIDIA GPU" in caplog.text


def test_a_missing_flash_mla_is_stood_in_for(fake_sglang):
    provide_flash_mla()
    module = importlib.import_module("flash_mla")
    assert module.flash_mla_with_kvcache is flash_mla.flash_mla_with_kvcache
    assert importlib.import_module("flash_mla.flash_mla_interface").FlashMLASchedMeta is flash_mla.FlashMLASchedMeta
    with pytest.raises(AttributeError, match="prefill needs the package sgl-flash-mla"):
        module.fused_norm_rope_attn_rope_cast.prefill  # noqa: B018
    with pytest.raises(AttributeError, match="get_mla_decoding_metadata needs the package sgl-flash-mla"):
        module.get_mla_decoding_metadata  # noqa: B018


def test_a_flash_mla_without_sglangs_fused_attention_is_kept(fake_sglang, monkeypatch, tmp_path):
    """As the alias is, and FlashMLA itself: SGLang's interface asks for the name when it is imported."""
    flash_mla.install_alias(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("flash_mla", "flash_mla.flash_mla_interface", "flash_mla.fused_norm_rope_attn_rope_cast"):
        monkeypatch.delitem(sys.modules, name)
    provide_flash_mla()
    module = importlib.import_module("flash_mla")
    assert module.__file__ == str(tmp_path / "flash_mla" / "__init__.py")
    with pytest.raises(AttributeError, match="decode needs the package sgl-flash-mla"):
        module.fused_norm_rope_attn_rope_cast.decode  # noqa: B018


@pytest.mark.parametrize("hook", hooks.HOOKS, ids=lambda hook: hook.target)
def test_signatures_are_sglangs(hook):
    """Those in the source of the installed SGLang, where there is one: it need not be importable.

    An earlier one may lack our last arguments.
    """
    theirs = signature_in_sources(*hook.target.split("."))
    mine = list(inspect.signature(hook.function).parameters.values())[int(hook.around) :]
    positional = [p for p in mine if p.kind == p.POSITIONAL_OR_KEYWORD][: len(theirs.args)]
    assert [argument.arg for argument in theirs.args] == [p.name for p in positional]
    assert {argument.arg for argument in theirs.kwonlyargs} <= {p.name for p in mine if p.kind == p.KEYWORD_ONLY}
    defaults = [p.default for p in positional if p.default is not p.empty]
    assert [ast.literal_eval(default) for default in theirs.defaults] == defaults


def signature_in_sources(package: str, *modules_and_name: str) -> ast.arguments:
    *modules, name = modules_and_name
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        pytest.skip(f"{package} is not installed")
    path = Path(spec.submodule_search_locations[0], *modules)
    # A method's class stands where its module's last part would; sgl-kernel gives its functions other names' modules.
    paths = [path.with_suffix(".py"), path.parent.with_suffix(".py")] if modules else sorted(path.glob("*.py"))
    for functions in (ast.walk(ast.parse(path.read_text())) for path in paths if path.exists()):
        for node in functions:
            if isinstance(node, ast.FunctionDef) and node.name == name:
                return node.args
    pytest.skip(f"this {package} does not have it")
