"""Training steps of enabled models, compared with transformers' attention, in float32."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from integrations.test_transformers_families import (
    DRAWN,
    EXPERTS,
    GLM5,
    INDEXED,
    LARGE4,
    SIZES,
    SUPPORTED,
    _stock,
    hy4_vl,
)

from flashlatte.integrations.transformers import disable, enable
from flashlatte.integrations.transformers.calls import CACHE
from flashlatte.layers import training

transformers: Any = pytest.importorskip("transformers")

# More tokens than the indexers select.
LENGTH = 30
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "v3": ("DeepseekV3", {}),
    "v32": ("DeepseekV32", INDEXED),
    "glm5": ("GlmMoeDsa", GLM5),
}
REFUSED = ["glm5-next"]
# Queries are scaled by position; every 16 positions in mistral4.
SCALING = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 32.0, "original_max_position_embeddings": 16}
SCALING |= {"llama_4_scaling_beta": 0.3, "mscale": 1.0, "mscale_all_dim": 1.0}
SCALED: dict[str, tuple[str, dict[str, Any]]] = {
    "mistral4": ("Mistral4", {"rope_parameters": SCALING, "n_group": 1, "max_position_embeddings": 512})
}
# Layers 1, and 3 and 4, read the latents of two earlier ones, all of which are rotated.
SHARING = {"num_hidden_layers": 5, "no_rope_layers": [1, 1, 1, 1, 1], "kv_source_layers": [0, 0, 2, 2, 2]}
SHARING |= {"indexer_types": ["full", "shared", "full", "full", "shared"]}


@pytest.fixture(params=FAMILIES)
def name(request) -> str:
    return request.param


@pytest.fixture(params=[*FAMILIES, "v4"])
def any_name(request) -> str:
    return request.param


def make(name: str, **options: Any) -> Any:
    if name == "v4":
        pytest.importorskip("transformers.models.deepseek_v4")
        from support.transformers_v4 import model_of

        return model_of(**options).requires_grad_(True).train()
    if name in SUPPORTED and not options and name not in FAMILIES:
        return copy.deepcopy(_stock(name)).requires_grad_(True).train()
    family, of_family = (FAMILIES | SCALED)[name]
    if not hasattr(transformers, f"{family}Config"):
        pytest.skip(f"transformers {transformers.__version__} has no {family}")
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**SIZES | EXPERTS | of_family | options)
    return getattr(transformers, f"{family}ForCausalLM")(config).train()


def step(model: Any, inputs: dict[str, torch.Tensor], **options: Any) -> Any:
    """Outputs of a step, with gradients in the parameters."""
    labels = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, -100)
    outputs = model(**inputs, labels=labels, **options)
    outputs.loss.backward()
    return outputs


def gradients(model: Any) -> dict[str, torch.Tensor]:
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def layers_of(model: Any) -> Any:
    """The decoder layers of a model, or of its language model."""
    return getattr(model.model, "language_model", model.model).layers


def checkpointing(model: Any, use_reentrant: bool) -> None:
    kwargs = {"use_reentrant": use_reentrant}
    if hasattr(model, "activation_checkpointing_enable"):
        model.activation_checkpointing_enable(activation_checkpointing_kwargs=kwargs)
    else:  # before transformers 5.24
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=kwargs)


def assert_close(result: torch.Tensor, expected: torch.Tensor, what: str = "") -> None:
    error = ((result - expected).abs().max() / expected.abs().max().clamp_min(1e-12)).item()
    # Gradients of the weights of residual streams are small differences of large sums.
    assert error < (1e-3 if "hc" in what else 1e-4), f"{what} differs by {error:.2e} of its largest element"


@pytest.fixture
def attended(monkeypatch) -> list[bool]:
    """Whether each layer's attention so far selected tokens."""
    seen: list[bool] = []
    attend = training.attend

    def watched(*args: Any, **kwargs: Any) -> Any:
        output = attend(*args, **kwargs)
        seen.append(output.indices is not None)
        return output

    monkeypatch.setattr(training, "attend", watched)
    return seen


