"""The paged latent cache compared with transformers' ``DynamicCache``, in all formats."""

import copy
import random
from typing import Any

import pytest
import torch

from flashlatte import kv_cache
from flashlatte.integrations.transformers import disable, enable
from flashlatte.integrations.transformers.calls import CACHE

pytest.importorskip("transformers")

from transformers import DynamicCache

ROWS_OF_A_FORMAT = {"bf16": 576 * 2, "fp16": 576 * 2, "fp32": 576 * 4, "fp8": 576, "v32": 656}


class Session:
    """The same calls to a model with stock attention and to an enabled copy, with one cache each."""

    def __init__(self, model, **options):
        self.models = (model, enable(copy.deepcopy(model), **options))
        self.caches: Any = [None, None]
        self.mask: Any = None

    @torch.no_grad()
    def forward(self, ids, mask=None, pass_mask=True):
        """Logits of ``ids`` from both models, compared for visible tokens; the mask is appended to the earlier ones."""
        new = torch.ones_like(ids) if mask is None else mask
        self.mask = new if self.mask is None else torch.cat((self.mask, new), dim=1)
        outs = [
            model(ids, attention_mask=self.mask if pass_mask else None, **{CACHE: cache}, use_cache=True)
            for model, cache in zip(self.models, self.caches, strict=True)
        ]
        self.caches = [out.past_key_values for out in outs]
        expected, got = (out.logits for out in outs)
        assert not got.isnan().any()
        torch.testing.assert_close(got[new.bool()], expected[new.bool()], rtol=1e-4, atol=1e-4)

    def change(self, method, *args):
        for cache in self.caches:
            getattr(cache, method)(*args)
        assert self.caches[1].get_seq_length() == self.caches[0].get_seq_length()

    def select(self, method, argument, rows):
        self.change(method, argument)
        self.mask = self.mask[rows]

    def crop(self, count):
        self.change("crop", -count)
        self.mask = self.mask[:, : self.mask.shape[1] - count]


def tokens(requests, length):
    return torch.randint(1, 64, (requests, length))


def padded(requests, length):
    return (torch.arange(length) >= torch.randint(0, length, (requests, 1))).long()


@pytest.mark.parametrize("seed", [0, 1, 2, *(pytest.param(seed, marks=pytest.mark.full) for seed in range(3, 8))])
@pytest.mark.parametrize("page_size", [4, 64])
def test_any_sequence_of_cache_operations(make_model, seed, page_size):
    torch.manual_seed(seed)
    choose = random.Random(seed)
    session = Session(make_model(kv_lora_rank=32, qk_rope_head_dim=16), page_size=page_size)
    length = choose.randint(1, 40)
    session.forward(tokens(3, length), padded(3, length) if seed % 2 else None)
    for _ in range(25):
        requests = session.mask.shape[0]
        match choose.choice(["step", "step", "step", "steps", "chunk", "crop", "reorder", "select", "repeat", "copy"]):
            case "step":
                session.forward(tokens(requests, 1), pass_mask=bool(seed % 2) or choose.random() < 0.5)
            case "steps":
                session.forward(tokens(requests, choose.randint(2, 9)))
            case "chunk":
                session.forward(tokens(requests, 20), padded(requests, 20) if seed % 2 else None)
            case "crop":
                session.crop(choose.randint(0, min(11, session.mask.shape[1] - 1)))
            case "reorder":
                rows = torch.randint(0, requests, (requests,))
                session.select("reorder_cache", rows, rows)
            case "select":
                rows = torch.tensor(choose.sample(range(requests), choose.randint(1, requests)))
                session.select("batch_select_indices", rows, rows)
            case "repeat" if requests < 6:
                session.select("batch_repeat_interleave", 2, torch.arange(requests).repeat_interleave(2))
            case "copy":
                session.caches = copy.deepcopy(session.caches)
    session.forward(tokens(session.mask.shape[0], 1))


