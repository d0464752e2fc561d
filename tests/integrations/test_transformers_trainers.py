"""Training steps of enabled models under ``torch.compile`` and FSDP2, compared with a single process."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from integrations.test_transformers_training import LENGTH, gradients, layers_of, make
from support import rank_fsdp_jobs as jobs
from support.ranks import Ranks

from flashlatte.integrations.transformers import enable

full = pytest.mark.full
NAMES = ["v3", "v32", "glm5", "v4"]


@pytest.fixture(scope="module")
def ranks():
    made = Ranks(2)
    yield made
    made.close()


def step(model: Any, length: int = LENGTH) -> dict[str, torch.Tensor]:
    model.zero_grad()
    rows = torch.randint(3, 64, (2, length), generator=torch.Generator().manual_seed(length))
    model(rows, labels=rows).loss.backward()
    return gradients(model)


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for key, gradient in expected.items():
        error = (found[key] - gradient).abs().max() / gradient.abs().max().clamp_min(1e-12)
        assert error < 1e-4, f"{key} differs by {error:.1e}"


@pytest.fixture
def _fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("_fresh_compiler")
@full
@pytest.mark.parametrize("part", ["attention", "layer", "model"])
@pytest.mark.parametrize("name", [*NAMES, "large4"])
def test_compiled_without_a_graph_break(name, part):
    """Also when other lengths follow. "aot_eager" traces forward and backward passes, and generates no code."""
    model = enable(make(name))
    compiled = copy.deepcopy(model)
    layers = layers_of(compiled)
    parts = {"attention": [layer.self_attn for layer in layers], "layer": layers}
    for module in parts.get(part, [compiled]):
        module.compile(backend="aot_eager", fullgraph=True)
    for length in (LENGTH, LENGTH + 10):
        assert_equal(step(compiled, length), step(model, length))


@pytest.mark.parametrize(
    ("name", "options"),
    [
        *((name, {}) for name in NAMES),
        ("v32", {"use_reentrant": True}),
        ("v4", {"use_reentrant": False}),
        pytest.param("large4", {}, marks=full),
        pytest.param("large4", {"use_reentrant": False}, marks=full),
        # The warm-up, in which no layer's input requires a gradient.
        ("v32", {"indexers_only": True}),
        pytest.param("v4", {"indexers_only": True, "use_reentrant": True}, marks=full),
        pytest.param("v32", {"compiled": True}, marks=full),
        pytest.param("v32", {"indexers_only": True, "compiled": True}, marks=full),
        pytest.param("v4", {"compiled": True}, marks=full),
        pytest.param("v4", {"indexers_only": True, "compiled": True}, marks=full),
    ],
)
def test_fully_sharded(ranks, name, options):
    for errors in ranks.run(jobs.errors, name, **options):
        assert max(errors.values()) < 1e-5, errors


@pytest.mark.parametrize("name", ["v3", "v4"])
def test_fully_sharded_in_bf16(ranks, name):
    model = enable(make(name))
    rows = torch.randint(3, 64, (1, LENGTH), generator=torch.Generator().manual_seed(1))
    exact = model(rows, labels=rows).loss.item()
    for loss, count in ranks.run(jobs.loss_in_bf16, name):
        assert abs(loss - exact) < 0.05 * abs(exact)
        assert count == len(list(model.parameters()))
