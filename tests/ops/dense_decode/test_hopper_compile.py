"""What the compiler makes of the Hopper kernel, without the GPU: launches are recorded, and compiled to cubins."""

from __future__ import annotations

import functools
import re
from typing import Any

import pytest
import torch
from support.compile import Launch, Recorder
from support.later_spills import allowed
from support.marks import mostly_full

from flashlatte.runtime import checks, dispatch, machine

triton = pytest.importorskip("triton")

from support import compile as support  # noqa: E402
from support.hopper_dense_decode import decode  # noqa: E402

from flashlatte.ops.dense_decode.hopper import combine as ranges  # noqa: E402
from flashlatte.ops.dense_decode.hopper import fixup, launch  # noqa: E402
from flashlatte.ops.dense_decode.hopper.few_rows import attender  # noqa: E402
from flashlatte.runtime.strides import strides_in_use  # noqa: E402
from flashlatte.split_kv import combine, plan  # noqa: E402

pytestmark = pytest.mark.skipif(machine.interpreting(), reason="compiles, which the interpreter does not")

KERNEL = launch.kernel

CALLS: dict[str, dict[str, Any]] = {
    "bf16 576": {},
    "bf16 512": {"head_dim": 512},
    "fp16 576, whole requests": {"dtype": torch.float16, "batch": 70, "heads": 8192},
    "bf16 576, batch invariant, misaligned out": {"batch_invariant": True, "out_pad": 1, "index_dtype": torch.int64},
    "bf16 576, rows that are no tile": {"heads": 126},
    "bf16 576, many requests": {"batch": 128},
    "e4m3": {"cache_dtype": torch.float8_e4m3fn},
    "e4m3, many requests": {"batch": 128, "cache_dtype": torch.float8_e4m3fn},
    "e4m3, many requests, pages of 16": {"batch": 128, "page_size": 16, "cache_dtype": torch.float8_e4m3fn},
}
FEW_ROWS: dict[str, dict[str, Any]] = {
    "576": {},
    "512, pages of 16": {"head_dim": 512, "page_size": 16},
    "batch invariant, float16": {"batch_invariant": True, "dtype": torch.float16, "out_pad": 1},
}


@pytest.fixture
def record(monkeypatch):
    """Calls the launcher, and returns what it launched."""
    recorder, combiner = Recorder(KERNEL), Recorder(combine.combine_kernel)
    monkeypatch.setattr(launch, "kernel", recorder)
    monkeypatch.setattr(launch, "clear_kernel", Recorder(fixup.clear_kernel))
    monkeypatch.setattr(combine, "combine_kernel", combiner)
    monkeypatch.setattr(ranges, "combine_ranges_kernel", Recorder(ranges.combine_ranges_kernel))
    monkeypatch.setattr(machine, "num_sms", lambda _: 132)

    def record(**call: Any) -> Launch:
        recorder.launches.clear()
        decode(**call)
        return recorder.launches[0]

    return record


@pytest.fixture
def compiled(record):
    """The machine code of a call."""
    return lambda name: support.compile_gluon(KERNEL, record(**CALLS[name]))


@pytest.mark.full
def test_a_tile_is_freed_before_the_output_is_rescaled(compiled):
    """The rescaling may not delay the refill: nothing between the product that read a tile last and its barrier."""
    code = re.findall(r"/\*[0-9a-f]{4,}\*/\s+(.*?);", compiled("bf16 576").sass)
    frees = [index for index, one in enumerate(code) if re.match(r"BAR\.ARV 0x[5-8], 0x100", one)]
    waits = [index for index, one in enumerate(code) if "WARPGROUP.DEPBAR" in one]
    after = [index - max(wait for wait in waits if wait < index) for index in frees if index > waits[0]]
    # Those of the loop and of the last step, of each of the four tiles; the initial ones stand before any product.
    assert sum(distance <= 20 for distance in after) >= 8


