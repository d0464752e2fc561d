"""vLLM's unified attention, compared with float64 for vLLM's masks and layouts."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flashlatte.integrations.vllm import ops

E4M3 = torch.float8_e4m3fn
LENGTHS_Q, LENGTHS_K, PAGE_SIZE, SCALE = [1, 4], [9, 4], 4, 0.25
TABLE = torch.tensor([[4, 1, 0], [2, 5, 3]], dtype=torch.int32)
GIVEN: dict[str, Any] = {
    "cu_seqlens_q": torch.tensor([0, 1, 5], dtype=torch.int32),
    "max_seqlen_q": 4,
    "seqused_k": torch.tensor(LENGTHS_K, dtype=torch.int32),
    "max_seqlen_k": 9,
    "softmax_scale": SCALE,
    "causal": True,
    "window_size": (-1, -1),
    "block_table": TABLE,
    "softcap": 0,
    "q_descale": None,
    "k_descale": torch.full((2, 2), 0.5),
    "v_descale": torch.full((2, 2), 0.25),
}


def draw(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def problem():
    q = draw(5, 4, 16, dtype=torch.bfloat16)
    return q, *(draw(6, PAGE_SIZE, 2, 16, seed=seed, dtype=torch.bfloat16) for seed in (1, 2))


def attend(q, k, v, out, options: dict[str, Any] | None = None):
    merged = GIVEN | (options or {})
    ops.unified_attention(q=q, k=k, v=v, out=out, **merged)


def e4m3(x):
    """Saturating cast, as uint8."""
    return x.clamp(-448, 448).to(E4M3).view(torch.uint8)


def attention(q, k, v, lengths_q, lengths_k, table, page_size, scale, sees=lambda query, key: key <= query):
    """float64 attention; the last query is aligned with the last key."""
    outs, first = [], 0
    for request, (s_q, s_k) in enumerate(zip(lengths_q, lengths_k, strict=True)):
        slots = torch.tensor([int(table[request, p // page_size]) * page_size + p % page_size for p in range(s_k)])
        keys, values = (x.flatten(0, 1)[slots].double() for x in (k, v))
        keys, values = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (keys, values))
        scores = torch.einsum("qhd,khd->hqk", q[first : first + s_q].double() * scale, keys)
        hidden = ~sees(torch.arange(s_k - s_q, s_k)[:, None], torch.arange(s_k))
        weights = scores.masked_fill(hidden, -math.inf).softmax(dim=-1)
        outs.append(torch.einsum("hqk,khd->qhd", weights, values))
        first += s_q
    return torch.cat(outs)


def test_unified_attention():
    q, k, v = problem()
    out = torch.empty_like(q)
    attend(q, k, v, out)
    expected = attention(q, k, v, LENGTHS_Q, LENGTHS_K, TABLE, PAGE_SIZE, SCALE)
    assert torch.allclose(out.double(), expected, atol=2e-2)

    # One scale for an fp8 cache stored as uint8, and an fp8 q.
    k8, v8, q8 = e4m3(k.float() / 0.5), e4m3(v.float() / 0.25), (q.float() / 0.5).to(E4M3)
    k_read, v_read = k8.view(E4M3).float() * 0.5, v8.view(E4M3).float() * 0.25
    attend(q, k8, v8, out)
    expected = attention(q, k_read, v_read, LENGTHS_Q, LENGTHS_K, TABLE, PAGE_SIZE, SCALE)
    assert torch.allclose(out.double(), expected, atol=2e-2)
    attend(q8, k8, v8, out, {"q_descale": torch.tensor(0.5)})
    expected = attention(q8.float() * 0.5, k_read, v_read, LENGTHS_Q, LENGTHS_K, TABLE, PAGE_SIZE, SCALE)
    assert torch.allclose(out.double(), expected, atol=2e-2)

    # A scale for each token and head, and an fp8 output.
    scale_caches = {name: draw(6, PAGE_SIZE, 2, seed=seed).abs() for seed, name in enumerate(("k", "v"), 3)}
    modes: dict[str, Any] = {"kv_quant_mode": SimpleNamespace(name="FP8_PER_TOKEN_HEAD")}
    modes |= {f"{name}_scale_cache": cache for name, cache in scale_caches.items()}
    fp8_out = torch.empty_like(q, dtype=E4M3)
    attend(q, k8, v8, fp8_out, modes | {"output_scale": torch.tensor(0.125)})
    k_read, v_read = (x.view(E4M3).float() * scale_caches[name][..., None] for x, name in ((k8, "k"), (v8, "v")))
    expected = attention(q, k_read, v_read, LENGTHS_Q, LENGTHS_K, TABLE, PAGE_SIZE, SCALE)
    assert torch.allclose(fp8_out.double() * 0.125, expected, atol=2e-2, rtol=1 / 14)


@pytest.mark.parametrize("right", [2, 0, -1])
def test_a_window_without_causal_is_as_wide_on_both_sides(right):
    """vLLM's decoder layers pass (left, 0), and its kernel uses left for both sides if a batch is not causal."""
    q, k, v = problem()
    out = torch.empty_like(q)
    attend(q, k, v, out, {"causal": False, "window_size": (2, right)})
    expected = attention(
        q, k, v, LENGTHS_Q, LENGTHS_K, TABLE, PAGE_SIZE, SCALE, lambda query, key: (query - key).abs() <= 2
    )
    assert torch.allclose(out.double(), expected, atol=2e-2)


