"""Compile tests of the Hopper kernel, without a GPU: recorded launches are compiled to cubins."""

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

from flashlatte.ops.dense_decode.hopper import fixup, launch  # noqa: E402
from flashlatte.ops.dense_decode.hopper.few_rows import consumer  # noqa: E402
from flashlatte.runtime.strides import strides_in_use  # noqa: E402
from flashlatte.split_kv import combine, fp24_combine, plan  # noqa: E402

pytestmark = pytest.mark.skipif(machine.interpreting(), reason="compiles, which the interpreter does not")

KERNEL = launch.dense_decode_kernel
COMBINE = combine.combine_kernel

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
    """Calls the launcher and returns its launches."""
    recorder, combiner = Recorder(KERNEL), Recorder(combine.combine_kernel)
    monkeypatch.setattr(launch, "dense_decode_kernel", recorder)
    monkeypatch.setattr(launch, "clear_kernel", Recorder(fixup.clear_kernel))
    monkeypatch.setattr(combine, "combine_kernel", combiner)
    monkeypatch.setattr(fp24_combine, "combine_fp24_kernel", Recorder(fp24_combine.combine_fp24_kernel))
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
def test_a_tile_is_released_before_the_output_is_rescaled(compiled):
    """Rescaling must not delay the refill: nothing is between the last product that reads a tile and its barrier."""
    code = re.findall(r"/\*[0-9a-f]{4,}\*/\s+(.*?);", compiled("bf16 576").sass)
    frees = [index for index, one in enumerate(code) if re.match(r"BAR\.ARV 0x[5-8], 0x100", one)]
    waits = [index for index, one in enumerate(code) if "WARPGROUP.DEPBAR" in one]
    after = [index - max(wait for wait in waits if wait < index) for index in frees if index > waits[0]]
    # Arrivals of the loop and of the last step for each of four tiles; the initial ones precede any product.
    assert sum(distance <= 20 for distance in after) >= 8


def test_fixup_orders_partial_outputs_and_flags(compiled):
    """A partial output is stored before its flag and loaded after it, 16 bytes per thread at a time."""
    code = compiled("bf16 576, many requests").sass
    raised = code.split("STG.E.STRONG.GPU")
    # Each consumer sets one flag and polls two.
    assert len(raised) == 1 + 2
    assert len(re.findall(r"\bLDG\.E\.STRONG\.GPU\b", code)) == 4
    for before in raised[:-1]:
        assert before.rindex("MEMBAR") > before.rindex("STG.E.128") > 0
    assert len(re.findall(r"\bLDG\.E\.128\b", code)) == 2 * 32


@pytest.mark.full
@pytest.mark.parametrize("name", [name for name in CALLS if "e4m3" in name])
def test_keys_in_flight_do_not_spill(compiled, name):
    """A spill of a loaded word waits for the load. With small pages an address may spill; it is reloaded once in the
    loop, and once where lanes of a warp diverge.

    It is loaded again once in the loop, and once where the lanes of a warp have parted."""
    most = allowed(f"dense_decode casts {name}", 2 if "pages of 16" in name else 0)
    assert support.cast_loop_spills(compiled(name).sass) <= most


@pytest.mark.parametrize("name", mostly_full(FEW_ROWS, "576"))
def test_few_rows_do_not_spill(record, name):
    call = record(**{"batch": 128, "heads": 16, "cache_dtype": torch.float8_e4m3fn} | FEW_ROWS[name])
    code = support.compile_gluon(KERNEL, call)
    assert call.arguments["CONFIG"].few_rows
    assert code.spills <= allowed(f"dense_decode few rows {name}", 0)
    # Two blocks of a step: 32 or 36 products for the scores, 16 columns of keys each, and 32 for the output.
    assert code.hgmma == 2 * (32 + (36 if name == "576" or "invariant" in name else 32))


@pytest.mark.parametrize(("rows", "few"), [(1, True), (16, True), (17, False), (128, False)])
def test_few_rows_selection(record, rows, few):
    call = record(heads=rows, cache_dtype=torch.float8_e4m3fn).arguments
    assert call["CONFIG"].few_rows is few
    assert call["descriptors_half"].layout.swizzle_byte_width == (64 if few else 128)
    assert record(heads=rows).arguments["CONFIG"].few_rows is False


