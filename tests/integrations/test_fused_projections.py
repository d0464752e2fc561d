"""Models with fused projections, as on a GPU: the same tokens, and the same checkpoint."""

from __future__ import annotations

import copy
import importlib
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")

from support.engine_models import generated_by_transformers, greedy, model, prompt  # noqa: E402

from flashlatte.engine import Engine  # noqa: E402
from flashlatte.integrations.transformers import enable  # noqa: E402
from flashlatte.layers import fused_projections  # noqa: E402

FAMILIES = ["DeepseekV3", "DeepseekV32"]
if hasattr(transformers, "DeepseekV4Config"):
    FAMILIES.append("DeepseekV4")
PLACES = ["layers.fused_projections", "engine.model", "engine.v4", "integrations.transformers.v4.attention"]


@pytest.fixture
def laid(monkeypatch):
    """Fuse projections on the CPU too."""

    def lay(layers):
        for projections in layers:
            fused_projections.fuse_weights(*projections)

    # All are imported first: a module that is imported after the first replacement would keep it.
    for module in [importlib.import_module(f"flashlatte.{place}") for place in PLACES]:
        monkeypatch.setattr(module, "fuse_weights_on_gpu", lay)


def attentions(served: Any) -> list[Any]:
    return [layer.self_attn for layer in served.model.layers]


@pytest.mark.parametrize("family", FAMILIES)
def test_enabled(laid, family, tmp_path):
    served = enable(copy.deepcopy(model(family)), page_size=8)
    for attention in attentions(served):
        assert attention.q_a_proj.weight.untyped_storage().nbytes() > attention.q_a_proj.weight.nbytes
    ids = torch.tensor([prompt(19)])
    tokens = served.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=9, do_sample=False)
    assert tokens[0, 19:].tolist() == generated_by_transformers(family, prompt(19), 9)

    served.save_pretrained(tmp_path)
    loaded = type(model(family)).from_pretrained(tmp_path)
    for name, weight in model(family).state_dict().items():
        assert loaded.state_dict()[name].equal(weight), name


@pytest.mark.parametrize("family", FAMILIES)
def test_engine(laid, family):
    whole = copy.deepcopy(model(family))
    served = Engine(whole, num_pages=24, page_size=8, max_num_batched_tokens=12)
    for attention in attentions(whole):
        assert attention.q_a_proj.weight.untyped_storage().nbytes() > attention.q_a_proj.weight.nbytes
    (output,) = served.generate([prompt(19)], greedy(9))
    assert output.outputs[0].token_ids == generated_by_transformers(family, prompt(19), 9)
