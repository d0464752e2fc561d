"""Gradients of ``V4Attention.forward_training`` compared with transformers' attention, in float32."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from layers.stock import assert_within

pytest.importorskip("transformers.models.deepseek_v4")

from layers.v4.test_against_transformers import KINDS, modeling, stock_config, stock_layer
from torch.utils.checkpoint import checkpoint

from flashlatte.layers.v4 import V4Attention, V4Config

SLIDING, SELECTING, COMPRESSING = KINDS
# More groups than the indexer selects, none, and as many tokens as form groups.
LENGTHS = (43, 3, 32)
# Of one token, of one group of the smaller ratio and a token more, and shorter than a group at the end of the batch.
SHORT_LENGTHS = (1, 1, 5, 31, 2, 4, 17, 3)


def layers_of(kind: str, head_dim: int = 32, **change: Any) -> tuple[Any, Any, Any]:
    """transformers' config and layer, and a ``V4Attention`` with its weights."""
    config = stock_config(kind, head_dim, **change)
    stock = stock_layer(config, 0).train()
    layer = V4Attention(V4Config.from_transformers(config, 0)).train()
    layer.load_state_dict({name: x for name, x in stock.state_dict().items() if "rotary_emb" not in name})
    return config, stock, layer.requires_grad_(True)


def hidden_of(lengths: tuple[int, ...] = LENGTHS) -> torch.Tensor:
    return torch.randn(sum(lengths), 48, generator=torch.Generator().manual_seed(1)).requires_grad_()


def boundaries(lengths: tuple[int, ...] = LENGTHS) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


