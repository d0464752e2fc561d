"""The Gluon kernel without a GPU: supported calls, launches, and compile tests."""

from __future__ import annotations

import re
from collections import Counter

import pytest
import torch
from support.calls import BF16, CALLS, FP16
from support.loops import loops
from support.recording import NUM_SMS, Recorded, Recording

from flashlatte import paged_attention
from flashlatte.ops.paged_attention import api
from flashlatte.ops.paged_attention.hopper.launch import heads_per_tile
from flashlatte.runtime import dispatch, machine
from flashlatte.testing.paged_attention_case import PagedAttentionCase

pytestmark = pytest.mark.skipif(machine.interpreting(), reason="compiles, which the interpreter does not")

H100 = dispatch.CallSpec("paged_attention", torch.device("cuda"), BF16, page_size=64, head_dim=128, head_dim_v=128)


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        ({}, None),
        ({"rows": 8192}, None),
        ({"page_size": 48, "head_dim": 192, "dtype": FP16}, None),
        ({"dtype": torch.float32}, "takes bfloat16, float16, not float32"),
        ({"page_size": 8}, "takes pages of a multiple of 16 tokens, not 8"),
        ({"head_dim_v": 192}, "takes head dims up to 192 with 128, not 128 with 192"),
        ({"rows_aligned": False}, "takes tensors whose rows begin at multiples of 16 bytes"),
        ({"optional_features": "softcap, qq_bias"}, "does not take softcap, qq_bias"),
        ({"rows": -32}, r"takes calls in which one request can have 8192 query rows .*; here it can have 0"),
    ],
    ids=str,
)
def test_supported_calls(monkeypatch, facts, reason):
    monkeypatch.setattr(machine, "_compute_capability", lambda _: (9, 0))
    (hopper, *_) = dispatch.explain(dispatch.CallSpec(**(vars(H100) | facts)))
    assert hopper.backend == "hopper"
    assert re.fullmatch(reason or "", hopper.refusal or "")


@pytest.mark.parametrize(
    ("case", "optional_features"),
    [
        ({}, None),
        ({"layout": "hnd", "window": 5, "sinks": True}, None),
        ({"layout": "split"}, "rows of a cache in pieces"),
        ({"cache_dtype": torch.int8}, "a quantized cache"),
        ({"new_keys": True, "softcap": 2.0}, "k and v in addition to the cache, softcap"),
        ({"alibi": "linear", "qq_bias": 3, "prefix_ranges": 1}, "prefix_ranges, alibi_slopes, qq_bias"),
        ({"fp8_out": True}, "out in float8_e4m3fn"),
    ],
    ids=str,
)
def test_refused_features(monkeypatch, case, optional_features):
    calls = []
    monkeypatch.setattr(api.dispatch, "select", lambda call, _: calls.append(call) or "reference")
    paged_attention(**PagedAttentionCase(2, 3, 5, 4, 2, head_dim=16, d_v=16, decodes=3, **case).inputs())
    assert [call.optional_features for call in calls] == [optional_features]
    # Nine tokens; four other requests have one each.
    assert calls[0].rows == 5 * 4


@pytest.fixture
def launched(monkeypatch):
    record = Recording(monkeypatch)

    def launched(**call) -> list[Recorded]:
        return CALLS["paged_attention"](record, "hopper", **call)

    return launched


@pytest.mark.parametrize(
    ("call", "grid"),
    [
        ({"tokens": 8192}, NUM_SMS),
        # A tile of 32 tokens with 4 heads, for 8 kv heads; one more per request, and for tokens of none.
        ({"tokens": 32}, 32),
        ({"tokens": 64, "heads": 7, "kv_heads": 1}, 21),
    ],
    ids=str,
)
def test_grid_is_no_larger_than_the_work(launched, call, grid):
    (one,) = launched(requests=1, **call)
    assert one.launch.grid == (min(grid, NUM_SMS),)


def test_requests_of_few_queries_have_launches_that_do_not_grow_with_tokens(launched):
    grids = [[one.launch.grid for one in launched(requests=40, tokens=tokens)] for tokens in (2048, 65_536)]
    assert grids[0] == grids[1]
    assert len(grids[0]) > 1


def test_rows_that_tma_cannot_address_are_an_error(launched):
    """Also under torch.compile, where the operation cannot check addresses."""
    with pytest.raises(ValueError, match=r"^q must have rows that begin at multiples of 16 bytes for backend='hopper'"):
        launched(q_pad=4)


def test_lengths_and_strides_do_not_compile(launched):
    calls = ({"tokens": 600}, {"tokens": 4000, "requests": 9, "q_pad": 8}, {"requests": 9, "columns": 3, "pages": 99})
    assert len({launched(**call)[0].variant for call in calls}) == 1


@pytest.mark.parametrize(("heads", "packed"), [(1, 1), (4, 4), (6, 2), (7, 1), (12, 4), (128, 64)])
def test_heads_per_tile(heads, packed):
    assert heads_per_tile(heads) == packed
    assert heads % packed == 0


@pytest.mark.full
@pytest.mark.parametrize(
    "call",
    [{}, {"page_size": 64, "heads": 8}, {"head_dim": 64, "d_v": 64}, {"head_dim": 192, "page_size": 48}],
    ids=str,
)
def test_main_loop(launched, call):
    code = launched(tokens=2048, requests=1, **call)[0].compile()
    chunks, v_chunks = call.get("head_dim", 128) // 64, call.get("d_v", 128) // 64
    # Code that was moved to the end forms other loops with products, but without softmax.
    main = [body for body in loops(code.sass) if sum("MUFU.EX2" in one for one in body) >= 64]
    for loop in sorted(main, key=len)[:2]:
        count = Counter(re.sub(r"^@!?U?P\w+\s+", "", one).split()[0].split(".")[0] for one in loop)
        assert count["STL"] == count["LDL"] == 0
        assert 0 < count["HGMMA"] <= 4 * chunks + 8
        # 64 of P, and the change of row_max of two rows.
        assert count["MUFU"] <= 66
        # The softmax overlaps with the second product: the wait for it comes after nearly all exponentials.
        awaited = next(index for index, one in enumerate(loop) if "WARPGROUP.DEPBAR.LE gsb0, 0x0" in one)
        assert sum("MUFU.EX2" in one for one in loop[:awaited]) >= 64
    # A producer with unrolled copies would spill hundreds of times.
    assert code.spills <= 16
    assert len(re.findall(r"\bUTMALDG\b", code.sass)) <= 4 * chunks + 2 * chunks + 2 * v_chunks + 2