def test_no_window_without_causal_masks_nothing():
    q, k, v = problem()
    for window in ((-1, -1), (-1, 0)):
        out = torch.empty_like(q)
        attend(q, k, v, out, {"causal": False, "window_size": window})
        everything = attention(q, k, v, LENGTHS_Q, LENGTHS_K, TABLE, PAGE_SIZE, SCALE, lambda query, key: key < 2**31)
        assert torch.allclose(out.double(), everything, atol=2e-2)


@pytest.mark.parametrize(("name", "dtype"), [("INT8_PER_TOKEN_HEAD", torch.int8), ("FP8_PER_TOKEN_HEAD", E4M3)])
def test_rows_that_end_in_their_scale(name, dtype):
    """vLLM's pages [pages, heads, page_size, 2 (d + 4)], whose scales are a view of the last bytes of each row."""
    q, k, v = problem()
    mode = SimpleNamespace(name=name)
    pages = torch.full((6, 2, PAGE_SIZE, 40), 7, dtype=torch.int8).view(dtype)
    k_cache, v_cache = pages.transpose(1, 2).split(20, dim=-1)
    floats = pages.view(torch.float32).transpose(1, 2)
    scales = floats[..., 4], floats[..., 9]
    slots = torch.arange(6 * PAGE_SIZE)
    ops.triton_reshape_and_cache_flash_per_token_head_quant(
        k.flatten(0, 1), v.flatten(0, 1), k_cache, v_cache, *scales, slots, mode
    )
    for rows, cache, scale in ((k, k_cache, scales[0]), (v, v_cache, scales[1])):
        assert torch.allclose(cache[..., :16].float() * scale[..., None], rows.float(), atol=0.15)
    out = torch.empty_like(q)
    modes: dict[str, Any] = {"kv_quant_mode": mode, "k_scale_cache": scales[0], "v_scale_cache": scales[1]}
    attend(q, k_cache, v_cache, out, modes)
    k_read, v_read = (
        cache[..., :16].float() * scale[..., None] for cache, scale in zip((k_cache, v_cache), scales, strict=True)
    )
    expected = attention(q, k_read, v_read, LENGTHS_Q, LENGTHS_K, TABLE, PAGE_SIZE, SCALE)
    assert torch.allclose(out.double(), expected, atol=2e-2)


def test_expanded_scales_and_padded_tables():
    q, k, v = problem()
    k8, v8, q8 = e4m3(k.float()), e4m3(v.float()), q.to(E4M3)
    one, expanded = torch.empty_like(q), torch.empty_like(q)
    attend(q8, k8, v8, one, {"q_descale": torch.tensor(0.5)})
    attend(q8, k8, v8, expanded, {"q_descale": torch.full((2, 2), 0.5)})
    assert one.equal(expanded)
    # Only the first rows of a padded batch's block table are used.
    table = torch.cat((TABLE, torch.full((3, 3), 99)))
    attend(q8, k8, v8, expanded, {"q_descale": torch.tensor(0.5), "block_table": table})
    assert one.equal(expanded)
    nobody: dict[str, Any] = {"cu_seqlens_q": torch.tensor([0]), "seqused_k": TABLE[:0, 0], "block_table": TABLE[:0]}
    nobody |= {"k_descale": torch.ones(0, 2), "v_descale": torch.ones(0, 2)}
    attend(q[:0], k8, v8, one[:0], nobody)