def test_p_of_few_rows_is_finite_in_float16():
    """For scores so large that float32 rounds the maximum minus a constant."""
    places = torch.arange(-512, 513) / 2**24
    largest = torch.cat([sign * 2.0**exponent * (1 + places) for sign in (-1, 1) for exponent in range(-4, 60)])
    row_max = largest - consumer.P_EXPONENT.value
    assert torch.exp2(largest - row_max).half().isfinite().all()


def test_few_rows_compile_once_for_all_head_counts(record):
    calls = [record(heads=heads, cache_dtype=torch.float8_e4m3fn) for heads in (1, 5, 16)]
    assert len({support.variant_key(KERNEL, call) for call in calls}) == 1


def test_stream_k_needs_no_combine(record, monkeypatch):
    """Flags are cleared first, by a kernel that waits for the preceding one, which may use the same scratch."""
    monkeypatch.setattr(launch, "clear_kernel", clearer := Recorder(fixup.clear_kernel))
    monkeypatch.setattr(combine, "combine_kernel", combiner := Recorder(combine.combine_kernel.fn))
    call = record(batch=128).arguments
    assert not combiner.launches
    (cleared,) = clearer.launches
    assert cleared.options["launch_pdl"] is True
    assert call["CONFIG"].stream_k is True
    assert cleared.arguments["partials"] == call["grid_num_splits"] * call["grid_num_groups"]
    assert call["scratch"].numel() == cleared.arguments["partials"] * fixup.PARTIAL.value
    code = support.compile_launch(fixup.clear_kernel, cleared, 90)
    assert code.spills == 0
    assert 0 < code.sass.index("ACQBULK") < code.sass.index("STG")


@pytest.mark.parametrize(
    ("heads", "h_kv", "box"),
    [(128, 1, [1, 1, 64]), (192, 1, [1, 1, 64]), (16, 2, [1, 8, 8]), (1, 1, [1, 64, 1]), (126, 1, None), (48, 1, None)],
)
def test_query_boxes(record, heads, h_kv, box):
    """TMA copies the 64 rows of a CTA if they are whole tokens, or heads of one token."""
    arguments = record(heads=heads, h_kv=h_kv).arguments
    if box is None:
        assert arguments["query_half"] is arguments["query_rope"] is None
    else:
        assert arguments["query_half"].block_shape == [*box, 256]
        assert arguments["query_rope"].block_shape == [*box, 64]


@pytest.mark.parametrize(("page_size", "box"), [(8, 8), (16, 16), (32, 32), (48, 16), (64, 64), (192, 64)])
def test_a_box_is_within_one_page(record, page_size, box):
    arguments = record(page_size=page_size).arguments
    assert arguments["CONFIG"].box * arguments["CONFIG"].boxes_per_page == page_size
    assert arguments["descriptors_half"].block_shape == [1, box, 1, 256]
    assert arguments["descriptors_rope"].block_shape == [1, box, 1, 64]


def test_queries_with_stride_0_are_not_copied_by_tma():
    """A TMA descriptor cannot have a stride of 0."""
    q = torch.empty(1, 1, 128, 576, dtype=torch.bfloat16).expand(3, 2, 128, 576)
    assert launch._query_descriptors(q, None, 128) == (None, None)


def test_separate_rope(record):
    """Both parts of the queries are copied from their places; rows that are not aligned are joined."""
    call = record(separate_rope=True).arguments
    assert (call["query_q"].shape[3], call["query_separate_q_rope"].shape[3]) == (512, 64)
    assert call["query_rope"].base.data_ptr() == call["query_separate_q_rope"].data_ptr()
    for joined in (record(separate_rope=True, head_dim=576, d_v=448), record(), record(q_pad=1)):
        assert joined.arguments["query_q"].shape[3] == 576
        assert joined.arguments["query_separate_q_rope"] is None


