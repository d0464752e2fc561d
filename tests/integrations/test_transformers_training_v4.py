"""Training steps of an enabled DeepSeek-V4, compared with transformers' attention, in float32."""

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
    """The indexer's gradients come from its own loss, which stock attention does not have."""
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


def test_padding_is_excluded_from_the_loss():
    """A row with padding on the right has the loss of the row without padding."""
    model = enable(make("v4"))
    ids, mask = tokens(1, LENGTH), torch.ones(1, LENGTH, dtype=torch.int64)
    mask[:, 30:] = 0
    padded, alone = model(ids, attention_mask=mask), model(ids[:, :30])
    assert_close(padded.indexer_loss, alone.indexer_loss)


# Of one token, shorter than a group, as many as form groups of 4, and more groups than the indexer selects.
LENGTHS = (1, 3, 29, 8, 1, 23, 2)


def packed_inputs(by: str) -> dict[str, torch.Tensor]:
    """Sequences in one row, separated by ``by``: "position_ids", "cu_seq_lens" or "both"."""
    inputs = {"input_ids": tokens(1, sum(LENGTHS))}
    if by != "cu_seq_lens":
        inputs["position_ids"] = torch.cat([torch.arange(length) for length in LENGTHS])[None]
    if by != "position_ids":
        inputs["cu_seq_lens_q"] = torch.tensor([0, *LENGTHS]).cumsum(0).int()
    return inputs


def weighted_logits(outputs, first=0):
    logits = outputs.logits[0]
    weights = torch.randn(sum(LENGTHS), logits.shape[1], generator=torch.Generator().manual_seed(5))
    return (logits * weights[first : first + len(logits)]).sum()


@pytest.mark.parametrize("by", ["position_ids", "cu_seq_lens", "both"])
def test_packed_sequences_are_those_alone(attended, by):
    model = enable(make("v4"))
    inputs = packed_inputs(by)
    alone, logits, first = torch.zeros(()), [], 0
    # Tokens with a group to attend to, over which the mean of a layer's loss is.
    counts = [max(0, length - 3) for length in LENGTHS]
    for length, count in zip(LENGTHS, counts, strict=True):
        outputs = model(input_ids=inputs["input_ids"][:, first : first + length])
        alone = alone + weighted_logits(outputs, first) + outputs.get("indexer_loss", 0.0) * count / sum(counts)
        logits.append(outputs.logits)
        first += length
    alone.backward()
    expected = gradients(model)
    model.zero_grad()
    attended.clear()
    outputs = model(**inputs)
    assert attended == [False, True, False]
    assert_close(outputs.logits, torch.cat(logits, dim=1), "logits")
    total = weighted_logits(outputs) + outputs.indexer_loss
    assert_close(total, alone, "loss")
    total.backward()
    found = gradients(model)
    assert found.keys() == expected.keys()
    for key, gradient in expected.items():
        assert_close(found[key], gradient, key)


def test_packed_rows_of_a_batch_are_those_alone():
    """Two rows with different boundaries: a sequence does not continue in the next row."""
    model = enable(make("v4"))
    lengths = ((20, 17), (5, 32))
    ids = tokens(2, LENGTH)
    positions = torch.stack([torch.cat([torch.arange(length) for length in row]) for row in lengths])
    outputs = model(input_ids=ids, position_ids=positions)
    for row, parts in enumerate(lengths):
        alone = [model(input_ids=part[None]).logits[0] for part in ids[row].split(parts)]
        assert_close(outputs.logits[row], torch.cat(alone), "logits")


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"position_ids": torch.arange(3, LENGTH + 3)[None]}, "its position_ids do not count from 0 in each sequence"),
        (
            {"position_ids": torch.arange(LENGTH)[None], "cu_seq_lens_q": torch.tensor([0, LENGTH, 2 * LENGTH - 4])},
            f"its cu_seq_lens_q do not lead from 0 to its {2 * LENGTH} tokens",
        ),
        (
            {"position_ids": torch.arange(LENGTH)[None], "cu_seq_lens_q": torch.tensor([0, 9, 2 * LENGTH])},
            "its position_ids do not count from 0 in each sequence",
        ),
        ({"position_ids": torch.arange(LENGTH)[None], "attention_mask": mask_of()}, "it has position_ids and an att"),
        ({"cu_seq_lens_q": torch.tensor([0, 9, 2 * LENGTH]), "attention_mask": mask_of()}, "it has cu_seq_lens_q and"),
    ],
)
def test_unsupported_boundaries_are_refused(attended, options, reason):
    with pytest.raises(ValueError, match=f"cannot compute this training step: {reason}"):
        enable(make("v4"))(tokens(2, LENGTH), **options)
    assert not attended


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
    with pytest.raises(ValueError, match=r"^an enabled model whose indexer is trained cannot compute this .*: it"):
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
