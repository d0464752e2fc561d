"""A small random Hy4 on disk, for transformers and for vLLM.

transformers rotates the two halves of the rope elements, vLLM's layers rotate adjacent pairs. vLLM's weights therefore
have these elements in another order.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from support.tiny_checkpoints import COMMON, INDEXER

OPTIONS = {
    "q_lora_rank": 96,
    "qk_nope_head_dim": 192,
    "v_head_dim": 256,
    "pad_token_id": 258,
    # vLLM normalizes latents of queries and index keys with 1e-6, transformers some of them with rms_norm_eps.
    "rms_norm_eps": 1e-6,
    "num_hidden_layers": 4,
    "indexer_types": ["full", "shared", "full", "shared"],
    "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
}
# transformers' names, and those of vLLM's layers.
RENAMED = (
    (r"\.ffn_hc\.", ".mlp_hc."),
    (r"\.(attn|mlp)_hc\.", r".hc_\1_layer.hc_pre.hc_"),
    (r"\.hc_head\.hc_", ".hc_head.hc_head_"),
    (r"self_attn\.sinks$", "self_attn.learnable_sink_param"),
    (r"self_attn\.gate_proj", "self_attn.linear_gate"),
)
ROPE = COMMON["qk_rope_head_dim"]
# Rows of a weight that end with rope elements, and how many rows each head has (0: one head of all rows).
ROTATED = (
    (r"self_attn\.q_b_proj\.weight$", OPTIONS["qk_nope_head_dim"] + ROPE),
    (r"self_attn\.kv_a_proj_with_mqa\.weight$", 0),
    (r"indexer\.wq_b\.weight$", INDEXER["index_head_dim"]),
    (r"indexer\.(wk\.weight|k_norm\.(weight|bias))$", 0),
)


def write(path: Path, **changes: Any) -> tuple[Path, Path]:
    """Write a model in float32: the folders of transformers' and of vLLM's checkpoint."""
    options: dict[str, Any] = COMMON | INDEXER | OPTIONS | changes
    config = transformers.HYV4Config(**options)
    torch.manual_seed(0)
    model = transformers.HYV4ForCausalLM(config).float()
    with torch.no_grad():
        # Norm weights other than 1, and sinks and gates that have an effect.
        for name, parameter in model.named_parameters():
            if name.endswith(("layernorm.weight", "sinks", "k_norm.bias")) or "_hc." in name:
                parameter.add_(0.2 * torch.randn_like(parameter))
    theirs, vllms = path / "transformers", path / "vllm"
    model.save_pretrained(theirs)
    vllms.mkdir()
    save_file(
        {_name(name): _weight(name, value) for name, value in model.state_dict().items()}, vllms / "model.safetensors"
    )
    (vllms / "config.json").write_text(
        json.dumps(json.loads((theirs / "config.json").read_text()) | {"num_nextn_predict_layers": 0})
    )
    return theirs, vllms


def _name(name: str) -> str:
    for pattern, new in RENAMED:
        name = re.sub(pattern, new, name)
    return name


def _weight(name: str, value: torch.Tensor) -> torch.Tensor:
    for pattern, per_head in ROTATED:
        if re.search(pattern, name):
            heads = value.unflatten(0, (-1, per_head or value.shape[0]))
            kept, halves = heads.split((heads.shape[1] - ROPE, ROPE), 1)
            pairs = halves.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)
            return torch.cat((kept, pairs), 1).flatten(0, 1).contiguous()
    return value.contiguous()
