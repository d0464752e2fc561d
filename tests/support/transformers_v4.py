"""A small random DeepSeek-V4 of transformers, and its logits step by step."""

import torch
import transformers

from flashlatte.integrations.transformers.calls import CACHE

SLIDING, CSA, HCA = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"


def config_of(**change):
    fields = {
        "vocab_size": 97,
        "hidden_size": 48,
        "num_hidden_layers": 3,
        "layer_types": [HCA, CSA, SLIDING],
        "num_attention_heads": 4,
        "head_dim": 32,
        "partial_rotary_factor": 0.25,
        "q_lora_rank": 24,
        "o_groups": 2,
        "o_lora_rank": 16,
        "sliding_window": 6,
        "compress_rates": {CSA: 4, HCA: 8},
        # With few heads many scores are 0, and the stock indexer resolves ties differently.
        "index_n_heads": 16,
        "index_head_dim": 32,
        "index_topk": 3,
        "moe_intermediate_size": 16,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "mlp_layer_types": ["moe"] * 3,
        "hc_mult": 2,
        "max_position_embeddings": 512,
        "attn_implementation": "eager",
    }
    return transformers.DeepseekV4Config(**(fields | change))


def model_of(**change):
    torch.manual_seed(0)
    model = transformers.DeepseekV4ForCausalLM(config_of(**change)).eval().requires_grad_(False)
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1 or "sinks" in name:
            torch.nn.init.normal_(parameter, std=0.2)
    return model


def tokens(requests, columns):
    return torch.randint(3, 97, (requests, columns), generator=torch.Generator().manual_seed(1))


def logits_by_steps(model, ids, sizes, mask=None, positions=None):
    """Logits of all columns that come ``sizes`` at a time, and the cache.

    ``positions`` are those that ``generate`` makes of the mask, if None.
    """
    if positions is None and mask is not None:
        positions = (mask.cumsum(1) - 1).masked_fill(mask == 0, 0)
    cache, found, at = None, [], 0
    for size in sizes:
        end = at + size
        visible = None if mask is None else mask[:, :end]
        position_ids = None if positions is None else positions[:, at:end]
        out = model(ids[:, at:end], attention_mask=visible, position_ids=position_ids, **{CACHE: cache}, use_cache=True)
        cache, at = out.past_key_values, end
        found.append(out.logits)
    return torch.cat(found, dim=1), cache
