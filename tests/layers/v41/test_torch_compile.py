"""``torch.compile`` of DeepSeek-V4.1's layers: one graph without breaks, of each kind of layer."""

from __future__ import annotations

import warnings

import pytest
import torch
from layers.v41.model import FIELDS, Model, hidden_states
from support import v41_reference


@pytest.mark.full
def test_compiled_layers_are_one_graph():
    fields = FIELDS | {
        "num_hidden_layers": 4,
        "compress_ratios": [2, 1, 1, 1],
        "kv_source_layer_ids": [0, 1],
        "index_source_layer_ids": [0, 1, 3],
        "candidate_source_layer_id": 1,
    }
    weights, hidden = v41_reference.random_weights(fields, 0), hidden_states(fields, [13, 1, 9], 0)
    model, compiled = (Model(fields, weights, 3, 16) for _ in range(2))
    for layer in compiled.layers:
        layer.compile(fullgraph=True, backend="aot_eager")
    spans = [(0, 13), (0, 1), (0, 9)]
    with warnings.catch_warnings():
        # Dynamo warns if it traces through a cached function, which is then recomputed in every call.
        warnings.filterwarnings("error", message=".*lru_cache.*")
        found = compiled.run(hidden, spans)
    for ours, theirs in zip(found, model.run(hidden, spans), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)
