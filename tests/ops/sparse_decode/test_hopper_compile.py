"""Compile tests of the Hopper kernel, without a GPU: recorded launches are compiled to cubins."""

from __future__ import annotations

import random
import re
from collections import Counter
from typing import Any

import pytest
import torch
from support import compile as support
from support.compile import Recorder, variant_key
from support.later_spills import allowed
from support.marks import mostly_full

from flashlatte.kv_cache import get_format
from flashlatte.ops.sparse_decode import api
from flashlatte.runtime import dispatch, machine

triton = pytest.importorskip("triton")


from support.hopper_sparse_decode import CALLS, KERNEL, LENGTHS, recording  # noqa: E402

from flashlatte.ops.sparse_decode.hopper import launch  # noqa: E402
from flashlatte.split_kv import combine, plan  # noqa: E402

pytestmark = pytest.mark.skipif(machine.interpreting(), reason="compiles, which the interpreter does not")

COMBINE = combine.combine_kernel


@pytest.fixture
def record(monkeypatch):
    return recording(monkeypatch)


@pytest.fixture
def compiled(record):
    """The machine code of a call."""
    return lambda name: support.compile_gluon(KERNEL, record(**CALLS[name]))


@pytest.mark.parametrize("name", mostly_full(CALLS, "v32, whole items"))
def test_nothing_is_read_before_the_preceding_kernel_has_finished(compiled, name):
    code = compiled(name)
    assert code.sass.count("ACQBULK") == 1
    before, producer = code.sass.split("ACQBULK")
    # The code of the consumers ends with a register release. It comes first or last.
    start = before[before.rindex("USETMAXREG") :]
    assert "SYNCS" in start
    assert not re.search(r"\b(?:LDG|LDGSTS|STG)\b", start)
    # The combine may launch after all halves have been filled.
    assert code.sass.count("PREEXIT") == 1
    _, after = producer.split("PREEXIT")
    after, *_ = re.split(r"\bEXIT\b", after)
    assert not re.search(r"\b(?:LDG|LDGSTS|STG|BAR\.ARV 0x[5-9a-f])\b", after)


@pytest.mark.full
@pytest.mark.parametrize("name", ["v32, alone", "model1, ranges, alone", "bf16 576, whole items"])
def test_the_producer_does_not_spill_loaded_words(compiled, name):
    """A spill of a loaded word would wait for its load at once."""
    assert producer_loop_spills(compiled(name).sass) <= allowed(f"sparse_decode producer {name}", 0)


def producer_loop_spills(sass: str) -> int:
    """Spill instructions between the producer's barriers for the first and the last half of a block."""
    lines = sass.splitlines()
    threads = r", 0x1[08]0\b"
    # The numbers of these barriers depend on the block.
    first = next(i for i, line in enumerate(lines) if re.search(r"BAR\.SYNC\S* R\d+" + threads, line))
    last = max(i for i, line in enumerate(lines) if i > first and re.search(r"BAR\.ARV R\d+" + threads, line))
    return sum(bool(re.search(r"\b(?:STL|LDL)\b", line)) for line in lines[first:last])


@pytest.mark.full
@pytest.mark.parametrize(
    "name",
    ["v32, alone", "model1, ranges, alone", "v41, ranges, alone", "v32, whole items", "model1, ranges", "v41, ranges"],
)
def test_loads_are_16_bytes_wide(compiled, name):
    code = compiled(name)
    loads = Counter(re.findall(r"\bLDG\.E(\.\w+)?", code.sass))
    stores = Counter(re.findall(r"\bSTS(\.\w+)?", code.sass))
    row = {"v32": 512, "model1": 448, "v41": 512}[name.split(",")[0]]
    if name.endswith("alone"):
        # 64 tokens by 128 threads: for a block, and the first half of all. Twice as many when dequantized.
        assert loads[".128"] >= (row + 256) * 64 // (16 * 128)
        assert stores[".128"] >= 2 * row * 64 // (16 * 128)
    else:
        # 32 tokens: for two blocks, and the first of all, v32 with 16 bytes of scales.
        assert loads[".128"] >= 3 * row * 32 // (16 * 128) + 3 * (row == 512)
        assert stores[".128"] >= 2 * 2 * row * 32 // (16 * 128)
    # No conversion of e4m3 through float32.
    assert not re.search(r"\bF2F\.|E4M3", code.sass)


