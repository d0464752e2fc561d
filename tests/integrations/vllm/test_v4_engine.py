"""vLLM's CUDA layer of DeepSeek-V4 with FlashLatte's functions, called on a CPU.

PyTorch functions stand in place of vLLM's Triton kernels, which turn what was chosen into slots and gather rows.
"""

from types import SimpleNamespace

import pytest
import torch
from support.vllm_v4_model import gather
from torch import nn
from vllm.models.deepseek_v4.nvidia import flashmla, model
from vllm.v1.attention.backends.mla import sparse_swa

from flashlatte import kv_cache
from flashlatte.integrations.vllm.backends import v4

PADDED, HEADS, SCALE = 64, 3, 512**-0.5
WINDOW, SWA_PAGE, PAGE, PAGES = 4, 8, 4, 5
# Two decode requests with one query each, and one prefill request whose last 5 tokens are new.
LENGTHS, QUERIES = {1: (9, 14, 11), 4: (9, 14, 11), 128: (300, 515, 388)}, (1, 1, 5)
DECODING, PREFILLING = 2, 5
# Rows of the prefill workspace that are reserved for groups.
GROUPS = 4


def draw(*shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def paged(pages, page_size, seed):
    """A cache in vLLM's layout, with pages at multiples of 576 bytes and gaps between them, and its rows."""
    packed = kv_cache.pack(draw(pages, page_size, 1, 512, seed=seed).bfloat16(), "model1").squeeze(2)
    stride = -(-page_size * 584 // 576) * 576 + 576
    cache = torch.full((pages * stride,), 255, dtype=torch.uint8).as_strided(packed.shape, (stride, 584, 1))
    cache.copy_(packed)
    return cache, kv_cache.unpack(packed.unsqueeze(2), "model1").double().flatten(0, 2)


def attend(query, rows, sink):
    scores = query.double() @ rows.T * SCALE
    every = torch.cat((scores, sink.double()[:, None]), dim=1).softmax(dim=1)
    return every[:, :-1] @ rows


class Case:
    """One batch over one layer, and the keys of its queries."""

    def __init__(self, ratio):
        generator = torch.Generator().manual_seed(ratio)
        self.ratio, self.lengths, self.tokens = ratio, LENGTHS[ratio], DECODING + PREFILLING
        pages = -(-max(self.lengths) // SWA_PAGE)
        self.swa_cache, self.swa_rows = paged(3 * pages, SWA_PAGE, seed=1)
        self.cache, self.rows = paged(PAGES, PAGE, seed=2)
        self.swa_table = torch.randperm(3 * pages, generator=generator).view(3, pages)
        self.table = torch.randint(PAGES, (3, 4), generator=generator)
        self.q = draw(self.tokens, PADDED, 512, seed=3).bfloat16()
        self.sink = torch.cat((draw(HEADS, seed=4), torch.full((PADDED - HEADS,), -torch.inf)))
        self.chosen = []
        ends = [
            end for length, count in zip(self.lengths, QUERIES, strict=True) for end in range(length - count, length)
        ]
        owners = [request for request, count in enumerate(QUERIES) for _ in range(count)]
        for token, (request, position) in enumerate(zip(owners, ends, strict=True)):
            groups = 0 if ratio == 1 else (position + 1) // ratio
            picked = torch.randperm(groups, generator=generator)[: max(groups - token % 2, 0)].tolist()
            self.chosen.append((request, position, picked))

    def swa(self, request, position):
        return [int(self.swa_table[request, p // SWA_PAGE]) * SWA_PAGE + p % SWA_PAGE for p in self.window(position)]

    def window(self, position):
        return range(max(position - WINDOW + 1, 0), position + 1)

    def compressed(self, request, picked):
        return [int(self.table[request, group // PAGE]) * PAGE + group % PAGE for group in picked]

    def expected(self):
        out = []
        for token, (request, position, picked) in enumerate(self.chosen):
            rows = torch.cat((self.swa_rows[self.swa(request, position)], self.rows[self.compressed(request, picked)]))
            out.append(attend(self.q[token, :HEADS], rows, self.sink[:HEADS]))
        return torch.stack(out)


def padded(lists, width):
    """vLLM's padding: int32 [n, 1, width], padded with -1, and the lengths."""
    rows = [one + [-1] * (width - len(one)) for one in lists]
    return torch.tensor(rows, dtype=torch.int32).unsqueeze(1), torch.tensor(
        [len(one) for one in lists], dtype=torch.int32
    )


def metadata(case):
    decoding = case.chosen[:DECODING]
    swa_indices, swa_lens = padded([case.swa(request, position) for request, position, _ in decoding], WINDOW)
    swa = SimpleNamespace(
        num_decodes=2,
        num_prefills=1,
        num_decode_tokens=DECODING,
        num_prefill_tokens=PREFILLING,
        decode_swa_indices=swa_indices,
        decode_swa_lens=swa_lens,
        is_valid_token=torch.ones(DECODING, dtype=torch.bool),
        token_to_req_indices=torch.arange(DECODING),
        tile_sched_swaonly=object(),
        tile_sched_c4a=object(),
        tile_sched_c128a=object(),
        prefill_seq_lens=torch.tensor(case.lengths[2:]),
        prefill_gather_lens=torch.tensor([QUERIES[2] + WINDOW - 1]),
        prefill_left_visible=None,
        prefill_right_visible=None,
        query_start_loc=torch.tensor([0, 1, 2, 7]),
        query_start_loc_cpu=torch.tensor([0, 1, 2, 7]),
        block_table=case.swa_table,
        block_size=SWA_PAGE,
        get_prefill_chunk_plan=lambda **_: [(0, 1, GROUPS, GROUPS + QUERIES[2] + WINDOW - 1)],
    )
    indices, lens = padded([case.compressed(request, picked) for request, _, picked in decoding], 8)
    prefill, _ = padded([picked for _, _, picked in case.chosen[DECODING:]], 8)
    own = SimpleNamespace(
        block_size=PAGE * case.ratio,
        block_table=case.table,
        c128a_global_decode_topk_indices=indices,
        c128a_decode_topk_lens=lens,
        c128a_prefill_topk_indices=prefill.squeeze(1),
    )
    return {"swa": swa} | ({} if case.ratio == 1 else {"own": own}), (indices, lens)


@pytest.fixture
def layer(monkeypatch):
    """Creates a layer without weights, and a function that runs it."""
    for name in ("flash_mla_with_kvcache", "flash_mla_sparse_fwd"):
        monkeypatch.setattr(flashmla, name, getattr(flashmla, name))
    monkeypatch.setattr(model, "_select_dsv4_attn_cls", model._select_dsv4_attn_cls)
    monkeypatch.setattr(sparse_swa, "get_mla_metadata", sparse_swa.get_mla_metadata)
    v4.install.cache_clear()
    v4.install()

    def run(case):
        layer = v4.FlashLatteV4Attention.__new__(v4.FlashLatteV4Attention)
        nn.Module.__init__(layer)
        vars(layer).update(
            n_local_heads=HEADS,
            compress_ratio=case.ratio,
            window_size=WINDOW,
            scale=SCALE,
            attn_sink=case.sink,
            prefix="own",
            kv_cache=case.cache,
            swa_cache_layer=SimpleNamespace(prefix="swa", kv_cache=case.swa_cache),
            topk_indices_buffer=torch.empty(case.tokens, 8, dtype=torch.int32),
            max_image_tokens=0,
            max_num_batched_tokens=16,
            PREFILL_CHUNK_SIZE=4,
        )
        batch, slots = metadata(case)
        if case.ratio == 4:
            for token, (_, _, picked) in enumerate(case.chosen):
                layer.topk_indices_buffer[token] = padded([picked], 8)[0][0, 0]

        def combine(chosen, *_args, out, **_):
            """Rows of the workspace: the selected groups first, then the window."""
            first = case.lengths[2] - QUERIES[2] - WINDOW + 1
            for row, (_, position, picked) in enumerate(case.chosen[DECODING:]):
                picked = [] if case.ratio == 1 else picked
                assert case.ratio == 1 or chosen[row, : len(picked)].tolist() == picked
                rows = picked + [GROUPS + p - first for p in case.window(position)]
                out[0][row], out[1][row] = padded([rows], out[0].shape[1])[0][0, 0], len(rows)
            return out

        monkeypatch.setattr(flashmla, "get_forward_context", lambda: SimpleNamespace(attn_metadata=batch))
        monkeypatch.setattr(flashmla, "compute_global_topk_indices_and_lens", lambda *_: slots)
        monkeypatch.setattr(flashmla, "dequantize_and_gather_k_cache", gather)
        monkeypatch.setattr(flashmla, "combine_topk_swa_indices", combine)
        # vLLM's workspace has arbitrary contents.
        spaces = lambda *expected: tuple(torch.full(shape, -7, dtype=dtype) for shape, dtype in expected)  # noqa: E731
        manager = SimpleNamespace(get_simultaneous=spaces)
        monkeypatch.setattr(flashmla, "current_workspace_manager", lambda: manager)
        out = torch.full((case.tokens, PADDED, 512), torch.nan, dtype=torch.bfloat16)
        layer.forward_mqa(case.q, case.q[:, 0], torch.zeros(case.tokens), out)
        return out

    return run


@pytest.mark.parametrize("ratio", [1, 4, 128])
def test_a_batch_of_decode_and_prefill(layer, ratio):
    case = Case(ratio)
    out = layer(case)
    assert out[:, HEADS:].isnan().all()  # padded heads are not computed
    assert torch.allclose(out[:, :HEADS].double(), case.expected(), atol=2e-2)


def test_the_layer_is_flashlattes_if_it_is_selected(monkeypatch, layer):
    def config(name):
        backend = None if name is None else SimpleNamespace(name=name)
        return SimpleNamespace(attention_config=SimpleNamespace(backend=backend, backend_per_kind={}))

    assert model._select_dsv4_attn_cls(config("CUSTOM")) is v4.FlashLatteV4Attention
    assert model._select_dsv4_attn_cls(config(None)) is flashmla.DeepseekV4FlashMLAAttention
    # The schedule that vLLM requests from FlashMLA, which is missing here.
    assert sparse_swa.get_mla_metadata()[1] is None