@pytest.mark.parametrize("batch", [1, 3, 16, 128, 400])
@pytest.mark.parametrize("rows", [1, 64, 128, 512])
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_scratch_is_bounded_and_the_gpu_filled(batch, rows, batch_invariant):
    made = launch.make_plan(132, batch, rows, 1, 1 << 17, batch_invariant, one_byte=rows == 1)
    split = made.split
    assert 4 * split.scratch <= plan.MAX_SCRATCH_BYTES
    if not batch_invariant:
        assert split.ctas(batch) >= 120


def test_uniform_requests_are_not_split_and_others_fill_the_gpu():
    """128 requests with four row groups: 32 ranges of four requests each, or 33, which use all SMs."""
    made = launch.make_plan(132, 128, 256, 1, 8192, False, one_byte=False)
    assert (made.uniform.ranges, made.split.splits) == (32, 33)
    # One row group: using all SMs does not pay, except if keys are cast.
    for rows, one_byte, splits in ((16, False, 128), (64, False, 128), (16, True, 132), (64, True, 132)):
        made = launch.make_plan(132, 128, rows, 1, 4096, False, one_byte)
        assert (made.uniform.ranges, made.split.splits) == (128, splits)
    # Splits of a request are combined in powers of two.
    made = launch.make_plan(132, 1, 64, 1, 8192, False, one_byte=False)
    assert made.uniform.ranges == made.split.splits == 64


@pytest.mark.parametrize(
    ("batch", "keys", "stream_k", "overhead"), [(1, 8192, False, 0), (1, 128, True, 2), (2, 8192, False, 2)]
)
def test_overhead(batch, keys, stream_k, overhead):
    """Also with stream-K fixup."""
    made = launch.make_plan(132, batch, 16, 1, keys, False, one_byte=False)
    assert (made.stream_k, made.split.overhead) == (stream_k, overhead)


@pytest.mark.parametrize(
    "call",
    [
        pytest.param({"batch": 4, "heads": 16}, id="16 heads", marks=pytest.mark.full),
        pytest.param({"batch": 2}, id="128 heads", marks=pytest.mark.full),
        pytest.param({"batch": 128}, id="many requests"),
    ],
)
def test_no_barrier_between_lengths_and_keys(record, call):
    """No warp waits for another before the first loads, and the producer has no divisions left."""
    code = support.compile_gluon(KERNEL, record(**call)).sass
    _, after_wait = code.split("ACQBULK")
    finding, _ = after_wait.rsplit("REDUX", 1)
    assert "BAR." not in finding
    _, producer, *_ = after_wait.split("USETMAXREG")
    assert "UTMALDG" in producer
    assert "MUFU.RCP" not in producer


@pytest.mark.parametrize(("max_keys", "fp24"), [(1 << 30, True), (2**31 - 1, False)])
def test_costs_beyond_32_bits_use_the_common_combine(max_keys, fp24):
    made = launch.make_plan(132, 1, 64, 1, max_keys, False, one_byte=False)
    assert made.fp24_partials is fp24
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
def test_refusals(monkeypatch, fields, reason):
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
def test_aligned_rows(strides, offset, aligned):
    storage = torch.empty(4 * 64 * 600, dtype=torch.bfloat16)
    assert checks.rows_aligned(storage.as_strided((3, 64, 1, 576), strides, offset)) is aligned


def test_descriptors_are_cached():
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
def test_the_combine_waits_for_the_main_kernel(record, monkeypatch):
    """On Hopper the combine kernel launches while the main kernel runs, and must not read before that has finished."""
    combiner = Recorder(COMBINE)
    monkeypatch.setattr(combine, "combine_kernel", combiner)
    monkeypatch.setattr(combine, "launches_overlap", lambda _: True)
    for call in ({"batch": 1, "heads": 16, "columns": 2048}, {"batch_invariant": True}):
        record(**call)
        launched = combiner.launches.pop()
        assert launched.options["launch_pdl"] is True
        code = support.compile_launch(COMBINE, launched, 90)
        assert code.spills == 0
        first_wide_load = re.search(r"\bLDG\.\S*128\b", code.sass)
        assert first_wide_load is not None
        assert 0 < code.sass.index("ACQBULK") < first_wide_load.start()
