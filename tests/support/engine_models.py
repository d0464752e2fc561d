"""Small random models, and the tokens that transformers generates with them."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from flashlatte.engine import Engine, RequestOutput, SamplingParams

VOCABULARY = 97
# Lengths of the prompts of ``check``.
LENGTHS = (3, 17, 40, 1, 26)
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 2,
    "first_k_dense_replace": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "max_position_embeddings": 512,
    "bos_token_id": 0,
    "eos_token_id": None,
    "pad_token_id": 0,
}
# Many index heads, so that scores with only negative products, which are 0, are rare.
INDEXED = {"index_n_heads": 32, "index_head_dim": 32, "index_topk": 8}
FOUR_LAYERS = {"num_hidden_layers": 4, "indexer_types": ["full", "shared", "full", "shared"]}
# Queries grow every 16 positions.
MISTRAL = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 16,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.3,
}
# Layers of MLA between layers of linear attention, whose heads have another dim.
HYBRID = {
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "full_attention"],
    "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
    "num_local_experts": 4,
}
OPTIONS: dict[str, dict[str, Any]] = {
    "Mistral4": {"rope_parameters": MISTRAL},
    "SarvamMLA": {"q_lora_rank": None},
    "DeepseekV32": INDEXED,
    "AXK2": INDEXED | {"n_group": None, "topk_group": None},
    "HYV4": INDEXED | FOUR_LAYERS | {"hc_mult": 3, "swiglu_limit": 2.0},
    # Two layers with windows of 9 tokens, and other heads and rows.
    "Dots3Note": INDEXED
    | {
        "num_hidden_layers": 4,
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
        "use_dsa": True,
        "sliding_window": 9,
        "shared_experts_intermediate_size": 32,
        "head_dim": 24,
        "swa_num_attention_heads": 2,
        "swa_num_key_value_heads": 2,
        "swa_q_lora_rank": 20,
        "swa_kv_lora_rank": 40,
        "swa_head_dim": 20,
        "swa_qk_nope_head_dim": 8,
        "swa_v_head_dim": 14,
    },
    "GlmMoeDsa": INDEXED | FOUR_LAYERS,
    "KimiLinear": HYBRID | {"q_lora_rank": None, "linear_head_dim": 20, "linear_num_heads": 3},
    "BailingHybrid": HYBRID | {"head_dim": 20},
    # Two of pools of four tokens are selected; the third layer reuses the selection of the second.
    "Glm5Next": INDEXED
    | {
        "num_hidden_layers": 4,
        "layer_types": [
            "linear_attention",
            "deepseek_sparse_attention",
            "deepseek_sparse_attention",
            "linear_attention",
        ],
        "indexer_types": ["full", "full", "shared", "full"],
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
        "index_kpool": 4,
        "hc_mult": 3,
        "linear_head_dim": 20,
        "linear_num_heads": 3,
        "qk_rope_head_dim": 0,
    },
    "HYV4VL": INDEXED
    | FOUR_LAYERS
    | {
        "hc_mult": 3,
        "rms_norm_eps": 1e-3,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]},
    },
    # Layers 1 and 3 are not rotated; 2 and 3 read the latents of 0 and 1; 2 reuses the selection of 1.
    "MistralLarge4": INDEXED
    | {
        "num_hidden_layers": 4,
        "no_rope_layers": [1, 0, 1, 0],
        "kv_source_layers": [0, 1, 0, 1],
        "indexer_types": ["full", "full", "shared", "full"],
        "rope_parameters": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 32.0}
        | {"original_max_position_embeddings": 16, "mscale_all_dim": 1.0, "attention_factor": 1.0},
        "final_logit_softcapping": 2.0,
    },
    "LongcatFlash": {
        "num_layers": 2,
        "ffn_hidden_size": 96,
        "expert_ffn_hidden_size": 32,
        "moe_topk": 2,
        "head_dim": 8,
        "zero_expert_num": 2,
    },
    "MiniCPM3": {"scale_emb": 3, "scale_depth": 1.2, "dim_model_base": 16},
}
# Fields that these families do not have.
ABSENT = {
    "BailingHybrid": ("n_routed_experts",),
    "Glm5Next": ("first_k_dense_replace",),
    "LongcatFlash": ("num_hidden_layers", "intermediate_size", "num_experts_per_tok"),
}
VISION = {"num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 32}
# Families whose model class belongs to another family than their config.
CLASSES = {"SarvamMLA": "DeepseekV3"}
# Groups of 4 tokens, of which an indexer selects, and of 8, beside a window of 6.
V4_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "layer_types": ["heavily_compressed_attention", "compressed_sparse_attention", "sliding_attention"],
    "mlp_layer_types": ["hash_moe", "moe", "moe"],
    "num_attention_heads": 4,
    "head_dim": 32,
    "partial_rotary_factor": 0.25,
    "q_lora_rank": 24,
    "o_groups": 2,
    "o_lora_rank": 16,
    "sliding_window": 6,
    "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
    "index_n_heads": 32,
    "index_head_dim": 32,
    "index_topk": 3,
    "moe_intermediate_size": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "hc_mult": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 0,
    "eos_token_id": None,
    "pad_token_id": 0,
}


# Heads and tokens of the sizes that kernels support, and groups of 4 and 128.
V4_LARGE = V4_SIZES | {
    "max_position_embeddings": 4096,
    "hidden_size": 256,
    "num_attention_heads": 64,
    "head_dim": 512,
    "partial_rotary_factor": 0.125,
    "q_lora_rank": 128,
    "o_groups": 8,
    "o_lora_rank": 64,
    "sliding_window": 128,
    "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 128},
    "index_n_heads": 64,
    "index_head_dim": 128,
    "index_topk": 64,
    "moe_intermediate_size": 64,
}


def model(family: str = "DeepseekV3", /, **changes: Any) -> Any:
    """The ``new_model`` of these arguments, the same one in each call."""
    return _model(family, tuple(changes.items()))


@functools.cache
def _model(family: str, changes: tuple[tuple[str, Any], ...]) -> Any:
    return new_model(family, **dict(changes))


def new_model(family: str, /, **changes: Any) -> Any:
    """A float32 model whose greedy tokens vary and have a margin in probability; ``changes`` of config fields."""
    import transformers

    if not hasattr(transformers, f"{family}Config"):
        pytest.skip(f"transformers {transformers.__version__} has no {family}")
    sizes = (V4_SIZES if family == "DeepseekV4" else SIZES | OPTIONS.get(family, {})) | changes
    absent = ABSENT.get(family, ())
    # Arguments of ``model`` are tuples, which can be cached.
    sizes = {name: [*size] if isinstance(size, tuple) else size for name, size in sizes.items() if name not in absent}
    config = getattr(transformers, f"{family}TextConfig", getattr(transformers, f"{family}Config"))(**sizes)
    # Some parameters of linear attention keep the values with which transformers initializes them.
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        made = _initialized(transformers, family, config)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, weight in made.named_parameters():
            if family.startswith("HYV4") and name.endswith("sinks"):
                weight.normal_(generator=generator)
            if name.endswith(("softmax_scaling.scale", "softmax_scaling.bias", "rotary_emb.alpha")):
                weight.normal_(0.0, 0.5, generator=generator)
            if weight.dim() > 1:
                gain = 4.0 if "q_b_proj" in name or "o_proj" in name else 1.0
                weight.normal_(0.0, gain / weight.shape[-1] ** 0.5, generator=generator)
    return made.eval()


def _initialized(transformers: Any, family: str, config: Any) -> Any:
    """A model of the language model's config, with the model around it if transformers has none without."""
    name = CLASSES.get(family, family)
    if hasattr(transformers, f"{name}ForCausalLM"):
        return getattr(transformers, f"{name}ForCausalLM")(config)
    vision = VISION | ({"out_hidden_size": config.hidden_size} if family == "HYV4VL" else {})
    whole = getattr(transformers, f"{family}Config")(text_config=config.to_dict(), vision_config=vision)
    return getattr(transformers, f"{family}ForConditionalGeneration")(whole)


