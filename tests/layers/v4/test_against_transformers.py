"""DeepSeek-V4's layer compared with transformers' attention over whole requests."""

from __future__ import annotations

import random

import pytest
import torch

from flashlatte.layers.v4 import V4Attention, V4Cache, V4Config, V4Step, WorkspaceLimits

transformers = pytest.importorskip("transformers")
modeling = pytest.importorskip("transformers.models.deepseek_v4.modeling_deepseek_v4")

KINDS = ("sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention")
PAGE_SIZE, STATE_PAGE_SIZE = 4, 3


def stock_config(kind, head_dim=32, **change):
    fields = {
        "hidden_size": 48,
        "num_hidden_layers": 1,
        "layer_types": [kind],
        "num_attention_heads": 4,
        "head_dim": head_dim,
        "q_lora_rank": 24,
        "o_groups": 2,
        "o_lora_rank": 16,
        "sliding_window": 6,
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
        "index_n_heads": 16,  # with few heads, many scores are 0, and the stock indexer resolves ties differently
        "index_head_dim": 32,
        "index_topk": 3,
        "partial_rotary_factor": 8 / head_dim,
        "max_position_embeddings": 256,
        "attn_implementation": "eager",
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 64,
            "beta_fast": 32,
            "beta_slow": 1,
        },
    }
    return transformers.DeepseekV4Config(**(fields | change))


def stock_layer(config, seed):
    torch.manual_seed(seed)
    layer = modeling.DeepseekV4Attention(config, 0).eval()
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return layer


@torch.no_grad()
def stock_output(layer, config, hidden):
    """[n, hidden_size] for one request's hidden states."""
    count = hidden.shape[0]
    positions = torch.arange(count)[None]
    embeddings = modeling.DeepseekV4RotaryEmbedding(config)
    tables = {name: embeddings(hidden, position_ids=positions, layer_type=name) for name in ("main", "compress")}
    distance = positions.T - positions
    visible = (distance >= 0) & (distance < config.sliding_window)
    mask = torch.zeros(1, 1, count, count).masked_fill(~visible, -torch.inf)
    return layer(hidden[None], tables, positions, mask)[0][0]


def steps_of(lengths, seed):
    """The tokens of each request in each step; steps mix prefill, its chunks, and decode."""
    rng, done, steps = random.Random(seed), [0] * len(lengths), []
    while done != lengths:
        ends = [min(n, d + rng.choice([0, 1, 1, 3, 9])) for d, n in zip(done, lengths, strict=True)]
        if ends != done:
            steps.append(list(zip(done, ends, strict=True)))
        done = ends
    return steps


def run(attention, hidden, steps, cache_format="fp32", padding=0, limits=None, drafts=0):
    """Outputs of the requests whose hidden states these are, with requests' pages interleaved.

    With ``limits`` some attend over a workspace; without, batches may have padding. Behind the tokens of a step each
    request has as many ``drafts`` as it has room for, which are taken back. Rows that nobody wrote hold NaN.
    """
    config = attention.config
    requests, max_length = len(hidden), max(len(h) for h in hidden)
    columns = -(-max_length // PAGE_SIZE)
    table = torch.arange(requests * columns).view(columns, requests).T.contiguous()
    ring = -(-(2 * max(config.ratio, 1) + drafts) // STATE_PAGE_SIZE)
    state_table = torch.arange(requests * ring).flip(0).view(requests, ring)
    cache = V4Cache.allocate(
        config,
        requests * columns,
        PAGE_SIZE,
        state_pages=requests * ring,
        state_page_size=STATE_PAGE_SIZE,
        cache_format=cache_format,
    )
    for pages in cache.tensors.values():
        if pages.is_floating_point():
            pages.fill_(torch.nan)
    outputs = [[] for _ in hidden]
    for kept in steps:
        step = [(begin, min(end + drafts, len(h))) for (begin, end), h in zip(kept, hidden, strict=True)]
        spans = [range(begin, end) for begin, end in step]
        ids = [request for request, span in enumerate(spans) for _ in span] + [-1] * padding
        positions = [position for span in spans for position in span] + [7] * padding
        groups = {config.ratio: (table, state_table)} if config.ratio else {}
        sizes = {"window": config.window, "page_size": PAGE_SIZE}
        if limits is None:
            built = V4Step.build(torch.tensor(ids), torch.tensor(positions), table, groups, **sizes)
        else:
            built = V4Step.from_spans(step, table, groups, **sizes, limits=limits)
        rows = []
        for h, (begin, end), (_, stop) in zip(hidden, kept, step, strict=True):
            rows += [h[begin:end], torch.randn(stop - end, config.hidden_size)]
        out = attention(torch.cat([*rows, torch.randn(padding, config.hidden_size)]), built, cache)
        for request, part in enumerate(out[: len(ids) - padding].split([len(span) for span in spans])):
            begin, end = kept[request]
            outputs[request].append(part[: end - begin])
    return [torch.cat(parts) for parts in outputs]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.full), pytest.param(2, marks=pytest.mark.full)])
