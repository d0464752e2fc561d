"""Calls of operations that launch each of their kernels, with CPU tensors of arbitrary contents.

``use_hopper`` makes the checks for a GPU succeed; nothing is compiled or run.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support import no_gpu

import flashlatte
from flashlatte.kv_cache import turboquant
from flashlatte.ops.index_weights import index_weights
from flashlatte.ops.mhc import mhc_post, mhc_pre
from flashlatte.ops.norm_rope import latent_rows, rotate_heads
from flashlatte.ops.norm_rope.rotary import Rotary
from flashlatte.runtime import dispatch, machine

BF16 = torch.bfloat16


def use_hopper(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Returns a list of launches: grid, stream, kernel, packed metadata, and the kernel's arguments."""
    # The named backend, though the tensors are on the CPU.
    monkeypatch.setattr(dispatch, "select", lambda _, backend: backend)
    monkeypatch.setattr(machine, "num_sms", lambda _: 132)
    monkeypatch.setattr("flashlatte.ops.sparse_decode.hopper.launch.clusters_fill", lambda *_: True)
    return no_gpu.use_without_compiling(monkeypatch)


def _rows(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


def _ints(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int32)


def _dense_decode(backend: str, batch: int = 2, heads: int = 16, cache_dtype: torch.dtype = BF16) -> None:
    cache = _rows(4, 64, 1, 576, dtype=cache_dtype)
    flashlatte.dense_decode(_rows(batch, 1, heads, 576), cache, _ints(batch, 64), _ints(batch), backend=backend)


def _sparse_decode(backend: str, form: str, heads: int = 16, extra: bool = False) -> None:
    cache = flashlatte.kv_cache.allocate(form, 4, 64)
    flashlatte.sparse_decode(
        _rows(2, 1, heads, 576 if form == "bf16" else flashlatte.kv_cache.get_format(form).head_dim),
        cache,
        _ints(2, 1, 512),
        cache_format=form,
        topk_length=_ints(2) if extra else None,
        extra_k_cache=cache.clone() if extra else None,
        extra_indices=_ints(2, 1, 64) if extra else None,
        backend=backend,
    )


def _sparse_prefill(backend: str, s_q: int = 3, heads: int = 128, topk: int = 128, **options: Any) -> None:
    operands = _rows(s_q, heads, 576), _rows(200, 1, 576), _ints(s_q, 1, topk)
    flashlatte.sparse_prefill(*operands, backend=backend, **options)


def _sparse_attention(backend: str) -> None:
    q, kv = _rows(3, 16, 576).requires_grad_(), _rows(200, 1, 576).requires_grad_()
    for deterministic in (False, True):
        out, _ = flashlatte.sparse_attention(q, kv, _ints(3, 1, 128), deterministic=deterministic, backend=backend)
        out.sum().backward()


def _indexer_loss(backend: str) -> None:
    index_q, index_k, weights = (_rows(*shape).requires_grad_() for shape in ((3, 64, 128), (200, 128), (3, 64)))
    given = (index_q, index_k, weights, _rows(3, 16, 576), _rows(200, 1, 576))
    for deterministic in (False, True):
        flashlatte.indexer_loss(*given, _ints(3, 1, 128), deterministic=deterministic, backend=backend)
    flashlatte.indexer_loss(*given, key_start=_ints(3), key_end=_ints(3), backend=backend)


def _dense_prefill(backend: str) -> None:
    q, k, v = (_rows(70, 2, d).requires_grad_() for d in (192, 192, 128))
    for deterministic in (False, True):
        begins = torch.tensor([0, 70], dtype=torch.int32)
        out, _ = flashlatte.dense_prefill(q, k, v, begins, begins, 70, 70, deterministic=deterministic, backend=backend)
        out.sum().backward()


def _caches(form: str) -> None:
    cache = flashlatte.kv_cache.allocate(form, 4, 64)
    head_dim = flashlatte.kv_cache.get_format(form).head_dim
    flashlatte.kv_cache.write(cache, _ints(3), _rows(3, head_dim), cache_format=form, backend="portable")
    for out in (None, _rows(9, head_dim)):
        table = (_ints(1, 4), _ints(2))
        flashlatte.kv_cache.gather(cache, *table, total_tokens=9, cache_format=form, out=out, backend="portable")
    flashlatte.kv_cache.gather_records(cache, _ints(1, 4), _ints(2), 9, cache_format=form, backend="portable")
    flashlatte.kv_cache.copy_blocks(cache, [0, 1], [1, 0], backend="portable")


def _cache_write_of_requests() -> None:
    cache = flashlatte.kv_cache.allocate("bf16", 4, 64)
    lists: dict[str, Any] = {"request_ids": _ints(3), "page_indices": _ints(5), "page_indptr": _ints(4)}
    flashlatte.kv_cache.write(cache, _ints(3), _rows(3, 512), rope=_rows(3, 64), **lists, backend="portable")


def _compress() -> None:
    cache, states = flashlatte.kv_cache.allocate("model1", 4, 64), torch.zeros(4, 64, 2048)
    parts = (torch.zeros(3, 1024), torch.zeros(3, 1024), torch.zeros(4, 1024), torch.zeros(512), torch.zeros(9, 64))
    states_of: dict[str, Any] = {"state_cache": states, "state_table": _ints(1, 4)}
    flashlatte.compress(*parts, _ints(3), _ints(3), cache, _ints(3), **states_of, backend="portable")


def _concat_mla_q() -> None:
    flashlatte.concat_mla_q(_rows(3, 4, 512), _rows(3, 4, 64), backend="portable")


def _rope_cache_write() -> None:
    cache, table = flashlatte.kv_cache.allocate("bf16", 4, 64), torch.zeros(9, 64)
    rows = (_rows(3, 512), _rows(3, 64), _ints(3), table)
    flashlatte.kv_cache.rope_write(cache, _ints(3), *rows, interleaved=True, q_rope=_rows(3, 4, 64), backend="portable")


def _pack_seq() -> None:
    packed = flashlatte.pack_seq(_rows(3, 4, 64), _ints(3), 2, backend="portable")
    flashlatte.unpack_seq(packed, _ints(3), 3, backend="portable")


def _index_workspace() -> None:
    sizes: dict[str, Any] = {"window": 128, "ratio": 4, "workspace_rows": 64, "window_row": 16}
    flashlatte.index_workspace(_ints(3, 512), _ints(2), _ints(1), 3, **sizes, backend="portable")


def _v4_rows() -> None:
    q, table = _rows(3, 64, 512), torch.zeros(8, 64)
    flashlatte.q_kv_norm(_rows(3, 1024), q[:, 0], torch.zeros(1024), torch.zeros(512), backend="portable")
    cache = flashlatte.kv_cache.allocate("model1", 4, 64)
    flashlatte.rotate_and_cache(q, q[:, 0], table, _ints(3), cache, _ints(3), backend="portable")
    flashlatte.inverse_rope_quantize(q, table, _ints(3), 8, backend="portable")
    flashlatte.index_query_mxfp4(_rows(3, 64, 128), torch.zeros(3, 64), table, _ints(3), backend="portable")


def _reshape_and_cache() -> None:
    key, value = _rows(3, 2, 128), _rows(3, 2, 64)
    caches = _rows(4, 16, 2, 128, dtype=torch.int8), _rows(4, 16, 2, 64, dtype=torch.int8)
    flashlatte.reshape_and_cache(key, value, *caches, _ints(3), k_scale=torch.ones(4, 16, 2), backend="portable")


def _turboquant() -> None:
    rows, slots = _rows(3, 2, 64), _ints(3)
    cache = turboquant.allocate("turboquant_4bit_nc", 4, 64, 2, 64)
    flashlatte.turboquant_store(rows, rows, cache, slots, backend="portable")
    flashlatte.turboquant_gather(cache, _ints(1, 4), _ints(2), 9, 64, backend="portable")
    flashlatte.turboquant_decode(_rows(2, 1, 4, 64), cache, _ints(2, 64), _ints(2), backend="portable")


def _norm_rope() -> None:
    rotary = Rotary(torch.zeros(8, 64), _ints(3), interleaved=True)
    latent_rows(_rows(3, 576), _rows(512), rotary, 1e-6, backend="portable")
    rotate_heads(_rows(3, 2, 64), rotary, _rows(3, 2, 64), backend="portable")


def _paged_attention(
    cache_dtype: torch.dtype = BF16, tokens: int = 4, backend: str = "portable", **options: Any
) -> None:
    cache = _rows(4, 16, 2, 128, dtype=cache_dtype)
    boundaries = torch.tensor([0, 1, tokens], dtype=torch.int32)
    q = _rows(tokens, 8, 128)
    flashlatte.paged_attention(
        q, cache, cache.clone(), _ints(2, 64), _ints(2), boundaries, causal=True, backend=backend, **options
    )


def _merge_states() -> None:
    outs, lses = zip(*[(_rows(3, 4, 64), torch.zeros(3, 4)) for _ in range(2)], strict=True)
    flashlatte.merge_states(list(outs), list(lses), backend="portable")


def _index_cache() -> None:
    cache = _rows(4, 64, 132, dtype=torch.uint8)
    flashlatte.index_quantize(cache, _ints(3), _rows(3, 128), backend="portable")
    flashlatte.index_gather(cache, _ints(1, 4), _ints(2), total_tokens=9, backend="portable")


def _index_weights() -> None:
    index_weights(_rows(3, 512), torch.zeros(64, 512), backend="portable")


def _mhc() -> None:
    streams, numbers = _rows(3, 4, 64), torch.zeros(3, 24)
    shares, mixture, seen = mhc_pre(streams, numbers, numbers[0], torch.zeros(3), backend="portable")
    mhc_post(seen, streams, shares, mixture, backend="portable")


def _index_query() -> None:
    flashlatte.index_query(_rows(3, 64, 128), torch.zeros(3, 64), torch.zeros(8, 64), _ints(3), backend="portable")


def _index_logits(backend: str) -> None:
    # A Hopper kernel writes the masked columns; elsewhere PyTorch does, and its operations are not repeated.
    clean = backend == "hopper"
    q, weights = _rows(3, 1, 64, 128, dtype=torch.float8_e4m3fn), torch.zeros(3, 64)
    keys, scales = _rows(200, 128, dtype=torch.float8_e4m3fn), torch.zeros(200)
    flashlatte.index_logits(q[:, 0], keys, weights, _ints(3), _ints(3), k_scale=scales, clean=clean, backend=backend)
    cache = _rows(4, 64, 1, 132, dtype=torch.uint8)
    flashlatte.paged_index_logits(q, cache, weights, _ints(3), _ints(3, 4), clean=clean, backend=backend)


def _sparse_index_logits() -> None:
    q, weights = _rows(3, 64, 128, dtype=torch.float8_e4m3fn), torch.zeros(3, 64)
    keys, scales = _rows(200, 128, dtype=torch.float8_e4m3fn), torch.zeros(200)
    blocks: tuple[torch.Tensor, ...] = (weights, _ints(3, 16), _ints(3, 16))
    flashlatte.sparse_index_logits(q, keys, *blocks, block_size=8, k_scale=scales, backend="portable")
    flashlatte.sparse_index_logits(
        q, _rows(4, 64, 1, 132, dtype=torch.uint8), *blocks, block_size=8, backend="portable"
    )


def _topk(backend: str, rows: int, width: int) -> None:
    flashlatte.topk(torch.zeros(rows, width), 64, return_values=True, backend=backend)


def _topk_slots(backend: str) -> None:
    pages = {"block_table": _ints(2, 4), "page_size": 64}
    flashlatte.topk(torch.zeros(4, 300), 64, next_n=2, **pages, backend=backend)
    flashlatte.topk(torch.zeros(4, 300), 64, request_ids=_ints(4), **pages, backend=backend)


def _index_convert() -> None:
    flashlatte.index_convert(_ints(3, 64), _ints(3, 4), 64, return_counts=True, backend="portable")


OPERATIONS = (
    "cache_copy",
    "cache_gather",
    "cache_write",
    "compress",
    "concat_mla_q",
    "dense_decode",
    "dense_prefill",
    "gather_records",
    "index_convert",
    "index_logits",
    "index_quantize",
    "index_query",
    "index_weights",
    "index_workspace",
    "indexer_loss",
    "inverse_rope_quantize",
    "merge_states",
    "mhc",
    "norm_rope",
    "pack_seq",
    "paged_attention",
    "q_kv_norm",
    "reshape_and_cache",
    "rope_cache_write",
    "rotate_and_cache",
    "sparse_attention",
    "sparse_decode",
    "sparse_prefill",
    "topk",
    "turboquant_decode",
    "turboquant_gather",
    "turboquant_store",
)
# Calls that also run operations of PyTorch, and so are not repeated by their launches.
NOT_REPEATED = [functools.partial(_indexer_loss, backend) for backend in ("portable", "hopper")]
CALLS: list[Callable[[], None]] = [
    lambda: _dense_decode("portable"),
    lambda: _dense_decode("portable", cache_dtype=torch.float8_e4m3fn),
    lambda: _dense_decode("hopper"),
    lambda: _dense_decode("hopper", batch=200),
    lambda: _dense_decode("hopper", heads=128),
    lambda: _dense_decode("hopper", cache_dtype=torch.float8_e4m3fn),
    *(
        functools.partial(_sparse_decode, "portable", form, extra=True)
        for form in ("v32", "v32_no_rope", "model1", "v41", "bf16")
    ),
    *(functools.partial(_sparse_decode, "hopper", form) for form in ("v32", "v32_no_rope", "model1", "bf16")),
    lambda: _sparse_decode("hopper", "v32", heads=128, extra=True),
    *(functools.partial(_sparse_prefill, backend) for backend in ("portable", "hopper")),
    lambda: _sparse_prefill("hopper", s_q=400, heads=16, topk=512),
    lambda: _sparse_prefill("hopper", precision="fp8"),
    *(functools.partial(_sparse_attention, backend) for backend in ("portable", "hopper")),
    *NOT_REPEATED,
    *(functools.partial(_dense_prefill, backend) for backend in ("portable", "hopper")),
    *(functools.partial(_caches, form) for form in ("v32", "v32_no_rope", "model1", "v41", "nvfp4_ds_mla", "bf16")),
    _cache_write_of_requests,
    _norm_rope,
    _index_cache,
    _index_query,
    _index_weights,
    _mhc,
    *(functools.partial(_index_logits, backend) for backend in ("portable", "hopper")),
    _sparse_index_logits,
    *(functools.partial(_topk, "portable", 2, width) for width in (100, 100_000)),
    *(functools.partial(_topk, "hopper", rows, 100) for rows in (2, 60, 100, 200)),
    *(functools.partial(_topk_slots, backend) for backend in ("portable", "hopper")),
    _index_convert,
    _paged_attention,
    lambda: _paged_attention(tokens=1100, backend="hopper"),
    lambda: _paged_attention(torch.int8, 300, k_scale=torch.ones(2), attn_sink=torch.ones(8)),
    _index_workspace,
    _v4_rows,
    _reshape_and_cache,
    _compress,
    _concat_mla_q,
    _pack_seq,
    _rope_cache_write,
    _merge_states,
    _turboquant,
]
