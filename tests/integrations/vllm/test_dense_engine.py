"""vLLM's engine, scheduler and model over FlashLatte's dense MLA, on a CPU."""

import pytest
from support import tiny_checkpoints
from support.vllm_engine import MIXED, NEW_TOKENS, Generated, engine, largest_difference, prompts

# Of logprobs, in float32.
CLOSE = 5e-5
OPERATIONS = {"cache_write", "dense_decode", "dense_prefill"}
LONG = (300, 250, 410)


@pytest.fixture(scope="module")
def whole(checkpoint):
    """What V3 generates of ``LONG`` prompts that are prefilled whole."""
    with engine(checkpoint("v3"), enable_chunked_prefill=False, max_num_batched_tokens=1024) as vllm:
        generated = vllm.generate(prompts(LONG))
        assert OPERATIONS <= vllm.calls()[0].keys()
        return generated


def same(ours, theirs):
    assert [one.tokens for one in ours] == [other.tokens for other in theirs]
    assert largest_difference(ours, theirs) < CLOSE


@pytest.mark.parametrize("family", ["v2", "v3"])
def test_generates_what_transformers_and_vllm_do(family, checkpoint):
    from vllm.v1.attention.backends.mla.prefill import selector

    given = prompts(MIXED)
    with engine(checkpoint(family)) as vllm:
        ours = vllm.generate(given)
        assert OPERATIONS <= vllm.calls()[0].keys()
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
        same(vllm.generate(prompts(LONG)), whole)
        assert vllm.calls()[0]["merge_states"] > 0