@pytest.mark.parametrize("side", [None, "left", "right"])
def test_gradients_are_stock_attention_s(name, prompts, attended, side):
    """The indexer's gradients come from its own loss, which stock attention does not have."""
    inputs = prompts((0, 0) if side is None else (5, 9), length=LENGTH, side=side or "left")
    stock = make(name)
    model = enable(copy.deepcopy(stock), indexer_loss_coef=0.5)
    expected, outputs = step(stock, inputs), step(model, inputs)
    assert attended == [name != "v3"] * len(model.model.layers)
    assert outputs.get(CACHE) is None
    own = outputs.loss - (0.5 * outputs.indexer_loss if name != "v3" else 0)
    assert_close(own, expected.loss, "loss")
    shown = inputs["attention_mask"].bool()
    assert_close(outputs.logits[shown], expected.logits[shown], "logits")
    found, wanted = gradients(model), gradients(stock)
    assert {key for key in found if ".indexer." not in key} == wanted.keys()
    for key, gradient in wanted.items():
        assert_close(found[key], gradient, key)
    of_indexers = {key for key, _ in model.named_parameters() if ".indexer." in key}
    assert of_indexers <= found.keys()
    assert bool(of_indexers) == (name != "v3")
    assert all(found[key].abs().sum() > 0 for key in of_indexers)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", [name for name in SUPPORTED if name not in REFUSED])
