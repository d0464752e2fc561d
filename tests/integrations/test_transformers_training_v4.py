"""Training steps of an enabled DeepSeek-V4 against transformers' own attention, in float32."""

from __future__ import annotations

import copy

import pytest
import torch
from integrations.test_transformers_training import assert_close, gradients, make

pytest.importorskip("transformers.models.deepseek_v4")

from support.transformers_v4 import tokens

from flashlatte.integrations.transformers import disable, enable
from flashlatte.integrations.transformers.calls import CACHE
from flashlatte.layers.v4 import training

LENGTH = 37


@pytest.fixture
def attended(monkeypatch) -> list[bool]:
    """Whether each layer's attention so far selected groups."""
    seen: list[bool] = []
    attend = training.attend

    def watched(*args, **kwargs):
        output = attend(*args, **kwargs)
        seen.append(output.indices is not None)
        return output

    monkeypatch.setattr(training, "attend", watched)
    return seen


def step(model, mask, **options):
    ids = tokens(*mask.shape)
    outputs = model(ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100), **options)
    outputs.loss.backward()
    return outputs


def mask_of(hidden=slice(0, 0)):
    mask = torch.ones(2, LENGTH, dtype=torch.int64)
    mask[0, hidden] = 0
    return mask


@pytest.mark.parametrize("hidden", [slice(0, 0), slice(0, 7), slice(-7, None), slice(10, 15)])
def test_gradients_are_stock_attention_s(attended, hidden):
    """The indexer's are of its own loss, and stock attention has none."""
    mask, stock = mask_of(hidden), make("v4")
    model = enable(copy.deepcopy(stock), indexer_loss_coef=0.5)
    expected, outputs = step(stock, mask), step(model, mask)
    assert attended == [False, True, False]  # all groups, selected groups, a window only
    assert outputs.get(CACHE) is None
    assert_close(outputs.loss - 0.5 * outputs.indexer_loss, expected.loss, "loss")
    shown = mask.bool()
    assert_close(outputs.logits[shown], expected.logits[shown], "logits")
    found, wanted = gradients(model), gradients(stock)
    for key, gradient in wanted.items():
        assert_close(found[key], gradient, key)
    of_indexers = {key for key, _ in model.named_parameters() if ".indexer." in key}
    assert len(of_indexers) == 6
    assert found.keys() == wanted.keys() | of_indexers
    assert all(found[key].abs().sum() > 0 for key in of_indexers)


def test_padding_has_no_part_in_the_loss():
    """A row that is padded on the right has the loss of the same row alone."""
    model = enable(make("v4"))
    ids, mask = tokens(1, LENGTH), torch.ones(1, LENGTH, dtype=torch.int64)
    mask[:, 30:] = 0
    padded, alone = model(ids, attention_mask=mask), model(ids[:, :30])
    assert_close(padded.indexer_loss, alone.indexer_loss)


@pytest.mark.parametrize("option", ["position_ids", "output_attentions", CACHE, "mask", "dropout"])
def test_other_steps_are_stock_attention_s_or_refused(attended, option):
    mask, options = mask_of(), {}
    if option == "position_ids":
        options[option] = torch.arange(LENGTH)[None]
    elif option == "output_attentions":
        options[option] = True
    elif option == "mask":
        options["attention_mask"] = None
    model = enable(make("v4", **({"attention_dropout": 0.1} if option == "dropout" else {})))
    if option == CACHE:
        import transformers

        options[option] = transformers.DynamicCache(config=model.config)
    if option == "mask":
        mask = torch.zeros(2, 1, LENGTH, LENGTH)
        options = {}
    ids = tokens(2, LENGTH)
    with pytest.raises(ValueError, match=r"^an enabled model whose indexer learns cannot compute this .*: it"):
        model(ids, attention_mask=mask, **options)
    for key, parameter in model.named_parameters():
        parameter.requires_grad_(".indexer." not in key)
    assert "indexer_loss" not in model(ids, attention_mask=mask, **options)
    assert not attended


def test_generation_and_disable_after_training(attended):
    stock, mask = make("v4"), mask_of()
    model = enable(copy.deepcopy(stock))
    step(model, mask)
    count = len(attended)
    with torch.no_grad():
        options = {"max_new_tokens": 4, "do_sample": False}
        ids = tokens(2, LENGTH)
        assert torch.equal(model.eval().generate(ids, **options), stock.eval().generate(ids, **options))
    assert "indexer_loss" not in step(disable(model.train()), mask)
    assert len(attended) == count