def test_new_tokens_that_are_hidden(make_model):
    session = Session(make_model())
    session.forward(tokens(2, 10))
    for mask in ([[1], [0]], [[0, 1, 0], [1, 1, 1]], [[1, 0], [0, 1]], [[0], [0]], [[1], [1]]):
        session.forward(tokens(2, len(mask[0])), torch.tensor(mask))


def test_a_mask_that_hides_stored_tokens_later(make_model):
    session = Session(make_model())
    session.forward(tokens(2, 10))
    session.mask[0, 3:5] = 0
    session.forward(tokens(2, 1))
    session.forward(tokens(2, 4))
    session.mask[0, 3:5] = 1
    session.forward(tokens(2, 1))


def test_a_mask_that_shows_hidden_tokens_is_refused(make_model):
    session = Session(make_model())
    session.forward(tokens(2, 10), padded(2, 10))
    with pytest.raises(ValueError, match="attention_mask must be given as one value for each token"):
        session.forward(tokens(2, 1), pass_mask=False)
    session.mask = torch.ones(2, 10, dtype=torch.long)
    with pytest.raises(ValueError, match="attention_mask must not show past tokens that an earlier mask hid"):
        session.forward(tokens(2, 1))


def test_no_mask_is_needed_once_all_hidden_tokens_are_gone(make_model):
    session = Session(make_model())
    session.forward(tokens(2, 6), torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0]]))
    session.crop(2)
    session.forward(tokens(2, 3), pass_mask=False)
    session.forward(tokens(2, 2), torch.tensor([[1, 1], [0, 1]]))
    session.select("batch_select_indices", torch.tensor([0]), torch.tensor([0]))
    session.forward(tokens(1, 1), pass_mask=False)


@pytest.mark.parametrize("history", [0, 10])
def test_masks_of_four_dimensions(make_model, history):
    torch.manual_seed(0)
    session = Session(make_model())
    if history:
        session.forward(tokens(2, history))
    ids = tokens(2, 6)
    mask = torch.rand(2, 1, 6, history + 6) < 0.5
    mask |= torch.eye(history + 6, dtype=torch.bool)[history:]
    with torch.no_grad():
        expected, got = (
            model(ids, attention_mask=mask, **{CACHE: cache}).logits
            for model, cache in zip(session.models, session.caches, strict=True)
        )
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


def test_attention_that_is_not_causal(make_model):
    torch.manual_seed(0)
    session = Session(make_model())
    session.forward(tokens(2, 10))
    ids = tokens(2, 4)
    with torch.no_grad():
        expected, got, causal = (
            model(ids, **{CACHE: copy.deepcopy(cache)}, **options).logits
            for model, cache, options in (
                (session.models[0], session.caches[0], {"is_causal": False}),
                (session.models[1], session.caches[1], {"is_causal": False}),
                (session.models[1], session.caches[1], {}),
            )
        )
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
    assert (got - causal).abs().max() > 0.1


def test_a_failed_pass_does_not_change_the_cache(make_model):
    session = Session(make_model())
    session.forward(tokens(2, 10), padded(2, 10))
    last = session.models[1].model.layers[-1].mlp
    broken = last.register_forward_pre_hook(lambda *_: 1 / 0)
    mask = torch.cat((session.mask, torch.ones(2, 3)), dim=1)
    with pytest.raises(ZeroDivisionError), torch.no_grad():
        session.models[1](tokens(2, 3), attention_mask=mask, **{CACHE: session.caches[1]})
    broken.remove()
    session.forward(tokens(2, 1))


@pytest.mark.parametrize("shape", [(0, 5), (2, 0)])
def test_a_pass_over_nothing_is_refused(make_model, shape):
    model = enable(make_model())
    with torch.no_grad(), pytest.raises(ValueError, match=r"^input_ids must have at least one request and one"):
        model(torch.zeros(shape, dtype=torch.long))
    embeds = torch.zeros(*shape, model.config.hidden_size)
    with torch.no_grad(), pytest.raises(ValueError, match=r"^inputs_embeds must have at least one request"):
        model(inputs_embeds=embeds)


