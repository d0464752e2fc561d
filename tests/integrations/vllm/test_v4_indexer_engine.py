"""DeepSeek-V4's indexer selection with vLLM's metadata, called on a CPU: the groups selected for each request."""

from types import SimpleNamespace

import pytest
import torch
from vllm.models.deepseek_v4 import attention

from flashlatte import kv_cache
from flashlatte.integrations.vllm.backends import indexer, v4_indexer
from flashlatte.ops.index_quantize import index_quantize

RATIO, PAGE, PAGES, HEADS, TOPK = 4, 8, 12, 16, 5
# Three requests and their new tokens; the queries of the last are prefilled in two chunks.
LENGTHS, NEW = (70, 43, 51), (2, 1, 9)
TABLE = torch.tensor([[3, 7, 1, 0], [5, 2, 9, 0], [8, 11, 4, 0]])


def draw(*shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class Case:
    def __init__(self, lengths=LENGTHS, new=NEW):
        self.lengths, self.new = lengths, new
        self.cache = kv_cache.allocate("index_fp8", PAGES, PAGE)
        self.keys = draw(PAGES * PAGE, 128, seed=1).bfloat16()
        index_quantize(self.cache, torch.arange(PAGES * PAGE), self.keys)
        tokens = sum(new)
        self.q = draw(tokens, HEADS, 128, seed=2).to(torch.float8_e4m3fn)
        self.weights = draw(tokens, HEADS, seed=3)
        # Request and position of each token.
        self.tokens = [
            (request, place)
            for request, (end, count) in enumerate(zip(lengths, new, strict=True))
            for place in range(end - count, end)
        ]

    def decode(self, requests, **changes):
        lens = torch.tensor(self.new[:requests], dtype=torch.int32)
        ends = torch.tensor(self.lengths[:requests], dtype=torch.int32)
        uniform = len(set(self.new[:requests])) == 1
        seen = ends[:, None] - self.new[0] + 1 + torch.arange(self.new[0]) if uniform else torch.full((requests, 2), -9)
        given = {
            "block_table": TABLE[:requests],
            "seq_lens": (seen // RATIO).int(),
            "decode_lens": lens,
            "requires_padding": not uniform,
        }
        return SimpleNamespace(**given | changes)

    def chunk(self, request, first, last):
        """Tokens ``first`` to ``last`` - 1 of the last prefill request."""
        groups = self.lengths[request] // RATIO
        token_start = sum(self.new[:request])
        places = torch.tensor([place for owner, place in self.tokens if owner == request][first:last])
        return SimpleNamespace(
            block_table=TABLE[request : request + 1],
            cu_seq_lens=torch.tensor([0, groups], dtype=torch.int32),
            total_seq_lens=groups,
            cu_seqlen_ks=torch.zeros(last - first, dtype=torch.int32),
            cu_seqlen_ke=((places + 1) // RATIO).int(),
            token_start=token_start + first,
            token_end=token_start + last,
        )

    def expected(self, token):
        """The groups that a token's scores select, computed from the bfloat16 values written to the cache."""
        request, place = self.tokens[token]
        group = torch.arange((place + 1) // RATIO)
        keys = self.keys[TABLE[request, group // PAGE] * PAGE + group % PAGE].float()
        scores = (self.q[token].float() @ keys.T).relu().T @ self.weights[token]
        return set(scores.topk(min(TOPK, len(group))).indices.tolist()), scores


@pytest.fixture
def choose(monkeypatch):
    """Calls the indexer with a case and vLLM's metadata; the buffers have one row more than there are tokens."""

    def run(case, decode, chunks):
        indexer = v4_indexer.FlashLatteV4SparseAttnIndexer.__new__(v4_indexer.FlashLatteV4SparseAttnIndexer)
        torch.nn.Module.__init__(indexer)
        decoding = sum(case.new[: 0 if decode is None else len(decode.decode_lens)])
        batch = SimpleNamespace(
            num_decode_tokens=decoding,
            num_prefill_tokens=len(case.tokens) - decoding,
            seq_lens=torch.tensor(case.lengths, dtype=torch.int32),
            decode=decode,
            prefill=SimpleNamespace(chunks=chunks) if chunks else None,
        )
        rows = len(case.tokens) + 1
        vars(indexer).update(
            k_cache=SimpleNamespace(prefix="own", kv_cache=case.cache.squeeze(2)),
            topk_tokens=TOPK,
            compress_ratio=RATIO,
            topk_indices_buffer=torch.full((rows + 2, 8), 77, dtype=torch.int32),
        )
        monkeypatch.setattr(v4_indexer, "get_forward_context", lambda: SimpleNamespace(attn_metadata={"own": batch}))
        chosen = indexer.forward_native(torch.empty(rows, 1), case.q, None, case.weights)
        assert (chosen[rows:] == 77).all()
        assert (chosen[rows - 1] == -1).all()
        return chosen[: rows - 1]

    return run


def check(case, chosen):
    for token, row in enumerate(chosen.tolist()):
        expected, scores = case.expected(token)
        taken = [group for group in row if group >= 0]
        assert len(taken) == len(expected) == len(set(taken))
        # Near ties may differ: keys have eight bits.
        least = min((scores[group] for group in expected), default=0)
        assert all(scores[group] > least - 0.05 * scores.abs().max() for group in taken)


def test_requests_with_different_numbers_of_tokens(choose):
    case = Case()
    check(case, choose(case, case.decode(2), [case.chunk(2, 0, 4), case.chunk(2, 4, 9)]))


@pytest.mark.parametrize("tokens", [1, 2])
def test_requests_with_as_many_tokens_each(choose, tokens):
    case = Case(new=(tokens, tokens, 9))
    check(case, choose(case, case.decode(2), [case.chunk(2, 0, 9)]))


def test_tokens_before_the_first_group_have_no_groups(choose):
    """vLLM creates no chunk for requests without a group."""
    case = Case(lengths=(70, 43, 3), new=(1, 1, 3))
    chosen = choose(case, case.decode(2), [])
    check(case, chosen)
    assert (chosen[2:] == -1).all()


def test_tokens_that_fill_a_graph(choose):
    """Two requests in a CUDA graph captured for three tokens each."""
    case = Case(new=(2, 1, 9))
    decode = case.decode(2, decode_lens=torch.tensor([2, 1, 0], dtype=torch.int32), block_table=TABLE)
    case.tokens, case.new = case.tokens[:3], (2, 1, 3)
    case.q, case.weights = case.q[:6], case.weights[:6]
    case.tokens += [(0, 0)] * 3
    chosen = choose(case, decode, [])
    case.tokens = case.tokens[:3]
    check(case, chosen[:3])
    assert (chosen[3:] == -1).all()


@pytest.fixture
def installed(monkeypatch):
    """``attention`` with FlashLatte's indexer, for a model whose layers have these ratios, and vLLM's calls."""
    made = []
    monkeypatch.setattr(attention, "SparseAttnIndexer", lambda *_, **options: made.append(options))
    monkeypatch.setattr(attention, "DeepseekV4Indexer", attention.DeepseekV4Indexer)
    text = SimpleNamespace(compress_ratios=[0, 4, 128, 4, 4], num_hidden_layers=5, index_topk_freq=2)
    config = SimpleNamespace(
        attention_config=SimpleNamespace(backend=SimpleNamespace(name="CUSTOM")),
        model_config=SimpleNamespace(hf_text_config=text),
        compilation_config=SimpleNamespace(static_forward_context={}),
    )
    for module in (indexer, v4_indexer):
        monkeypatch.setattr(module, "get_current_vllm_config", lambda: config)
    v4_indexer.install.cache_clear()
    v4_indexer.install()
    yield made, config.compilation_config.static_forward_context
    v4_indexer.install.cache_clear()


def make(layers, layer, **options):
    """The class that vLLM's layer creates for its key cache, which must be registered before."""
    prefix = f"model.layers.{layer}.attn.indexer.k_cache"
    layers[prefix] = None
    sizes = (128, "ue8m0", TOPK, 128, 1024, 4096)
    return attention.SparseAttnIndexer(SimpleNamespace(prefix=prefix), *sizes, "buffer", **options)


def test_the_indexer_is_vllms_for_keys_of_four_bits(installed):
    made, layers = installed
    make(layers, 1, use_fp4_cache=True, compress_ratio=4)
    assert made == [{"use_fp4_cache": True, "compress_ratio": 4}]


def test_every_other_layer_reuses_a_selection(installed):
    made, layers = installed
    layers["model.layers.0.attn.swa_cache"] = None
    reuse = [isinstance(make(layers, layer, use_fp4_cache=True), v4_indexer.SharedSelection) for layer in (1, 3, 4)]
    assert reuse == [False, True, False]
    assert len(made) == 2


def test_a_pipeline_stage_begins_with_a_selection(installed):
    _, layers = installed
    assert not isinstance(make(layers, 3, use_fp4_cache=True), v4_indexer.SharedSelection)


def test_a_layer_that_reuses_a_selection_computes_nothing():
    layer = attention.DeepseekV4Indexer.__new__(v4_indexer.FlashLatteV4Indexer)
    torch.nn.Module.__init__(layer)
    buffer = torch.arange(4)
    layer.indexer_op = v4_indexer.SharedSelection(buffer)
    assert layer(None, None, None, None, None, None) == (None, None, None)
    assert layer.indexer_op(None, None, None, None) is buffer
