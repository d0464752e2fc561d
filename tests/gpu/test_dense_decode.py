"""Dense decode on a GPU: every backend compared with the reference, and guarantees such as reproducibility."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
import torch
from gpu import harness
from gpu.harness import DEVICE, Arguments, Results

import flashlatte
from flashlatte.bench.timing import host_microseconds
from flashlatte.testing import compare, oracles
from flashlatte.testing.cases import DenseDecodeCase
from flashlatte.testing.draws import Draw

pytestmark = pytest.mark.gpu

FLASHMLA_GRID = harness.pairwise(
    {
        "batch": (1, 2, 6, 64),
        "s_q": (1, 2, 4),
        "s_k": (20, 140, 4096),
        "h_q": (1, 3, 9, 63, 64, 126, 128),
        "h_kv": (1, 2, 3, 8),
        "varlen": (False, True),
        "causal": (False, True),
        "dtype": (torch.bfloat16, torch.float16),
    },
    lambda row: row["h_q"] % row["h_kv"] == 0,
)
UNUSUAL_GRID = harness.pairwise(
    {
        "batch": (1, 5, 33),
        "s_q": (1, 3),
        "s_k": (1, 63, 700),
        "h_q": (1, 16, 128),
        "head_dim, head_dim_v": ((576, 512), (512, 512), (192, 128), (48, 32)),
        "page_size": (1, 2, 8, 16, 48, 61, 64, 128),
        "cache_dtype": (None, torch.float8_e4m3fn),
        "index_dtype": (torch.int32, torch.int64),
        "varlen": (False, True),
        "causal": (False, True),
        "zero_lengths": (False, True),
        "strided": (False, True),
        "separate_rope": (False, True),
    }
)
# At most 16 rows over an e4m3 cache have a kernel of their own on Hopper (``few_rows``).
FEW_ROWS_GRID = harness.pairwise(
    {
        "batch": (1, 3, 40, 150, 300),
        "s_q, h_q, h_kv": ((1, 16, 1), (1, 1, 1), (2, 8, 1), (3, 5, 1), (1, 32, 2), (4, 4, 1)),
        "s_k": (1, 64, 129, 900),
        "head_dim, head_dim_v": ((576, 512), (512, 512)),
        "page_size": (8, 16, 48, 64, 128),
        "dtype": (torch.bfloat16, torch.float16),
        "cache_dtype": (torch.float8_e4m3fn,),
        "varlen": (False, True),
        "causal": (False, True),
        "zero_lengths": (False, True),
        "strided": (False, True),
        "separate_rope": (False, True),
    }
)
ORACLE_CASES = (
    DenseDecodeCase(batch=3, s_q=2, s_k=900, h_q=16, varlen=True, causal=True),
    DenseDecodeCase(batch=2, s_q=1, s_k=2000, h_q=128, softmax_scale=0.3),
    DenseDecodeCase(batch=2, s_q=1, s_k=300, h_q=64, dtype=torch.float16),
    DenseDecodeCase(batch=3, s_q=2, s_k=900, h_q=16, page_size=16, varlen=True, causal=True),
    DenseDecodeCase(batch=2, s_q=1, s_k=2000, h_q=128, cache_dtype=torch.float8_e4m3fn),
    DenseDecodeCase(
        batch=2, s_q=1, s_k=300, h_q=64, page_size=32, dtype=torch.float16, cache_dtype=torch.float8_e4m3fn
    ),
    DenseDecodeCase(batch=3, s_q=2, s_k=900, h_q=8, varlen=True, causal=True, cache_dtype=torch.float8_e4m3fn),
)
IN_EVERY_FORM = pytest.mark.parametrize(
    "form",
    [{}, {"page_size": 16}, {"cache_dtype": torch.float8_e4m3fn}, {"cache_dtype": torch.float8_e4m3fn, "h_q": 8}],
    ids=["pages of 64", "pages of 16", "e4m3", "e4m3, few rows"],
)
ON_EVERY_BACKEND = pytest.mark.parametrize("backend", harness.KERNEL_BACKENDS)
# In additions of PyTorch's, whose time differs between hosts: a call takes about 5, and took 20 before its launches
# were repeated.
MAX_HOST_TIME = 10
TYPICAL = DenseDecodeCase(batch=32, s_q=2, s_k=1500, h_q=128, varlen=True, causal=True)


@ON_EVERY_BACKEND
@pytest.mark.parametrize("row", FLASHMLA_GRID, ids=harness.ids(FLASHMLA_GRID))
def test_flashmla_grid(row: Arguments, backend: str) -> None:
    check(DenseDecodeCase(**row).inputs(DEVICE), backend)


@pytest.mark.parametrize("row", FEW_ROWS_GRID, ids=harness.ids(FEW_ROWS_GRID))
def test_few_rows(row: Arguments) -> None:
    check(DenseDecodeCase(**_fields(row)).inputs(DEVICE), "hopper")


@ON_EVERY_BACKEND
@pytest.mark.parametrize("row", UNUSUAL_GRID, ids=harness.ids(UNUSUAL_GRID))
def test_unusual_shapes(row: Arguments, backend: str) -> None:
    check(DenseDecodeCase(**_fields(row)).inputs(DEVICE), backend)


@ON_EVERY_BACKEND
@IN_EVERY_FORM
@pytest.mark.parametrize("varlen", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_many_empty_requests(causal: bool, varlen: bool, form: Arguments, backend: str) -> None:
    case = DenseDecodeCase(128, 2, 4096, 128, varlen=varlen, causal=causal, zero_lengths=True)
    check(replace(case, **form).inputs(DEVICE), backend)


@pytest.mark.parametrize("cache_dtype", [None, torch.float8_e4m3fn])
@pytest.mark.parametrize("h_q", [16, 128])
@pytest.mark.parametrize("batch", [5, 20, 32, 33, 64, 66])
@pytest.mark.parametrize("more_or_less", [0, 256])
def test_equal_lengths_and_others_with_their_average(
    more_or_less: int, batch: int, h_q: int, cache_dtype: torch.dtype | None
) -> None:
    """Ranges that do or do not divide evenly among the requests; the kernel detects equal lengths by their average."""
    arguments = DenseDecodeCase(batch, 1, 1300, h_q, cache_dtype=cache_dtype).inputs(DEVICE)
    lengths = arguments["cache_seqlens"].fill_(1000)
    pairs = (batch - 1) // 2
    lengths[1 : 1 + pairs] += more_or_less
    lengths[1 + pairs : 1 + 2 * pairs] -= more_or_less
    check(arguments, "hopper")


@ON_EVERY_BACKEND
@pytest.mark.parametrize("case", ORACLE_CASES, ids=str)
def test_error_against_float64(case: DenseDecodeCase, backend: str) -> None:
    arguments = case.inputs(DEVICE)
    oracle, _ = oracles.dense_decode(**arguments)
    baseline, _ = oracles.dense_decode(**arguments, dtype=case.dtype)
    compare.assert_accurate(decode(arguments, backend)["out"], oracle, baseline, "out")


@ON_EVERY_BACKEND
def test_garbage_in_the_table_and_lengths_beyond_it(backend: str) -> None:
    arguments = replace(TYPICAL, batch=6, s_k=300).inputs(DEVICE)
    arguments["k_cache"].nan_to_num_(nan=0.1)  # the lengths below include positions that must not be read
    table = arguments["block_table"]
    table[0, 0], table[1, 1], table[2, :] = -1, -(2**31), 2**31 - 1
    arguments["cache_seqlens"][3] = 2**31 - 1
    arguments["cache_seqlens"][4] = -5
    check(arguments, backend)


@ON_EVERY_BACKEND
@pytest.mark.parametrize("h_q", [8, 128])
@pytest.mark.parametrize("column", [3, 300, 575])
def test_a_nan_of_an_e4m3_cache_is_seen(column: int, h_q: int, backend: str) -> None:
    arguments = replace(TYPICAL, h_q=h_q, causal=False, cache_dtype=torch.float8_e4m3fn).inputs(DEVICE)
    page = arguments["block_table"][1, 0].long()
    arguments["k_cache"].view(torch.uint8)[page, 0, 0, column] = 0xFF
    nan = decode(arguments, backend)["out"].isnan()
    assert nan[1].any(dim=-1).all()
    assert not nan[[0, *range(2, TYPICAL.batch)]].any()


@ON_EVERY_BACKEND
def test_a_scale_on_the_device(backend: str) -> None:
    arguments = replace(TYPICAL, cache_dtype=torch.float8_e4m3fn).inputs(DEVICE)
    check(harness.replaced(arguments, k_scale=torch.tensor([0.03], device=DEVICE)), backend)


@ON_EVERY_BACKEND
@pytest.mark.parametrize("h_q", [8, 64])
def test_large_keys_of_an_e4m3_cache(h_q: int, backend: str) -> None:
    """Keys of about 2.5: FlashMLA's tolerances, made for keys of about 0.1, are too tight even for bf16."""
    arguments = DenseDecodeCase(batch=3, s_q=2, s_k=500, h_q=h_q, cache_dtype=torch.float8_e4m3fn).inputs(DEVICE)
    arguments["k_scale"] = 0.5
    oracle, _ = oracles.dense_decode(**arguments)
    baseline, _ = oracles.dense_decode(**arguments, dtype=torch.bfloat16)
    found = decode(arguments, backend)
    compare.assert_accurate(found["out"], oracle, baseline, "out")
    arguments["k_scale"] = torch.tensor([0.5], device=DEVICE)
    harness.assert_same_bits(found, decode(arguments, backend))