def test_options_that_do_nothing_are_no_reason_to_refuse():
    """vLLM passes these with every layer, also without a window or an image."""
    q, k, v = problem()
    plain, out = torch.empty_like(q), torch.empty_like(q)
    attend(q, k, v, plain)
    ranges = torch.tensor([[[0, 0]], [[0, 0]]], dtype=torch.int32)
    for nothing in (
        {"chunk_lookback": 1},
        {"mm_prefix_clamp_sliding_window": True, "mm_prefix_range": ranges},
        {"mm_prefix_clamp_sliding_window": True},
        {"rswa_window": 3},
    ):
        attend(q, k, v, out, nothing)
        assert out.equal(plain)


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"kv_quant_mode": 2}, TypeError, "^kv_quant_mode must be vLLM's KVQuantMode or None, got 2$"),
        (
            {"kv_quant_mode": SimpleNamespace(name="NVFP4")},
            ValueError,
            "^kv_quant_mode must be NONE, FP8_PER_TENSOR, INT8_PER_TOKEN_HEAD or FP8_PER_TOKEN_HEAD, got NVFP4$",
        ),
        (
            {"causal": False, "window_size": (3, 1)},
            ValueError,
            r"^window_size must be \(left, right\) .*, got \(3, 1\)$",
        ),
        ({"window_size": (3,)}, TypeError, r"^window_size must be a pair of ints, got \(3,\)$"),
        (
            {"window_size": (3, 0), "chunk_lookback": 1},
            ValueError,
            "^chunk_lookback must be -1 with a window: .* got 1$",
        ),
        (
            {"rswa_window": 3, "rswa_prefix_lens": TABLE[:, 0]},
            ValueError,
            "^rswa_window or rswa_prefix_lens must be None",
        ),
        (
            {"window_size": (3, 0), "mm_prefix_clamp_sliding_window": True, "mm_prefix_range": TABLE[:, None, :2]},
            ValueError,
            "^mm_prefix_clamp_sliding_window must be False with a window and mm_prefix_range",
        ),
    ],
)
def test_what_is_not_served_is_refused(given, error, message):
    q, k, v = problem()
    with pytest.raises(error, match=message):
        attend(q, k, v, torch.empty_like(q), given)


def test_unified_attention_diffkv_takes_parts_of_one_cache():
    q, cache = draw(5, 4, 24, dtype=torch.bfloat16), draw(6, PAGE_SIZE, 2, 24 + 16, seed=1)
    sinks = torch.tensor([0.5, -math.inf, 1.0, 0.0])
    names = ("cu_seqlens_q", "seqused_k", "softmax_scale", "causal", "window_size", "block_table", "softcap")
    shared = {name: GIVEN[name] for name in names}
    fp8_scales: dict[str, Any] = {"k_descale": torch.tensor(0.5), "v_descale": torch.tensor(0.25)}
    for dtype, scales in ((torch.bfloat16, {}), (E4M3, fp8_scales)):
        stored = cache.to(dtype)
        k, v, out = stored[..., :24], stored[..., 24:], torch.full((5, 4, 16), torch.nan, dtype=torch.bfloat16)
        ops.unified_attention_diffkv(q, k, v, out, **shared, sinks=sinks, **scales)

        same = torch.empty_like(out)
        attend(q, k, v, same, {"sinks": sinks, "k_descale": None, "v_descale": None} | scales)
        assert torch.equal(out, same)
    ops.unified_attention_diffkv(q, k.view(torch.uint8), v.view(torch.uint8), out, **shared)
    expected = attention(q, k.float(), v.float(), LENGTHS_Q, LENGTHS_K, TABLE, PAGE_SIZE, SCALE)
    assert torch.allclose(out.double(), expected, atol=2e-2)
