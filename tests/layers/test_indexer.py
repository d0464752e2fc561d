"""``MLAAttention`` with an indexer compared with transformers' modules, in float32, and over quantized caches."""

# The drawn engines have an index cache and a selection.
# pyright: reportOptionalMemberAccess=false, reportOptionalIterable=false, reportOptionalSubscript=false
# pyright: reportArgumentType=false

from __future__ import annotations

import dataclasses

import pytest
import torch

pytest.importorskip("transformers")

from layers.stock import (
    INDEXED,
    Engine,
    assert_like_stock,
    assert_within,
    hidden_states,
    layer_like,
    stock,
)

from flashlatte.layers import IndexerConfig, MLAAttention, MLAConfig
from flashlatte.layers.models import shared_selection_layers

TOPK = INDEXED["index_topk"]


@pytest.fixture(params=["v32", "glm5", "axk2", "hy4", pytest.param("v32-yarn", marks=pytest.mark.full)])
def model(request):
    return stock(request.param)


def engine_of(model, lengths, cache_format="fp32", **options):
    return Engine(layer_like(model), hidden_states(lengths), cache_format, **options)


def slots_of(engine):
    selection = engine.metadata.selection
    assert selection is not None
    assert selection.slots is not None
    return selection.slots.tolist()


def test_prefill(model):
    engine = engine_of(model, (37, 1, TOPK, 20), max_decode_queries=0)
    engine.step({0: 37, 1: 1, 2: TOPK, 3: 20})
    assert_like_stock(model, engine)


@pytest.mark.parametrize(("gather_tokens", "logit_bytes"), [(1, 700), (50, 1), (4096, 2**20)])
def test_prefill_in_parts_in_any_workspace(model, gather_tokens, logit_bytes):
    engine = engine_of(
        model, (50, 9, 41), max_decode_queries=0, gather_tokens=gather_tokens, logit_bytes=logit_bytes, page_size=8
    )
    engine.step({0: 20, 2: 5})
    engine.step({2: 16, 0: 17, 1: 9})
    engine.step({0: 13, 2: 20})
    assert_like_stock(model, engine)


def test_decode_from_fewer_tokens_than_are_selected_to_more(model):
    engine = engine_of(model, (33, 25, 21))
    engine.step({0: 13, 1: 5, 2: 1})
    for _ in range(20):
        engine.step({0: 1, 1: 1, 2: 1})
    assert_like_stock(model, engine)


def test_selection_is_joined_before_attention_begins(model, monkeypatch):
    class Latest:
        """A fake side stream of a graph, whose work runs as late as possible."""

        def __init__(self, device, wanted):
            self.wanted, self.waiting = wanted, []

        def run(self, work):
            if self.wanted:
                self.waiting.append(work)
            else:
                work()

        def join(self):
            assert not self.wanted or self.waiting
            for work in self.waiting:
                work()
            self.waiting.clear()

    steps = [{0: 13, 1: 5}, {0: 1, 1: 1}, {1: 2, 0: 1}, {0: 1, 1: TOPK}, {1: 1, 0: 1}]
    wanted, engine = (engine_of(model, (33, 40)) for _ in range(2))
    for step in steps:
        wanted.step(step)
    monkeypatch.setattr("flashlatte.layers.indexer.SideStream", Latest)
    for step in steps:
        engine.step(step)
    for result, expected in zip(engine.results(), wanted.results(), strict=True):
        assert result.equal(expected)


def test_mixed_batches_of_decode_and_prefill(model):
    engine = engine_of(model, (40, 30, 60, 25), max_decode_queries=2, gather_tokens=40)
    engine.step({0: 11})
    engine.step({0: 1, 2: 25})
    engine.step({0: 1, 1: 5, 2: 20})
    engine.step({1: 0, 0: 1, 2: 3})
    engine.step({2: 1, 0: 1, 3: 25, 1: 20})
    engine.step({0: 2, 2: 2})
    assert_like_stock(model, engine)


@pytest.mark.parametrize("queries", [2, 4])
def test_speculative_tokens_select_separately(model, queries):
    engine = engine_of(model, (30, 27), max_decode_queries=queries)
    engine.step({0: 6, 1: 5})
    for _ in range(5):
        engine.step({0: queries, 1: queries})
    engine.step({0: 1, 1: 2})
    assert_like_stock(model, engine)


