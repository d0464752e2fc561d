"""DeepSeek models without rotated keys: checkpoints, and vLLM's model for them, through ``model_class_overrides``."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from support.tiny_checkpoints import COMMON, INDEXER

NOPE, ROPE = COMMON["qk_nope_head_dim"], COMMON["qk_rope_head_dim"]
# Rotated elements of a weight's rows: rows of a head (0: all rows are one head), and the first rotated row of a head.
ROTATED = (
    (r"self_attn\.q_b_proj\.weight$", NOPE + ROPE, NOPE),
    (r"self_attn\.kv_a_proj_with_mqa\.weight$", 0, COMMON["kv_lora_rank"]),
    (r"indexer\.wq_b\.weight$", INDEXER["index_head_dim"], 0),
    (r"indexer\.(wk\.weight|k_norm\.(weight|bias))$", 0, 0),
)


def write(model: Path, path: Path) -> tuple[Path, Path]:
    """Two models from V3 or V3.2: one for transformers whose rotated elements are 0, and the same one without them.

    The second one divides scores by the root of fewer elements, so its queries are smaller.
    """
    theirs, vllms = path / "transformers", path / "vllm"
    weights = load_file(model / "model.safetensors")
    config = json.loads((model / "config.json").read_text())
    _save(theirs, {name: _parts(name, x)[0] for name, x in weights.items()}, config)
    shorter = {name: _parts(name, x)[1] for name, x in weights.items()}
    _save(vllms, shorter, config | {"qk_rope_head_dim": 0, "qk_head_dim": NOPE, "head_dim": 0})
    return theirs, vllms


def _save(path: Path, weights: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
    path.mkdir(parents=True)
    save_file({name: x.contiguous() for name, x in weights.items()}, path / "model.safetensors", {"format": "pt"})
    (path / "config.json").write_text(json.dumps(config))


def _parts(name: str, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A weight whose rotated elements are 0, and the weight for a model without them."""
    for pattern, per_head, first in ROTATED:
        if re.search(pattern, name):
            heads = x.clone().unflatten(0, (-1, per_head or x.shape[0]))
            heads[:, first : first + ROPE] = 0
            zeroed = heads.flatten(0, 1)
            # An index head keeps its width.
            if "indexer" in name:
                return zeroed, zeroed
            scale = (NOPE / (NOPE + ROPE)) ** 0.5 if "q_b_proj" in name else 1
            return zeroed, torch.cat((heads[:, :first], heads[:, first + ROPE :]), 1).flatten(0, 1) * scale
    return x, x


class NoRotation(torch.nn.Module):
    """Replacement for RoPE that does nothing."""

    def forward(self, positions: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return q, k

    def enabled(self) -> bool:
        return False


def __getattr__(name: str) -> Any:
    """vLLM's model class of this name, in which attention without rotated elements has no RoPE."""
    if not name.startswith("Deepseek"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from vllm.model_executor.models import deepseek_v2

    stock = deepseek_v2.get_rope
    if stock.__module__ != __name__:
        deepseek_v2.get_rope = get_rope = lambda dim, **options: stock(dim, **options) if dim else NoRotation()
        get_rope.__module__ = __name__

        class Indexer(deepseek_v2.Indexer):
            """vLLM's reshapes no elements of width 0: give it some that are not rotated."""

            def __init__(self, *arguments: Any, **options: Any) -> None:
                super().__init__(*arguments, **options)
                self.rope_dim = self.rope_dim or ROPE

        deepseek_v2.Indexer = Indexer
    return deepseek_v2.DeepseekV3ForCausalLM
