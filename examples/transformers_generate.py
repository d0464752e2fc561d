"""A small DeepSeek-V3 with random weights generates with transformers' attention, and with FlashLatte's."""

import torch
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

from flashlatte.integrations.transformers import enable

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
    model = DeepseekV3ForCausalLM(SMALL).to(device).eval()
    prompt = torch.randint(256, (2, 12), device=device)

    def generate() -> torch.Tensor:
        return model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=16, do_sample=False)

    stock = generate()
    enable(model)
    ours = generate()
    same = (ours == stock).sum().item() - prompt.numel()
    print(f"{same} of {stock.numel() - prompt.numel()} tokens are those of transformers' attention (float32)")
    assert torch.equal(ours, stock)


if __name__ == "__main__":
    main()