def test_reset_makes_room_for_another_batch(make_model):
    session = Session(make_model())
    session.forward(tokens(3, 10), padded(3, 10))
    session.caches[1].reset()
    assert session.caches[1].get_seq_length() == 0
    session.caches[0] = session.mask = None
    session.forward(tokens(2, 7))
    session.forward(tokens(2, 1))


def test_batch_size_and_device_must_be_the_cache_s(make_model):
    session = Session(make_model())
    session.forward(tokens(3, 10))
    assert session.caches[1].batch_size == 3
    with pytest.raises(ValueError, match="input must have the cache's 3 requests, got 2"), torch.no_grad():
        session.models[1](tokens(2, 1), **{CACHE: session.caches[1]})
    with pytest.raises(ValueError, match="input must be on the cache's device cpu, got meta"), torch.no_grad():
        session.models[1](tokens(3, 1).to("meta"), **{CACHE: session.caches[1]})


def test_stock_attention_continues_with_a_paged_cache_after_disable(make_model):
    session = Session(make_model())
    session.forward(tokens(3, 10), padded(3, 10))
    session.forward(tokens(3, 1))
    session.forward(tokens(3, 20))
    disable(session.models[1])
    session.forward(tokens(3, 1))
    session.forward(tokens(3, 5))
    assert type(session.caches[1]) is DynamicCache
    for got, expected in zip(session.caches[1].layers, session.caches[0].layers, strict=True):
        stored = session.mask[:, None, :, None].bool()
        for name in ("keys", "values"):
            torch.testing.assert_close(
                getattr(got, name), torch.where(stored, getattr(expected, name), 0.0), rtol=1e-4, atol=1e-4
            )


def test_enabled_attention_leaves_a_filled_dynamic_cache_to_stock_attention(make_model):
    session = Session(make_model())
    disable(session.models[1])
    session.forward(tokens(2, 10))
    enable(session.models[1])
    session.forward(tokens(2, 1))
    session.forward(tokens(2, 5))
    assert type(session.caches[1]) is DynamicCache


def test_layers_called_outside_of_a_model_are_refused(make_model):
    session = Session(make_model())
    session.forward(tokens(2, 4))
    model = session.models[1].model
    hidden = torch.zeros(2, 1, 64)
    with (
        pytest.raises(ValueError, match="a paged cache must be used inside a forward pass of the whole model"),
        torch.no_grad(),
    ):
        model.layers[0](
            hidden,
            **{CACHE: session.caches[1]},
            position_embeddings=model.rotary_emb(hidden, torch.tensor([[4]])),
        )


@pytest.mark.parametrize("cache_format", ROWS_OF_A_FORMAT)
def test_the_cache_holds_bytes_of_its_format(make_model, cache_format):
    model = enable(make_model(), cache_format)
    with torch.no_grad():
        latents = model(tokens(2, 130), use_cache=True).past_key_values.store
    assert latents.layout == kv_cache.get_format(cache_format, 576 if cache_format != "v32" else None)
    for layer in range(2):
        pages = latents._pages[layer]
        assert pages.shape[1] == 64
        assert pages.shape[-1] * pages.dtype.itemsize == ROWS_OF_A_FORMAT[cache_format]


# Differences of a latent or rope accepted, beside one rounding: norm and rotation are computed in float32 and rounded
# once, in stock attention after each operation.
@pytest.mark.parametrize(
    ("dtype", "expected", "bound"),
    [(torch.float32, "fp32", 1e-5), (torch.bfloat16, "bf16", 2**-6), (torch.float16, "fp16", 2**-9)],
)
def test_the_format_follows_the_model_s_dtype(make_model, prompts, dtype, expected, bound):
    model = enable(make_model()).to(dtype)
    stock = make_model().to(dtype)
    with torch.no_grad():
        cache, stock_cache = (each(**prompts((3, 0))).past_key_values for each in (model, stock))
    assert cache.store.layout.name == expected
    stored = prompts((3, 0))["attention_mask"][:, None, :, None].bool()
    cache.release()
    # The second layer's rows come from hidden states that already differ.
    got, wanted = cache.layers[0], stock_cache.layers[0]
    for name in ("keys", "values"):
        assert getattr(got, name).dtype == dtype
        rows = torch.where(stored, getattr(wanted, name), 0.0)
        torch.testing.assert_close(getattr(got, name), rows, rtol=bound, atol=bound)