def run_stock(stock: Any, config: Any, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """One sequence: output [n, hidden_size], probabilities [h, n, n + groups], and index logits [n, groups]."""
    count = hidden.shape[0]
    positions = torch.arange(count)[None]
    embeddings = modeling.DeepseekV4RotaryEmbedding(config)
    tables = {name: embeddings(hidden, position_ids=positions, layer_type=name) for name in ("main", "compress")}
    distance = positions.T - positions
    visible = (distance >= 0) & (distance < config.sliding_window)
    mask = torch.zeros(1, 1, count, count).masked_fill(~visible, -torch.inf)
    logits: list[torch.Tensor] = []
    indexer = getattr(stock.compressor, "indexer", None)
    if indexer is not None:
        scorer = indexer.scorer.register_forward_hook(lambda module, args, output: logits.append(output[0]))
        pre = indexer.register_forward_pre_hook(lambda module, args: (args[0].detach(), args[1].detach(), *args[2:]))
    out, probabilities = stock(hidden[None], tables, positions, mask)
    if indexer is not None:
        scorer.remove()
        pre.remove()
    return out[0], probabilities[0], logits[0] if logits else torch.zeros(count, 0)


def loss_of_stock(probabilities: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """The divergence of the softmax of the logits from the attention to the groups, over the selected ones."""
    target = probabilities[..., probabilities.shape[1] :].detach().sum(dim=0)
    if not target.shape[1]:
        return target.new_zeros(())
    seen = target > 0
    target = target / target.sum(dim=-1, keepdim=True).clamp_min(1e-30)
    log_prediction = logits.masked_fill(~seen, -torch.inf).log_softmax(dim=-1)
    return torch.where(seen, target * (target.clamp_min(1e-30).log() - log_prediction), 0.0).sum()


def gradients(module: torch.nn.Module, hidden: torch.Tensor, total: torch.Tensor) -> dict[str, torch.Tensor]:
    named = {"hidden": hidden} | dict(module.named_parameters())
    found = torch.autograd.grad(total, list(named.values()), allow_unused=True)
    return {name: x for name, x in zip(named, found, strict=True) if x is not None}


def weighted(out: torch.Tensor) -> torch.Tensor:
    return (out * torch.randn(out.shape, generator=torch.Generator().manual_seed(3))).sum()


@pytest.mark.parametrize("lengths", [LENGTHS, SHORT_LENGTHS, (10, 9)], ids=["selected", "short", "all selected"])
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_equal_stock_and_the_indexer_is_trained_by_its_loss(kind, lengths):
    config, stock, layer = layers_of(kind)
    hidden = hidden_of(lengths)
    result = layer.forward_training(hidden, boundaries(lengths), max(lengths))
    found_stock = [run_stock(stock, config, part) for part in hidden.split(lengths)]
    expected = torch.cat([out for out, _, _ in found_stock])
    assert_within(result.out, expected)
    total, wanted_total = weighted(result.out), weighted(expected)
    if kind == SELECTING:
        loss = torch.stack([loss_of_stock(*rest) for _, *rest in found_stock]).sum()
        torch.testing.assert_close(result.indexer_loss, loss, rtol=1e-4, atol=1e-5)
        assert result.num_rows == sum(max(0, length - 3) for length in lengths)
        assert (result.indices is None) == (max(lengths) // 4 <= 3)
        total, wanted_total = total + result.indexer_loss, wanted_total + loss
    else:
        assert result[1:] == (None, None, None)
    found, wanted = gradients(layer, hidden, total), gradients(stock, hidden, wanted_total)
    assert found.keys() == wanted.keys() == {"hidden", *dict(layer.named_parameters())}
    for key, gradient in found.items():
        assert_within(gradient, wanted[key], 2e-4 if ".indexer." in key else 5e-5)


def test_gradients_in_float64_at_head_dim_512():
    config, stock, layer = layers_of(SELECTING, 512)
    stock, layer = stock.double(), layer.double()
    hidden = hidden_of((22,)).detach().double().requires_grad_()
    result = layer.forward_training(hidden, boundaries((22,)), 22)
    expected = run_stock(stock, config, hidden)[0]
    found, wanted = (gradients(one, hidden, weighted(out)) for one, out in ((layer, result.out), (stock, expected)))
    # transformers' norms compute in float32.
    assert_within(result.out, expected, 1e-6)
    assert found.keys() == wanted.keys()
    for key, gradient in found.items():
        assert_within(gradient, wanted[key], 1e-5)


def test_the_indexer_s_graph_is_separate():
    _, _, layer = layers_of(SELECTING)
    hidden = hidden_of()
    result = layer.forward_training(hidden, boundaries(), max(LENGTHS))
    of_loss = gradients(layer, hidden, result.indexer_loss)
    assert of_loss.keys() == {name for name, _ in layer.named_parameters() if ".indexer." in name}
    of_out = gradients(layer, hidden, layer.forward_training(hidden, boundaries(), max(LENGTHS)).out.sum())
    assert not of_loss.keys() & of_out.keys()
    layer.compressor.indexer.requires_grad_(False)
    assert layer.forward_training(hidden, boundaries(), max(LENGTHS)).indexer_loss is None


def test_warm_up_attends_to_all_groups_and_learns_from_them():
    _, _, layer = layers_of(SELECTING)
    hidden = hidden_of()
    warm = layer.forward_training(hidden, boundaries(), max(LENGTHS), dense=True)
    layer.config = replace(layer.config, indexer=replace(layer.config.indexer, topk=16))
    whole = layer.forward_training(hidden, boundaries(), max(LENGTHS))
    assert warm.out.equal(whole.out)
    assert warm.indexer_loss.equal(whole.indexer_loss)
    assert warm.indices is None


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_checkpointing_changes_nothing(kind, use_reentrant):
    _, _, layer = layers_of(kind)
    hidden, found = hidden_of(), []

    def run(hidden):
        result = layer.forward_training(hidden, boundaries(), max(LENGTHS))
        return (result.out,) if result.indexer_loss is None else (result.out, result.indexer_loss)

    for call in (run, lambda hidden: checkpoint(run, hidden, use_reentrant=use_reentrant)):
        torch.stack([result.sum() for result in call(hidden)]).sum().backward()
        found.append([hidden.grad, *(parameter.grad for parameter in layer.parameters())])
        hidden.grad = None
        layer.zero_grad()
    for gradient, expected in zip(*found, strict=True):
        assert gradient.equal(expected)


@pytest.mark.parametrize("kind", KINDS)
def test_autocast_is_close_to_float32(kind):
    _, _, layer = layers_of(kind)
    hidden = hidden_of()
    exact = layer.forward_training(hidden, boundaries(), max(LENGTHS), dense=True)
    with torch.autocast("cpu", torch.bfloat16):
        result = layer.forward_training(hidden, boundaries(), max(LENGTHS), dense=True)
    assert result.out.dtype == torch.bfloat16
    assert_within(result.out.float(), exact.out, 0.05)
    found, expected = (gradients(layer, hidden, weighted(one.out.float())) for one in (result, exact))
    for key, gradient in found.items():
        assert gradient.dtype == expected[key].dtype
        assert_within(gradient, expected[key], 0.1)


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_of_no_sequence_and_unused_groups(kind):
    """Their attention output is 0, and NaN in them does not propagate to other tokens."""
    _, _, layer = layers_of(kind)
    hidden, lengths = hidden_of(), torch.tensor([0, 43, 46])
    expected = layer.forward_training(hidden[:46], lengths, 43)
    poisoned = torch.cat((hidden[:46], torch.full((32, 48), torch.nan)))
    result = layer.forward_training(poisoned, lengths, 43)
    assert_within(result.out[:46], expected.out, 1e-6)
    assert result.num_rows is None or result.num_rows == expected.num_rows


@pytest.mark.parametrize("lengths", [(1,), (2, 1)])
def test_fewer_tokens_than_a_group(lengths):
    """The indexer has a loss of no rows, so that a step has the same results for any number of tokens."""
    config, stock, layer = layers_of(SELECTING)
    hidden = hidden_of(lengths)
    result = layer.forward_training(hidden, boundaries(lengths), max(lengths))
    expected = torch.cat([run_stock(stock, config, part)[0] for part in hidden.split(lengths)])
    assert_within(result.out, expected)
    assert (result.indexer_loss, result.num_rows, result.indices) == (0, 0, None)
    found = gradients(layer, hidden, weighted(result.out) + result.indexer_loss)
    wanted = gradients(stock, hidden, weighted(expected))
    assert found.keys() == {"hidden", *dict(layer.named_parameters())}
    for key, gradient in found.items():
        if key in wanted:
            assert_within(gradient, wanted[key], 5e-5)
        else:
            assert gradient.eq(0).all(), key


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"hidden": torch.zeros(26, 9)}, ValueError, r"^hidden must have shape \[tokens, 48\]"),
        ({"hidden": torch.zeros(26, 48).half()}, TypeError, "^hidden must be float32, got float16$"),
        ({"cu_seqlens": torch.zeros(2)}, TypeError, "^cu_seqlens must be int32 or int64, got float32$"),
        ({"max_seqlen": 257}, ValueError, "^max_seqlen must be at most the config's rope.max_position 256, got 257$"),
        ({"max_seqlen": 25}, ValueError, "^max_seqlen must be at least the 26 tokens of the longest sequence, got 25$"),
        ({"cu_seqlens": torch.tensor([-5, 26])}, ValueError, "^cu_seqlens must be between 0 and 26"),
        ({"cu_seqlens": torch.tensor([0])}, ValueError, r"^cu_seqlens must have shape \[n \+ 1\] with n at least 1"),
        ({"dense": 1}, TypeError, "^dense must be True or False, got 1$"),
    ],
)
def test_errors_name_the_argument(change, error, message):
    call = {"hidden": torch.zeros(26, 48), "cu_seqlens": torch.tensor([0, 26]), "max_seqlen": 26}
    layer = V4Attention(V4Config.from_transformers(stock_config(SLIDING), 0))
    with pytest.raises(error, match=message):
        layer.forward_training(**(call | change))


def test_parts_without_a_gradient_are_refused():
    _, _, layer = layers_of(COMPRESSING)
    layer.compressor.gate = torch.nn.Linear(2, 2)
    with pytest.raises(ValueError, match=r"^module must have only parts that training supports, got gate"):
        layer.forward_training(hidden_of(), boundaries(), max(LENGTHS))