@pytest.mark.full
@pytest.mark.parametrize("name", ["v41_fp4, ranges", "v41_fp4, ranges, alone"])
def test_loads_of_fp4_are_8_bytes_wide(compiled, name):
    """As many loads as over v41, of half the width, and stores of 16 bytes."""
    code = compiled(name)
    loads = Counter(re.findall(r"\bLDG\.E(\.\w+)?", code.sass))
    stores = Counter(re.findall(r"\bSTS(\.\w+)?", code.sass))
    if name.endswith("alone"):
        assert loads[".64"] >= (256 + 128) * 64 // (8 * 128)
        assert stores[".128"] >= 1024 * 64 // (16 * 128)
    else:
        assert loads[".64"] >= 3 * 256 * 32 // (8 * 128)
        assert stores[".128"] >= 2 * 1024 * 32 // (16 * 128)
    assert loads[".128"] >= 4


@pytest.mark.full
def test_a_misaligned_page_costs_width_not_correctness(compiled):
    code = compiled("model1, odd pages")
    assert not re.search(r"\bLDG\.E\.128\b", code.sass)
    assert re.search(r"\bLDG\.E\.64\b", code.sass)


@pytest.mark.full
def test_bf16_rows_are_copied_asynchronously(compiled):
    # 64 rows of 576 elements in 256 threads, for q and two blocks.
    assert compiled("bf16 576, whole items").async_copies >= 3 * 64 * 576 // (8 * 256)


def test_stores_are_16_bytes_wide(compiled):
    widths = Counter(re.findall(r"\bSTG\.E(\.\w+)?", compiled("v32, whole items").sass))
    # 64 x 256 elements in 128 threads per consumer, and the lse.
    assert widths[".128"] >= 2 * 64 * 256 // (8 * 128)
    assert widths[""] <= 2


