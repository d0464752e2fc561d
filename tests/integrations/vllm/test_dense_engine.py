"""vLLM's engine with FlashLatte's dense MLA, on a CPU."""

import pytest
from support import tiny_checkpoints
from support.vllm_engine import MIXED, NEW_TOKENS, Generated, engine, largest_difference, prompts

# Tolerance of logprobs, in float32.
CLOSE = 5e-5
OPERATIONS = {"cache_write", "dense_decode", "dense_prefill"}
# Prompts and number of generated tokens.
PROMPTS = {
    "long": (prompts((300, 250, 410)), NEW_TOKENS),
    "shared": (prompts([200] * 4, shared=160), NEW_TOKENS),
    "lasting": (prompts((100, 120, 110, 90)), 60),
}
LONG = PROMPTS["long"][0]


@pytest.fixture(scope="module")
def whole(checkpoint):
    """Outputs of V3 with whole prefills and no prefix cache, by prompt name."""
    with engine(checkpoint("v3"), enable_chunked_prefill=False, enable_prefix_caching=False) as vllm:
        generated = {name: vllm.generate(given, new_tokens) for name, (given, new_tokens) in PROMPTS.items()}
        assert vllm.calls()[0].keys() >= OPERATIONS
        return generated


def same(ours, theirs):
    assert [one.tokens for one in ours] == [other.tokens for other in theirs]
    assert largest_difference(ours, theirs) < CLOSE


@pytest.mark.parametrize("family", ["v2", "v3"])
def test_generates_the_tokens_of_transformers_and_vllm(family, checkpoint):
    from vllm.v1.attention.backends.mla.prefill import selector

    given = prompts(MIXED)
    with engine(checkpoint(family)) as vllm:
        ours = vllm.generate(given)
        assert vllm.calls()[0].keys() >= OPERATIONS
    stock = [Generated(*tiny_checkpoints.greedy(checkpoint(family), ids, NEW_TOKENS)) for ids in given]
    same(ours, stock)

    selector._auto_select_mla_prefill_backend.cache_clear()
    with engine(checkpoint(family), attention_backend="CPU_MLA") as vllm:
        theirs = vllm.generate(given)
        assert not vllm.calls()[0]
    selector._auto_select_mla_prefill_backend.cache_clear()
    same(ours, theirs)


def test_prompts_in_chunks(checkpoint, whole):
    with engine(checkpoint("v3"), max_num_batched_tokens=96) as vllm:
        same(vllm.generate(LONG), whole["long"])
        assert vllm.calls()[0]["merge_states"] > 0


def test_context_in_many_pieces(checkpoint, whole, monkeypatch):
    """A small workspace: the context of several requests is split into several chunks."""
    from flashlatte.integrations.vllm.backends.dense import FlashLatteMLAMetadataBuilder

    rows = staticmethod(lambda config: 128)
    monkeypatch.setattr(FlashLatteMLAMetadataBuilder, "determine_chunked_prefill_workspace_size", rows)
    with engine(checkpoint("v3"), max_num_batched_tokens=96) as vllm:
        same(vllm.generate(LONG), whole["long"])
        assert vllm.calls()[0]["cache_gather"] > 20


@pytest.mark.parametrize("block_size", [16, 32, 128])
def test_other_pages(checkpoint, whole, block_size):
    with engine(checkpoint("v3"), block_size=block_size, max_num_batched_tokens=256) as vllm:
        same(vllm.generate(LONG), whole["long"])


def test_prefixes_that_are_cached(checkpoint, whole):
    given, _ = PROMPTS["shared"]
    with engine(checkpoint("v3"), enable_prefix_caching=True) as vllm:
        ours = vllm.generate(given[:1]) + vllm.generate(given[1:])
    assert [one.cached for one in ours] == [0, 128, 128, 128]
    same(ours, whole["shared"])


def test_requests_that_are_preempted(checkpoint, whole):
    with engine(checkpoint("v3"), block_size=16, num_gpu_blocks_override=34, max_model_len=512) as vllm:
        ours = vllm.generate(*PROMPTS["lasting"])
        assert vllm.metric("num_preemptions") > 0
    same(ours, whole["lasting"])


def test_speculation(checkpoint, whole, own_process):
    """Several queries of a request in one step. The model repeats itself, so prompt lookup finds drafts."""
    speculation = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2, "prompt_lookup_min": 1}
    with engine(checkpoint("v3"), speculative_config=speculation) as vllm:
        ours = vllm.generate(*PROMPTS["lasting"])
        assert vllm.metric("spec_decode_num_accepted_tokens") > 0
    same(ours, whole["lasting"])


# Largest difference of a logprob from float32. Dense layers only: a near tie between experts is not an error.
@pytest.mark.parametrize(
    ("options", "bound"),
    [
        ({"dtype": "bfloat16"}, 0.1),
        ({"dtype": "float16"}, 0.02),
        ({"dtype": "float32", "kv_cache_dtype": "fp8"}, 0.25),
        ({"dtype": "bfloat16", "kv_cache_dtype": "fp8_e4m3"}, 0.25),
    ],
)
def test_fewer_bits(checkpoint, options, bound):
    model = checkpoint("v3", first_k_dense_replace=3)
    given = prompts(MIXED)
    expected = [Generated(*tiny_checkpoints.greedy(model, ids, NEW_TOKENS)) for ids in given]
    with engine(model, max_num_batched_tokens=96, **options) as vllm:
        assert 0 < largest_difference(vllm.generate(given), expected) < bound


def test_heads_on_two_ranks(checkpoint, whole, own_process):
    options = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
    with engine(checkpoint("v3"), max_num_batched_tokens=256, **options) as vllm:
        same(vllm.generate(LONG), whole["long"])
        counts = vllm.calls()
    assert len(counts) == 2
    assert all(one.keys() >= OPERATIONS for one in counts)


def test_context_on_two_ranks(checkpoint, whole, own_process):
    """Each rank has every other token of a context: vLLM merges decode by lse, and gathers context for prefill."""
    options = {
        "tensor_parallel_size": 2,
        "decode_context_parallel_size": 2,
        "distributed_executor_backend": "mp",
        "worker_extension_cls": "support.vllm_ranks.SharesContext",
    }
    with engine(checkpoint("v3"), max_num_batched_tokens=256, **options) as vllm:
        same(vllm.generate(LONG), whole["long"])
        counts = vllm.calls()
    assert len(counts) == 2
    assert all(one.keys() >= {"cache_write", "dense_decode"} for one in counts)