def generated_by_transformers(family: str, prompt: list[int], count: int, **options: Any) -> list[int]:
    ids = torch.tensor([prompt])
    tokens = model(family).generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False, **options
    )
    return tokens[0, len(prompt) :].tolist()


def greedy(max_tokens: int = 16, **options: Any) -> SamplingParams:
    """Sampling parameters, greedy unless ``options`` contain a temperature."""
    return SamplingParams(**{"temperature": 0.0, "max_tokens": max_tokens} | options)


def chosen_logprobs(output: RequestOutput) -> list[float]:
    """The log-probability of each token of a request's first output."""
    first = output.outputs[0]
    return [one[token].logprob for one, token in zip(first.logprobs or [], first.token_ids, strict=False)]


def prompt_logprobs(outputs: list[RequestOutput]) -> torch.Tensor:
    """The log-probabilities of the prompts' tokens from the second on, of all requests."""
    entries = [
        (token, one)
        for output in outputs
        for token, one in zip(output.prompt_token_ids, output.prompt_logprobs or [], strict=True)
    ]
    return torch.tensor([one[token].logprob for token, one in entries if one is not None])


def prompt(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, VOCABULARY, (length,), generator=generator).tolist()


def large_v4(**changes: Any) -> Any:
    """A random DeepSeek-V4 of V4_LARGE, of which sizes may be changed; the same in every process."""
    from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

    torch.manual_seed(0)
    made: Any = DeepseekV4ForCausalLM(DeepseekV4Config(**V4_LARGE | changes))
    for weight in made.parameters():
        if weight.dim() > 1:
            torch.nn.init.normal_(weight, std=weight.shape[-1] ** -0.5)
    for name, table in made.named_buffers():
        if name.endswith("tid2eid"):
            table.copy_(torch.randint(4, table.shape))
    return made.eval()


def engine(family: str | torch.nn.Module = "DeepseekV3", **options: Any) -> Engine:
    """An engine with few pages and short chunks."""
    settings: dict[str, Any] = {"page_size": 8, "num_pages": 64, "max_num_batched_tokens": 32, "max_num_seqs": 4}
    return Engine(model(family) if isinstance(family, str) else family, **settings | options)


def check(engine: Engine, family: str = "DeepseekV3", new: int = 9) -> list[Any]:
    """Generate for prompts of several lengths together, and compare with transformers."""
    prompts = [prompt(length, seed) for seed, length in enumerate(LENGTHS)]
    outputs = engine.generate(prompts, greedy(new))
    for tokens, output in zip(prompts, outputs, strict=True):
        assert output.outputs[0].token_ids == generated_by_transformers(family, tokens, new)
        assert output.outputs[0].finish_reason == "length"
    assert engine.pool.in_use == 0
    return outputs
