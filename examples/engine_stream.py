"""The engine: requests that share a prefix, one of them streamed while the others run."""

import torch
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

from flashlatte.engine import Engine, SamplingParams

SMALL = DeepseekV3Config(
    vocab_size=256,
    hidden_size=128,
    intermediate_size=256,
    moe_intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=4,
    n_routed_experts=8,
    num_experts_per_tok=2,
    n_group=2,
    topk_group=1,
    first_k_dense_replace=1,
    q_lora_rank=64,
    kv_lora_rank=512,
    qk_nope_head_dim=32,
    qk_rope_head_dim=64,
    v_head_dim=32,
)


def main() -> None:
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    engine = Engine(DeepseekV3ForCausalLM(SMALL).to(device).eval(), num_pages=64, page_size=16)
    shared = torch.randint(256, (64,)).tolist()
    first = engine.generate([[*shared, 1]], SamplingParams(temperature=0, max_tokens=4))[0]

    others = [engine.add([*shared, number], SamplingParams(temperature=0, max_tokens=8)) for number in (2, 3)]
    streamed = list(engine.stream([*shared, 1], SamplingParams(temperature=0, max_tokens=4)))
    print("streamed:", *streamed)
    while engine.unfinished:
        for output in engine.step():
            if output.finished:
                tokens = output.outputs[0].token_ids
                print(f"{output.request_id}: {len(tokens)} tokens, {output.num_cached_tokens} prompt tokens cached")
    statistics = engine.statistics()
    print(f"{statistics['cached_tokens']:.0f} tokens of {len(others) + 2} prompts came from the prefix cache")
    assert streamed == first.outputs[0].token_ids
    assert statistics["cached_tokens"] >= 3 * 64


if __name__ == "__main__":
    main()