def test_no_request_can_be_longer_than_the_selection(model):
    engine = engine_of(model, (TOPK, 5))
    engine.step({0: 6, 1: 4})
    engine.step({0: 2, 1: 1})
    assert engine.builder._selected is None
    assert_like_stock(model, engine)


def test_an_idle_step_and_padding_do_not_change_the_caches():
    engine = engine_of(stock("v32"), (20, 9))
    engine.step({0: 15, 1: 2})
    assert engine.index_cache is not None
    before = engine.cache.clone(), engine.index_cache.clone()
    for padded in (None, 2):
        metadata = engine.builder.build([0], [], engine.table[:0], pad_requests_to=padded)
        hidden = torch.zeros(metadata.num_tokens, 64)
        out = engine.layer(hidden, engine.cache, metadata, index_cache=engine.index_cache)
        assert out.shape == hidden.shape
        assert not out.isnan().any()
    for kept, now in zip(before, (engine.cache, engine.index_cache), strict=True):
        torch.testing.assert_close(now, kept, rtol=0, atol=0, equal_nan=True)


def test_shards_of_heads_sum_to_the_layer():
    model, total = stock("v32"), 0.0
    for heads in ((0, 1), (1, 4)):
        engine = Engine(layer_like(model, heads=heads), hidden_states((30, 20)), max_decode_queries=1)
        engine.step({0: 12, 1: 19})
        engine.step({1: 1, 0: 18})
        total = total + torch.cat(engine.results())
    assert_within(total, torch.cat([model(sequence) for sequence in hidden_states((30, 20))]))


def test_layers_that_share_a_selection_attend_to_the_same_tokens():
    """The second layer is the first one without its indexer, so its output must be the same."""
    engine = engine_of(stock("glm5"), (30, 12), max_decode_queries=1)
    first = engine.layer
    second = MLAAttention(first.config, shares_selection=True, dtype=torch.float32)
    assert second.indexer is None
    second.load_weights(stock("glm5").module.state_dict(), ignore=("indexer.*",))
    cache = engine.cache.clone()
    for news in ({0: 21, 1: 11}, {1: 1, 0: 4}, {0: 1}):
        begin = list(engine.done)
        out = engine.step(news)
        hidden = torch.cat([engine.sequences[r][begin[r] : begin[r] + count] for r, count in news.items()])
        torch.testing.assert_close(second(hidden, cache, engine.metadata), out, rtol=0, atol=0)


def test_hadamard_changes_rounding_only():
    model = stock("v32")
    plain = layer_like(model)
    assert plain.config.indexer is not None
    config = dataclasses.replace(plain.config, indexer=dataclasses.replace(plain.config.indexer, hadamard=True))
    layer = MLAAttention(config, dtype=torch.float32)
    layer.load_weights(model.module.state_dict())
    engine = Engine(layer, hidden_states((30, 20)))
    engine.step({0: 12, 1: 19})
    engine.step({1: 1, 0: 18})
    assert_like_stock(model, engine)


@pytest.mark.parametrize("index_format", ["index_fp8", "index_bf16"])
def test_v32_pages_and_quantized_keys(index_format):
    """Rounded keys change the selection among close scores, so only most outputs are close; all are finite."""
    model = stock("v32", (("kv_lora_rank", 512), ("qk_rope_head_dim", 64), ("index_head_dim", 128)))
    engine = engine_of(model, (60, 44), "v32", index_format=index_format, max_decode_queries=2, page_size=64)
    engine.step({0: 40, 1: 30})
    for _ in range(7):
        engine.step({0: 2, 1: 2})
    errors = []
    for request, result in enumerate(engine.results()):
        expected = model(engine.sequences[request])[: len(result)]
        errors += ((result - expected).abs().amax(dim=1) / expected.abs().max()).tolist()
    near = sum(error < 0.05 for error in errors) / len(errors)
    assert near > 0.5
    assert max(errors) < 1.0


def choice(index_format):
    """The selections of each of 1,024 random tokens, at most 64."""
    options = {"index_topk": 64, "index_head_dim": 128, "max_position_embeddings": 1024, "qk_rope_head_dim": 64}
    layer, (hidden,) = layer_like(stock("v32", tuple(options.items()))), hidden_states((1024,))
    engine = Engine(layer, (hidden,), max_decode_queries=0, index_format=index_format, page_size=64)
    engine.step({0: 1024})
    return [set(row) for row in slots_of(engine)]


