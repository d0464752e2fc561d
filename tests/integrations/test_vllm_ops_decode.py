"""vLLM's decode attention, compared with float64 for vLLM's buffers and pages."""

import math
from typing import Any

import pytest
import torch

from flashlatte.integrations.vllm import ops

E4M3 = torch.float8_e4m3fn
LENGTHS, PAGE_SIZE, SCALE = [9, 4, 0], 4, 0.25
# A padded batch has more rows than requests.
TABLE = torch.tensor([[4, 1, 0], [2, 5, 3], [1, 1, 1], [7, 7, 7]], dtype=torch.int32)
# Heads of queries and keys, widths of keys and values, and whether values are parts of the keys.
MLA, GROUPED = (4, 1, 16, 8, True), (4, 2, 16, 8, False)


def draw(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def problem(h_q, h_kv, width, width_v, is_mla):
    k = draw(6, PAGE_SIZE, h_kv, width, seed=1)
    v = k[..., :width_v] if is_mla else draw(6, PAGE_SIZE, h_kv, width_v, seed=2)
    return draw(len(LENGTHS), h_q, width), k, v


def decode(q, k, v, *, table=TABLE, lse_dtype=torch.bfloat16, page_size=PAGE_SIZE, **options: Any):
    out = torch.full((len(LENGTHS), q.shape[1], v.shape[-1]), torch.nan, dtype=torch.bfloat16)
    lse = torch.full(q.shape[:2], torch.nan, dtype=lse_dtype)
    ops.decode_attention_fwd(q, k, v, out, lse, table, torch.tensor(LENGTHS), None, None, SCALE, page_size, **options)
    return out, lse


def expected(q, k, v, cap=0.0):
    """float64 out and lse; 0 and -inf without keys."""
    out = torch.zeros(len(LENGTHS), q.shape[1], v.shape[-1], dtype=torch.float64)
    lse = torch.full(q.shape[:2], -math.inf, dtype=torch.float64)
    for request, length in enumerate(LENGTHS):
        slots = [int(TABLE[request, p // PAGE_SIZE]) * PAGE_SIZE + p % PAGE_SIZE for p in range(length)]
        keys, values = (x.flatten(0, 1)[slots].double().repeat_interleave(q.shape[1] // x.shape[2], 1) for x in (k, v))
        scores = torch.einsum("hd,khd->hk", q[request].double(), keys) * SCALE
        scores = cap * torch.tanh(scores / cap) if cap else scores
        lse[request] = scores.logsumexp(-1)
        out[request] = torch.einsum("hk,khd->hd", scores.softmax(-1), values)
    return out, lse


def assert_expected(actual, wanted):
    torch.testing.assert_close(actual[0].double(), wanted[0], atol=2e-2, rtol=2e-2)
    torch.testing.assert_close(actual[1].double(), wanted[1], atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("sizes", [MLA, GROUPED])
@pytest.mark.parametrize("lse_dtype", [torch.bfloat16, torch.float32])
def test_pages_and_slots_agree_with_float64(sizes, lse_dtype):
    q, k, v = problem(*sizes)
    wanted = expected(q, k, v)
    assert_expected(decode(q, k, v, lse_dtype=lse_dtype, is_mla=sizes[-1]), wanted)
    assert_expected(decode(q, k, v, table=TABLE.unsqueeze(2), is_mla=sizes[-1]), wanted)

    # Buffers of slots, with the slots of each request instead of its pages.
    slots = (TABLE.unsqueeze(-1) * PAGE_SIZE + torch.arange(PAGE_SIZE)).flatten(1)
    flat = k.flatten(0, 1), v.flatten(0, 1)
    assert_expected(decode(q, *flat, is_mla=sizes[-1]), wanted)
    assert_expected(decode(q, *flat, table=slots, page_size=1, is_mla=sizes[-1]), wanted)

    # One layer of a cache whose pages have the rows of all layers.
    k_layers = torch.stack([torch.full_like(k, torch.nan), k], dim=1)
    v_layers = k_layers[..., : v.shape[-1]] if sizes[-1] else torch.stack([torch.full_like(v, torch.nan), v], dim=1)
    assert_expected(decode(q, k_layers[:, 1], v_layers[:, 1], is_mla=sizes[-1]), wanted)


@pytest.mark.parametrize("sizes", [MLA, GROUPED])
@pytest.mark.parametrize("stored", [E4M3, torch.uint8])
def test_fp8_buffers_have_scales(sizes, stored):
    q, k, v = problem(*sizes)
    k_scale, v_scale = torch.tensor(0.5), torch.tensor([0.25])
    k8, v8 = ((x.float() / scale).to(E4M3) for x, scale in ((k, k_scale), (v, v_scale)))
    if sizes[-1]:
        v8, v_scale = k8[..., : v.shape[-1]], k_scale
    actual = decode(q, k8.view(stored), v8.view(stored), k_scale=k_scale, v_scale=v_scale, is_mla=sizes[-1])
    assert_expected(actual, expected(q, k8.double() * k_scale.double(), v8.double() * v_scale.double()))
    # vLLM passes the scales with every cache.
    assert_expected(decode(q, k, v, k_scale=k_scale, v_scale=v_scale, is_mla=sizes[-1]), expected(q, k, v))


def test_logit_cap():
    q, k, v = problem(*GROUPED)
    assert_expected(decode(q, k, v, logit_cap=0.5), expected(q, k, v, cap=0.5))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"page_size": 2}, r"^k_buffer must have shape \[pages, 2, h_kv, width\] or .*, got \[6, 4, 1, 16\]$"),
        ({"v": torch.zeros(6, 4, 2, 8).bfloat16()}, r"^v_buffer must have k_buffer's pages.* \[6, 4, 1\], got"),
        ({"logit_cap": 1.0}, r"^logit_cap must be 0 with is_mla, got 1.0$"),
        ({"table": TABLE[:2]}, r"^req_to_token must have the 3 rows of q, got 2$"),
        ({"k": torch.zeros(6, 4, 1, 24).bfloat16()}, r"^k_buffer must have shape"),
    ],
)
def test_errors_name_vllms_arguments(change, message):
    q, k, v = problem(*MLA)
    with pytest.raises(ValueError, match=message):
        decode(**{"q": q, "k": k, "v": v, "is_mla": True} | change)
