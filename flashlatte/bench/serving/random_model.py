"""A random model of a DeepSeek's layer sizes for serving engines: configuration, weights and prompts."""

from __future__ import annotations

import contextlib
import itertools
import json
import random
import re
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

V3 = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "max_position_embeddings": 163840,
    "rope_theta": 10000.0,
    "rope_scaling": {
        "type": "yarn",
        "factor": 40,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
    },
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "vocab_size": 4096,  # a small one, so that sampling is short and a random model's tokens are no near ties
    "torch_dtype": "bfloat16",
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "num_nextn_predict_layers": 0,
}

V32 = V3 | {
    "architectures": ["DeepseekV32ForCausalLM"],
    "model_type": "deepseek_v32",
    "index_n_heads": 64,
    "index_head_dim": 128,
    "index_topk": 2048,
}
# DeepSeek-V4-Flash, with 8 of its 256 experts, chosen by token: a choice by score has near ties.
V4 = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "hidden_size": 4096,
    "moe_intermediate_size": 2048,
    "num_attention_heads": 64,
    "num_key_value_heads": 1,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "q_lora_rank": 1024,
    "o_groups": 8,
    "o_lora_rank": 1024,
    "index_n_heads": 64,
    "index_head_dim": 128,
    "index_topk": 512,
    "sliding_window": 128,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 6,
    "topk_method": "noaux_tc",
    "scoring_func": "sqrtsoftplus",
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "swiglu_limit": 10.0,
    "expert_dtype": "bf16",
    "max_position_embeddings": 163840,
    "rope_theta": 10000.0,
    "compress_rope_theta": 160000.0,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "vocab_size": 4096,
    "torch_dtype": "bfloat16",
    "num_nextn_predict_layers": 0,
}
CONFIGS = {"v3": V3, "v32": V32, "v4": V4}
# V4's factors of the logits from which it mixes its residual streams.
MIXING_SCALE = re.compile(r"hc_\w+_scale$")
# A longer prompt repeats its first tokens: to draw millions takes longer than to measure.
DRAWN_TOKENS = 512


def write_config(folder: Path, model: str, layers: int) -> None:
    """Write the config.json of a model with ``layers`` layers.

    V3 and V3.2 have dense MLPs, as in their first three layers. V4's first layer has a window only. The others compress
    4 and 128 tokens alternately, so that three layers have all kinds.

    Args:
        model: a key of ``CONFIGS``.
    """
    ratios = [0, *itertools.islice(itertools.cycle((4, 128)), layers)][:layers]
    v4, others = {"compress_ratios": ratios, "num_hash_layers": layers}, {"first_k_dense_replace": layers}
    config = CONFIGS[model] | {"num_hidden_layers": layers} | (v4 if model == "v4" else others)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")


@contextlib.contextmanager
def folder_of(model: str, layers: int) -> Iterator[str]:
    """The directory of the model: a temporary one for a key of ``CONFIGS``, or ``model`` itself."""
    if model not in CONFIGS:
        yield model
        return
    with tempfile.TemporaryDirectory() as folder:
        write_config(Path(folder), model, layers)
        yield folder


def vocabulary(folder: str) -> int:
    return _config(folder)["vocab_size"]


def has_indexer(folder: str) -> bool:
    return "index_topk" in _config(folder)


def is_v4(folder: str) -> bool:
    return _config(folder).get("model_type") == V4["model_type"]


def _config(folder: str) -> dict[str, Any]:
    return json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))


def fill_weights(parameters: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Fill weights so that the variance of activations stays 1 and attention is neither uniform nor one-hot.

    The ``dummy`` weights of vLLM and SGLang, at most 0.001, make all scores of attention nearly 0. The values depend on
    a parameter's position and name alone, so that all engines of a model have the same. A table of integers, V4's
    experts of each token, has consecutive experts in each row.
    """
    for number, (name, weight) in enumerate(parameters):
        if not weight.is_floating_point():
            rows, columns = (torch.arange(size, device=weight.device) for size in weight.shape)
            weight.data.copy_((rows[:, None] + columns) % V4["n_routed_experts"])
            continue
        if weight.dim() == 1:
            is_factor = ("norm" in name and not name.endswith("bias")) or MIXING_SCALE.search(name)
            weight.data.fill_(1.0 if is_factor else 0.0)
            continue
        deviation = 1.0 if "embed" in name else weight.shape[-1] ** -0.5
        weight.data.normal_(std=deviation, generator=torch.Generator(weight.device).manual_seed(number))


def prompt(draw: random.Random, vocabulary: int, length: int) -> list[int]:
    drawn = draw.choices(range(vocabulary), k=min(length, DRAWN_TOKENS))
    return (drawn * -(-length // DRAWN_TOKENS))[:length]