def test_ranges_wait_for_each_other(compiled):
    """A partial result is there before its flag is, and read after that, 16 bytes a thread at a time."""
    code = compiled("bf16 576, many requests").sass
    raised = code.split("STG.E.STRONG.GPU")
    # By each consumer: a flag raised, and two flags of a record looked at.
    assert len(raised) == 1 + 2
    assert len(re.findall(r"\bLDG\.E\.STRONG\.GPU\b", code)) == 4
    for before in raised[:-1]:
        assert before.rindex("MEMBAR") > before.rindex("STG.E.128") > 0
    assert len(re.findall(r"\bLDG\.E\.128\b", code)) == 2 * 32


@pytest.mark.parametrize("name", mostly_full((name for name in CALLS if "e4m3" in name), "e4m3, many requests"))
def test_keys_on_their_way_stay_in_registers(compiled, name):
    """A word that is spilled is waited for as soon as it has been asked for. With small pages an address may be.

    It is loaded again once in the loop, and once where the lanes of a warp have parted.
    """
    most = allowed(f"dense_decode casts {name}", 2 if "pages of 16" in name else 0)
    assert support.cast_loop_spills(compiled(name).sass) <= most


@pytest.mark.parametrize("name", mostly_full(FEW_ROWS, "576"))
def test_few_rows_stay_in_registers(record, name):
    call = record(**{"batch": 128, "heads": 16, "cache_dtype": torch.float8_e4m3fn} | FEW_ROWS[name])
    code = support.compile_gluon(KERNEL, call)
    assert call.arguments["PLAN"].few_rows
    assert code.spills <= allowed(f"dense_decode few rows {name}", 0)
    # Of a step's two blocks: scores of 32 or 36 products of 16 columns of keys, and 32 for the output.
    assert code.hgmma == 2 * (32 + (36 if name == "576" or "invariant" in name else 32))


@pytest.mark.parametrize(("rows", "few"), [(1, True), (16, True), (17, False), (128, False)])
def test_which_rows_are_few(record, rows, few):
    call = record(heads=rows, cache_dtype=torch.float8_e4m3fn).arguments
    assert call["PLAN"].few_rows is few
    assert call["keys_half"].layout.swizzle_byte_width == (64 if few else 128)
    assert record(heads=rows).arguments["PLAN"].few_rows is False


def test_p_of_few_rows_is_finite_in_float16():
    """However large the scores, whose maximum less a few float32 rounds."""
    places = torch.arange(-512, 513) / 2**24
    largest = torch.cat([sign * 2.0**exponent * (1 + places) for sign in (-1, 1) for exponent in range(-4, 60)])
    row_max = largest - attender.P_EXPONENT.value
    assert torch.exp2(largest - row_max).half().isfinite().all()


def test_few_rows_are_compiled_once_for_all_numbers_of_heads(record):
    calls = [record(heads=heads, cache_dtype=torch.float8_e4m3fn) for heads in (1, 5, 16)]
    assert len({support.variant_key(KERNEL, call) for call in calls}) == 1


def test_requests_that_ranges_share_need_no_combine(record, monkeypatch):
    """Flags are cleared first, by a kernel that waits for the one before it, as scratch may be in use."""
    monkeypatch.setattr(launch, "clear_kernel", clearer := Recorder(fixup.clear_kernel))
    monkeypatch.setattr(combine, "combine_kernel", combiner := Recorder(combine.combine_kernel.fn))
    call = record(batch=128).arguments
    assert not combiner.launches
    (cleared,) = clearer.launches
    assert cleared.options["launch_pdl"] is True
    assert call["PLAN"].stream_k is True
    assert cleared.arguments["partials"] == call["num_splits"] * call["num_groups"]
    assert call["scratch"].numel() == cleared.arguments["partials"] * fixup.PARTIAL.value
    code = support.compile_launch(fixup.clear_kernel, cleared, 90)
    assert code.spills == 0
    assert 0 < code.sass.index("ACQBULK") < code.sass.index("STG")


