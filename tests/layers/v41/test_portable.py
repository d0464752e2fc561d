"""The layers with Triton kernels, in the interpreter, compared with the reference operations."""

from __future__ import annotations

import pytest
import torch
from layers.v41.model import FIELDS, Model, hidden_states
from support import v41_reference

from flashlatte.layers.v4 import WorkspaceLimits
from flashlatte.runtime import machine

pytestmark = [
    pytest.mark.interpreter,
    pytest.mark.skipif(not machine.interpreting(), reason="runs Triton kernels"),
]
SIZES = {
    "num_hidden_layers": 3,
    "compress_ratios": [2, 1, 1],
    "kv_source_layer_ids": [0, 1],
    "index_source_layer_ids": [0, 1, 2],
    "candidate_source_layer_id": 1,
    "candidate_topk_blocks": 2,
    "candidate_block_size": 4,
    "num_attention_heads": 2,
}
WIDE = {"head_dim": 512, "qk_rope_head_dim": 64, "index_head_dim": 128, "index_n_heads": 8}


@pytest.mark.parametrize(
    ("formats", "change"),
    [
        pytest.param(("bf16", None), {}, id="plain", marks=pytest.mark.full),
        pytest.param(("v41", "v41_fp4"), WIDE, id="v41", marks=pytest.mark.full),
    ],
)
def test_portable_kernels(formats, change):
    fields = FIELDS | SIZES | change
    weights = v41_reference.random_weights(fields, 0, std=0.1)
    hidden = hidden_states(fields, [11, 5], 0)
    steps = [([(0, 9), (0, 4)], None), ([(9, 11), (4, 4)], WorkspaceLimits(min_queries=2)), ([(11, 11), (4, 5)], None)]
    models = [
        Model(fields, weights, 2, 16, *formats, dtype=torch.bfloat16, backend=backend)
        for backend in ("portable", "reference")
    ]
    for spans, limits in steps:
        found, expected = (model.run(hidden, spans, limits) for model in models)
        for layer, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
            out, reference = torch.cat(ours).double(), torch.cat(theirs).double()
            assert (out - reference).norm(dim=1).max() < 0.02 * reference.norm(dim=1).max(), layer
