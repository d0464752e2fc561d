"""Classes of the dense backend without an engine: supported options, and batches of vLLM's metadata."""

from types import SimpleNamespace

import pytest
import torch

from flashlatte.integrations.vllm import support

LATENT, ROPE, HEADS, PAGE = 512, 64, 2, 16


def reasons(**changes):
    from vllm.platforms.interface import DeviceCapability

    from flashlatte.integrations.vllm.backends.dense import FlashLatteMLABackend

    asked = {
        "head_size": 576,
        "dtype": torch.bfloat16,
        "kv_cache_dtype": "auto",
        "block_size": 64,
        "use_mla": True,
        "has_sink": False,
        "use_sparse": False,
        "use_mm_prefix": False,
        "use_per_head_quant_scales": False,
        "device_capability": DeviceCapability(9, 0),
        "attn_type": "decoder",
    }
    capability = changes.pop("capability", None)
    if capability is not None:
        changes["device_capability"] = DeviceCapability(*capability)
    return FlashLatteMLABackend.validate_configuration(**asked | changes)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"kv_cache_dtype": "fp8"},
        {"block_size": 16},
        {"block_size": None, "kv_cache_dtype": None},
        {"dtype": torch.float16},
        {"capability": (8, 0)},
        {"use_batch_invariant": True},
        {"use_dcp": True},
    ],
)
def test_supported_configurations(changes):
    assert reasons(**changes) == []


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"kv_cache_dtype": "fp8_e5m2"}, "kv_cache_dtype not supported"),
        ({"use_sparse": True}, "sparse not supported"),
        ({"capability": (7, 5)}, "compute capability not supported"),
        ({"use_non_causal": True}, "non-causal attention not supported"),
        ({"use_pcp": True}, "PCP not supported"),
        ({"has_sliding_window": True}, "sliding window not supported"),
        ({"use_mm_prefix": True}, "partial multimodal token full attention not supported"),
        ({"dtype": torch.float64}, "dtype not supported"),
    ],
)
def test_unsupported_configurations(changes, reason):
    assert reason in reasons(**changes)


def test_indexers_are_refused_with_the_reason():
    assert f"FlashLatte: {support.NEEDS_CUSTOM}" in reasons(use_sparse=True)


def test_sinks_are_supported():
    assert reasons(has_sink=True) == []


def test_refusals_have_the_kernels_reason(monkeypatch):
    from flashlatte.integrations.vllm.backends import dense

    monkeypatch.setattr(dense.current_platform, "device_type", "cuda")
    (reason,) = reasons(dtype=torch.float32)
    assert reason.startswith("FlashLatte: ")
    assert "it takes bfloat16, float16, not float32" in reason


@pytest.mark.parametrize(("tokens", "requests"), [(8, 2), (16, 4)])
def test_padding_without_tokens_is_no_request(tokens, requests):
    """Two of four requests are in use, with 4 of 8 tokens each; a CUDA graph pads to 16 tokens in requests of 4."""
    from flashlatte.integrations.vllm.backends.dense import FlashLatteMLAMetadataBuilder

    starts = torch.tensor([0, 4, 8, 8, 8]) if tokens == 8 else torch.tensor([0, 4, 8, 12, 16])
    made = object.__new__(FlashLatteMLAMetadataBuilder)._build_decode(
        block_table_tensor=torch.arange(12).view(4, 3),
        seq_lens_device=torch.tensor([20, 9, 0, 0]),
        max_seq_len=20,
        query_start_loc_cpu=starts,
        query_start_loc_device=starts,
        num_decode_tokens=tokens,
        max_query_len=4,
        dcp_tot_seq_lens_device=None,
    )
    assert made.block_table.shape == (requests, 3)
    assert made.seq_lens.shape == (requests,)


def decoding(merged):
    """A layer implementation without vLLM's configuration, with the attributes that decode reads."""
    from flashlatte.integrations.vllm.backends.dense import FlashLatteMLAImpl

    impl = object.__new__(FlashLatteMLAImpl)
    impl.kv_lora_rank, impl.scale, impl.is_fp8 = LATENT, 192**-0.5, False
    impl.need_to_return_lse_for_decode = merged
    return impl


