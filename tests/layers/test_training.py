"""Gradients of ``MLAAttention.forward_training`` compared with transformers' modules, in float32."""

from __future__ import annotations

import copy
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
from layers.stock import INDEXED_MODELS, MODELS, Stock, assert_within, hidden_states, layer_like, stock
from support.training_calls import relative_errors
from torch.utils.checkpoint import checkpoint

from flashlatte.layers import IndexerConfig, MLAAttention, MLAConfig
from flashlatte.layers.training_batch import TrainingBatch

LENGTHS = (5, 1, 20)
FEW = ("v2-lite", "v3", "v3-yarn", "v3-half-bias", "longcat", "ling3", "kimi-linear", "mistral4", "minicpm3")
DENSE = [name if name in FEW else pytest.param(name, marks=pytest.mark.full) for name in MODELS]


def boundaries(lengths: tuple[int, ...]) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


def trainable(model: Stock, **options: Any) -> Any:
    return layer_like(model, **options).requires_grad_(True).train()


def weights_of_outputs(hidden: torch.Tensor) -> torch.Tensor:
    return torch.randn(hidden.shape, generator=torch.Generator().manual_seed(3))


def gradients(module: torch.nn.Module, hidden: torch.Tensor, total: torch.Tensor) -> dict[str, torch.Tensor]:
    named = {"hidden": hidden} | dict(module.named_parameters())
    found = torch.autograd.grad(total, list(named.values()), allow_unused=True)
    return {name: x for name, x in zip(named, found, strict=True) if x is not None}


def stock_attention(model: Stock, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, Any, torch.Tensor]:
    """The output [n, hidden_size], probabilities [h, n, n], rotary embeddings and mask of one sequence."""
    count = hidden.shape[0]
    ids, mask = torch.arange(count)[None], torch.full((count, count), -torch.inf).triu(1)[None, None]
    embeddings = None if model.rope is None else model.rope(hidden[None], ids)
    results = model.module(hidden[None], position_embeddings=embeddings, attention_mask=mask, position_ids=ids)
    return results[0][0], results[1][0], embeddings, mask


def stock_copy(model: Stock) -> Stock:
    found = copy.copy(model)
    found.module = copy.deepcopy(model.module).requires_grad_(True).train()
    return found


def stock_index_logits(model: Stock, hidden: torch.Tensor, embeddings: Any) -> torch.Tensor:
    """Logits [n, n] of a stock module's indexer, with gradients, from detached inputs."""
    module: Any = model.module
    indexer, rope = module.indexer, module.qk_rope_head_dim
    host = sys.modules[type(module).__module__]
    interleaved = type(module).__name__.startswith("Glm")
    rotate = host.apply_rotary_pos_emb_interleave if interleaved else host.apply_rotary_pos_emb
    q_latent = module.q_a_layernorm(module.q_a_proj(hidden)).detach()[None]
    q = indexer.wq_b(q_latent).unflatten(-1, (indexer.n_heads, -1))
    k = indexer.k_norm(indexer.wk(hidden.detach()[None])).unsqueeze(2)
    first = q.shape[-1] - rope if type(module).__name__.startswith("HY") else 0
    rotated = rotate(q[..., first : first + rope], k[..., first : first + rope], *embeddings, unsqueeze_dim=2)
    q, k = (
        torch.cat((x[..., :first], part, x[..., first + rope :]), dim=-1)
        for x, part in zip((q, k), rotated, strict=True)
    )
    q, k = q[0], k[0, :, 0]
    scores = torch.einsum("shd,nd->shn", q, k).relu() * indexer.softmax_scale
    return torch.einsum("sh,shn->sn", indexer.weights_proj(hidden.detach()) * indexer.n_heads**-0.5, scores)