@pytest.mark.parametrize(
    ("heads", "h_kv", "box"),
    [(128, 1, [1, 1, 64]), (192, 1, [1, 1, 64]), (16, 2, [1, 8, 8]), (1, 1, [1, 64, 1]), (126, 1, None), (48, 1, None)],
)
def test_queries_come_as_tokens_by_heads(record, heads, h_kv, box):
    """TMA copies a program's 64 rows where they are whole tokens, or heads of one token."""
    arguments = record(heads=heads, h_kv=h_kv).arguments
    if box is None:
        assert arguments["query_half"] is arguments["query_rope"] is None
    else:
        assert arguments["query_half"].block_shape == [*box, 256]
        assert arguments["query_rope"].block_shape == [*box, 64]


@pytest.mark.parametrize(("page_size", "box"), [(8, 8), (16, 16), (32, 32), (48, 16), (64, 64), (192, 64)])
def test_a_box_lies_in_one_page(record, page_size, box):
    arguments = record(page_size=page_size).arguments
    assert arguments["PLAN"].box * arguments["PLAN"].boxes_per_page == page_size
    assert arguments["keys_half"].block_shape == [1, box, 1, 256]
    assert arguments["keys_rope"].block_shape == [1, box, 1, 64]


def test_queries_that_repeat_are_not_copied_by_tma():
    """A TMA descriptor cannot say that an axis has no stride."""
    q = torch.empty(1, 1, 128, 576, dtype=torch.bfloat16).expand(3, 2, 128, 576)
    assert launch._query_descriptors(q, strides_in_use(q), 128) == (None, None)


@pytest.mark.parametrize("batch", [1, 3, 16, 128, 400])
@pytest.mark.parametrize("rows", [1, 64, 128, 512])
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_scratch_is_bounded_and_the_gpu_filled(batch, rows, batch_invariant):
    made = launch.make_plan(132, batch, rows, 1, 1 << 17, batch_invariant, one_byte=rows == 1)
    split = made.split
    assert 4 * split.scratch <= plan.MAX_SCRATCH_BYTES
    if not batch_invariant:
        assert split.ctas(batch) >= 120


def test_equal_requests_are_not_split_and_others_fill_the_gpu():
    """128 requests of four groups of rows: 32 ranges of four requests each, or 33, which are all SMs."""
    made = launch.make_plan(132, 128, 256, 1, 8192, False, one_byte=False)
    assert (made.equals.ranges_of_equals, made.split.splits) == (32, 33)
    # One group of rows: four idle CTAs cost more than all SMs win, but where keys are cast.
    for rows, one_byte, splits in ((16, False, 128), (64, False, 128), (16, True, 132), (64, True, 132)):
        made = launch.make_plan(132, 128, rows, 1, 4096, False, one_byte)
        assert (made.equals.ranges_of_equals, made.split.splits) == (128, splits)
    # A request that several ranges have is combined by powers of two.
    made = launch.make_plan(132, 1, 64, 1, 8192, False, one_byte=False)
    assert made.equals.ranges_of_equals == made.split.splits == 64


@pytest.mark.parametrize(
    ("batch", "keys", "stream_k", "overhead"), [(1, 8192, False, 0), (1, 128, True, 2), (2, 8192, False, 2)]
)
def test_starting_on_a_request_counts_where_there_are_several(batch, keys, stream_k, overhead):
    """Or where ranges finish each other's."""
    made = launch.make_plan(132, batch, 16, 1, keys, False, one_byte=False)
    assert (made.stream_k, made.split.overhead) == (stream_k, overhead)


@pytest.mark.parametrize("call", [{"batch": 4, "heads": 16}, {"batch": 2}], ids=["16 heads", "128 heads"])
def test_nothing_keeps_lengths_from_keys(record, call):
    """No warp waits for another while it finds its range, and the producer has nothing left to divide."""
    code = support.compile_gluon(KERNEL, record(**call)).sass
    _, after_wait = code.split("ACQBULK")
    finding, _ = after_wait.rsplit("REDUX", 1)
    assert "BAR." not in finding
    _, producer, *_ = after_wait.split("USETMAXREG")
    assert "UTMALDG" in producer
    assert "MUFU.RCP" not in producer


