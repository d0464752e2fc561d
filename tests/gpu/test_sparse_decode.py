"""Sparse decode on a GPU: every backend compared with the reference, and guarantees such as reproducibility."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from gpu import harness
from gpu.harness import DEVICE, Arguments, Results

import flashlatte
from flashlatte import kv_cache
from flashlatte.testing import compare, oracles
from flashlatte.testing.cases import SparseDecodeCase, selection_mask
from flashlatte.testing.draws import Draw

pytestmark = pytest.mark.gpu

# Tokens of a request and indices, and page sizes, in FlashMLA's tests.
SCOPES = ((512, 64), (1024, 576), (2046, 2048))
PAGE_SIZES = (2, 61, 64, 69, 576)
FLASHMLA_GRID = harness.pairwise(
    {
        "cache_format": ("v32", "model1"),
        "batch": (4, 74, 321),
        "s_q": (1, 3),
        "h_q": (64, 128),
        "scope": SCOPES,
        "page_size": PAGE_SIZES,
        "extra": (None, *SCOPES),
        "extra_page_size": PAGE_SIZES,
        "topk_lengths": ("all", "request"),
        "varlen": (False, True),
    }
)
UNUSUAL_GRID = harness.pairwise(
    {
        "cache_format, head_dim, dtype": (
            ("v32", None, torch.bfloat16),
            ("v32", None, torch.float16),
            ("v32_no_rope", None, torch.bfloat16),
            ("model1", None, torch.bfloat16),
            ("v41", None, torch.bfloat16),
            ("v41_fp4", None, torch.bfloat16),
            ("bf16", 576, torch.bfloat16),
            ("bf16", 512, torch.bfloat16),
            ("bf16", 48, torch.bfloat16),
            ("fp16", 576, torch.float16),
        ),
        "batch": (1, 9),
        "s_q": (1, 2, 5),
        "h_q": (3, 8, 16, 96),
        "scope": ((7, 1), (300, 33), (1000, 500), (40, 900)),
        "page_size": (1, 3, 16, 64),
        "extra": (None, (1, 1), (500, 130)),
        "extra_page_size": (1, 61),
        "topk_lengths": ("all", "request", "token"),
        "extra_topk_lengths": ("all", "request", "token"),
        "index_dtype": (torch.int32, torch.int64),
        "attn_sink": (False, True),
        "duplicates": (False, True),
        "strided": (False, True),
        "zero_lengths": (False, True),
    }
)
ORACLE_CASES = (
    SparseDecodeCase(batch=3, s_q=2, s_k=900, h_q=64, topk=256),
    SparseDecodeCase(batch=2, s_q=2, s_k=900, h_q=128, topk=128, cache_format="model1", extra_topk=300, extra_s_k=700),
    SparseDecodeCase(batch=2, s_q=2, s_k=900, h_q=128, topk=128, cache_format="v41", extra_topk=300, extra_s_k=700),
    SparseDecodeCase(batch=2, s_q=2, s_k=900, h_q=128, topk=128, cache_format="v41_fp4", extra_topk=300, extra_s_k=700),
    SparseDecodeCase(batch=3, s_q=2, s_k=900, h_q=64, topk=256, cache_format="v41_fp4"),
    SparseDecodeCase(batch=2, s_q=2, s_k=900, h_q=128, topk=128, cache_format="v32_no_rope"),
    SparseDecodeCase(batch=2, s_q=1, s_k=700, h_q=16, topk=500, cache_format="bf16"),
)
# Few query tokens with few blocks.
SMALL_CASES = (
    SparseDecodeCase(batch=2, s_q=2, s_k=900, h_q=64, topk=128, cache_format="model1", extra_topk=512, extra_s_k=900),
    SparseDecodeCase(
        batch=2,
        s_q=1,
        s_k=900,
        h_q=40,
        topk=130,
        cache_format="model1",
        page_size=61,
        extra_topk=300,
        extra_s_k=700,
        extra_page_size=2,
        index_dtype=torch.int64,
        strided=True,
        empty_rows=0.3,
    ),
    SparseDecodeCase(batch=2, s_q=1, s_k=3000, h_q=16, topk=2000),
    SparseDecodeCase(batch=1, s_q=2, s_k=900, h_q=192, topk=200, extra_topk=70, extra_s_k=400, attn_sink=False),
    SparseDecodeCase(batch=1, s_q=2, s_k=900, h_q=64, topk=512, invalid_share=1.0),
    SparseDecodeCase(batch=2, s_q=2, s_k=3000, h_q=96, topk=2000, cache_format="bf16", strided=True),
    SparseDecodeCase(batch=2, s_q=2, s_k=3000, h_q=128, topk=2048, empty_rows=0.3),
    SparseDecodeCase(
        batch=2, s_q=1, s_k=900, h_q=16, topk=128, cache_format="v32_no_rope", extra_topk=512, extra_s_k=900
    ),
    SparseDecodeCase(batch=2, s_q=1, s_k=900, h_q=64, topk=128, cache_format="v41", extra_topk=512, extra_s_k=900),
    SparseDecodeCase(batch=2, s_q=1, s_k=900, h_q=64, topk=128, cache_format="v41_fp4", extra_topk=512, extra_s_k=900),
)
ON_EVERY_BACKEND = pytest.mark.parametrize("backend", harness.KERNEL_BACKENDS)
TYPICAL = SparseDecodeCase(batch=16, s_q=2, s_k=3000, h_q=128, topk=1024, varlen=True)
WITH_EXTRA = replace(
    TYPICAL,
    cache_format="model1",
    page_size=256,
    topk=128,
    topk_lengths="request",
    extra_topk=512,
    extra_s_k=2000,
    extra_topk_lengths="request",
)
NO_ROPE = replace(TYPICAL, cache_format="v32_no_rope")
V41_WITH_EXTRA = replace(WITH_EXTRA, cache_format="v41")
FP4_WITH_EXTRA = replace(WITH_EXTRA, cache_format="v41_fp4")
ON_EVERY_FORMAT = pytest.mark.parametrize(
    "typical",
    [TYPICAL, NO_ROPE, WITH_EXTRA, V41_WITH_EXTRA, FP4_WITH_EXTRA],
    ids=["v32", "v32_no_rope", "model1", "v41", "v41_fp4"],
)
# Quantized columns, and bytes of a row.
SIZES = {"v32": (512, 656), "v32_no_rope": (512, 528), "model1": (448, 576), "v41": (512, 528), "v41_fp4": (512, 288)}


@ON_EVERY_BACKEND
@pytest.mark.parametrize("row", FLASHMLA_GRID, ids=harness.ids(FLASHMLA_GRID))
def test_flashmla_grid(row: Arguments, backend: str) -> None:
    check(case_of(row).inputs(DEVICE), backend)


@ON_EVERY_BACKEND
@pytest.mark.parametrize("row", UNUSUAL_GRID, ids=harness.ids(UNUSUAL_GRID))
def test_unusual_shapes(row: Arguments, backend: str) -> None:
    cache_format, head_dim, dtype = row["cache_format, head_dim, dtype"]
    head_dim_v = 32 if head_dim == 48 else 512
    rest = {name: value for name, value in row.items() if "," not in name}
    case = case_of(rest | {"cache_format": cache_format, "head_dim": head_dim, "dtype": dtype})
    check(replace(case, head_dim_v=head_dim_v).inputs(DEVICE), backend)


@ON_EVERY_BACKEND
@pytest.mark.parametrize(("scope", "page_size"), [((512, 64), 61), ((650, 576), 53)], ids=str)
@pytest.mark.parametrize("nothing", [{"invalid_share": 1.0}, {"zero_lengths": True}, {"empty_rows": 0.5}], ids=str)
@pytest.mark.parametrize("attn_sink", [False, True])
def test_queries_that_select_nothing(
    attn_sink: bool, nothing: Arguments, scope: tuple[int, int], page_size: int, backend: str
) -> None:
    shape: Arguments = {"batch": 6, "s_q": 3, "h_q": 64, "scope": scope, "extra": scope}
    pages: Arguments = {"page_size": page_size, "extra_page_size": page_size}
    for cache_format in SIZES:
        row = shape | pages | nothing | {"attn_sink": attn_sink, "cache_format": cache_format}
        check(case_of(row).inputs(DEVICE), backend)


@ON_EVERY_BACKEND
@pytest.mark.parametrize("case", SMALL_CASES, ids=str)
def test_small_calls(case: SparseDecodeCase, backend: str) -> None:
    arguments = case.inputs(DEVICE)
    check(arguments, backend)
    harness.assert_same_bits(decode(arguments, backend), decode(arguments, backend))


@ON_EVERY_BACKEND
@pytest.mark.parametrize("h_q", [16, 64])
def test_columns_of_all_sizes_in_a_small_call(h_q: int, backend: str) -> None:
    """Partial outputs keep each element's own exponent."""
    case = SparseDecodeCase(batch=2, s_q=2, s_k=900, h_q=h_q, topk=700, cache_format="bf16", attn_sink=False)
    arguments = case.inputs(DEVICE)
    sizes = 2.0 ** Draw(1, DEVICE).integers(-60, 61, 512)
    # Only the last 64 columns contribute to scores.
    arguments["q"][..., :512] = 0
    arguments["k_cache"][..., :512] *= sizes
    out, _ = flashlatte.sparse_decode(**arguments, backend="reference")
    result = decode(arguments, backend)["out"]
    compare.assert_close((result / sizes).bfloat16(), (out / sizes).bfloat16(), compare.SPARSE_DECODE_OUT, "out")


