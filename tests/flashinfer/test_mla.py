"""``BatchMLAPagedAttentionWrapper`` against float64."""

# Tuples and dicts of arguments are unpacked, and a plan is read after it was made.
# pyright: reportArgumentType=false, reportCallIssue=false, reportOptionalMemberAccess=false

import math
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.flashinfer_calls import LATENT, ROPE, WORKSPACE, MLARequests, buffers, split

from flashlatte.flashinfer import attend, page_tables, plans
from flashlatte.flashinfer.mla import BatchMLAPagedAttentionWrapper
from flashlatte.testing import compare
from flashlatte.testing.compare import assert_close


def assert_results(results, expected, tolerance=compare.FLOAT32):
    for name, result, wanted in zip(("out", "lse"), results, expected, strict=True):
        assert_close(result, wanted, tolerance, name)


@st.composite
def requests(draw, causal=None):
    number = draw(st.integers(1, 5))
    same = draw(st.booleans())
    counts = [draw(st.integers(1, 4))] * number if same else draw(st.lists(st.integers(0, 4), min_size=1, max_size=5))
    lengths = draw(st.lists(st.integers(0, 20), min_size=len(counts), max_size=len(counts)))
    causal = draw(st.booleans()) if causal is None else causal
    return MLARequests(counts, lengths, draw(st.sampled_from([1, 2, 8])), causal, seed=draw(st.integers(0, 99)))


@given(case=requests(), graph=st.booleans(), padding=st.integers(0, 3))
def test_requests_against_the_oracle(case, graph, padding):
    wrapper = BatchMLAPagedAttentionWrapper(WORKSPACE, **(buffers(case, 100) if graph else {}))
    case.plan(wrapper)
    expected = case.expected()
    case.q = torch.cat((case.q, torch.full((padding, *case.q.shape[1:]), torch.nan)))
    out, lse = case.run(wrapper)
    tokens = len(out) - padding
    assert_results((out[:tokens], lse[:tokens]), expected)
    assert out[tokens:].eq(0).all()
    assert lse[tokens:].isneginf().all()


@pytest.mark.parametrize("page_size", [1, 8])
@pytest.mark.parametrize("queries", [1, 3])
def test_plans_in_the_memory_that_a_graph_reads(page_size, queries):
    """A captured ``run`` launches with the tensors of the plan at its capture: it computes what later plans say."""
    first = MLARequests([queries] * 4, [3, 0, 9, 30], page_size, True)
    wrapper = BatchMLAPagedAttentionWrapper(WORKSPACE, **buffers(first, 80))
    first.plan(wrapper)
    captured = wrapper._plan
    later = [
        MLARequests([queries] * 4, [8, 31, 2, 1], page_size, True, seed=1),
        MLARequests([queries, queries, 0, 0], [8, 20, 0, 0], page_size, True, seed=2),
    ]
    if queries == 1 or page_size == 1:
        later.append(MLARequests([2, 0, queries, 0], [7, 3, 9, 5], page_size, True, seed=3))
    for case in later:
        case.plan(wrapper)
        case.q, expected, tokens = torch.cat((case.q, first.q)), case.expected(), len(case.q)
        with mock.patch.object(wrapper, "_plan", captured._replace(tokens=0)):
            case.q = case.q[: len(first.q)]
            assert_results([result[:tokens] for result in case.run(wrapper)], expected)


def test_a_plan_in_inference_mode_can_be_replaced_outside():
    case = MLARequests([1, 1], [20, 3], 8, False)
    wrapper = BatchMLAPagedAttentionWrapper(WORKSPACE, **buffers(case))
    with torch.inference_mode():
        case.plan(wrapper)
        assert_results(case.run(wrapper), case.expected())
    case.plan(wrapper)
    assert_results(case.run(wrapper), case.expected())