@pytest.mark.parametrize("name", DENSE)
def test_dense_gradients_equal_stock(name):
    model = stock_copy(stock(name))
    layer = trainable(model)
    hidden = torch.cat(hidden_states(LENGTHS)).requires_grad_()
    outputs = weights_of_outputs(hidden)
    result = layer.forward_training(hidden, boundaries(LENGTHS), max(LENGTHS))
    assert result[1:] == (None, None, None)
    expected = torch.cat([stock_attention(model, part)[0] for part in hidden.split(LENGTHS)])
    assert_within(result.out, expected)
    found = gradients(layer, hidden, (result.out * outputs).sum())
    wanted = gradients(model.module, hidden, (expected * outputs).sum())
    assert found.keys() == wanted.keys()
    for key, gradient in found.items():
        assert_within(gradient, wanted[key])


@pytest.mark.parametrize("lengths", [LENGTHS, (8, 3)], ids=["selected", "all selected"])
@pytest.mark.parametrize("name", INDEXED_MODELS)
def test_sparse_gradients_equal_stock_and_the_indexer_is_trained_by_its_loss(name, lengths):
    model = stock_copy(stock(name))
    layer = trainable(model)
    hidden = torch.cat(hidden_states(lengths)).requires_grad_()
    outputs = weights_of_outputs(hidden)
    result = layer.forward_training(hidden, boundaries(lengths), max(lengths))
    expected, loss = [], torch.zeros(())
    for part in hidden.split(lengths):
        out, probabilities, embeddings, mask = stock_attention(model, part)
        expected.append(out)
        target = probabilities.sum(dim=0).detach()
        target = target / target.sum(dim=-1, keepdim=True)  # less than the number of heads with a sink
        logits = stock_index_logits(model, part, embeddings) + mask[0, 0]
        # In stock attention only the selected tokens are visible.
        log_prediction = logits.masked_fill(target == 0, -torch.inf).log_softmax(dim=-1)
        loss = loss + torch.where(target > 0, target * (target.log() - log_prediction), 0.0).sum()
    assert_within(result.out, torch.cat(expected))
    assert result.num_rows == sum(lengths)
    torch.testing.assert_close(result.indexer_loss, loss, rtol=1e-4, atol=1e-5)
    assert (result.indices is None) == (max(lengths) <= 8)

    found = gradients(layer, hidden, (result.out * outputs).sum() + result.indexer_loss)
    wanted = gradients(model.module, hidden, (torch.cat(expected) * outputs).sum() + loss)
    assert found.keys() == wanted.keys() == {"hidden", *dict(layer.named_parameters())}
    for key, gradient in found.items():
        assert_within(gradient, wanted[key], 2e-4 if key.startswith("indexer") else 2e-5)


def test_the_indexer_s_graph_is_separate():
    model = stock("v32")
    layer = trainable(model)
    hidden = torch.cat(hidden_states(LENGTHS)).requires_grad_()
    result = layer.forward_training(hidden, boundaries(LENGTHS), max(LENGTHS))
    of_loss = gradients(layer, hidden, result.indexer_loss)
    assert of_loss.keys() == {name for name, _ in layer.named_parameters() if name.startswith("indexer.")}
    result = layer.forward_training(hidden, boundaries(LENGTHS), max(LENGTHS))
    of_out = gradients(layer, hidden, result.out.sum())
    assert not of_loss.keys() & of_out.keys()


def test_a_frozen_indexer_has_no_loss():
    layer = trainable(stock("v32"))
    layer.indexer.requires_grad_(False)
    hidden = torch.cat(hidden_states(LENGTHS))
    result = layer.forward_training(hidden, boundaries(LENGTHS), max(LENGTHS))
    assert result.indexer_loss is None
    assert result.out.requires_grad


def test_warm_up_is_dense_and_learns_from_all_keys():
    layer = trainable(stock("v32"))
    hidden = torch.cat(hidden_states(LENGTHS))
    warm = layer.forward_training(hidden, boundaries(LENGTHS), max(LENGTHS), dense=True)
    layer.config = replace(layer.config, indexer=replace(layer.config.indexer, topk=max(LENGTHS)))
    whole = layer.forward_training(hidden, boundaries(LENGTHS), max(LENGTHS))
    assert warm.out.equal(whole.out)
    assert warm.indexer_loss.equal(whole.indexer_loss)
    assert warm.indices is None