@ON_EVERY_BACKEND
@pytest.mark.parametrize("column", [0, 255, 256, 447])
@pytest.mark.parametrize("case", [*SMALL_CASES[::2], SMALL_CASES[-1]], ids=str)
def test_nan_number_in_a_small_call(case: SparseDecodeCase, column: int, backend: str) -> None:
    arguments = replace(case, invalid_share=0.0).inputs(DEVICE)
    indices = arguments["indices"]
    slot = int(indices[0, 0, 5])
    selected = (indices == slot).any(dim=-1)
    page, offset = divmod(slot, case.page_size)
    byte = offset * SIZES[case.cache_format][1] + byte_of(case.cache_format, column)
    arguments["k_cache"][page].view(torch.uint8).flatten()[byte] = 0xFF
    out = decode(arguments, backend)["out"]
    assert out[selected].isnan().all()
    assert out[~selected].isfinite().all()


@ON_EVERY_BACKEND
@pytest.mark.parametrize("case", ORACLE_CASES, ids=str)
def test_error_against_float64(case: SparseDecodeCase, backend: str) -> None:
    arguments = case.inputs(DEVICE)
    oracle, _ = oracles.sparse_decode(**arguments)
    baseline, _ = oracles.sparse_decode(**arguments, dtype=torch.bfloat16)
    compare.assert_accurate(decode(arguments, backend)["out"], oracle, baseline, "out")


