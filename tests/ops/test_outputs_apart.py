"""An ``out`` that starts at the address of an input is rejected: kernels read inputs while others write results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import flashlatte
from flashlatte import kv_cache
from flashlatte.kv_cache import turboquant
from flashlatte.runtime import checks

BEGINS = torch.tensor([0, 4])
PAGE, LENGTH = torch.zeros(1, 1, dtype=torch.int32), torch.tensor([4])


def _rows(*shape: int) -> torch.Tensor:
    return torch.randn(shape).bfloat16()


def _dense_decode(given: str) -> None:
    read: dict[str, Any] = {"q": _rows(1, 1, 4, 512), "k_cache": _rows(1, 4, 1, 512)}
    out = read[given].view(1, 1, 4, 512)
    flashlatte.dense_decode(**read, block_table=PAGE, cache_seqlens=LENGTH, out=out)


def _sparse_decode(given: str) -> None:
    read: dict[str, Any] = {
        "q": _rows(1, 1, 4, 512),
        "k_cache": _rows(1, 4, 1, 512),
        "extra_k_cache": _rows(1, 4, 1, 512),
    }
    indices, out = torch.zeros(1, 1, 4, dtype=torch.int32), read[given].view(1, 1, 4, 512)
    flashlatte.sparse_decode(**read, indices=indices, extra_indices=indices, out=out)


def _sparse_prefill(given: str) -> None:
    read: dict[str, Any] = {"q": _rows(1, 4, 512), "kv": _rows(4, 1, 512)}
    indices = torch.zeros(1, 1, 4, dtype=torch.int32)
    flashlatte.sparse_prefill(**read, indices=indices, out=read[given].view(1, 4, 512))


def _dense_prefill(given: str) -> None:
    read: dict[str, Any] = {name: _rows(4, 2, 64) for name in "qkv"}
    flashlatte.dense_prefill(
        **read, cu_seqlens_q=BEGINS, cu_seqlens_k=BEGINS, max_seqlen_q=4, max_seqlen_k=4, out=read[given]
    )


def _vit_attention(given: str) -> None:
    read: dict[str, Any] = {name: _rows(4, 2, 64) for name in "qkv"}
    flashlatte.vit_attention(**read, cu_seqlens=BEGINS, max_seqlen=4, out=read[given])


def _turboquant_decode(given: str) -> None:
    read: dict[str, Any] = {"q": _rows(1, 1, 2, 64)}
    cache = turboquant.allocate("turboquant_4bit_nc", 1, 4, 1, 64)
    flashlatte.turboquant_decode(**read, cache=cache, block_table=PAGE, cache_seqlens=LENGTH, out=read[given])


def _gather(given: str) -> None:
    read: dict[str, Any] = {"cache": _rows(1, 4, 1, 576)}
    kv_cache.gather(**read, block_table=PAGE, cu_seqlens=BEGINS, out=read[given].view(4, 576))


def _gather_records(given: str) -> None:
    read: dict[str, Any] = {"cache": _rows(1, 4, 1, 576)}
    kv_cache.gather_records(**read, block_table=PAGE, cu_seqlens=BEGINS, total_tokens=4, out=read[given].view(4, 576))


def _index_gather(given: str) -> None:
    read: dict[str, Any] = {"cache": _rows(1, 4, 1, 64)}
    with checks.naming(values="out"):
        flashlatte.index_gather(
            **read, block_table=PAGE, cu_seqlens=BEGINS, total_tokens=4, head_dim=64, values=read[given].view(4, 64)
        )


def _concat_mla_q(given: str) -> None:
    out = _rows(4, 2, 128)
    read: dict[str, Any] = {name: _rows(4, 2, 64) for name in ("ql_nope", "q_pe")} | {given: out[..., :64]}
    flashlatte.concat_mla_q(**read, out=out)


def _pack_seq(given: str) -> None:
    read: dict[str, Any] = {"x": _rows(4, 2, 64)}
    flashlatte.pack_seq(**read, cu_seqlens=BEGINS, max_seqlen=4, out=read[given].view(1, 4, 2, 64))


def _unpack_seq(given: str) -> None:
    read: dict[str, Any] = {"packed": _rows(1, 4, 2, 64)}
    flashlatte.unpack_seq(**read, cu_seqlens=BEGINS, total_tokens=4, out=read[given].view(4, 2, 64))


@pytest.mark.parametrize(
    ("call", "given"),
    [
        *((_dense_decode, name) for name in ("q", "k_cache")),
        *((_sparse_decode, name) for name in ("q", "k_cache", "extra_k_cache")),
        *((_sparse_prefill, name) for name in ("q", "kv")),
        *((_dense_prefill, name) for name in "qkv"),
        *((_vit_attention, name) for name in "qkv"),
        (_turboquant_decode, "q"),
        (_gather, "cache"),
        (_gather_records, "cache"),
        (_index_gather, "cache"),
        *((_concat_mla_q, name) for name in ("ql_nope", "q_pe")),
        (_pack_seq, "x"),
        (_unpack_seq, "packed"),
    ],
)
def test_an_output_at_the_address_of_an_input_is_refused(call: Callable[[str], None], given: str) -> None:
    with pytest.raises(ValueError, match=rf"^out must share no memory with {given} \(both begin at one address\)$"):
        call(given)
