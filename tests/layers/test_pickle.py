"""Layers that are unpickled in a process that has created other layers."""

import pickle
from typing import Any

import pytest
import torch

from flashlatte.layers import MLAAttention, MLAConfig, rope
from flashlatte.layers.v4 import V4Attention, V4Config


@pytest.mark.parametrize("kind", ["MLA", "DeepSeek-V4"])
def test_an_unpickled_layer_rotates_by_its_own_table(monkeypatch, kind):
    small: dict[str, Any] = {"hidden_size": 64, "q_lora_rank": 16, "num_attention_heads": 8}
    with torch.device("meta"):
        layer = MLAAttention(MLAConfig(**small)) if kind == "MLA" else V4Attention(V4Config(**small))
    stored = pickle.dumps(layer)
    monkeypatch.setattr(rope, "_TABLE_KEYS", [("another embedding", 0)])
    loaded = pickle.loads(stored)
    assert rope._TABLE_KEYS[loaded._rope_table_id] == rope._TABLE_KEYS[-1] != ("another embedding", 0)
