"""``torch.compile`` of DeepSeek-V4's layer: one graph without breaks, of each kind of layer."""

from __future__ import annotations

import warnings

import pytest
import torch

pytest.importorskip("transformers.models.deepseek_v4")

from layers.v4.test_against_transformers import KINDS, run, steps_of, stock_config, stock_layer

from flashlatte.layers.v4 import V4Attention, V4Config


@pytest.mark.full
@pytest.mark.parametrize("kind", KINDS)
def test_a_compiled_layer_is_one_graph(kind):
    config = stock_config(kind)
    state = stock_layer(config, seed=0).state_dict()
    attention = V4Attention(V4Config.from_transformers(config, 0))
    attention.load_state_dict({name: value for name, value in state.items() if "rotary_emb" not in name})
    hidden, steps = [torch.randn(n, 48) for n in (13, 1, 9)], steps_of([13, 1, 9], seed=0)
    expected = run(attention, hidden, steps)
    attention.compile(fullgraph=True, backend="aot_eager")
    with warnings.catch_warnings():
        # Dynamo warns if it traces through a cached function, which is then recomputed in every call.
        warnings.filterwarnings("error", message=".*lru_cache.*")
        results = run(attention, hidden, steps)
    for out, wanted in zip(results, expected, strict=True):
        torch.testing.assert_close(out, wanted, rtol=1e-6, atol=1e-6)
