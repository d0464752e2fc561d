"""Selection in one call compared with logits and sorting, and with transformers' DeepSeek-V3.2 indexer."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flashlatte import kv_cache
from flashlatte.kv_cache.index_formats import index_format
from flashlatte.ops.index_convert import index_convert
from flashlatte.ops.index_quantize import index_quantize
from flashlatte.ops.index_select import index_select, paged_index_select

BACKENDS = ["reference", pytest.param("portable", marks=pytest.mark.interpreter)]


def generator(seed):
    return torch.Generator().manual_seed(seed)


def largest(logits, count):
    """Ascending indices of the ``count`` largest of float64 logits [n]; lower indices first among ties."""
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    return sorted(order[:count])


def scores(q, keys, weights):
    """float64 [M, N] of small integers, whose float32 sums are exact, so that ties are the same everywhere."""
    return torch.einsum("mh,mhn->mn", weights.double(), torch.einsum("mhd,nd->mhn", q.double(), keys.double()).relu())


def integers(low, high, *shape, seed):
    return torch.randint(low, high, shape, generator=generator(seed))


@pytest.mark.parametrize("backend", BACKENDS)
@given(
    rows=st.integers(1, 9),
    num_keys=st.sampled_from([1, 50, 300]),
    heads=st.sampled_from([1, 8]),
    dtype=st.sampled_from([torch.bfloat16, torch.float8_e4m3fn]),
    bounds=st.sampled_from([torch.int32, torch.int64]),
    selected=st.sampled_from([1, 16, 100]),
    workspace=st.sampled_from([1, 4000, 2**26]),
    seed=st.integers(0, 1000),
)
def test_ragged(backend, rows, num_keys, heads, dtype, bounds, selected, workspace, seed):
    q = integers(-2, 3, rows, heads, 32, seed=seed).to(dtype)
    k = integers(-2, 3, num_keys, 48, seed=seed + 1).float()[:, :32]
    weights = integers(-3, 4, rows, heads, seed=seed + 2).float()
    start = integers(-3, num_keys, rows, seed=seed + 3)
    end = integers(0, num_keys + 4, rows, seed=seed + 4)
    place = torch.arange(num_keys)
    k[~((place >= start[:, None]) & (place < end[:, None])).any(0)] = torch.nan
    keys, k_scale = k.to(dtype), None
    if dtype == torch.float8_e4m3fn:
        k_scale = 2.0 ** integers(-2, 3, num_keys, seed=seed + 5)
        k = k * k_scale[:, None]
    actual = index_select(
        q,
        keys,
        weights,
        start.to(bounds),
        end.to(bounds),
        selected,
        k_scale=k_scale,
        workspace_bytes=workspace,
        backend=backend,
    )
    logits = scores(q, k, weights)
    for row in range(rows):
        first, last = max(int(start[row]), 0), min(int(end[row]), num_keys)
        expected = largest(logits[row, first:last].tolist(), selected)
        assert actual[row].tolist() == expected + [-1] * (selected - len(expected))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("workspace", [1, 2**26])
def test_ragged_as_slots(workspace, backend):
    rows, num_keys, selected = 5, 40, 8
    q, k = integers(-2, 3, rows, 4, 32, seed=0).to(torch.bfloat16), integers(-2, 3, num_keys, 32, seed=1).bfloat16()
    weights = integers(-3, 4, rows, 4, seed=2).float()
    keys = q, k, weights, torch.tensor([0, 0, 3, 3, 20]), torch.tensor([3, 20, 20, 40, 40])
    options = {"workspace_bytes": workspace, "backend": backend}
    positions = index_select(*keys, selected, **options)
    for ids in (torch.tensor([0, 0, 2, 2, 1]), None):
        table = torch.randperm(60, generator=generator(3)).view(-1, 12)[: 3 if ids is not None else rows, :5]
        slots = index_select(*keys, selected, block_table=table, page_size=6, request_ids=ids, **options)
        assert slots.equal(index_convert(positions, table, 6, request_ids=ids))
    with pytest.raises(ValueError, match=r"^block_table must have shape \[5, max_pages\]"):
        index_select(*keys, selected, block_table=table[:3], page_size=6, **options)


@pytest.mark.parametrize("backend", BACKENDS)
@given(
    lengths=st.lists(st.integers(0, 50), min_size=1, max_size=3),
    next_n=st.integers(1, 2),
    kind=st.sampled_from(["index_bf16", "index_fp8"]),
    page_size=st.sampled_from([1, 16, 33]),
    no_page=st.sampled_from([None, -1, 2**30]),
    per_token=st.booleans(),
    slots=st.booleans(),
    workspace=st.sampled_from([1, 2**26]),
    seed=st.integers(0, 1000),
)
def test_paged(backend, lengths, next_n, kind, page_size, no_page, per_token, slots, workspace, seed):
    requests, selected = len(lengths), 20
    columns = max(1, *(-(-length // page_size) for length in lengths))
    num_slots = requests * columns * page_size
    table = torch.randperm(requests * columns, generator=generator(seed)).view(requests, columns).int()
    position = torch.arange(columns * page_size)
    places = table[:, position // page_size].long() * page_size + position % page_size
    k = integers(-2, 3, num_slots, 32, seed=seed + 1).float()
    k[places[position >= torch.tensor(lengths)[:, None]]] = torch.nan
    cache = kv_cache.allocate(index_format(kind, 32), requests * columns, page_size)
    index_quantize(cache, torch.arange(num_slots), k, scale_rounding="power_of_two", backend="reference")
    if no_page is not None:
        table[:, columns // 2] = no_page
        # Its keys count as zeros, and have no slots in the cache.
        removed = position // page_size == columns // 2
        places[:, removed] = num_slots
    k = torch.cat((k, torch.zeros(1, 32)))
    q = integers(-2, 3, requests, next_n, 8, 32, seed=seed + 2)
    q = q.to(torch.bfloat16 if kind == "index_bf16" else torch.float8_e4m3fn)
    weights = integers(-3, 4, requests * next_n, 8, seed=seed + 3).float()
    limits = torch.tensor(lengths).unsqueeze(1) - next_n + 1 + torch.arange(next_n)
    actual = paged_index_select(
        q,
        cache,
        weights,
        limits if per_token else torch.tensor(lengths),
        table,
        selected,
        slots=slots,
        workspace_bytes=workspace,
        backend=backend,
    )
    for request in range(requests):
        rows = slice(request * next_n, (request + 1) * next_n)
        logits = scores(q[request], k[places[request]], weights[rows])
        for token in range(next_n):
            limit = max(int(limits[request, token]), 0)
            chosen = largest(logits[token, :limit].tolist(), selected)
            result = actual[request * next_n + token]
            if slots:
                result = torch.where((result < 0) | (result >= num_slots), -1, result)
            places_of = torch.where(places[request] < num_slots, places[request], -1)
            expected = places_of[chosen].tolist() if slots else chosen
            assert result.tolist() == expected + [-1] * (selected - len(expected))


@pytest.mark.parametrize("kind", ["ragged", "paged"])
def test_as_the_indexer_of_transformers(kind):
    """From hidden states to selected tokens, in float32 (paged: with bf16 keys and queries)."""
    transformers = pytest.importorskip("transformers.models.deepseek_v32.modeling_deepseek_v32")
    configuration = pytest.importorskip("transformers.models.deepseek_v32.configuration_deepseek_v32")
    tokens, topk = 150, 24
    config = configuration.DeepseekV32Config(
        hidden_size=64,
        q_lora_rank=48,
        qk_rope_head_dim=16,
        index_n_heads=8,
        index_head_dim=32,
        index_topk=topk,
        max_position_embeddings=256,
    )
    with torch.random.fork_rng():
        torch.manual_seed(1)  # one of those without two logits of 0 at the end of a selection
        indexer = transformers.DeepseekV32Indexer(config, 0).float().eval()
        hidden, residual = torch.randn(1, tokens, 64), torch.randn(1, tokens, 48)
    angles = torch.arange(tokens).unsqueeze(1) * 10000.0 ** (-torch.arange(8) / 8)
    cos, sin = angles.cos().repeat(1, 2).unsqueeze(0), angles.sin().repeat(1, 2).unsqueeze(0)
    causal = torch.ones(tokens, tokens, dtype=torch.bool).tril()
    with torch.no_grad():
        q = indexer.wq_b(residual).view(1, tokens, 8, 32)
        k = indexer.k_norm(indexer.wk(hidden)).unsqueeze(2)
        q_rope, k_rope = transformers.apply_rotary_pos_emb(q[..., :16], k[..., :16], cos, sin, unsqueeze_dim=2)
        q, k = torch.cat((q_rope, q[..., 16:]), dim=-1)[0], torch.cat((k_rope, k[..., 16:]), dim=-1)[0, :, 0]
        weights = indexer.weights_proj(hidden)[0] * 8**-0.5 * 32**-0.5
        expected = indexer(hidden, residual, (cos, sin), causal.unsqueeze(0), torch.arange(tokens)).squeeze(0)
    ends = torch.arange(1, tokens + 1)
    if kind == "ragged":
        actual = index_select(q, k, weights, ends * 0, ends, topk, workspace_bytes=4096 * 7)
        for row in range(tokens):
            chosen = {int(i) for i in expected[row] if i <= row}
            assert {int(i) for i in actual[row] if i >= 0} == chosen
        return
    # The same positions through a cache, bf16 on both sides.
    q, k = q.bfloat16(), k.bfloat16()
    cache = kv_cache.allocate(index_format("index_bf16", 32), 10, 16)
    index_quantize(cache, torch.arange(tokens), k)
    table = torch.arange(10).unsqueeze(0)
    paged = paged_index_select(q.unsqueeze(0), cache, weights, torch.tensor([tokens]), table, topk)
    assert paged.equal(index_select(q, k, weights, ends * 0, ends, topk))


def test_empty_work():
    none = torch.empty(0, dtype=torch.int32)
    q, k = torch.empty(0, 8, 32), torch.zeros(4, 32)
    assert index_select(q, k, torch.empty(0, 8), none, none, 5).shape == (0, 5)
    ends = torch.zeros(2, dtype=torch.int32)
    assert index_select(torch.ones(2, 8, 32), k[:0], torch.ones(2, 8), ends, ends, 5).eq(-1).all()
    cache = kv_cache.allocate(index_format("index_bf16", 32), 1, 8)
    q = torch.empty(0, 1, 8, 32, dtype=torch.bfloat16)
    table = torch.empty(0, 2, dtype=torch.int32)
    assert paged_index_select(q, cache, torch.empty(0, 8), none, table, 5).shape == (0, 5)


def call(**change):
    arguments = {
        "q": torch.zeros(2, 1, 8, 128, dtype=torch.bfloat16),
        "cache": torch.zeros(4, 8, 1, 132, dtype=torch.uint8),
        "weights": torch.zeros(2, 8),
        "cache_seqlens": torch.tensor([3, 9]),
        "block_table": torch.zeros(2, 2, dtype=torch.int32),
        "num_selected": 4,
    }
    return paged_index_select(**(arguments | change))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"num_selected": 0}, ValueError, "num_selected must be at least 1, got 0"),
        ({"cache_seqlens": torch.tensor([3])}, ValueError, r"cache_seqlens must have shape \[2\]"),
        ({"weights": torch.zeros(3, 8)}, ValueError, r"weights must have shape \[2, 8\]"),
        ({"workspace_bytes": 0}, ValueError, "workspace_bytes must be at least 1, got 0"),
        ({"slots": 1}, TypeError, "slots must be True or False"),
        ({"indices": torch.zeros(2, 3, dtype=torch.int32)}, ValueError, r"indices must have shape \[2, 4\]"),
    ],
)
def test_errors_name_the_argument(change, error, message):
    with pytest.raises(error, match=message):
        call(**change)


def test_rows_of_arguments_must_agree():
    ends = torch.zeros(3, dtype=torch.int32)
    with pytest.raises(ValueError, match="weights must have q's 2 rows, got 3"):
        index_select(torch.ones(2, 8, 32), torch.ones(4, 32), torch.ones(3, 8), ends, ends, 4)
