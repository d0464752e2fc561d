"""``torch.compile`` of the layer: one graph without breaks, reused for other lengths."""

from __future__ import annotations

import warnings

import pytest
import torch

pytest.importorskip("transformers")

from layers.stock import Engine, assert_within, hidden_states, layer_like, stock
from torch._dynamo.testing import CompileCounterWithBackend


def run(engine, counter=None):
    """Prefill, decode, and both in a batch; with the number of graphs after each step."""
    graphs = []
    for news in ({0: 12, 1: 17}, *[{0: 1, 1: 1}] * 5, {0: 1, 1: 2, 2: 18}):
        engine.step(news)
        graphs.append(0 if counter is None else counter.frame_count)
    return torch.cat(engine.results()), graphs


LAYERS = [
    ("v3", "fp32", 32, 8),
    ("v3", "v32", 512, 64),
    ("v32", "fp32", 32, 8),
]


# "aot_eager" traces through autograd and takes mutation out of the graph, as the default backend does, and spends no
# time on machine code.
@pytest.mark.full
@pytest.mark.parametrize(("name", "cache_format", "rank", "rope"), LAYERS)
def test_a_compiled_layer_is_one_graph(name, cache_format, rank, rope):
    model = stock(name, (("kv_lora_rank", rank), ("qk_rope_head_dim", rope)))
    sequences = hidden_states((20, 30, 40))
    expected, _ = run(Engine(layer_like(model), sequences, cache_format))
    engine = Engine(layer_like(model), sequences, cache_format)
    counter = CompileCounterWithBackend("aot_eager")
    engine.layer = torch.compile(  # pyright: ignore[reportAttributeAccessIssue]
        engine.layer, fullgraph=True, backend=counter
    )
    with warnings.catch_warnings():
        # Dynamo warns if it traces through a cached function, which is then recomputed in every call.
        warnings.filterwarnings("error", message=".*lru_cache.*")
        result, graphs = run(engine, counter)
    assert_within(result, expected, 1e-6)
    # One for prefill, one for the first decode step, perhaps one more whose lengths are free, then none.
    assert graphs[0] == 1
    assert graphs[2:6] == [graphs[2]] * 4


@pytest.mark.full
@pytest.mark.parametrize("dynamic", [None, pytest.param(True, id="symbolic sizes")])
@pytest.mark.parametrize("name", ["v3", "v32"])
def test_compiled_steps_of_any_numbers_of_requests_and_tokens(name, dynamic):
    model = stock(name, (("kv_lora_rank", 32), ("qk_rope_head_dim", 8)))
    sequences = hidden_states((20, 30, 40, 40))
    engines = [Engine(layer_like(model), sequences, "fp32") for _ in range(2)]
    engines[1].layer = torch.compile(  # pyright: ignore[reportAttributeAccessIssue]
        engines[1].layer, fullgraph=True, backend="aot_eager", dynamic=dynamic
    )
    for engine in engines:
        for news in ({0: 6, 1: 5}, {0: 1, 1: 1}, {0: 1, 2: 7}, {0: 1, 1: 1, 2: 6}, {0: 1, 1: 1, 2: 1, 3: 9}):
            engine.step(news)
    expected, result = (torch.cat(engine.results()) for engine in engines)
    assert_within(result, expected, 1e-6)