@pytest.mark.parametrize("size", [1e-30, 1e-4, 3e4])
def test_sizes_of_queries_over_an_e4m3_cache(size: float) -> None:
    """``few_rows`` casts queries to float16. Rows of different magnitudes, a row of zeros, and small elements in a
    row."""
    arguments = DenseDecodeCase(batch=3, s_q=1, s_k=500, h_q=16, cache_dtype=torch.float8_e4m3fn).inputs(DEVICE)
    q = arguments["q"]
    q *= size
    q[:, :, ::2] *= 1e-3
    q[:, :, 3] = 0
    q[:, :, 5, 1:] *= 1e-4
    arguments["softmax_scale"] = 0.05 / size
    oracle, _ = oracles.dense_decode(**arguments)
    baseline, _ = oracles.dense_decode(**arguments, dtype=torch.bfloat16)
    compare.assert_accurate(decode(arguments, "hopper")["out"], oracle, baseline, "out")


def test_many_small_weights_over_an_e4m3_cache() -> None:
    """One dominant key and 60,000 others with the same total weight: P is float16 in ``few_rows``."""
    arguments = DenseDecodeCase(batch=1, s_q=1, s_k=60_000, h_q=16, cache_dtype=torch.float8_e4m3fn).inputs(DEVICE)
    q, cache = arguments["q"], arguments["k_cache"]
    q.zero_()
    q[..., 0] = 1.0
    page = arguments["block_table"][0, 0].long()
    cache[..., 0] = torch.zeros(cache.shape[:-1], device=DEVICE).to(cache.dtype)
    cache[page, 0, :, 0] = torch.tensor(16.0, device=DEVICE).to(cache.dtype)
    arguments["k_scale"], arguments["softmax_scale"] = 1.0, 11.0 / 16.0
    oracle, _ = oracles.dense_decode(**arguments)
    baseline, _ = oracles.dense_decode(**arguments, dtype=torch.bfloat16)
    compare.assert_accurate(decode(arguments, "hopper")["out"], oracle, baseline, "out")


