"""Batches whose requests have different numbers of new tokens, as with speculative decoding, through the dense backend.

The builder reads a batch's metadata and the layer implementation attends, without an engine.
"""

from types import SimpleNamespace

import pytest
import torch
from vllm.model_executor.layers.attention.mla_attention import MLACommonMetadata, MLACommonMetadataBuilder
from vllm.v1.attention.backend import CommonAttentionMetadata

from flashlatte.integrations.vllm.backends.dense import FlashLatteMLAImpl, FlashLatteMLAMetadataBuilder

LATENT, WIDTH, HEADS, PAGE, DRAFTS = 512, 576, 2, 16, 3


def builder(drafts=DRAFTS):
    """A builder without vLLM's configuration, with the attributes that ``build`` reads."""
    made = object.__new__(FlashLatteMLAMetadataBuilder)
    made.device, made.page_size, made.chunked_prefill_workspace_size = torch.device("cpu"), PAGE, 64
    made.use_pcp, made.non_causal_multi_token_decode, made.dcp_world_size, made.dcp_manager = False, False, 1, None
    made.dcp_local_block_size = made.dcp_virtual_block_size = 1
    made.chunked_prefill_workspace, made.q_data_type, made.metadata_cls = None, torch.float32, MLACommonMetadata
    made.model_config = SimpleNamespace(dtype=torch.float32, get_head_size=lambda: WIDTH)
    made._prefill_backend = SimpleNamespace(get_name=lambda: "CUSTOM", prepare_metadata=lambda _: None)
    speculative = SimpleNamespace(num_speculative_tokens=drafts, parallel_drafting=False) if drafts else None
    made.vllm_config = SimpleNamespace(
        speculative_config=speculative,
        parallel_config=SimpleNamespace(decode_context_parallel_size=1),
        use_v2_model_runner=True,
    )
    made._init_reorder_batch_threshold(made.reorder_batch_threshold, True, False)
    return made


def batch(counts, contexts, host_surplus=0, padded_tokens=0):
    """vLLM's metadata; ``host_surplus``: drafts of the last step that the host counts although they were rejected."""
    starts = torch.tensor([0, *counts], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    lengths = torch.tensor(counts, dtype=torch.int32) + torch.tensor(contexts, dtype=torch.int32)
    pages = int(lengths.max() + host_surplus) // PAGE + 1
    tokens = sum(counts) + padded_tokens
    return CommonAttentionMetadata(
        query_start_loc=starts.clone(),
        query_start_loc_cpu=starts,
        seq_lens=lengths,
        seq_lens_cpu_upper_bound=lengths + host_surplus,
        num_reqs=len(counts),
        num_actual_tokens=tokens,
        max_query_len=max(counts),
        max_seq_len=4096,
        block_table_tensor=torch.arange(len(counts) * pages, dtype=torch.int32).view(-1, pages).flip(0),
        slot_mapping=torch.zeros(tokens, dtype=torch.int64),
    )


@pytest.mark.parametrize(
    ("counts", "drafts", "decoding"),
    [
        ([1, 1, 1], 0, 3),
        ([4, 4], DRAFTS, 2),
        ([60, 60], DRAFTS, 2),
        ([60, 60], 0, 2),
        ([129, 129], 0, 0),
        ([4, 1, 2], DRAFTS, 3),
        ([4, 1, 2, 60, 3], DRAFTS, 3),
        ([60, 60, 100], DRAFTS, 0),
        ([1, 1, 2], 0, 2),
    ],
)
def test_decode_requests_of_a_batch(counts, drafts, decoding):
    made = builder(drafts)
    threshold = made.reorder_batch_threshold
    metadata = made.build(0, batch(counts, [20] * len(counts)))
    assert (metadata.num_decodes, metadata.num_decode_tokens) == (decoding, sum(counts[:decoding]))
    assert metadata.num_prefills == len(counts) - decoding
    assert made.reorder_batch_threshold == threshold == 128


@pytest.mark.parametrize("surplus", [0, 2])
@pytest.mark.parametrize("counts", [[4, 1, 2], [1, 3, 4, 4], [2, 2, 4, 1, 70]])
def test_each_token_attends_to_its_own_past(counts, surplus):
    """Also if the host does not know yet that drafts were rejected (asynchronous scheduling)."""
    contexts = [37, 15, 70, 1, 30][: len(counts)]
    given = batch(counts, contexts, host_surplus=surplus)
    metadata = builder().build(0, given)
    tokens, requests = metadata.num_decode_tokens, metadata.num_decodes
    assert requests == len([count for count in counts if count <= 1 + DRAFTS])
    generator = torch.Generator().manual_seed(0)
    cache = torch.full((given.block_table_tensor.numel(), PAGE, WIDTH), float("nan"))
    rows = [
        torch.randn(count + context, WIDTH, generator=generator)
        for count, context in zip(counts, contexts, strict=True)
    ]
    for request, content in enumerate(rows):
        for position, row in enumerate(content):
            cache[given.block_table_tensor[request, position // PAGE], position % PAGE] = row
    query = torch.randn(tokens, HEADS, WIDTH, generator=generator)
    impl = object.__new__(FlashLatteMLAImpl)
    impl.kv_lora_rank, impl.scale, impl.is_fp8 = LATENT, 0.1, False
    impl.need_to_return_lse_for_decode = True
    out, lse = impl.forward_mqa(query.split((LATENT, 64), dim=-1), cache, metadata, SimpleNamespace(_k_scale=None))
    assert out.shape == (tokens, HEADS, LATENT)
    token = 0
    for count, context, content in list(zip(counts, contexts, rows, strict=True))[:requests]:
        for seen in range(context + 1, context + count + 1):
            keys = content[:seen].double()
            scores = query[token].double() @ keys.T * impl.scale
            expected = scores.softmax(-1) @ keys[:, :LATENT]
            torch.testing.assert_close(out[token].double(), expected, atol=1e-5, rtol=0)
            torch.testing.assert_close(lse[token].double(), scores.logsumexp(-1), atol=1e-5, rtol=0)
            token += 1
    assert token == tokens


@pytest.mark.parametrize(
    ("ranks", "drafts", "asynchronous", "refused"),
    [(2, 3, True, True), (2, 3, False, False), (2, 0, True, False), (1, 3, True, False)],
)
def test_ranks_that_share_contexts_need_lengths_on_the_host(monkeypatch, ranks, drafts, asynchronous, refused):
    """There, requests with drafts run in vLLM's prefill."""
    monkeypatch.setattr(MLACommonMetadataBuilder, "__init__", lambda self, *_: setattr(self, "dcp_world_size", ranks))
    config = SimpleNamespace(
        speculative_config=SimpleNamespace() if drafts else None,
        scheduler_config=SimpleNamespace(async_scheduling=asynchronous),
    )
    arguments = (None, ["layer"], config, torch.device("cpu"))
    if refused:
        with pytest.raises(ValueError, match="speculative decoding only with --no-async-scheduling"):
            FlashLatteMLAMetadataBuilder(*arguments)
    else:
        made = FlashLatteMLAMetadataBuilder(*arguments)
        assert made.supports_draft_decode_metadata_update == (ranks == 1)
