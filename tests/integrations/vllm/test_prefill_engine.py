"""The prefill backend for vLLM's own attention, compared with float64 attention."""

from types import SimpleNamespace

import pytest
import torch

SCALE = 192**-0.5
HEADS, TOKENS, CONTEXT = 2, (3, 4), (5, 0)


@pytest.fixture
def backend():
    from flashlatte.integrations.vllm.backends.prefill import FlashLattePrefillBackend

    sizes = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
    return FlashLattePrefillBackend(num_heads=HEADS, scale=SCALE, vllm_config=None, **sizes)


def draw(keys):
    generator = torch.Generator().manual_seed(keys)
    k = torch.randn(keys, HEADS, 192, generator=generator)
    return k, torch.randn(keys, HEADS, 128, generator=generator)


def attention(q, k, v, mask):
    """out [T, h, v] and natural-log lse [h, T] in float64."""
    scores = torch.einsum("qhd,khd->hqk", q.double(), k.double()) * SCALE
    scores = scores.masked_fill(~mask, -torch.inf)
    lse = scores.logsumexp(-1)
    weights = torch.where(lse[..., None] == -torch.inf, 0.0, (scores - lse[..., None]).exp())
    return torch.einsum("hqk,khd->qhd", weights, v.double()), lse


def owners(counts):
    return torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))


def metadata(**context):
    starts = torch.tensor([0, 3, 7], dtype=torch.int32)
    table = torch.zeros(2, 1, dtype=torch.int32)
    chunked = SimpleNamespace(workspace=None, **context)
    return SimpleNamespace(query_start_loc=starts, max_query_len=4, block_table=table, chunked_context=chunked)


def close(ours, theirs):
    torch.testing.assert_close(ours[0].double(), theirs[0], atol=1e-5, rtol=0)
    torch.testing.assert_close(ours[1].double(), theirs[1], atol=1e-5, rtol=0)


def test_new_tokens(backend):
    q, (k, v) = draw(7)[0] + 1, draw(7)
    backend.prepare_metadata(metadata())
    order = torch.arange(7)
    mask = (owners(TOKENS)[:, None] == owners(TOKENS)) & (order[:, None] >= order)
    expected = attention(q, k, v, mask)
    close(backend.run_prefill_new_tokens(q, k, v, return_softmax_lse=True), expected)
    out = torch.full((7, HEADS, 128), torch.nan)
    assert backend.run_prefill_new_tokens(q, k, v, return_softmax_lse=False, out=out) is out
    torch.testing.assert_close(out.double(), expected[0], atol=1e-5, rtol=0)
    with pytest.raises(ValueError, match="output_scale must be None"):
        backend.run_prefill_new_tokens(q, k, v, return_softmax_lse=False, output_scale=torch.ones(1))


CU_KEYS = torch.tensor([0, 5, 5], dtype=torch.int32)
OBJECT = SimpleNamespace(
    request_slice=slice(0, 2),
    token_slice=slice(0, 7),
    num_context_tokens=5,
    cu_seq_lens=CU_KEYS,
    starts=torch.zeros(2),
    query_start_loc=torch.tensor([0, 3, 7], dtype=torch.int32),
    max_query_len=4,
    max_seq_len=5,
)
LISTS = {"seq_tot": [5], "max_seq_lens": [5], "cu_seq_lens": CU_KEYS[None], "starts": torch.zeros(1, 2)}


@pytest.mark.parametrize(
    ("context", "named"), [({}, {"chunk": OBJECT}), (LISTS, {"chunk_idx": 0})], ids=["objects", "lists"]
)
def test_a_chunk_of_the_context(backend, context, named):
    """Chunks as in vLLM 0.32 and 0.26. The second request has no context: out 0, lse -inf."""
    q, (k, v) = draw(7)[0], draw(5)
    backend.prepare_metadata(metadata(**context))
    expected = attention(q, k, v, owners(TOKENS)[:, None] == owners(CONTEXT))
    close(backend.run_prefill_context_chunk(**named, q=q, k=k, v=v), expected)