@pytest.mark.parametrize("counts", [[1, 1], [2, 2], [1, 3]])
def test_another_default_device(counts):
    case = MLARequests(counts, [20, 3], 8, True)
    expected, wrapper = case.expected(), BatchMLAPagedAttentionWrapper(WORKSPACE)
    with torch.device("meta"):
        case.plan(wrapper)
        results = case.run(wrapper)
    assert_results(results, expected)


def test_lists_are_copied_to_the_buffers():
    case = MLARequests([1, 1], [20, 3], 8, False)
    given_buffers = buffers(case)
    case.plan(BatchMLAPagedAttentionWrapper(WORKSPACE, **given_buffers))
    for name, values in zip(plans.LISTS, case.lists, strict=True):
        assert given_buffers[name][: len(values)].equal(values)


def test_a_large_table_is_built_in_parts(monkeypatch):
    monkeypatch.setattr(plans, "MAX_ENTRIES", 10)
    for counts in ([1, 4, 2], [2, 2, 2]):
        case = MLARequests(counts, [9, 30, 4], 4, True)
        wrapper = BatchMLAPagedAttentionWrapper(WORKSPACE)
        case.plan(wrapper)
        assert wrapper._plan.table is None
        assert_results(case.run(wrapper), case.expected())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("page_size", [1, 16])
def test_half_precision(dtype, page_size):
    case = MLARequests([2, 1, 3], [40, 17, 3], page_size, True, dtype=dtype)
    wrapper = BatchMLAPagedAttentionWrapper(WORKSPACE, backend="fa3")
    case.plan(wrapper)
    out, lse = case.run(wrapper)
    expected, expected_lse = case.expected()
    torch.testing.assert_close(out.double(), expected, rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-4, atol=1e-4)
    natural = wrapper.run(*split(case.q), *split(case.cache), return_lse=True, return_lse_base_on_e=True)
    torch.testing.assert_close(natural[1] * math.log2(math.e), lse)


