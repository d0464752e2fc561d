"""vLLM's engine with models that have an indexer, on two ranks that share each context, on a CPU."""

import pytest
from support import tiny_hy4
from support.vllm_engine import NEW_TOKENS, engine, largest_difference, prompts

# Tolerance of logprobs. Over a quantized cache, another order of sums rounds a value to a neighbor, and may select
# another key whose score is nearly tied: up to 0.061, depending on the processor.
CLOSE, CLOSE_QUANTIZED = 5e-5, 0.1
GIVEN = prompts((230, 5, 170, 1, 66), shared=0)
RANKS = {
    "tensor_parallel_size": 2,
    "decode_context_parallel_size": 2,
    "distributed_executor_backend": "mp",
    "worker_extension_cls": "support.vllm_ranks.SharesContext",
    "max_num_batched_tokens": 96,
}
OPERATIONS = {"index_quantize", "index_select", "paged_index_logits", "global_topk", "sparse_decode"}


@pytest.fixture(scope="module")
def hy4(tmp_path_factory):
    """All tokens are selected: of two e4m3 index keys as good as equal, another order of sums selects the other."""
    return tiny_hy4.write(tmp_path_factory.mktemp("hy4"), index_topk=512)[1]


def generated(model, **options):
    with engine(model, attention_backend="CUSTOM", **options) as vllm:
        return vllm.generate(GIVEN, NEW_TOKENS), vllm.calls()


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("v32", {"block_size": 16}),
        ("v32", {"block_size": 64, "cp_kv_cache_interleave_size": 16, "kv_cache_dtype": "fp8_ds_mla"}),
        ("hy4", {}),
    ],
)
def test_two_ranks_generate_the_tokens_of_one(checkpoint, hy4, own_process, family, options):
    model = hy4 if family == "hy4" else checkpoint(family)
    cache = {name: value for name, value in options.items() if name == "kv_cache_dtype"}
    alone, _ = generated(model, max_num_batched_tokens=96, **cache)
    shared, counts = generated(model, **RANKS | options)
    assert len(counts) == 2
    assert all(one.keys() >= OPERATIONS and "attend_selected_rows" not in one for one in counts)
    assert [one.tokens for one in shared] == [other.tokens for other in alone]
    assert largest_difference(shared, alone) < (CLOSE_QUANTIZED if cache else CLOSE)