@pytest.mark.parametrize("merged", [True, False])
def test_decode_of_two_queries_and_its_lse(merged):
    """vLLM merges out [T, h, latent] and natural-log lse [T, h] over ranks."""
    generator = torch.Generator().manual_seed(0)
    cache = torch.randn(4, PAGE, LATENT + ROPE, generator=generator)
    parts = torch.randn(4, HEADS, LATENT, generator=generator), torch.randn(4, HEADS, ROPE, generator=generator)
    table, lengths = torch.tensor([[2, 0], [3, 1]], dtype=torch.int32), torch.tensor([20, 5], dtype=torch.int32)
    impl = decoding(merged)
    metadata = SimpleNamespace(decode=SimpleNamespace(block_table=table, seq_lens=lengths, padded=None))
    out, lse = impl.forward_mqa(parts, cache, metadata, SimpleNamespace(_k_scale=None))

    query = torch.cat(parts, dim=-1).double()
    for token in range(4):
        request, seen = token // 2, int(lengths[token // 2]) - 1 + token % 2
        keys = cache[table[request].long()].flatten(0, 1)[:seen].double()
        scores = query[token] @ keys.T * impl.scale
        expected = scores.softmax(-1) @ keys[:, :LATENT]
        torch.testing.assert_close(out[token].double(), expected, atol=1e-5, rtol=0)
        if merged:
            torch.testing.assert_close(lse[token].double(), scores.logsumexp(-1), atol=1e-5, rtol=0)
    assert (lse is None) == (not merged)


@pytest.mark.parametrize(("ranks", "interleave"), [(2, 1), (3, 1), (2, 16), (8, 4)])
def test_ranks_that_share_a_context(ranks, interleave):
    """Decode context parallelism: each rank has some or no tokens of a request, and vLLM merges the partial outputs."""
    from vllm.v1.attention.backends.utils import get_dcp_local_seq_lens
    from vllm.v1.attention.ops.dcp import _lse_weighted_combine

    generator = torch.Generator().manual_seed(1)
    lengths = torch.tensor([1, 2, 17, 61], dtype=torch.int32)
    query = torch.randn(len(lengths), HEADS, LATENT + ROPE, generator=generator)
    rows = torch.randn(len(lengths), 64, LATENT + ROPE, generator=generator)
    pages = 64 // PAGE
    table = torch.arange(len(lengths) * pages, dtype=torch.int32).view(-1, pages).flip(0)
    impl, partial = decoding(merged=True), []
    for rank in range(ranks):
        local = get_dcp_local_seq_lens(lengths, ranks, rank, interleave)
        cache = torch.full((len(lengths) * pages, PAGE, LATENT + ROPE), float("nan"))
        for request, length in enumerate(lengths.tolist()):
            mine = [token for token in range(length) if token // interleave % ranks == rank]
            assert len(mine) == int(local[request])
            for place, token in enumerate(mine):
                cache[table[request, place // PAGE], place % PAGE] = rows[request, token]
        metadata = SimpleNamespace(decode=SimpleNamespace(block_table=table, seq_lens=local, padded=None))
        partial.append(impl.forward_mqa(query, cache, metadata, SimpleNamespace(_k_scale=None)))

    outs, lses = (torch.stack(parts) for parts in zip(*partial, strict=True))
    out, lse = _lse_weighted_combine(outs, lses, return_lse=True, is_lse_base_on_e=impl.lse_base_on_e)
    for request, length in enumerate(lengths.tolist()):
        keys = rows[request, :length].double()
        scores = query[request].double() @ keys.T * impl.scale
        expected = scores.softmax(-1) @ keys[:, :LATENT]
        torch.testing.assert_close(out[request].double(), expected, atol=1e-5, rtol=0)
        torch.testing.assert_close(lse[request].double(), scores.logsumexp(-1), atol=1e-5, rtol=0)