def test_gradients_of_every_family(name, side, attended):
    """With padding whose embedding is not 0; the token after padding on the left is predicted from padding."""
    stock = copy.deepcopy(_stock(name)).requires_grad_(True).train()
    model = enable(copy.deepcopy(stock))
    ids = torch.randint(1, 64, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[0, slice(0, 5) if side == "left" else slice(-5, None)] = 0
    inputs = {"input_ids": ids, "attention_mask": mask}
    expected, outputs = step(stock, inputs, use_cache=False), step(model, inputs, use_cache=False)
    assert attended
    assert any(attended) == (outputs.get("indexer_loss") is not None)
    assert_close(outputs.loss - outputs.get("indexer_loss", 0), expected.loss, "loss")
    found, wanted = gradients(model), gradients(stock)
    assert {key for key in found if ".indexer." not in key} == wanted.keys()
    for key, gradient in wanted.items():
        assert_close(found[key], gradient, key)


@pytest.mark.parametrize("side", [None, "left"])
def test_the_language_model_inside_hy4_vl(prompts, attended, side):
    """Its positions have three axes."""
    stock = hy4_vl().train()
    model = enable(copy.deepcopy(stock))
    inputs = prompts((5, 0) if side else (0, 0), length=LENGTH)
    inputs["input_ids"] = inputs["input_ids"].clamp(max=61)
    expected, outputs = step(stock, inputs), step(model, inputs)
    assert all(attended)
    assert_close(outputs.loss - outputs.indexer_loss, expected.loss, "loss")
    found = gradients(model)
    for key, gradient in gradients(stock).items():
        assert_close(found[key], gradient, key)


def sharing_model() -> Any:
    """A Mistral Large 4 with ``SHARING``, whose learned frequencies and factors are not the initial ones."""
    if not hasattr(transformers, "MistralLarge4Config"):
        pytest.skip(f"transformers {transformers.__version__} has no MistralLarge4")
    torch.manual_seed(0)
    text = transformers.MistralLarge4TextConfig(**SIZES | EXPERTS | LARGE4 | SHARING)
    model = transformers.MistralLarge4TextModel(text).train()
    for name, weight in model.named_parameters():
        if name.endswith(DRAWN):
            weight.data.normal_(0.0, 0.5)
    return model


def weighted_sum(model: Any, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """A weighted sum of a decoder's last hidden states, with gradients in the parameters."""
    hidden = model(**inputs, use_cache=False).last_hidden_state
    total = (hidden * torch.randn(hidden.shape, generator=torch.Generator().manual_seed(5))).sum()
    total.backward()
    return total


def test_latents_of_several_layers_are_shared(prompts, attended):
    """Gradients of readers reach the layer whose latents they read, also under a checkpoint."""
    inputs, stock = prompts((0, 3), length=LENGTH), sharing_model()
    model = enable(copy.deepcopy(stock))
    total, expected = weighted_sum(model, inputs), weighted_sum(stock, inputs)
    assert len(attended) == 5
    assert_close(total, expected)
    found, wanted = gradients(model), gradients(stock)
    assert {"rotary_emb.alpha", "layers.4.self_attn.softmax_scaling.scale"} <= wanted.keys()
    for key, gradient in wanted.items():
        assert_close(found[key], gradient, key)
    model.zero_grad()
    checkpointing(model, use_reentrant=False)
    assert weighted_sum(model, inputs).equal(total)
    again = gradients(model)
    for key, gradient in wanted.items():
        assert_close(again[key], gradient, key)
    checkpointing(model, use_reentrant=True)
    with pytest.raises(ValueError, match=r"^a reentrant checkpoint loses the gradients of latents that layers share: "):
        model(**inputs, use_cache=False)


def test_layers_may_prefer_stock_attention(prompts, attended, monkeypatch):
    """As in float32 on a GPU."""
    inputs, stock = prompts((0, 3), length=LENGTH), make("v3")
    model = enable(copy.deepcopy(stock))
    monkeypatch.setattr("flashlatte.integrations.transformers.training.prefers_stock", lambda module, step: True)
    step(stock, inputs)
    step(model, inputs)
    assert not attended
    found = gradients(model)
    for key, gradient in gradients(stock).items():
        assert_close(found[key], gradient, key)


@pytest.mark.parametrize("name", REFUSED)
def test_families_that_do_not_train_are_refused(name, prompts, attended):
    inputs = prompts((0, 0), length=LENGTH)
    model = enable(copy.deepcopy(_stock(name)).requires_grad_(True).train())
    with pytest.raises(ValueError, match=r"compute this training step: its indexer selects pools"):
        step(model, inputs)
    for key, parameter in model.named_parameters():
        parameter.requires_grad_(".indexer." not in key)
    step(model, inputs)
    assert not attended


def test_short_sequences_attend_to_every_token(prompts, attended):
    inputs = prompts((0, 3), length=6)
    stock = make("v32")
    model = enable(copy.deepcopy(stock))
    step(stock, inputs)
    outputs = step(model, inputs)
    assert attended == [False] * len(model.model.layers)
    assert outputs.indexer_loss > 0
    found = gradients(model)
    for key, gradient in gradients(stock).items():
        assert_close(found[key], gradient, key)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing_changes_nothing(any_name, prompts, use_reentrant):
    """A reentrant checkpoint records no graph in its first pass; indexers are trained nevertheless."""
    inputs = prompts((0, 4), length=LENGTH)
    model = enable(make(any_name))
    outputs = step(model, inputs)
    expected = gradients(model)
    model.zero_grad()
    checkpointing(model, use_reentrant)
    again = step(model, inputs)
    assert again.loss.equal(outputs.loss)
    found = gradients(model)
    assert found.keys() == expected.keys()
    assert all(gradient.equal(expected[key]) for key, gradient in found.items())


@pytest.mark.parametrize("any_name", [*FAMILIES, "v4", "large4"])
def test_autocast(any_name, prompts):
    inputs = prompts((0, 4), length=LENGTH)
    stock = make(any_name)
    model = enable(copy.deepcopy(stock))
    with torch.autocast("cpu", torch.bfloat16):
        expected, outputs = stock(**inputs), model(**inputs, labels=inputs["input_ids"])
    outputs.loss.backward()
    assert all(gradient.isfinite().all() for gradient in gradients(model).values())
    if any_name == "v3":
        # The indexers' selections differ where scores are close.
        shown = inputs["attention_mask"].bool()
        error = (outputs.logits.float() - expected.logits.float())[shown].abs().max() / expected.logits.abs().max()
        assert error < 0.1


@pytest.mark.parametrize("option", ["output_attentions", CACHE, "mask", "dropout", "implementation"])
def test_other_steps_are_stock_attention_s_or_refused(prompts, attended, option):
    """An error if an indexer would not be trained."""
    inputs = prompts((0, 0), length=12)
    options: dict[str, Any] = {}
    if option == "output_attentions":
        options[option] = True
    elif option == "mask":
        inputs["attention_mask"][0, 4:6] = 0
    of_model = {"attention_dropout": 0.1} if option == "dropout" else {}
    implementation = "eager" if option in ("output_attentions", "implementation") else "sdpa"
    for name in ("v3", "v32"):
        model = make(name, **of_model)
        model.set_attn_implementation(implementation)
        enable(model)
        if option == CACHE:
            options[option] = transformers.DynamicCache(config=model.config)
        if name == "v3":
            step(model, inputs, **options)
        else:
            with pytest.raises(ValueError, match=r"^an enabled model whose indexer is trained cannot compute .*: it"):
                step(model, inputs, **options)
            for layer in model.model.layers:
                layer.self_attn.indexer.requires_grad_(False)
            step(model, inputs, **options)
    assert not attended


def test_generation_and_disable_after_training(name, prompts, attended):
    stock, inputs = make(name), prompts((0, 4), length=LENGTH)
    model = enable(copy.deepcopy(stock))
    step(model, inputs)
    trained = copy.deepcopy(model)
    with torch.no_grad():
        options = {"max_new_tokens": 4, "do_sample": False}
        assert torch.equal(model.eval().generate(**inputs, **options), stock.eval().generate(**inputs, **options))
    count = len(attended)
    step(trained, inputs)
    assert len(attended) == 2 * count
    assert "indexer_loss" not in step(disable(trained), inputs)
    assert len(attended) == 2 * count