@pytest.mark.parametrize("exponent", [20, 24, 25, 26, 27, 28])
def test_large_scores_over_an_e4m3_cache(exponent: int) -> None:
    """One key has all the weight, and its P must stay finite in float16, however float32 rounds the difference of
    scores."""
    arguments = DenseDecodeCase(batch=2, s_q=1, s_k=300, h_q=16, cache_dtype=torch.float8_e4m3fn).inputs(DEVICE)
    q, cache = arguments["q"], arguments["k_cache"]
    q.zero_()
    q[..., 0] = 1.0 + torch.arange(16, device=DEVICE) / 128
    cache[..., 0] = torch.zeros(cache.shape[:-1], device=DEVICE).to(cache.dtype)
    pages = arguments["block_table"][:, 0].long()
    cache.view(torch.uint8)[pages, 5, :, 0] = 0x58  # 16
    arguments["k_scale"], arguments["softmax_scale"] = 1.0, 2.0**exponent * math.log(2) / 16.0
    out = decode(arguments, "hopper")["out"]
    expected = cache.view(torch.uint8)[pages, 5, :, :512].view(cache.dtype).to(out.dtype)[:, None]
    assert torch.equal(out, expected.expand_as(out))


@ON_EVERY_BACKEND
@IN_EVERY_FORM
def test_same_bits_run_after_run(form: Arguments, backend: str) -> None:
    arguments = replace(TYPICAL, **form).inputs(DEVICE)
    first = decode(arguments, backend)
    for _ in range(3):
        harness.assert_same_bits(first, decode(arguments, backend))


@ON_EVERY_BACKEND
@pytest.mark.parametrize("where", [0, 20, 69])
def test_one_long_request_among_short_ones(where: int, backend: str) -> None:
    """Most programs process it, although there are as many requests as programs."""
    arguments = DenseDecodeCase(batch=70, s_q=1, s_k=8000, h_q=128).inputs(DEVICE)
    arguments["cache_seqlens"].fill_(100)
    arguments["cache_seqlens"][where] = 8000
    check(arguments, backend)


