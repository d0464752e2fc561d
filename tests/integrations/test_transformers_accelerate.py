"""Models split over devices by ``device_map``, for which accelerate's hooks move the arguments."""

from __future__ import annotations

import pytest
import torch
from integrations import test_transformers_indexed as indexed
from integrations.test_transformers_v4 import model_of as v4_model_of
from support.engine_models import greedy
from support.transformers_pairs import generate

from flashlatte.engine import Engine
from flashlatte.integrations.transformers import disable, enable

accelerate = pytest.importorskip("accelerate")


def dispatched(model):
    parts = ["model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head"]
    parts += [f"model.{name}" for name, _ in model.model.named_children() if name not in ("layers", parts)]
    parts += [f"model.layers.{number}" for number in range(len(model.model.layers))]
    dispatched = accelerate.dispatch_model(model, dict.fromkeys(parts, "cpu"), main_device="cpu", force_hooks=True)
    assert "forward" in vars(model.model.layers[0].self_attn)
    return dispatched


def check(model, ids, ours):
    """Stock attention's tokens, computed by FlashLatte while enabled, and by stock attention afterwards."""
    expected = generate(model, {"input_ids": ids}, do_sample=False, eos_token_id=None)
    assert expected[0, ids.shape[1] :].unique().numel() > 5
    enable(model)
    out = generate(model, {"input_ids": ids}, do_sample=False, eos_token_id=None, return_dict_in_generate=True)
    assert type(out.past_key_values).__name__ == ours
    assert torch.equal(out.sequences, expected)
    out = generate(disable(model), {"input_ids": ids}, do_sample=False, eos_token_id=None, return_dict_in_generate=True)
    assert type(out.past_key_values).__name__ != ours
    assert torch.equal(out.sequences, expected)


def test_latents(make_model, prompts, calls):
    check(dispatched(make_model()), prompts((0,))["input_ids"], "PagedLatentCache")
    assert calls["dense_decode"] > 0


def test_an_indexer(prompts):
    model = dispatched(indexed.make(*indexed.FAMILIES["v32"]))
    check(model, prompts((0,), length=40)["input_ids"], "PagedLatentCache")


def test_deepseek_v4():
    torch.manual_seed(1)
    check(dispatched(v4_model_of()), torch.randint(1, 97, (1, 30)), "PagedV4Cache")


def test_the_engine(make_model, prompts):
    model, ids = dispatched(make_model()), prompts((0,))["input_ids"]
    expected = generate(model, {"input_ids": ids}, do_sample=False)[0, ids.shape[1] :].tolist()
    (output,) = Engine(model, num_pages=32).generate([ids[0].tolist()], greedy(24))
    assert output.outputs[0].token_ids == expected


@pytest.mark.parametrize("use", [enable, Engine])
def test_offloaded_weights_are_refused(make_model, use):
    model = accelerate.cpu_offload(make_model(), execution_device=torch.device("cpu"))
    with pytest.raises((TypeError, ValueError), match=r"offload|must have its class's forward"):
        use(model)


def test_another_forward_below_accelerates_is_refused(make_model):
    model = make_model()
    attention = model.model.layers[1].self_attn
    attention.forward = lambda *args, **kwargs: type(attention).forward(attention, *args, **kwargs)
    with pytest.raises(ValueError, match="layer 1's attention must have its class's forward"):
        enable(dispatched(model))
