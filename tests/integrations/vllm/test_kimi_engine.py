"""vLLM's engine with the latent attention of Kimi-Linear and Kimi-K3: their layers call FlashLatte's parts."""

import pytest
from support import tiny_checkpoints, vllm_kimi_model
from support.vllm_engine import MIXED, NEW_TOKENS, Generated, engine, largest_difference, prompts

CLOSE = 5e-5
KIMI = "KimiLinearForCausalLM"
OVERRIDE = {KIMI: f"{vllm_kimi_model.__name__}:{KIMI}"}


# Kimi-Linear projects queries at once, Kimi-K3 through a latent.
@pytest.mark.parametrize("q_lora_rank", [None, 96])
def test_generates_the_tokens_of_transformers(tmp_path, own_process, q_lora_rank):
    """In a separate process: another engine in the process does not survive the packages that vLLM's model imports."""
    model, given = vllm_kimi_model.write(tmp_path, q_lora_rank=q_lora_rank), prompts(MIXED)
    with engine(model, model_class_overrides=OVERRIDE, max_num_batched_tokens=96, attention_backend="CUSTOM") as vllm:
        ours = vllm.generate(given)
        assert vllm.calls()[0].keys() >= {"dense_decode"}
    stock = [Generated(*tiny_checkpoints.greedy(model, ids, NEW_TOKENS)) for ids in given]
    assert [one.tokens for one in ours] == [other.tokens for other in stock]
    assert largest_difference(ours, stock) < CLOSE


def test_a_cache_of_fp8_is_refused_by_name(tmp_path):
    """vLLM's layer then requires quantized queries in prefill, which FlashLatte does not support."""
    from vllm.engine.arg_utils import EngineArgs

    arguments = {"model": str(vllm_kimi_model.write(tmp_path)), "skip_tokenizer_init": True, "max_model_len": 1024}
    with pytest.raises(ValueError, match="CUSTOM is FlashLatte: Kimi's layers quantize the queries of a prefill"):
        EngineArgs(**arguments, attention_backend="CUSTOM", kv_cache_dtype="fp8").create_engine_config()
