"""Training of the indexers of enabled models: the loss, its factor, and the warm-up."""

from __future__ import annotations

import pytest
from integrations.test_transformers_training import LENGTH, assert_close, checkpointing, gradients, make, step

from flashlatte.integrations.transformers import enable


@pytest.mark.parametrize("name", ["v32", "glm5", "v4"])
def test_dense_warmup(name, prompts):
    """It is a step of a model whose indexers select all tokens; a second ``enable`` begins the sparse stage."""
    inputs = prompts((0, 4), length=LENGTH)
    selects_all, model = enable(make(name, index_topk=64)), enable(make(name), dense_warmup=True)
    expected, outputs = step(selects_all, inputs), step(model, inputs)
    assert outputs.loss.equal(expected.loss)
    found = gradients(model)
    assert found.keys() == gradients(selects_all).keys()
    assert all(gradient.equal(found[key]) for key, gradient in gradients(selects_all).items())
    sparse = step(enable(model), inputs)
    assert not sparse.loss.equal(expected.loss)
    assert sparse.loss.equal(step(enable(make(name)), inputs).loss)


def test_dense_warmup_needs_an_indexer():
    for name in ("v3", "glm5-next"):
        with pytest.raises(ValueError, match=r"^dense_warmup must be False for a model without an indexer"):
            enable(make(name), dense_warmup=True)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")
@pytest.mark.parametrize("name", ["v32", "v4"])
def test_only_indexers_are_trained(name, prompts):
    """As in the warm-up."""
    inputs = prompts((0, 4), length=LENGTH)
    model = enable(make(name))
    step(model, inputs)
    expected = {key: gradient for key, gradient in gradients(model).items() if ".indexer." in key}
    for key, parameter in model.named_parameters():
        parameter.requires_grad_(".indexer." in key)
    for use_reentrant in (None, False, True):
        model.zero_grad()
        if use_reentrant is not None:
            # transformers then makes embeddings require a gradient too.
            model.disable_input_require_grads()
            checkpointing(model, use_reentrant)
        step(model, inputs)
        found = gradients(model)
        assert found.keys() == expected.keys()
        assert all(gradient.equal(expected[key]) for key, gradient in found.items())
    model.disable_input_require_grads()
    with pytest.raises(ValueError, match=r"^a reentrant checkpoint around an indexer in training must have"):
        step(model, inputs)


def test_gradients_of_each_loss(prompts):
    """The indexers' gradients are those of their loss, with any factor, and none without it."""
    inputs = prompts((0, 4), length=LENGTH)
    model = enable(make("v32"))
    outputs = model(**inputs)
    outputs.indexer_loss.backward(retain_graph=True)
    once = gradients(model)
    assert all(".indexer." in key for key in once)
    model.zero_grad()
    (3 * outputs.indexer_loss + outputs.logits.sum()).backward(retain_graph=True)
    for key, gradient in once.items():
        assert_close(gradients(model)[key], 3 * gradient, key)
    model.zero_grad()
    outputs.logits.sum().backward()
    assert all(gradients(model)[key].abs().sum() == 0 for key in once)


def test_a_frozen_indexer_has_no_loss(prompts):
    model = enable(make("v32"))
    for layer in model.model.layers:
        layer.self_attn.indexer.requires_grad_(False)
    assert "indexer_loss" not in step(model, prompts((0, 4), length=LENGTH))


def test_a_decoder_alone_returns_the_loss(prompts):
    decoder = enable(make("v32").model)
    outputs = decoder(**prompts((0, 4), length=LENGTH))
    outputs.indexer_loss.backward()
    assert {key.split(".")[3] for key in gradients(decoder)} == {"indexer"}


def test_tuples_are_rejected_if_an_indexer_is_trained(prompts):
    model = enable(make("v32"))
    with pytest.raises(ValueError, match=r"^return_dict must be True for a model whose indexer is trained"):
        model(**prompts((0, 4), length=LENGTH), return_dict=False)


def test_a_wrong_coefficient_is_refused():
    with pytest.raises(TypeError, match=r"^indexer_loss_coef must be"):
        enable(make("v3"), indexer_loss_coef="1")  # pyright: ignore[reportArgumentType]