@pytest.mark.interpreter
@pytest.mark.parametrize("page_size", [1, 4])
def test_triton_kernels(page_size):
    case = MLARequests([1, 3, 0], [19, 5, 7], page_size, True, dtype=torch.bfloat16)
    wrapper = BatchMLAPagedAttentionWrapper(WORKSPACE, backend="portable")
    case.plan(wrapper)
    for result, wanted in zip(case.run(wrapper), case.expected(), strict=True):
        torch.testing.assert_close(result.double(), wanted, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize(("page_size", "kpe_scale"), [(1, 0.5), (8, 0.5), (8, 0.25)])
def test_fp8_cache(page_size, kpe_scale):
    case = MLARequests([2, 2], [20, 7], page_size, True, kv_dtype=torch.float8_e4m3fn)
    wrapper = BatchMLAPagedAttentionWrapper(WORKSPACE, backend="fa3")
    case.plan(wrapper)
    results = case.run(wrapper, ckv_scale=0.5, kpe_scale=kpe_scale)
    case.q = torch.cat((case.q[..., :LATENT], case.q[..., LATENT:] * (kpe_scale / 0.5)), dim=-1)
    assert_results(results, case.expected(k_scale=0.5))


@pytest.mark.parametrize("adjacent", [True, False])
def test_queries_in_two_tensors_are_copied_and_the_cache_never(adjacent):
    case = MLARequests([2, 1], [20, 7], 8, True)
    wrapper = BatchMLAPagedAttentionWrapper(WORKSPACE)
    case.plan(wrapper)
    parts = split(case.q) if adjacent else [part.contiguous() for part in split(case.q)]
    with mock.patch.object(attend, "dense_decode", wraps=attend.dense_decode) as called:
        results = wrapper.run(*parts, *split(case.cache), return_lse=True)
    assert_results(results, case.expected())
    q, cache = called.call_args.args[:2]
    assert cache.data_ptr() == case.cache.data_ptr()
    assert (q.data_ptr() == case.q.data_ptr()) == adjacent
    with pytest.raises(ValueError, match=r"ckv_cache and kpe_cache must be adjacent columns of one tensor: allocate"):
        wrapper.run(*parts, *(part.contiguous() for part in split(case.cache)))


def test_a_gap_between_the_parts_of_a_cache_is_refused():
    case = MLARequests([1], [9], 8, False)
    wrapper = BatchMLAPagedAttentionWrapper(WORKSPACE)
    case.plan(wrapper)
    wide = torch.zeros(len(case.cache), 8, LATENT + ROPE + 1)
    with pytest.raises(ValueError, match="must be adjacent"):
        wrapper.run(*split(case.q), wide[..., :LATENT], wide[..., LATENT + 1 :])
    with pytest.raises(ValueError, match="must be adjacent"):
        wrapper.run(*split(case.q), case.cache[..., ROPE:], case.cache[..., :ROPE])


def test_a_cache_without_rope():
    case = MLARequests([2, 3], [20, 7], 8, True)
    wrapper = BatchMLAPagedAttentionWrapper(WORKSPACE)
    wrapper.plan(*case.lists, 3, LATENT, 0, 8, True, 0.2, torch.float32, torch.float32)
    (q, _), (ckv, _) = split(case.q), split(case.cache)
    results = wrapper.run(q, q[..., :0], ckv, ckv[..., :0], return_lse=True)
    case.q = torch.cat((q, torch.zeros(5, 3, ROPE)), dim=-1)
    case.cache = torch.cat((ckv, torch.zeros(*ckv.shape[:2], ROPE)), dim=-1)
    assert_results(results, case.expected())


def test_outputs_are_written_to():
    case = MLARequests([1, 3], [20, 7], 8, True)
    wrapper = BatchMLAPagedAttentionWrapper(WORKSPACE)
    case.plan(wrapper)
    out, lse = torch.empty(4, 3, LATENT + 1)[..., 1:], torch.empty(4, 6)[:, ::2]
    result = wrapper.run(*split(case.q), *split(case.cache), out, lse)
    assert result is out
    assert_results((out, lse), case.expected())


def test_cutlass_takes_lengths_and_a_table():
    case = MLARequests([1, 1, 1], [20, 0, 7], 8, False, sm_scale=192**-0.5)
    table = torch.zeros(3, 3, dtype=torch.int32)
    for row, pages in zip(table, case.tables, strict=True):
        row[: len(pages)] = pages
    wrapper = BatchMLAPagedAttentionWrapper(WORKSPACE, backend="cutlass")
    out = wrapper.run(*split(case.q), *split(case.cache), kv_len=case.lists[3], page_table=table)
    assert_close(out, case.expected()[0], compare.FLOAT32, "out")


@pytest.mark.parametrize("page_size", [1, 8])
def test_a_cache_without_pages(page_size):
    case = MLARequests([2, 2], [0, 0], page_size, True)
    case.cache = case.cache[:0]
    wrapper = BatchMLAPagedAttentionWrapper(WORKSPACE)
    case.plan(wrapper)
    out, lse = case.run(wrapper)
    assert out.eq(0).all()
    assert lse.isneginf().all()


def test_lengths_beyond_the_pages_are_not_read():
    case = MLARequests([1, 1], [8, 16], 8, False)
    expected = case.expected()
    case.lists = (*case.lists[:3], torch.tensor([100, 100], dtype=torch.int32))
    wrapper = BatchMLAPagedAttentionWrapper(WORKSPACE)
    case.plan(wrapper)
    assert_results(case.run(wrapper), expected)


def test_run_reads_no_tensor_on_the_host():
    """Neither reads values, which would synchronize, nor writes the plan."""
    case = MLARequests([2, 1], [20, 7], 8, True)
    wrapper = BatchMLAPagedAttentionWrapper(WORKSPACE)
    case.plan(wrapper)
    with (
        mock.patch("flashlatte.flashinfer.mla.attend"),
        mock.patch.object(torch.Tensor, "item", side_effect=AssertionError),
        mock.patch.object(torch.Tensor, "tolist", side_effect=AssertionError),
        mock.patch.object(torch.Tensor, "cpu", side_effect=AssertionError),
        mock.patch.object(torch.Tensor, "__bool__", side_effect=AssertionError),
        mock.patch.object(torch.Tensor, "__int__", side_effect=AssertionError),
    ):
        case.run(wrapper)


def test_plan_copies_lists_of_a_gpu_at_once(monkeypatch):
    tensors, copied = [torch.arange(3), torch.arange(4, dtype=torch.int32), torch.arange(2)], []
    monkeypatch.setattr(torch.Tensor, "cpu", lambda x: copied.append(x) or x)
    values = page_tables.on_host(*tensors)
    assert len(copied) == 1
    assert [value.tolist() for value in values] == [tensor.tolist() for tensor in tensors]


@pytest.mark.parametrize("columns", [1, 2, 15, 16, 17, 100, 2**20 + 1])
def test_widths_of_tables(columns):
    assert columns <= page_tables.rounded(columns) <= columns * 9 / 8 + 1


class TestRefusals:
    case = MLARequests([2, 2], [20, 7], 8, True)

    def plan(self, wrapper=None, **changes):
        names = ("qo_indptr", "kv_indptr", "kv_indices", "kv_len_arr")
        rest = {"num_heads": 3, "head_dim_ckv": LATENT, "head_dim_kpe": ROPE, "page_size": 8, "causal": True}
        rest |= {"sm_scale": 0.2, "q_data_type": torch.float32, "kv_data_type": torch.float32}
        wrapper = wrapper or BatchMLAPagedAttentionWrapper(WORKSPACE)
        wrapper.plan(**dict(zip(names, self.case.lists, strict=True)) | rest | changes)
        return wrapper

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"qo_indptr": torch.tensor([0, 3, 2])}, "qo_indptr must not decrease"),
            ({"qo_indptr": torch.tensor([1, 3, 4])}, "qo_indptr must begin with 0, got 1"),
            ({"kv_indptr": torch.tensor([0, 3, 5])}, "kv_indptr must not decrease, from at least 0 to 4, got"),
            ({"kv_indptr": torch.tensor([0, 3])}, "kv_indptr must have 3 boundaries for kv_len_arr's 2 requests"),
            ({"use_profiler": True}, "use_profiler must be left out, got True: there is no profiler"),
            ({"page_size": 0}, "page_size must be at least 1"),
            ({"sm_scale": 0.0}, "sm_scale must be"),
            (
                {"kv_indices": torch.zeros(9, dtype=torch.int32, device="meta")},
                "kv_indices must have values, got a meta",
            ),
        ],
    )
    def test_of_a_plan(self, change, message):
        with pytest.raises(ValueError, match=message):
            self.plan(**change)

    @pytest.mark.parametrize(
        "change",
        [
            {"q_data_type": torch.float8_e4m3fn},
            {"kv_data_type": torch.bfloat16},
            {"qo_indptr": [0, 1, 2]},
            {"causal": 1},
            {"sm_scale": None},
        ],
    )
    def test_of_types(self, change):
        with pytest.raises(TypeError, match=next(iter(change))):
            self.plan(**change)

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"profiler_buffer": WORKSPACE}, r"profiler_buffer must be left out, got a tensor \[16\]"),
            ({"o_scale": 0.5}, "o_scale must be left out"),
            ({"ckv_scale": 0.5}, "ckv_scale must be left out, got 0.5: the cache has no scales"),
            ({"q_nope": torch.zeros(3, 3, LATENT)}, "q_nope must have the 4 tokens of qo_indptr, got 3"),
            ({"q_pe": torch.zeros(4, 3, 8)}, r"q_pe must have shape \[4, 3, 16\]"),
            ({"ckv_cache": torch.zeros(2, 4, LATENT)}, r"ckv_cache must have shape \[pages, 8, 32\]"),
        ],
    )
    def test_of_a_run(self, change, message):
        names = ("q_nope", "q_pe", "ckv_cache", "kpe_cache")
        tensors = dict(zip(names, (*split(self.case.q), *split(self.case.cache)), strict=True))
        with pytest.raises(ValueError, match=message):
            self.plan().run(**tensors | change)

    @pytest.mark.parametrize("name", ["return_lse", "return_lse_base_on_e"])
    def test_of_flags_of_a_run(self, name):
        with pytest.raises(TypeError, match=f"^{name} must be True or False, got 'x'$"):
            self.plan().run(*split(self.case.q), *split(self.case.cache), **{name: "x"})

    def test_without_a_plan(self):
        with pytest.raises(ValueError, match="plan must be called before run"):
            self.case.run(BatchMLAPagedAttentionWrapper(WORKSPACE))

    def test_of_scales_that_an_fp8_cache_needs(self):
        case = MLARequests([1], [9], 8, False, kv_dtype=torch.float8_e4m3fn)
        wrapper = BatchMLAPagedAttentionWrapper(WORKSPACE)
        case.plan(wrapper)
        with pytest.raises(TypeError, match="kpe_scale must be a number"):
            case.run(wrapper, ckv_scale=1.0)

    def test_of_a_backend(self):
        with pytest.raises(ValueError, match="backend must be one of auto, fa2, fa3, cutlass, hopper"):
            BatchMLAPagedAttentionWrapper(WORKSPACE, backend="fa4")
        with pytest.raises(ValueError, match="backend must not be 'cutlass' for plan"):
            self.plan(BatchMLAPagedAttentionWrapper(WORKSPACE, backend="cutlass"))
        with pytest.raises(ValueError, match="hopper"):
            self.case.run(self.plan(BatchMLAPagedAttentionWrapper(WORKSPACE, backend="hopper")))

    def test_of_what_does_not_fit_a_graph(self):
        wrapper = self.plan(BatchMLAPagedAttentionWrapper(WORKSPACE, **buffers(self.case, 8)))
        lists = dict(zip(plans.LISTS, self.case.lists, strict=True))
        for change, message in (
            ({"qo_indptr": torch.tensor([0, 1, 4])}, "qo_indptr must have 2 queries for each request in CUDA-graph"),
            ({"num_heads": 4}, "num_heads, head_dim_ckv, .* must be those of the first plan in CUDA-graph mode"),
            ({"kv_indices": torch.zeros(9, dtype=torch.int32)}, "kv_indices must fit the buffer of 8 entries, got 9"),
            (
                {name: torch.cat((lists[name], lists[name][-1:])) for name in ("qo_indptr", "kv_indptr", "kv_len_arr")},
                "qo_indptr must fit the buffer of 3 entries, got 4",
            ),
        ):
            with pytest.raises(ValueError, match=message):
                self.plan(wrapper, **change)
        tokens = self.plan(
            BatchMLAPagedAttentionWrapper(WORKSPACE, **buffers(self.case, 8)), qo_indptr=torch.tensor([0, 1, 2])
        )
        with pytest.raises(ValueError, match="qo_indptr must have at most the 2 query tokens of the first plan"):
            self.plan(tokens, qo_indptr=torch.tensor([0, 1, 4]))

    def test_of_more_pages_than_a_table_in_a_graph_has(self, monkeypatch):
        monkeypatch.setattr(plans, "GRAPH_ENTRIES", 4)
        wrapper = BatchMLAPagedAttentionWrapper(WORKSPACE, **buffers(self.case, 4))
        with pytest.raises(ValueError, match="kv_indptr must have at most 2 pages for a request in CUDA-graph mode"):
            self.plan(wrapper)
