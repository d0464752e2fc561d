"""Checkpoints of small random models on disk, as vLLM and transformers load them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers

VOCABULARY = 320
COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 256,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_shared_experts": 1,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "max_position_embeddings": 2048,
    "bos_token_id": 256,
    "eos_token_id": 257,
    "tie_word_embeddings": False,
    # Large enough for logits that lie far apart.
    "initializer_range": 0.08,
}
# With few heads many index scores are 0 exactly, and which of them top-k takes is chance.
INDEXER = {"index_n_heads": 32, "index_head_dim": 128, "index_topk": 64}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "v2": (
        "DeepseekV2",
        {"q_lora_rank": None, "n_group": 1, "topk_group": 1, "topk_method": "greedy", "routed_scaling_factor": 1.0},
    ),
    "v3": ("DeepseekV3", {"q_lora_rank": 96, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5}),
    "v32": (
        "DeepseekV32",
        {"q_lora_rank": 96, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5, **INDEXER},
    ),
    "glm": (
        "GlmMoeDsa",
        {"q_lora_rank": 96, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 2.5, **INDEXER}
        | {"num_hidden_layers": 4, "qk_nope_head_dim": 192, "v_head_dim": 256, "pad_token_id": 258}
        | {"index_topk_freq": 2},
    ),
}
# What transformers leaves out of config.json, and vLLM reads.
BESIDE_V2 = {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "num_nextn_predict_layers": 0}


def write(family: str, path: Path, **changes: Any) -> Path:
    """Write a model of this family, in float32."""
    prefix, options = FAMILIES[family]
    config = getattr(transformers, f"{prefix}Config")(**COMMON | options | changes)
    torch.manual_seed(0)
    model = getattr(transformers, f"{prefix}ForCausalLM")(config).float()
    with torch.no_grad():
        # Norms that are not all one, so that a mistake in them shows.
        for name, parameter in model.named_parameters():
            if name.endswith("layernorm.weight"):
                parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(path)
    if family != "v2":
        file = path / "config.json"
        beside = BESIDE_V2 | ({"indexer_rope_interleave": True} if family == "glm" else {})
        file.write_text(json.dumps(json.loads(file.read_text()) | beside))
    return path


def greedy(path: Path, prompt: list[int], new_tokens: int) -> tuple[list[int], list[dict[int, float]]]:
    """What transformers generates: tokens, and for each the five largest logprobs by token."""
    model = _load(path)
    tokens, logprobs, past = torch.tensor([prompt]), [], None
    chosen: list[int] = []
    with torch.no_grad():
        for _ in range(new_tokens):
            step = model(tokens, past_key_values=past, use_cache=True)
            past = step.past_key_values
            best = step.logits[0, -1].float().log_softmax(-1).topk(5)
            logprobs.append(dict(zip(best.indices.tolist(), best.values.tolist(), strict=True)))
            chosen.append(int(best.indices[0]))
            tokens = best.indices[None, :1]
    return chosen, logprobs


_loaded: dict[Path, Any] = {}


def _load(path: Path) -> Any:
    if path not in _loaded:
        # By its own class: vLLM changes what transformers' Auto classes make of a configuration.
        (name,) = json.loads((path / "config.json").read_text())["architectures"]
        _loaded[path] = getattr(transformers, name).from_pretrained(path, dtype=torch.float32).eval()
    return _loaded[path]