def test_overlap_of_selections_by_rounded_and_float32_keys():
    """From the 65th token on, where not all tokens are selected: 0.971 with e4m3 keys and queries, 0.998 with bf16."""
    expected = choice("index_fp32")[64:]
    for index_format, least in (("index_fp8", 0.965), ("index_bf16", 0.995)):
        chosen = choice(index_format)[64:]
        overlap = sum(len(a & b) for a, b in zip(chosen, expected, strict=True)) / (64 * len(expected))
        assert overlap >= least


def test_given_indices_replace_the_selection_and_keys_are_stored():
    engine = engine_of(stock("v32"), (24,))
    slots = engine.table[0][torch.arange(24) // 4] * 4 + torch.arange(24) % 4
    own = slots[:, None]
    out = engine.step({0: 24}, indices=own)
    assert engine.index_cache is not None
    assert not engine.index_cache[engine.table[0]].isnan().any()
    values = engine.layer.kv_a_layernorm(engine.layer.kv_a_proj_with_mqa(engine.sequences[0])[:, :32])
    expected = engine.layer.o_proj(torch.einsum("hvl,tl->thv", engine.layer.w_uv, values).flatten(1))
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)


def test_config_of_a_checkpoint():
    fields = {
        "model_type": "deepseek_v32",
        "hidden_size": 7168,
        "num_attention_heads": 128,
        "num_hidden_layers": 61,
        "kv_lora_rank": 512,
        "q_lora_rank": 1536,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "index_n_heads": 64,
        "index_head_dim": 128,
        "index_topk": 2048,
        "quantization_config": {"scale_fmt": "ue8m0"},
    }
    assert MLAConfig.from_transformers(fields).indexer == IndexerConfig(scale_rounding="power_of_two")
    with pytest.raises(ValueError, match="config must have index_topk, got model_type deepseek_v32 without"):
        MLAConfig.from_transformers({name: value for name, value in fields.items() if name != "index_topk"})


def test_shared_layers_are_those_of_transformers():
    transformers = pytest.importorskip("transformers")
    for options in (
        {"index_topk_freq": 4},
        {"index_topk_freq": 3, "index_skip_topk_offset": 1},
        {"index_topk_pattern": "FFSSFSSS"},
        {},
    ):
        config = transformers.GlmMoeDsaConfig(num_hidden_layers=8, **options)
        expected = tuple(layer for layer, kind in enumerate(config.indexer_types) if kind == "shared")
        assert shared_selection_layers({"num_hidden_layers": 8, **options}) == expected
        indexer = MLAConfig.from_transformers(config).indexer
        assert indexer is not None
        assert indexer.shared_layers == expected


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"index_cache": None}, "index_cache must be given if and only if .* has an indexer"),
        (
            {"index_cache": torch.zeros(5, 4, 1, 32)},
            r"index_cache must have cache's 10 pages of 4 tokens .* got 5 of 4",
        ),
        ({"index_cache": torch.zeros(10, 2, 1, 32)}, "got 10 of 2"),
        ({"index_cache": torch.zeros(10, 4, 1, 33)}, "index_cache must hold index keys of 32 values"),
        ({"topk": None}, r"metadata must be built for topk the indexer's 8, got None: MLAMetadataBuilder\(topk=…\)"),
        ({"topk": 9}, "metadata must be built for topk the indexer's 8, got 9"),
        (
            {"cache": torch.zeros(10, 4, 1, 40).to(torch.float8_e4m3fn)},
            "cache of format fp8 cannot be read token by token",
        ),
    ],
)
def test_inconsistent_arguments_are_refused(change, message):
    engine = engine_of(stock("v32"), (40,), **({"topk": change["topk"]} if "topk" in change else {}))
    metadata = engine.builder.build([0, 20], [20], engine.table)
    arguments = {"index_cache": engine.index_cache, "cache": engine.cache} | change
    arguments.pop("topk", None)
    with pytest.raises(ValueError, match=message):
        engine.layer(engine.sequences[0][:20], arguments.pop("cache"), metadata, **arguments)