@ON_EVERY_BACKEND
def test_calls_close_behind_each_other(backend: str) -> None:
    """They share scratch memory with contents of earlier calls, and start before the previous call has ended."""
    cases = (
        replace(TYPICAL, batch=140, s_k=700),
        DenseDecodeCase(batch=300, s_q=1, s_k=500, h_q=16, varlen=True, zero_lengths=True),
        DenseDecodeCase(batch=131, s_q=1, s_k=900, h_q=64, varlen=True),
        DenseDecodeCase(batch=3, s_q=1, s_k=5000, h_q=128, varlen=True),
    )
    arguments = [case.inputs(DEVICE) for case in cases]
    alone = []
    for each in arguments:
        alone.append(decode(each, backend))
        torch.cuda.synchronize()
    rng = random.Random(0)
    order = [rng.randrange(len(cases)) for _ in range(100)]
    results = [decode(arguments[index], backend) for index in order]
    for index, result in zip(order, results, strict=True):
        harness.assert_same_bits(alone[index], result)


@ON_EVERY_BACKEND
@IN_EVERY_FORM
def test_batch_invariant_is_the_same_alone(form: Arguments, backend: str) -> None:
    arguments: Arguments = replace(TYPICAL, batch=19, s_k=3000, **form).inputs(DEVICE) | {"batch_invariant": True}
    together = decode(arguments, backend)
    for request in (0, 7, 18):
        one = slice(request, request + 1)
        per_request = {name: arguments[name][one] for name in ("q", "block_table", "cache_seqlens")}
        alone = decode(arguments | per_request, backend)
        harness.assert_same_bits(alone, {name: result[one] for name, result in together.items()})


@ON_EVERY_BACKEND
@pytest.mark.parametrize(
    ("h_q", "s_q", "page_size", "lengths", "columns"),
    [
        (3, 3, 64, (298, 54, 129), (5, 45, 300)),
        (33, 4, 128, (298, 54, 129), (3, 63, 300)),
        (128, 1, 64, (20_000, 54, 1100), (313, 2000)),
    ],
)
def test_batch_invariant_in_any_table_and_batch(
    h_q: int, s_q: int, page_size: int, lengths: tuple[int, ...], columns: tuple[int, ...], backend: str
) -> None:
    """A request's result depends on the request only: not on the table's width, other requests, or their order."""
    case = replace(TYPICAL, batch=3, h_q=h_q, s_q=s_q, page_size=page_size, s_k=max(lengths), varlen=False)
    arguments: Arguments = case.inputs(DEVICE) | {"batch_invariant": True}
    arguments["cache_seqlens"] = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
    # Shorter requests leave poisoned rows in their pages.
    arguments["k_cache"] = arguments["k_cache"].nan_to_num(nan=0.1)
    names = ("q", "block_table", "cache_seqlens")
    expected = decode(arguments, backend)
    for width in columns:
        table = torch.full((3, width), -1, dtype=torch.int32, device=DEVICE)
        used = min(width, arguments["block_table"].shape[1])
        table[:, :used] = arguments["block_table"][:, :used]
        wide = arguments | {"block_table": table}
        harness.assert_same_bits(decode(wide, backend), expected)
        for order in ((2, 0, 1), (1, 1, 0, 2, 2, 2, 0) * 20):
            others = wide | {name: wide[name][list(order)] for name in names}
            harness.assert_same_bits(
                decode(others, backend), {name: result[list(order)] for name, result in expected.items()}
            )