def test_a_layer_that_shares_a_selection():
    model = stock("glm5")
    layer = trainable(model)
    hidden = torch.cat(hidden_states(LENGTHS))
    own = layer.forward_training(hidden, boundaries(LENGTHS), max(LENGTHS))
    shared = MLAAttention(layer.config, shares_selection=True, dtype=torch.float32)
    shared.load_weights(model.module.state_dict(), ignore=["indexer.*"])
    result = shared.forward_training(hidden, boundaries(LENGTHS), max(LENGTHS), indices=own.indices)
    assert result.out.equal(own.out)
    assert result.indexer_loss is None
    with pytest.raises(ValueError, match=r"^indices must be those of the previous layer"):
        shared.forward_training(hidden, boundaries(LENGTHS), max(LENGTHS))
    with pytest.raises(ValueError, match=r"^indices must be None for a layer that does not share a selection"):
        layer.forward_training(hidden, boundaries(LENGTHS), max(LENGTHS), indices=own.indices)


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("name", ["v3", "v32"])
def test_checkpointing_changes_nothing(name, use_reentrant):
    layer = trainable(stock(name))
    hidden = torch.cat(hidden_states(LENGTHS)).requires_grad_()

    def run(hidden):
        result = layer.forward_training(hidden, boundaries(LENGTHS), max(LENGTHS))
        return result.out if result.indexer_loss is None else (result.out, result.indexer_loss)

    found = []
    for call in (run, lambda hidden: checkpoint(run, hidden, use_reentrant=use_reentrant)):
        results = call(hidden)
        results = (results,) if isinstance(results, torch.Tensor) else results
        torch.stack([result.float().sum() for result in results]).sum().backward()
        found.append([hidden.grad, *(parameter.grad for parameter in layer.parameters())])
        hidden.grad = None
        layer.zero_grad()
    for gradient, expected in zip(*found, strict=True):
        assert gradient.equal(expected)


# PyTorch's RMSNorm of bf16 with a float32 weight.
@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
@pytest.mark.parametrize("name", ["v3", "v32"])
def test_autocast_is_close_to_float32(name):
    layer = trainable(stock(name))
    hidden = torch.cat(hidden_states(LENGTHS)).requires_grad_()
    call = hidden, boundaries(LENGTHS), max(LENGTHS)
    exact = layer.forward_training(*call, dense=True)
    with torch.autocast("cpu", torch.bfloat16):
        result = layer.forward_training(*call, dense=True)
    assert result.out.dtype == torch.bfloat16
    assert_within(result.out.float(), exact.out, 0.05)
    found, expected = (gradients(layer, hidden, one.out.float().square().sum()) for one in (result, exact))
    for key, gradient in found.items():
        assert gradient.dtype == expected[key].dtype
        assert_within(gradient, expected[key], 0.1)
    with torch.autocast("cpu", torch.bfloat16):
        result = layer.forward_training(*call)
    assert all(gradient.isfinite().all() for gradient in gradients(layer, hidden, result.out.float().sum()).values())


@pytest.mark.parametrize("dense", [False, True])
def test_gradcheck(dense):
    """Also of the sinks and the indexer's head weights, which are float32 in a layer of another dtype."""
    sizes: dict[str, Any] = {"kv_lora_rank": 8, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 5}
    indexer = IndexerConfig(2, 32, topk=4)
    config = MLAConfig(16, 2, q_lora_rank=8, **sizes, indexer=indexer, attn_sink=True, output_gate="channel")
    layer = MLAAttention(config).double().requires_grad_(True)
    generator = torch.Generator().manual_seed(0)
    for parameter in layer.parameters():
        parameter.data.normal_(0.0, 0.3, generator=generator)
    weights: dict[bool, list[torch.nn.Parameter]] = {True: [], False: []}
    for name, parameter in layer.named_parameters():
        weights[name.startswith("indexer.")].append(parameter)
    hidden = torch.randn(10, 16, generator=generator, dtype=torch.float64)

    def results(index: int) -> Any:
        return lambda *_: layer.forward_training(hidden, torch.tensor([0, 7, 7, 10]), 7, dense=dense)[index]

    if dense:
        assert torch.autograd.gradcheck(results(1), weights[True], fast_mode=True)
    for parameter in weights[True]:
        parameter.requires_grad_(False)
    assert torch.autograd.gradcheck(results(0), (hidden.requires_grad_(), *weights[False]), fast_mode=True)