def test_a_token_that_is_not_stored_cannot_be_selected():
    engine = engine_of(stock("v32"), (40,))
    slots = torch.arange(20)
    slots[13] = -1
    with pytest.raises(ValueError, match="slot_mapping must have a slot for every token of a prefill with an indexer"):
        engine.builder.build([0, 20], [20], engine.table, slots)
    engine.builder.build([0, 8], [8], engine.table, slots[12:])


def test_a_shared_selection_must_exist():
    engine = engine_of(stock("v32"), (40,))
    metadata = engine.builder.build([0, 20], [20], engine.table)
    layer = MLAAttention(engine.layer.config, shares_selection=True, dtype=torch.float32)
    with pytest.raises(ValueError, match="metadata has no selection yet"):
        layer(engine.sequences[0][:20], engine.cache, metadata)
    engine.step({0: 20})
    with pytest.raises(ValueError, match="this layer has no indexer"):
        layer(engine.sequences[0][:20], engine.cache, engine.metadata, index_cache=engine.index_cache)
    with pytest.raises(ValueError, match=r"^q_lora_rank must be set in the config of a layer with an ind.*, got None$"):
        MLAAttention(MLAConfig(64, 4, indexer=IndexerConfig(4, 128, topk=8)))
    with pytest.raises(ValueError, match="shares_selection needs a config with an indexer"):
        MLAAttention(dataclasses.replace(engine.layer.config, indexer=None), shares_selection=True)


def test_a_layer_without_an_indexer_refuses_a_step_with_a_selection():
    engine = engine_of(stock("v3"), (20,), topk=8)
    with pytest.raises(ValueError, match="metadata must be built for topk None, as the layer has no indexer, got 8"):
        engine.step({0: 20})


def oracle_scores(layer, hidden):
    """The index scores of every pair of tokens, float64 [T, T], from the layer's weights; -inf for later keys."""
    indexer, config = layer.indexer.double(), layer.config
    hidden, rope_dim = hidden.double(), config.qk_rope_head_dim
    latent = torch.nn.functional.linear(hidden, layer.q_a_proj.weight.double())
    norm = layer.q_a_layernorm
    latent = latent * (latent.square().mean(-1, keepdim=True) + norm.eps).rsqrt() * norm.weight.double()
    angles = torch.arange(len(hidden)).double()[:, None] * 10000.0 ** -(torch.arange(0, rope_dim, 2) / rope_dim)

    def turned(x):
        a, b = x[..., : rope_dim // 2], x[..., rope_dim // 2 : rope_dim]
        cosine, sine = (f(angles).view(-1, *[1] * (x.dim() - 2), rope_dim // 2) for f in (torch.cos, torch.sin))
        return torch.cat((a * cosine - b * sine, b * cosine + a * sine, x[..., rope_dim:]), dim=-1)

    q = turned(indexer.wq_b(latent).unflatten(-1, (-1, config.indexer.head_dim)))
    k = turned(indexer.k_norm(indexer.wk(hidden)))
    scores = torch.einsum("th,thk->tk", indexer.weights_proj(hidden), torch.einsum("thd,kd->thk", q, k).relu())
    indexer.float()
    return (scores * q[0].numel() ** -0.5).masked_fill(torch.ones(len(hidden), len(hidden)).triu(1).bool(), -torch.inf)


@pytest.mark.parametrize("heads", [1, 32])
def test_selections_differ_from_the_oracle_only_in_tied_scores(heads):
    """With one head, half of the scores are zero."""
    layer = layer_like(stock("v32", (("index_n_heads", heads),)))
    (hidden,) = hidden_states((60,))
    engine = Engine(layer, (hidden,), max_decode_queries=4)
    scores, token, tied = oracle_scores(layer, hidden), 0, 0
    for count in (30, 4, 1, 20, 3, 2):
        engine.step({0: count})
        place = {int(page): column for column, page in enumerate(engine.table[0])}
        for row in slots_of(engine):
            chosen = [place[slot // 4] * 4 + slot % 4 for slot in row if slot >= 0]
            assert len(set(chosen)) == min(token + 1, TOPK)
            got = scores[token, chosen].sort(descending=True).values
            torch.testing.assert_close(got, scores[token].topk(len(chosen)).values, rtol=1e-5, atol=1e-6)
            tied += int((scores[token] == got[-1]).sum() > 1)
            token += 1
    assert (tied > 10) == (heads == 1)