@ON_EVERY_BACKEND
@IN_EVERY_FORM
@pytest.mark.parametrize("h_q", [16, 128])
def test_graph_follows_lengths_and_pages(h_q: int, form: Arguments, backend: str) -> None:
    arguments = replace(TYPICAL, batch=9, s_k=5000, **{"h_q": h_q} | form).inputs(DEVICE)
    lengths, table = arguments["cache_seqlens"].clone(), arguments["block_table"].clone()
    arguments["cache_seqlens"].fill_(1)
    outputs = harness.poisoned_decode_outputs(arguments)
    replay, results = harness.captured(lambda: decode(arguments, backend, outputs))

    order = torch.arange(8, -1, -1, device=DEVICE)
    for new_lengths, new_table in (
        (lengths, table),
        (lengths // 3, table),
        (torch.where(order % 2 == 0, 0, lengths), table),
        (lengths[order], table[order]),
    ):
        arguments["cache_seqlens"].copy_(new_lengths)
        arguments["block_table"].copy_(new_table)
        harness.nan_outputs(**outputs)
        replay()
        assert_right(results, arguments)


@ON_EVERY_BACKEND
def test_lse_of_any_strides(backend: str) -> None:
    arguments = replace(TYPICAL, batch=5).inputs(DEVICE)
    outputs = harness.poisoned_decode_outputs(arguments)
    outputs["lse"] = torch.full((5, 256, 4), torch.nan, device=DEVICE)[:, ::2, ::2]
    assert_right(decode(arguments, backend, outputs), arguments)


@ON_EVERY_BACKEND
@pytest.mark.parametrize("empty_lse", [float("inf"), float("-inf")])
def test_empty_lse(empty_lse: float, backend: str) -> None:
    arguments: Arguments = replace(TYPICAL, batch=8, zero_lengths=True).inputs(DEVICE) | {"empty_lse": empty_lse}
    check(arguments, backend)


@ON_EVERY_BACKEND
def test_cache_beyond_2_31_elements(backend: str) -> None:
    page_size, head_dim, pages_each = 64, 576, 40
    num_pages = 2**31 // (page_size * head_dim) + 100
    draw = Draw(0, DEVICE)
    cache = torch.full((num_pages, page_size, 1, head_dim), torch.nan, dtype=torch.bfloat16, device=DEVICE)
    table = torch.stack(
        [torch.arange(begin, begin + pages_each) for begin in (0, num_pages // 2, num_pages - pages_each)]
    )
    cache[table.flatten().to(DEVICE)] = draw.normal(table.numel(), page_size, 1, head_dim, dtype=torch.bfloat16)
    arguments: Arguments = {
        "q": draw.normal(3, 1, 128, head_dim, dtype=torch.bfloat16),
        "k_cache": cache,
        "block_table": table.int().to(DEVICE),
        "cache_seqlens": torch.full((3,), pages_each * page_size, dtype=torch.int32, device=DEVICE),
    }
    check(arguments, backend)


@ON_EVERY_BACKEND
def test_new_lengths_and_batches_compile_nothing(backend: str) -> None:
    rng = random.Random(0)
    cases = [replace(TYPICAL, batch=rng.randint(1, 70), s_k=rng.randint(2, 9000), seed=seed) for seed in range(20)]
    # The combine has a few tile shapes, by how many results there are to merge: these sizes meet all of them.
    for batch in (1, 2, 4, 16, 33, 64):
        decode(replace(TYPICAL, batch=batch, s_k=9000).inputs(DEVICE), backend)
    with harness.no_compilation():
        for case in cases:
            decode(case.inputs(DEVICE), backend)


@ON_EVERY_BACKEND
@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
def test_compiles_as_one_graph(compiler: str, backend: str) -> None:
    arguments = replace(TYPICAL, batch=4).inputs(DEVICE)
    decode(arguments, backend)

    def out_plus_lse(q: torch.Tensor) -> torch.Tensor:
        out, lse = flashlatte.dense_decode(**harness.replaced(arguments, q=q), backend=backend)
        return out.float() + lse.transpose(1, 2).unsqueeze(-1)

    harness.assert_compiles(out_plus_lse, arguments["q"], compiler)


@ON_EVERY_BACKEND
def test_host_time(backend: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = DenseDecodeCase(batch=1, s_q=1, s_k=4096, h_q=128).inputs(DEVICE)
    decode(arguments, backend)
    x = torch.zeros(16, device=DEVICE)
    addition = host_microseconds(lambda: x.add_(1))
    microseconds = host_microseconds(lambda: flashlatte.dense_decode(**arguments, backend=backend))
    with capsys.disabled():
        print(f"\ndense_decode, {backend}, b 1: {microseconds:.1f} µs of host time a call, x.add_(1) {addition:.1f}")
    assert microseconds < MAX_HOST_TIME * addition, "a call's launches are not repeated, or something waits"


def _fields(row: Arguments) -> Arguments:
    """A row of the grid; one of its keys may name several fields."""
    return {
        name: value
        for names, values in row.items()
        for name, value in zip(names.split(", "), values if ", " in names else [values], strict=True)
    }


def decode(arguments: Arguments, backend: str, outputs: Arguments | None = None) -> Results:
    with harness.refusals_skip(backend):
        out, lse = flashlatte.dense_decode(**arguments, **(outputs or {}), backend=backend)
    return {"out": out, "lse": lse}


def assert_right(results: Results, arguments: Arguments) -> None:
    out, lse = flashlatte.dense_decode(**arguments, backend="reference")
    compare.assert_close(results["out"], out, compare.DENSE_DECODE_OUT, "out")
    compare.assert_close(results["lse"], lse, compare.DECODE_LSE, "lse")


def check(arguments: Arguments, backend: str) -> None:
    assert_right(decode(arguments, backend, harness.poisoned_decode_outputs(arguments)), arguments)
