"""The sparse attention layers of GLM-5.3-Flash in vLLM: rows of 512 elements without rotated keys.

vLLM's model needs packages for images, and its indexer needs CUDA. The layers are therefore used in a DeepSeek without
rotated keys, and select every token up to each query. ``model_class_overrides`` names ``DeepseekV32ForCausalLM`` of
this module.
"""

from __future__ import annotations

import importlib
import json
import shutil
import sys
import types
from pathlib import Path
from typing import Any

import torch
from support.vllm_kimi_model import fused_norms
from support.vllm_nope_model import NoRotation

NAME, TOPK = "DeepseekV32ForCausalLM", 512
WANTED = {"architectures": [NAME], "model_type": "deepseek_v32", "index_topk": TOPK, "index_n_heads": 32}


def write(nope: Path, path: Path) -> Path:
    """Write a configuration with an indexer, and the weights of a DeepSeek-V3 without rotated keys."""
    path.mkdir()
    shutil.copy(nope / "model.safetensors", path)
    (path / "config.json").write_text(json.dumps(json.loads((nope / "config.json").read_text()) | WANTED))
    return path


class SelectsAll(torch.nn.Module):
    """Replacement for the indexer. The selection has -1 also before valid positions, as GLM-5.3's may."""

    def __init__(self, *arguments: Any, **_: Any) -> None:
        super().__init__()
        self.topk_tokens, self.topk_indices_buffer = TOPK, arguments[6]

    def forward(self, hidden_states: torch.Tensor, qr: Any, positions: torch.Tensor, rotary: Any) -> torch.Tensor:
        column = torch.arange(self.topk_indices_buffer.shape[1], dtype=torch.int32) - 3
        visible = (column >= 0) & (column <= positions[:, None])
        self.topk_indices_buffer[: len(positions)] = torch.where(visible, column, -1)
        return self.topk_indices_buffer


def glm_attention() -> types.ModuleType:
    """vLLM's module of these layers, without its package, which imports the whole model.

    It derives classes from vLLM's cache of index keys, which FlashLatte has replaced by a function on a CPU.
    """
    from vllm.model_executor.models import deepseek_v2

    from flashlatte.integrations.vllm.backends.indexer import FlashLatteIndexerCache

    deepseek_v2.DeepseekV32IndexerCache = FlashLatteIndexerCache.__base__
    for name in ("vllm.models.glm5next", "vllm.models.glm5next.common"):
        package = types.ModuleType(name)
        package.__path__ = [str(Path(sys.modules["vllm"].__path__[0]).joinpath(*name.split(".")[1:]))]
        sys.modules[name] = package
    return importlib.import_module("vllm.models.glm5next.common.attention")


def __getattr__(name: str) -> Any:
    if name != NAME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from vllm.model_executor.layers import mla
    from vllm.model_executor.models import deepseek_v2

    glm = glm_attention()
    glm.Indexer, glm.get_rope = SelectsAll, lambda *_, **__: NoRotation()
    mla.fused_q_kv_rmsnorm = fused_norms

    class Attention(glm.Glm5NextMLAAttention):
        def __init__(
            self, config: Any, index_group_builder: Any = None, reduce_results: bool = True, **options: Any
        ) -> None:
            config.indexer_rope_interleave = True
            super().__init__(config=config, skip_rope=True, **options)

        def forward(self, positions: torch.Tensor, hidden_states: torch.Tensor, scaling: Any) -> torch.Tensor:
            return super().forward(hidden_states, positions)

    deepseek_v2.DeepseekV2MLAAttention = Attention
    return deepseek_v2.DeepseekV3ForCausalLM
