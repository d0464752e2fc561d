"""Gradients of ``V4Attention.forward_training`` by Triton kernels in the interpreter, without transformers."""

from __future__ import annotations

from typing import Any

import pytest
from support.training_calls import relative_errors

from flashlatte.layers.v4 import V4Config, V4IndexerConfig

pytestmark = pytest.mark.interpreter


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("dense", [False, pytest.param(True, marks=pytest.mark.full)])
def test_kernels_in_bf16_are_close_to_float32(dense):
    sizes: dict[str, Any] = {"hidden_size": 64, "q_lora_rank": 32, "num_attention_heads": 4}
    sizes |= {"head_dim": 64, "rope_dim": 16, "o_groups": 2, "o_lora_rank": 32, "window": 8, "ratio": 4}
    indexer = V4IndexerConfig(num_heads=4, head_dim=32, topk=4)
    config = V4Config(**sizes, indexer=indexer)
    errors = relative_errors(config, (25, 15), dense=dense)
    assert len(errors) == 21
    assert max(errors.values()) < 0.03, errors