@pytest.mark.interpreter
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("dense", [False, pytest.param(True, marks=pytest.mark.full)])
def test_kernels_in_bf16_are_close_to_float32(dense):
    indexer = IndexerConfig(4, 32, topk=16)
    sizes: dict[str, Any] = {"kv_lora_rank": 64, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32}
    config = MLAConfig(hidden_size=64, num_attention_heads=4, q_lora_rank=32, **sizes, indexer=indexer)
    errors = relative_errors(config, (25, 15), dense=dense)
    assert len(errors) == 15
    assert max(errors.values()) < 0.02, errors


def test_tokens_outside_the_boundaries_belong_to_no_sequence():
    batch = TrainingBatch.packed(torch.tensor([2, 4, 4, 7]), 3, 9)
    assert batch.key_start.tolist() == [0, 0, 2, 2, 4, 4, 4, 0, 0]
    assert batch.key_end.tolist() == [0, 0, 3, 4, 5, 6, 7, 0, 0]


def test_boundaries_are_clamped():
    """On a GPU they are not checked."""
    batch = TrainingBatch.packed(torch.tensor([-5, 4, 2, 2**32]), 3, 9)
    assert batch.cu_seqlens.tolist() == [0, 4, 4, 9]
    assert batch.key_start.tolist() == [0] * 4 + [4] * 5


def test_parts_without_a_gradient_are_refused():
    layer = trainable(stock("v3"))
    call = torch.cat(hidden_states(LENGTHS)), boundaries(LENGTHS), max(LENGTHS)
    layer.gate = torch.nn.Linear(2, 2)
    with pytest.raises(ValueError, match=r"^module must have only parts that training supports, got gate"):
        layer.forward_training(*call)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"hidden": torch.zeros(26, 9)}, ValueError, r"^hidden must have shape \[tokens, 64\]"),
        ({"hidden": torch.zeros(26, 64).half()}, TypeError, "^hidden must be float32, got float16$"),
        ({"cu_seqlens": boundaries(LENGTHS).float()}, TypeError, "^cu_seqlens must be int32 or int64, got float32$"),
        ({"max_seqlen": 0}, ValueError, "^max_seqlen must be"),
        ({"max_seqlen": 513}, ValueError, "^max_seqlen must be at most the config's rope.max_position 512, got 513$"),
        ({"max_seqlen": 19}, ValueError, "^max_seqlen must be at least the 20 tokens of the longest sequence, got 19$"),
        ({"cu_seqlens": torch.tensor([0, 20, 10])}, ValueError, "^cu_seqlens must not decrease"),
        ({"cu_seqlens": torch.tensor([0, 2**32])}, ValueError, "^cu_seqlens must be between 0 and 26"),
        ({"cu_seqlens": torch.tensor([0])}, ValueError, r"^cu_seqlens must have shape \[n \+ 1\] with n at least 1"),
        ({"indices": torch.zeros(26, 8).int()}, ValueError, r"^indices must have shape \[26, 1, topk\]"),
        ({"indices": torch.zeros(26, 1, 8).int()}, ValueError, "^indices must be None for a layer that does not share"),
        ({"dense": 1}, TypeError, "^dense must be True or False, got 1$"),
    ],
)
def test_errors_name_the_argument(change, error, message):
    call = {"hidden": torch.zeros(26, 64), "cu_seqlens": boundaries(LENGTHS), "max_seqlen": 20}
    with pytest.raises(error, match=message):
        layer_like(stock("v3")).forward_training(**(call | change))