@ON_EVERY_BACKEND
def test_scales_that_are_no_powers_of_two(backend: str) -> None:
    arguments = replace(TYPICAL, batch=3).inputs(DEVICE)
    rows = Draw(1, DEVICE).normal(*arguments["k_cache"].shape[:3], 576, dtype=torch.bfloat16)
    arguments["k_cache"] = kv_cache.pack(rows, "v32", scale_rounding="exact")
    results = decode(arguments, backend, harness.poisoned_decode_outputs(arguments))
    # The kernels multiply in bf16: scaled numbers are rounded to it, and by the Hopper kernel, as by FlashMLA's, the
    # scales before.
    cache = arguments["k_cache"].clone()
    if backend == "hopper":
        scales = cache.view(torch.uint8)[..., 512:528].view(torch.float32)
        scales.copy_(scales.bfloat16())
    rounded = arguments | {"k_cache": kv_cache.unpack(cache), "cache_format": "bf16"}
    assert_right(results, rounded)


@ON_EVERY_BACKEND
@pytest.mark.parametrize("h_q", [16, 128])
@ON_EVERY_FORMAT
def test_nan_numbers_under_finite_scales(typical: SparseDecodeCase, h_q: int, backend: str) -> None:
    """A NaN at each position of a token, one per request: queries that select it get NaN, and no others change."""
    numbers, row_bytes = SIZES[typical.cache_format]
    case = replace(typical, batch=numbers, s_k=300, topk=128, h_q=h_q, extra_page_size=61, attn_sink=False)
    arguments = case.inputs(DEVICE)
    clean = decode(arguments, backend)
    place = torch.arange(numbers, device=DEVICE)
    for prefix, page_size in {"": case.page_size, "extra_": case.extra_page_size}.items():
        cache = arguments.get(f"{prefix}k_cache")
        if cache is None:
            continue
        indices, lengths = arguments[f"{prefix}indices"], arguments[f"{prefix}topk_length"]
        counts = selection_mask(indices, cache.shape[0] * page_size, lengths)
        chosen = (counts[:, 0] * Draw(1, DEVICE).integers(1, 1000, *counts[:, 0].shape)).argmax(dim=-1)
        slots = indices[place, 0, chosen].long().where(counts[:, 0].any(dim=-1), -1)
        damaged = cache.clone()
        here = slots >= 0
        in_page = slots % page_size * row_bytes + byte_of(case.cache_format, place)
        bytes_of_pages = damaged.view(torch.uint8).flatten(1)
        bytes_of_pages[(slots // page_size)[here], in_page[here]] = torch.where(place % 2 == 0, 0x7F, 0xFF)[here].byte()
        selected = (counts & torch.isin(indices, slots)).any(dim=-1)
        assert selected[:, 0].sum() >= 0.9 * numbers
        results = decode(arguments | {f"{prefix}k_cache": damaged}, backend)
        for name in ("out", "lse"):
            result, before = (x[name] if name == "out" else x[name].transpose(1, 2) for x in (results, clean))
            assert result[selected].isnan().all()
            assert torch.equal(result[~selected], before[~selected])


@ON_EVERY_BACKEND
@ON_EVERY_FORMAT
def test_same_bits_run_after_run(typical: SparseDecodeCase, backend: str) -> None:
    arguments = typical.inputs(DEVICE)
    first = decode(arguments, backend)
    for _ in range(3):
        harness.assert_same_bits(first, decode(arguments, backend))


@ON_EVERY_BACKEND
@ON_EVERY_FORMAT
def test_graph_follows_indices_and_lengths(typical: SparseDecodeCase, backend: str) -> None:
    arguments = replace(typical, topk_lengths="request").inputs(DEVICE)
    varying = [name for name in arguments if name.endswith(("indices", "topk_length")) and arguments[name] is not None]
    originals = {name: arguments[name].clone() for name in varying}
    for name in varying:
        arguments[name].fill_(-1 if name.endswith("indices") else 0)
    outputs = harness.poisoned_decode_outputs(arguments)
    replay, results = harness.captured(lambda: decode(arguments, backend, outputs))

    for change in (
        lambda name, x: x,
        lambda name, x: x // 2 if name.endswith("topk_length") else x,
        lambda name, x: torch.where(x % 3 == 0, 0, x) if name.endswith("topk_length") else x,
        lambda name, x: x.flip(0),
    ):
        for name in varying:
            arguments[name].copy_(change(name, originals[name]))
        harness.nan_outputs(**outputs)
        replay()
        assert_right(results, arguments)


@ON_EVERY_BACKEND
@pytest.mark.parametrize("cache_format", ["v32", "model1", "bf16"])
def test_cache_beyond_2_31_elements(cache_format: str, backend: str) -> None:
    layout = kv_cache.get_format(cache_format)
    page_size, draw = 64, Draw(0, DEVICE)
    num_pages = 2**31 // (page_size * layout.record_width) + 1000
    cache = kv_cache.allocate(layout, num_pages, page_size, device=DEVICE)
    cache.fill_(torch.nan if cache.is_floating_point() else 0xFF)
    slots = num_pages * page_size
    indices = torch.cat([draw.integers(0, 50_000, 2, 1, 500), draw.integers(slots - 50_000, slots, 2, 1, 500)], dim=-1)
    chosen = indices.unique()
    rows = draw.normal(chosen.numel(), layout.head_dim, dtype=torch.bfloat16)
    kv_cache.write(cache, chosen, rows, cache_format=layout, backend="reference")
    arguments: Arguments = {
        "q": draw.normal(2, 1, 128, layout.head_dim, dtype=torch.bfloat16),
        "k_cache": cache,
        "indices": indices.int(),
        "cache_format": layout,
    }
    check(arguments, backend)


@ON_EVERY_BACKEND
@ON_EVERY_FORMAT
def test_new_batches_and_lengths_compile_nothing(typical: SparseDecodeCase, backend: str) -> None:
    rng = random.Random(0)
    cases = [
        replace(typical, batch=rng.randint(1, 70), s_k=rng.randint(2, 4000), topk=64 * rng.randint(1, 20), seed=seed)
        for seed in range(20)
    ]
    # The kernels have a few forms, and the combine a few tile shapes, by how many query tokens and blocks there are:
    # these sizes meet all of them.
    for batch in (1, 2, 3, 5, 8, 16, 20, 31, 33, 34, 64):
        decode(replace(typical, batch=batch, topk=2048).inputs(DEVICE), backend)
    for batch, topk in ((64, 64), (1, 1024), (1, 512), (1, 128)):
        decode(replace(typical, batch=batch, topk=topk).inputs(DEVICE), backend)
    with harness.no_compilation():
        for case in cases:
            decode(case.inputs(DEVICE), backend)


@ON_EVERY_BACKEND
@ON_EVERY_FORMAT
def test_compiles_as_one_graph(typical: SparseDecodeCase, backend: str) -> None:
    arguments = replace(typical, batch=3).inputs(DEVICE)
    decode(arguments, backend)

    def out_plus_lse(q: torch.Tensor) -> torch.Tensor:
        out, lse = flashlatte.sparse_decode(**harness.replaced(arguments, q=q), backend=backend)
        return out.float() + lse.transpose(1, 2).unsqueeze(-1)

    harness.assert_compiles(out_plus_lse, arguments["q"])


def case_of(row: Arguments) -> SparseDecodeCase:
    fields = {name: value for name, value in row.items() if name not in ("scope", "extra")}
    fields["s_k"], fields["topk"] = row["scope"]
    if row["extra"] is not None:
        fields["extra_s_k"], fields["extra_topk"] = row["extra"]
    return SparseDecodeCase(**fields)


def byte_of(cache_format: str, column: Any) -> Any:
    """The byte of a token that makes a column NaN if it is 0x7F or 0xFF: the column's own byte, or for fp4 its
    scale."""
    return 256 + column // 16 if cache_format == "v41_fp4" else column


def decode(arguments: Arguments, backend: str, outputs: Arguments | None = None) -> Results:
    with harness.refusals_skip(backend):
        out, lse = flashlatte.sparse_decode(**arguments, **(outputs or {}), backend=backend)
    return {"out": out, "lse": lse}


def assert_right(results: Results, arguments: Arguments) -> None:
    out, lse = flashlatte.sparse_decode(**arguments, backend="reference")
    compare.assert_close(results["out"], out, compare.SPARSE_DECODE_OUT, "out")
    compare.assert_close(results["lse"], lse, compare.DECODE_LSE, "lse")


def check(arguments: Arguments, backend: str) -> None:
    assert_right(decode(arguments, backend, harness.poisoned_decode_outputs(arguments)), arguments)
