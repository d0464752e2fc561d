"""vLLM's engine with Hy4 on FlashLatte: selected tokens shared between layers, attention sinks, output gates."""

import pytest
from support import tiny_checkpoints, tiny_hy4
from support.vllm_engine import MIXED, NEW_TOKENS, Generated, engine, largest_difference, prompts

CLOSE = 5e-5
OPERATIONS = {"index_quantize", "index_gather", "index_select", "paged_index_select", "attend_selected_rows"}


@pytest.fixture(scope="module")
def hy4(tmp_path_factory):
    return tiny_hy4.write(tmp_path_factory.mktemp("hy4"))


@pytest.fixture(scope="module")
def stock(hy4):
    theirs, _ = hy4
    return [Generated(*tiny_checkpoints.greedy(theirs, ids, NEW_TOKENS)) for ids in prompts(MIXED)]


@pytest.mark.parametrize("chunk", [512, 96])
def test_generates_the_tokens_of_transformers(hy4, stock, exact_indexer, chunk):
    with engine(hy4[1], attention_backend="CUSTOM", max_num_batched_tokens=chunk) as vllm:
        ours = vllm.generate(prompts(MIXED))
        assert vllm.calls()[0].keys() >= OPERATIONS
    assert [one.tokens for one in ours] == [other.tokens for other in stock]
    assert largest_difference(ours, stock) < CLOSE


def test_sinks_affect_the_tokens(hy4, stock, exact_indexer, monkeypatch):
    """Without sinks the logprobs differ: the comparison above covers them."""
    from flashlatte.integrations.vllm.backends.sparse import FlashLatteSparseMLAImpl

    forward = FlashLatteSparseMLAImpl.forward_mqa

    def without_sinks(self, *arguments):
        self.sinks = None
        return forward(self, *arguments)

    monkeypatch.setattr(FlashLatteSparseMLAImpl, "forward_mqa", without_sinks)
    with engine(hy4[1], attention_backend="CUSTOM") as vllm:
        ours = vllm.generate(prompts(MIXED)[:2], 1)
    assert max(abs(a - ours[0].logprobs[0].get(token, a - 1)) for token, a in stock[0].logprobs[0].items()) > 0.01