def test_every_token_of_mixed_batches(kind, seed):
    config = stock_config(kind)
    stock = stock_layer(config, seed)
    attention = V4Attention(V4Config.from_transformers(config, 0))
    attention.load_state_dict({k: v for k, v in stock.state_dict().items() if "rotary_emb" not in k})
    hidden = [torch.randn(n, 48) for n in (43, 1, 30)]
    expected = [stock_output(stock, config, h) for h in hidden]
    for steps in ([[(0, 43), (0, 1), (0, 30)]], steps_of([43, 1, 30], seed)):
        for out, wanted in zip(run(attention, hidden, steps, padding=2), expected, strict=True):
            torch.testing.assert_close(out, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("limits", [None, pytest.param(WorkspaceLimits(min_queries=2), marks=pytest.mark.full)])
@pytest.mark.parametrize("kind", KINDS)
def test_rolled_back_tokens(kind, limits):
    """Drafts complete groups, whose rows are rewritten when other tokens replace them."""
    config = stock_config(kind)
    stock = stock_layer(config, 0)
    attention = V4Attention(V4Config.from_transformers(config, 0))
    attention.load_state_dict({k: v for k, v in stock.state_dict().items() if "rotary_emb" not in k})
    hidden = [torch.randn(n, 48) for n in (43, 1, 30)]
    found = run(attention, hidden, steps_of([43, 1, 30], 3), limits=limits, drafts=7)
    for out, h in zip(found, hidden, strict=True):
        torch.testing.assert_close(out, stock_output(stock, config, h), rtol=1e-4, atol=1e-4)


# As large as they come; few in a workspace; cut by their indices; long ones, or those with few tokens, in pages.
LIMITS = (
    WorkspaceLimits(min_queries=2),
    WorkspaceLimits(min_queries=2, max_rows=70),
    WorkspaceLimits(min_queries=1, max_indices=30),
    WorkspaceLimits(min_queries=2, max_rows=20),
    WorkspaceLimits(min_queries=2, max_rows_per_query=4),
)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.full)])
@pytest.mark.parametrize(
    "limits", [LIMITS[1], LIMITS[2], *(pytest.param(LIMITS[i], marks=pytest.mark.full) for i in (0, 3, 4))]
)
def test_every_token_over_a_workspace(kind, seed, limits):
    """Chunks end within groups, and decode tokens are between them."""
    config = stock_config(kind)
    stock = stock_layer(config, seed)
    attention = V4Attention(V4Config.from_transformers(config, 0))
    attention.load_state_dict({k: v for k, v in stock.state_dict().items() if "rotary_emb" not in k})
    hidden = [torch.randn(n, 48) for n in (43, 1, 30)]
    expected = [stock_output(stock, config, h) for h in hidden]
    for steps in ([[(0, 43), (0, 1), (0, 30)]], steps_of([43, 1, 30], seed)):
        for out, wanted in zip(run(attention, hidden, steps, limits=limits), expected, strict=True):
            torch.testing.assert_close(out, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("cache_format", ["model1", "v41"])
@pytest.mark.parametrize("kind", KINDS)
def test_quantized_caches(kind, cache_format):
    """e4m3 keys have a relative error of at most 2^-4, outputs a smaller one relative to their norm."""
    # If all groups are selected, the coarser index keys select no other ones.
    config = stock_config(kind, 512, partial_rotary_factor=64 / 512, index_head_dim=128, index_topk=16)
    stock = stock_layer(config, 0)
    attention = V4Attention(V4Config.from_transformers(config, 0))
    attention.load_state_dict({k: v for k, v in stock.state_dict().items() if "rotary_emb" not in k})
    hidden = [torch.randn(40, 48)]
    (out,) = run(attention, hidden, steps_of([40], 1), cache_format)
    expected = stock_output(stock, config, hidden[0])
    error = (out - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert error.max() < 2.0**-4
    assert error.max() > 1e-4  # it is quantized