class RoundTripCache(DynamicCache):
    """Stock attention's cache, with the values that a paged cache of a format would return."""

    def __init__(self, cache_format, scale):
        super().__init__()
        self.format, self.scale = cache_format, scale

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        latent, rope = key_states, value_states
        rows = torch.cat((latent, rope), dim=-1)
        records = kv_cache.quantize(rows, self.format, scale=self.scale)
        read = kv_cache.dequantize(records, self.format, scale=self.scale, dtype=rows.dtype)
        before = self.get_seq_length(layer_idx)
        latent_read, rope_read = read.split((latent.shape[-1], rope.shape[-1]), dim=-1)
        stored = super().update(latent_read, rope_read, layer_idx)
        if before == 0:
            return latent, rope
        return stored


@pytest.mark.parametrize(
    ("cache_format", "kv_lora_rank", "scale"),
    [("fp8", 512, None), ("fp8", 512, 0.25), ("v32", 512, None), ("model1", 448, None)],
)
def test_decode_over_quantized_latents_is_that_of_stock_attention(
    make_model, prompts, cache_format, kv_lora_rank, scale
):
    stock = make_model(kv_lora_rank=kv_lora_rank)
    enabled = enable(copy.deepcopy(stock), cache_format, k_scale=scale)
    layout = kv_cache.get_format(cache_format, kv_lora_rank + 64)
    for pads in ((0,), (3, 0, 31)):
        # Not float32's 1e-4: a latent at a rounding boundary may be rounded either way, as 1 in 10,000 is.
        assert decode_difference(stock, enabled, prompts(pads), RoundTripCache(layout, scale)) < 0.05
    assert decode_difference(stock, enabled, prompts((0,))) > 0.5, "without the round trip the difference shows"


# Bounds on the change of a logit by 16-bit rounding; the standard deviation of a logit is 2.3. The layers are dense,
# since a rounding that changes the choice of an expert changes logits by any amount.
@pytest.mark.full
@pytest.mark.parametrize(
    ("dtype", "cache_format", "bound"),
    [
        (torch.float32, "fp32", 1e-4),
        (torch.float32, "bf16", 0.25),
        (torch.float32, "fp16", 0.05),
        (torch.bfloat16, "bf16", 0.5),
        (torch.bfloat16, "fp32", 0.5),
        (torch.float16, "fp16", 0.1),
    ],
)
def test_decode_with_rounding_stays_near_stock_attention(make_model, prompts, dtype, cache_format, bound):
    stock = make_model(first_k_dense_replace=2).to(dtype)
    enabled = enable(copy.deepcopy(stock), cache_format)
    for pads in ((0,), (3, 0, 31)):
        assert decode_difference(stock, enabled, prompts(pads)) < bound


@torch.no_grad()
def decode_difference(stock, enabled, inputs, stock_cache=None):
    """Largest difference of logits over decode steps of one and of several tokens."""
    ids, mask = inputs.values()
    caches, worst = [copy.deepcopy(stock_cache), None], 0.0
    torch.manual_seed(1)
    for queries in (1, 1, 3, 1, 5, 1, 0):
        outs = [
            model(ids, attention_mask=mask, **{CACHE: cache})
            for model, cache in zip((stock, enabled), caches, strict=True)
        ]
        caches = [out.past_key_values for out in outs]
        seen = mask[:, -ids.shape[1] :].bool()
        expected, got = (out.logits[seen].float() for out in outs)
        worst = max(worst, (got - expected).abs().max().item())
        ids = tokens(ids.shape[0], queries)
        mask = torch.cat((mask, torch.ones_like(ids)), dim=1)
    return worst
