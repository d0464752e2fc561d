"""Training steps of enabled models over packed sequences, compared with separate sequences and stock attention."""

# A fixture's name is both a module-level name and an argument.
# ruff: noqa: F811

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from integrations.test_transformers_families import SIZES
from integrations.test_transformers_training import (
    FAMILIES,
    assert_close,
    attended,  # noqa: F401
    gradients,
    make,
)

from flashlatte.integrations.transformers import enable

# Some sequences are shorter than the indexers select.
LENGTHS = (20, 1, 4, 9)


def packed_inputs(by: str) -> dict[str, torch.Tensor]:
    """Sequences in one row, separated by ``by``: "position_ids", "cu_seq_lens" or "both"."""
    tokens = torch.randint(SIZES["vocab_size"], (1, sum(LENGTHS)), generator=torch.Generator().manual_seed(4))
    inputs = {"input_ids": tokens}
    boundaries = torch.tensor([0, *LENGTHS]).cumsum(0).int()
    if by != "cu_seq_lens":
        inputs["position_ids"] = torch.cat([torch.arange(length) for length in LENGTHS])[None]
    if by != "position_ids":
        inputs |= {"cu_seq_lens_q": boundaries, "cu_seq_lens_k": boundaries.clone()}
    return inputs


def weighted_logits(outputs: Any, first: int = 0) -> torch.Tensor:
    weights = torch.randn(sum(LENGTHS), SIZES["vocab_size"], generator=torch.Generator().manual_seed(5))
    logits = outputs.logits[0]
    return (logits * weights[first : first + logits.shape[0]]).sum()


@pytest.mark.parametrize("by", ["position_ids", "cu_seq_lens", "both"])
@pytest.mark.parametrize("name", [*FAMILIES, "mistral4", "large4"])
def test_packed_sequences_are_those_alone(name, attended, by):
    model, tokens = enable(make(name)), packed_inputs(by)["input_ids"]
    alone, first = torch.zeros(()), 0
    for length in LENGTHS:
        outputs = model(input_ids=tokens[:, first : first + length])
        # The mean over the rows of each sequence.
        alone = alone + weighted_logits(outputs, first) + outputs.get("indexer_loss", 0.0) * length / sum(LENGTHS)
        first += length
    alone.backward()
    expected = gradients(model)
    model.zero_grad()
    attended.clear()
    outputs = model(**packed_inputs(by))
    assert attended == [name not in ("v3", "mistral4")] * model.config.get_text_config().num_hidden_layers
    total = weighted_logits(outputs) + outputs.get("indexer_loss", 0.0)
    assert_close(total, alone)
    total.backward()
    found = gradients(model)
    assert found.keys() == expected.keys()
    for key, gradient in expected.items():
        assert_close(found[key], gradient, key)


@pytest.mark.parametrize("name", FAMILIES)
def test_packed_sequences_are_stock_attention_s(name, attended):
    """Compared for the model's loss only: stock attention has no loss of indexers. Two rows, with different or equal
    sequences."""
    stock, inputs = make(name), packed_inputs("position_ids")
    model = enable(copy.deepcopy(stock))
    tokens = inputs["input_ids"].repeat(2, 1)
    positions = inputs["position_ids"]
    others = torch.cat([torch.arange(length) for length in reversed(LENGTHS)])[None]
    for given in (torch.cat((positions, others)), positions):
        # With a cache, stock attention ignores where sequences end.
        expected = stock(input_ids=tokens, position_ids=given, use_cache=False)
        outputs = model(input_ids=tokens, position_ids=given)
        assert len(attended) == len(model.model.layers)
        assert_close(outputs.logits, expected.logits, "logits")
        for one, result in ((stock, expected), (model, outputs)):
            one.zero_grad()
            weighted_logits(result).backward()
        found = gradients(model)
        for key, gradient in gradients(stock).items():
            assert_close(found[key], gradient, key)
        attended.clear()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"cu_seq_lens_q": torch.tensor([0, 20, 35])}, "its cu_seq_lens_q do not lead from 0 to its 34 tokens"),
        ({"cu_seq_lens_q": torch.tensor([0, 20, 10, 34])}, "its cu_seq_lens_q do not lead from 0 to its 34 tokens"),
        ({"cu_seq_lens_k": torch.tensor([0, 12, 34])}, "its cu_seq_lens_k differ from its cu_seq_lens_q"),
        ({"cu_seq_lens_q": None}, "it has cu_seq_lens_k without cu_seq_lens_q"),
        ({"attention_mask": torch.ones(1, 34).long()}, "it has cu_seq_lens_q and an attention_mask"),
        ({"cu_seq_lens_q": torch.zeros(2)}, r"its cu_seq_lens_q are not int32 or int64 \[n \+ 1\]"),
    ],
)
def test_boundaries_that_are_not_those_of_the_tokens(change, reason):
    inputs = packed_inputs("cu_seq_lens")
    if "cu_seq_lens_q" in change and change["cu_seq_lens_q"] is not None:
        del inputs["cu_seq_lens_k"]
    with pytest.raises(ValueError, match=f": {reason}. Freeze the indexer"):
        enable(make("v32"))(**inputs | change)