@pytest.mark.parametrize("batch", [1, 3, 16, 128, 400, 20000])
@pytest.mark.parametrize("heads", [1, 64, 128, 512, 16384])
@pytest.mark.parametrize("uniform", [False, True])
def test_scratch_is_bounded_and_the_gpu_filled(batch, heads, uniform):
    made = launch.make_plan(132, batch, heads, 2048, 0, uniform)
    groups = made.split.groups
    assert 4 * made.split.scratch <= plan.MAX_SCRATCH_BYTES
    assert made.ctas % groups == 0
    # A few CTAs may idle so that items are not split.
    assert made.ctas >= 0.93 * min(batch, 132 // groups) * groups
    assert made.ctas <= max(132, groups)


def test_ranges_write_split_metadata(monkeypatch, record):
    """Behind the partial outputs, for a combine kernel that is launched early."""
    combiner = Recorder(COMBINE)
    monkeypatch.setattr(combine, "combine_kernel", combiner)
    for call in ({"batch": 74, "s_q": 1}, {"batch": 37, **LENGTHS}):
        launched = record(**call)
        (combined,) = combiner.launches
        combiner.launches.clear()
        assert launched.options["launch_pdl"] is True
        ranges, groups = launched.arguments["num_splits"], launched.arguments["num_groups"]
        assert (
            launched.arguments["scratch"].numel() == 2 * ranges * groups * plan.PartialShape(64, 512).elements + ranges
        )
        assert launched.arguments["scratch"] is combined.arguments["scratch"]


@pytest.mark.parametrize("batch", [1, 4, 74, 20000])
@pytest.mark.parametrize("uniform", [False, True])
def test_batch_invariant_splits_no_query_token(batch, uniform):
    made = launch.make_plan(132, batch, 128, 2048, 0, uniform, batch_invariant=True)
    assert not made.balanced
    assert (made.split.scratch, made.split.combines, made.equal_splits, made.granularity) == (0, False, None, 2)


def test_uniform_query_tokens_have_equal_splits():
    made = launch.make_plan(132, 4, 128, 2048, 0, True)
    assert (made.split.splits, made.equal_splits) == (64, 16)
    assert launch.make_plan(132, 4, 128, 2048, 0, False).equal_splits is None
    assert launch.make_plan(132, 74, 128, 2048, 0, True).equal_splits is None


def test_small_calls_have_splits_of_one_block():
    """Only with few rows to combine; not for bf16 caches, with lengths, or for calls that fill the GPU."""
    made = launch.make_plan(132, 4, 64, 128, 512, True)
    assert (made.granularity, made.equal_splits, made.split.splits, made.ctas) == (1, 10, 40, 40)
    assert launch.make_plan(132, 2, 16, 2048, 0, True).split.splits == 64
    assert launch.make_plan(132, 2, 48, 2048, 0, True).granularity == 2
    assert launch.make_plan(132, 5, 16, 2048, 0, True).granularity == 2
    assert launch.make_plan(132, 4, 64, 128, 0, True).granularity == 2
    assert launch.make_plan(132, 4, 64, 128, 512, False).granularity == 2
    assert launch.make_plan(132, 4, 64, 128, 512, True, has_scales=False).granularity == 2


@pytest.mark.parametrize(
    ("items", "heads", "topk", "extra_topk", "one_length", "lengths"),
    [
        (16, 64, 128, 512, False, False),
        (48, 64, 128, 512, True, False),
        (64, 64, 128, 512, True, True),
        # A tile of 16 heads leaves less to combine.
        (64, 16, 128, 512, False, False),
        # Two pairs a query token are never worth a second kernel.
        (8, 128, 128, 128, True, True),
        (48, 128, 2048, 0, True, False),
        (96, 64, 128, 1024, True, True),
        (40, 64, 16384, 0, False, False),
    ],
)
def test_query_tokens_are_split_if_that_is_faster(items, heads, topk, extra_topk, one_length, lengths):
    """Whole query tokens save the combine; ranges use idle SMs and balance lengths that are only on the device."""
    made = {
        is_uniform: launch.make_plan(132, items, heads, topk, extra_topk, is_uniform) for is_uniform in (True, False)
    }
    assert (not made[True].balanced, not made[False].balanced) == (one_length, lengths)


def test_overhead_does_not_lengthen_ranges():
    """74 items of 16 pairs in 66 ranges: with an overhead of a pair per item, a range would have 19."""
    assert launch.make_plan(132, 74, 128, 2048, 0, True).split.overhead == 0
    assert launch.make_plan(132, 74, 128, 2048, 0, False).split.overhead == 2


@pytest.mark.parametrize("lengths", [{}, LENGTHS], ids=["one length", "lengths"])
def test_new_batches_need_few_variants(monkeypatch, record, lengths):
    """Whole items, equal splits, of blocks and of pairs, ranges with an overhead and without; tiles of the combine."""
    combiner = Recorder(COMBINE)
    monkeypatch.setattr(combine, "combine_kernel", combiner)
    calls = [record(batch=batch, topk=topk, **lengths) for batch in range(1, 71) for topk in (64, 192, 576, 1152, 2048)]
    assert len({variant_key(KERNEL, call) for call in calls}) <= 5
    assert len({variant_key(COMBINE, call) for call in combiner.launches}) <= 5


def test_costs_beyond_32_bits_are_not_balanced():
    assert launch.make_plan(132, 3, 128, 2**30, 0, False).split.splits == 66
    assert not launch.make_plan(132, 16000, 128, 2**24, 0, False).balanced


@pytest.mark.parametrize("page_size", [1, 2, 3, 53, 61, 64, 69, 576, 2**20, 2**31 - 1])
def test_pages_by_multiplication(page_size):
    """``rows.locate`` divides by the page size with these factors, in unsigned 32-bit integers."""
    (_, _, slots, _, magic, shift), _, _ = launch._address_of(
        0, 1, page_size, 0, 656, "k_cache", get_format("v32").tiling
    )
    assert slots == page_size
    assert magic < 2**32
    rng = random.Random(0)
    edges = [k * page_size + d for k in (0, 1, 2, (2**31 - 2) // page_size) for d in (-1, 0, 1)]
    for slot in [*edges, 2**31 - 1, *(rng.randrange(2**31) for _ in range(2000))]:
        if 0 <= slot < 2**31:
            assert (2 * slot * magic >> 32) >> shift == slot // page_size


@pytest.mark.parametrize(
    ("page_bytes", "token_bytes", "form", "alignment", "flat"),
    [
        (64 * 656, 656, "v32", 16, True),
        (65 * 656, 656, "v32", 16, False),
        (64 * 584, 584, "model1", 16, False),
        (61 * 584, 584, "model1", 8, False),
        (64 * 528, 528, "v32_no_rope", 16, True),
        (64 * 528, 528, "v41", 16, True),
        (65 * 528, 528, "v41", 16, False),
        (64 * 288, 288, "v41_fp4", 16, True),
        (64 * 1152, 1152, "bf16", 16, True),
        (64 * 2304, 2304, "bf16", 16, True),
    ],
)
def test_addresses(page_bytes, token_bytes, form, alignment, flat):
    page_size = 61 if alignment == 8 else 64
    tiling = get_format(form, 576 if form == "bf16" else None).tiling
    address = launch._address_of(0, 8, page_size, page_bytes, token_bytes, "k_cache", tiling)
    assert address[1:] == (alignment, flat)


def test_misaligned_tokens_are_an_error():
    with pytest.raises(ValueError, match=r"^k_cache must have tokens at multiples of 4 bytes .*, got 2$"):
        launch._address_of(2, 8, 64, 64 * 656, 656, "k_cache", get_format("v32").tiling)


def call(cache_format: str, head_dim: int, head_dim_v: int = 512, **facts: Any) -> dispatch.CallSpec:
    sizes: dict[str, Any] = {"head_dim": head_dim, "head_dim_v": head_dim_v, "cache_format": cache_format}
    return dispatch.CallSpec(api.OPERATION, torch.device("cuda", 0), torch.bfloat16, **sizes, **facts)


def refusal(*shape: Any, extra: str | None = None, **facts: Any) -> str | None:
    spec = call(*shape, extra_cache_format=extra, **facts)
    return {choice.backend: choice.refusal for choice in dispatch.explain(spec)}["hopper"]


def test_refusals(monkeypatch):
    monkeypatch.setattr("flashlatte.runtime.machine.compute_capability", lambda _: (9, 0))
    formats = (
        ("v32", 576),
        ("v32_no_rope", 512),
        ("model1", 512),
        ("v41", 512),
        ("v41_fp4", 512),
        ("bf16", 576),
        ("bf16", 512),
    )
    for cache_format, head_dim in formats:
        assert refusal(cache_format, head_dim) is None
        assert refusal(cache_format, head_dim, extra=cache_format) is None
    assert "not 576 with 256" in (refusal("v32", 576, 256) or "")
    assert "not 48 with 32" in (refusal("bf16", 48, 32) or "")
    assert refusal("bf16", 576, rows_aligned=False) == "takes tensors whose rows begin at multiples of 16 bytes"
    assert refusal("v32", 576, rows_aligned=False) == "takes tensors whose rows begin at multiples of 4 bytes"
    assert "not nvfp4_ds_mla" in (refusal("nvfp4_ds_mla", 576) or "")
    assert refusal("v41", 512, extra="v41_fp4") == ("takes a second cache in the first one's format v41, not v41_fp4")


def test_caches_too_large_for_its_numbers_are_left_to_others(monkeypatch):
    monkeypatch.setattr("flashlatte.runtime.machine.compute_capability", lambda _: (9, 0))
    assert refusal("v32", 576, slots=2**31 - 1, stride_bytes=2**31 - 1) is None
    assert "less than 2147483648 tokens, not 2147483648" in (refusal("v32", 576, slots=2**31) or "")
    assert "less than 2147483648 bytes apart, not 2147483648" in (refusal("v32", 576, stride_bytes=2**31) or "")
    assert dispatch.select(call("v32", 576, stride_bytes=2**31)) == "portable"


@pytest.mark.parametrize("large", ["k_cache", "extra_k_cache"])
def test_error_gives_the_size_of_the_larger_cache(monkeypatch, large):
    calls = []
    monkeypatch.setattr(dispatch, "select", lambda spec, _: calls.append(spec) or "reference")
    caches: dict[str, Any] = {
        name: torch.zeros(2, 4, 1, 656, dtype=torch.uint8) for name in ("k_cache", "extra_k_cache")
    }
    caches[large] = torch.zeros(3, 2, 4, 1, 656, dtype=torch.uint8)[:, 0]
    indices = torch.zeros(1, 1, 3, dtype=torch.int32)
    q = torch.zeros(1, 1, 8, 576)
    api.sparse_decode(q, indices=indices, extra_indices=indices, cache_format="v32", **caches)
    assert [(spec.slots, spec.stride_bytes) for spec in calls] == [(12, 8 * 656)]


@pytest.mark.parametrize(("first_byte", "aligned"), [(0, True), (4, True), (2, False)])
@pytest.mark.parametrize("extra", [False, True])
def test_alignment_of_records(monkeypatch, first_byte, aligned, extra):
    calls = []
    monkeypatch.setattr(dispatch, "select", lambda call, _: calls.append(call) or "reference")
    shape, size = (2, 4, 1, 656), 2 * 4 * 656
    caches = [torch.zeros(size, dtype=torch.uint8).view(shape)]
    caches.insert(extra, torch.zeros(first_byte + size, dtype=torch.uint8)[first_byte:].view(shape))
    indices = torch.zeros(1, 1, 3, dtype=torch.int32)
    api.sparse_decode(
        torch.zeros(1, 1, 8, 576),
        caches[0],
        indices,
        cache_format="v32",
        extra_k_cache=caches[1],
        extra_indices=indices,
    )
    assert [call.rows_aligned for call in calls] == [aligned]