@pytest.mark.parametrize(("max_keys", "rounded"), [(1 << 30, True), (2**31 - 1, False)])
def test_ranges_that_would_not_fit_32_bits_have_the_common_combine(max_keys, rounded):
    made = launch.make_plan(132, 1, 64, 1, max_keys, False, one_byte=False)
    assert made.rounded is rounded
    assert made.split.combines


@functools.cache
def call_of(**fields: Any) -> dispatch.CallSpec:
    defaults = {"cache_format": "bf16", "page_size": 64, "head_dim": 576, "head_dim_v": 512}
    return dispatch.CallSpec("dense_decode", torch.device("cuda"), torch.bfloat16, **(defaults | fields))


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({}, None),
        ({"page_size": 192}, None),
        ({"head_dim": 512}, None),
        ({"page_size": 16}, None),
        ({"page_size": 24}, None),
        ({"page_size": 100}, "100"),
        ({"page_size": 1}, "multiple of 8"),
        ({"cache_format": "fp8"}, None),
        ({"cache_format": "fp8", "page_size": 16}, None),
        ({"cache_format": "fp32"}, "bf16, fp16 or fp8, not fp32"),
        ({"head_dim": 192, "head_dim_v": 128}, "192 with 128"),
        ({"head_dim_v": 448}, "448"),
        ({"rows_aligned": False}, "16 bytes"),
    ],
)
def test_what_it_refuses(monkeypatch, fields, reason):
    monkeypatch.setattr("flashlatte.runtime.machine.compute_capability", lambda _: (9, 0))
    refusal = {choice.backend: choice.refusal for choice in dispatch.explain(call_of(**fields))}["hopper"]
    assert refusal is None if reason is None else reason in refusal


@pytest.mark.parametrize(
    ("strides", "offset", "aligned"),
    [
        ((64 * 576, 576, 576, 1), 0, True),
        ((64 * 584, 584, 584, 1), 8, True),
        ((64 * 580, 580, 580, 1), 0, False),
        ((64 * 576, 576, 576, 1), 4, False),
        ((0, 576, 576, 1), 0, False),
    ],
)
def test_which_rows_are_aligned(strides, offset, aligned):
    storage = torch.empty(4 * 64 * 600, dtype=torch.bfloat16)
    assert checks.rows_aligned(storage.as_strided((3, 64, 1, 576), strides, offset)) is aligned


def test_descriptors_are_made_once_a_cache():
    cache = torch.empty(3, 128, 2, 576, dtype=torch.bfloat16)
    make = functools.partial(
        launch._descriptors,
        cache.data_ptr(),
        cache.dtype,
        tuple(cache.shape),
        strides_in_use(cache),
        64,
        False,
        cache.device,
    )
    half, rope = make()
    assert make()[0] is half
    assert rope is not None
    assert (half.block_shape, rope.block_shape) == ([1, 64, 1, 256], [1, 64, 1, 64])
    assert half.strides == [128 * 2 * 576, 2 * 576, 576, 1]
    assert not isinstance(half.base, torch.Tensor)


@pytest.mark.full
def test_the_combine_waits_for_what_it_combines(record, monkeypatch):
    """On Hopper it is launched while the main kernel runs, and may not read before that has ended."""
    combiner = Recorder(combine_kernel := combine.combine_kernel.fn)
    monkeypatch.setattr(combine, "combine_kernel", combiner)
    monkeypatch.setattr(combine, "launches_overlap", lambda _: True)
    for call in ({"batch": 1, "heads": 16, "columns": 2048}, {"batch_invariant": True}):
        record(**call)
        launched = combiner.launches.pop()
        assert launched.options["launch_pdl"] is True
        code = support.compile_launch(combine_kernel, launched, 90)
        assert code.spills == 0
        first_wide_load = re.search(r"\bLDG\.\S*128\b", code.sass)
        assert first_wide_load is not None
        assert 0 < code.sass.index("ACQBULK") < first_wide_load.start()
