"""DeepSeek-V4 under ``enable``: stock attention's logits for any positions and mask."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.overrides import TorchFunctionMode

pytest.importorskip("transformers")
pytest.importorskip("transformers.models.deepseek_v4.modeling_deepseek_v4")

from support.transformers_v4 import logits_by_steps, model_of, tokens

from flashlatte.integrations.transformers import enable
from flashlatte.integrations.transformers.calls import CACHE
from flashlatte.integrations.transformers.v4.masks import PassMask
from flashlatte.integrations.transformers.v4.store import V4Store
from flashlatte.layers.v4 import WorkspaceLimits

COLUMNS = 29
COLUMN = torch.arange(COLUMNS)
STEPS = [
    pytest.param([COLUMNS], id="whole", marks=pytest.mark.full),
    pytest.param([17, 1, 1, 10], id="chunks"),
]


@pytest.fixture(scope="module")
def stock():
    return model_of()


@pytest.fixture(scope="module")
def enabled(stock):
    return enable(copy.deepcopy(stock), page_size=4)


def assert_stocks_logits(stock, enabled, sizes, mask=None, positions=None):
    """Logits of hidden columns too: ``generate`` reads them if prompts are padded on the right."""
    ids = tokens(3, COLUMNS)
    expected, _ = logits_by_steps(stock, ids, sizes, mask, positions)
    found, cache = logits_by_steps(enabled, ids, sizes, mask, positions)
    assert type(cache).__name__ == "PagedV4Cache"
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


POSITIONS = {
    "offset": COLUMN[None] + 8,
    "gap": (COLUMN + 8 * (COLUMN >= 10))[None],
    "stride": 3 * COLUMN[None],
    "restart": (COLUMN % 11)[None],
    "each request its own": torch.stack((COLUMN, COLUMN + 5, (COLUMN - 4).clamp_min(0))),
    "int32": (COLUMN[None] + 8).int(),
}


@pytest.mark.parametrize("sizes", STEPS)
@pytest.mark.parametrize("name", POSITIONS)
def test_positions(stock, enabled, name, sizes):
    """In stock attention (position + 1) // ratio groups are visible, also groups that end after the query."""
    assert_stocks_logits(stock, enabled, sizes, positions=POSITIONS[name])


def mask_of(name):
    if name == "holes":
        return (torch.rand(3, COLUMNS, generator=torch.Generator().manual_seed(2)) > 0.4).long()
    padding = torch.tensor([[8], [0], [2]])
    return ((padding <= COLUMN) if name == "left" else (COLUMNS - padding > COLUMN)).long()


@pytest.mark.parametrize("sizes", STEPS)
@pytest.mark.parametrize("positions", ["of generate", pytest.param("columns", marks=pytest.mark.full), "offset"])
@pytest.mark.parametrize("name", ["left", "right", "holes"])
def test_masks(stock, enabled, name, positions, sizes):
    given = {"of generate": None, "columns": COLUMN[None], "offset": COLUMN[None] + 8}[positions]
    assert_stocks_logits(stock, enabled, sizes, mask_of(name), given)


@pytest.mark.parametrize(("name", "offset"), [("left", 0), ("left", 9), ("right", 0)])
def test_long_prompts(stock, enabled, name, offset, monkeypatch):
    """A workspace has no groups that end after a query, and no windows with gaps: then tokens are read from pages."""
    # 12 indices: workspaces of one or two tokens each.
    monkeypatch.setattr(V4Store, "workspaces", WorkspaceLimits(min_queries=2, max_indices=12))
    assert_stocks_logits(stock, enabled, [COLUMNS], mask_of(name), COLUMN[None] + offset)


def test_positions_by_default_are_columns(stock, enabled):
    """Also after a padded prompt; without a mask nothing is hidden."""
    ids, mask = tokens(3, COLUMNS), mask_of("left")
    logits = []
    for model in (stock, enabled):
        cache = model(ids[:, :20], attention_mask=mask[:, :20]).past_key_values
        first = model(ids[:, 20:24], attention_mask=mask[:, :24], **{CACHE: cache}).logits
        logits.append(torch.cat((first, model(ids[:, 24:], **{CACHE: cache}).logits), dim=1))
    torch.testing.assert_close(logits[1], logits[0], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="greedy"),
        pytest.param({"num_beams": 2}, id="beams", marks=pytest.mark.full),
        pytest.param({"prefill_chunk_size": 10}, id="chunks", marks=pytest.mark.full),
    ],
)
def test_generate_from_padded_prompts_twice(stock, enabled, side, options):
    """The second call continues with the first one's cache."""
    call = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0, "eos_token_id": None} | options
    sequences = []
    for model in (stock, enabled):
        mask = mask_of(side)
        ids = tokens(3, COLUMNS) * mask
        out = model.generate(ids, attention_mask=mask, return_dict_in_generate=True, **call)
        if "num_beams" not in options:
            ids = torch.cat((out.sequences, tokens(3, 6)), dim=1)
            mask = torch.nn.functional.pad(mask, (0, ids.shape[1] - COLUMNS), value=1)
            cache = {CACHE: out.past_key_values}
            out = model.generate(ids, attention_mask=mask, return_dict_in_generate=True, **cache, **call)
        sequences.append(out.sequences)
    assert sequences[1].equal(sequences[0])


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (
            {"position_ids": COLUMN[None] - 1},
            ValueError,
            "^position_ids must be at least 0 and below 16777216, got -1$",
        ),
        ({"position_ids": COLUMN[None] + 2**24 - 28}, ValueError, "^position_ids must be at least 0 .*, got 16777216$"),
        ({"position_ids": COLUMN[None].float()}, TypeError, "^position_ids must be int32 or int64, got float32$"),
        ({"position_ids": COLUMN[None, 1:]}, ValueError, r"^position_ids must have shape \[1, 29\]"),
        ({"position_ids": COLUMN.expand(2, -1)}, ValueError, r"^position_ids must have shape \[3, 29\]"),
        (
            {"attention_mask": torch.ones(3, 28)},
            ValueError,
            r"^attention_mask must be \[3, 29\], one value for each token",
        ),
        ({"attention_mask": torch.ones(3, 1, 29, 29)}, ValueError, r"^attention_mask must be \[b, columns\]"),
    ],
)
def test_masks_and_positions_that_do_not_fit_are_refused(enabled, change, error, message):
    with pytest.raises(error, match=message):
        enabled(tokens(3, COLUMNS), use_cache=True, **change)


def test_stock_attention_computes_noncausal_passes(stock):
    model = copy.deepcopy(stock)
    model.config.is_causal = False
    ids = tokens(2, 12)
    expected = model(ids, use_cache=True).logits
    found = enable(model, page_size=4)(ids, use_cache=True)
    assert type(found.past_key_values).__name__ == "DynamicCache"
    torch.testing.assert_close(found.logits, expected, rtol=1e-4, atol=1e-5)


def test_a_pass_reads_its_device_once_at_most():
    """Each read waits for the GPU."""

    class Reads(TorchFunctionMode):
        count = 0

        def __torch_function__(self, func, types, args=(), kwargs=None):
            self.count += func in (torch.Tensor.tolist, torch.Tensor.item, torch.Tensor.__bool__, torch.Tensor.__int__)
            return func(*args, **(kwargs or {}))

    counts = []
    for given in ((None, None), (mask_of("left"), None), (None, COLUMN[None]), (mask_of("holes"), COLUMN[None] + 8)):
        with Reads() as reads:
            PassMask.read(3, 0, COLUMNS, torch.device("cpu"), *given)
        counts.append(reads.count)
    assert counts == [0, 1, 1, 1]
