"""``turboquant_decode``: the reference, and the kernel in Triton's interpreter, compared with an oracle."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.torch_op import assert_compiles, opcheck
from support.turboquant_oracle import attend

from flashlatte import merge_states, turboquant_decode
from flashlatte.kv_cache import turboquant
from flashlatte.ops.turboquant_decode import api
from flashlatte.runtime import machine

BACKEND = "portable" if machine.interpreting() else "reference"
# Run both without the interpreter (reference) and with it (kernel).
pytestmark = [pytest.mark.interpreter, pytest.mark.filterwarnings("ignore::RuntimeWarning")]
pytestmark = pytestmark if machine.interpreting() else []
PAGES = 9


def paged(layout, page_size, lengths, heads, gap, generator, index=torch.int32):
    """A cache of random bytes with occasional NaN, except in slots with keys; and its block table."""
    columns = max(-(-max(*lengths, 1) // page_size), 1)
    width = layout.record_bytes
    storage = torch.randint(0, 256, (PAGES, page_size, heads, width + gap), generator=generator).to(torch.uint8)
    storage[..., layout.norm_offset - 2 :: 7] = 0xFF
    cache = storage[..., :width]
    order = torch.randperm(PAGES, generator=generator).tolist()
    table = torch.randint(-3, PAGES, (len(lengths), columns), generator=generator)
    for request, length in enumerate(lengths):
        for first in range(0, length, page_size):
            table[request, first // page_size] = page = order.pop() if order else -1
            count = min(length - first, page_size)
            key, value = torch.randn(2, count, heads, layout.head_dim, generator=generator)
            key[..., 1] *= 8
            if page >= 0:
                cache[page, :count] = layout.encode(key, value * torch.rand(count, 1, 1) - 0.2)
    return cache, table.to(index)


def check(q, cache, table, lengths, layout, **options):
    out, lse = turboquant_decode(q, cache, table, lengths, **options, backend=BACKEND)
    scale = options.get("softmax_scale") or q.shape[3] ** -0.5
    bits = (layout.key_bits, layout.value_bits)
    expected = attend(q, cache, table, lengths, bits, scale, options.get("causal", False))
    empty = expected[1].isneginf()
    wanted_lse = torch.where(empty, options.get("empty_lse", -math.inf), expected[1])
    # Queries are rounded to fp16 in the kernel, after their rotation.
    tolerance = 2e-3 if BACKEND == "portable" else 1e-5
    tolerance = max(tolerance, torch.finfo(q.dtype).eps)
    torch.testing.assert_close(out.double(), expected[0], rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(lse.double(), wanted_lse, rtol=tolerance, atol=tolerance)
    assert not out[empty.transpose(1, 2)].any()


@given(
    name=st.sampled_from(turboquant.TURBOQUANT_NAMES),
    head_dim=st.sampled_from([16, 32]),
    page_size=st.sampled_from([3, 16, 32]),
    lengths=st.lists(st.sampled_from([-5, 0, 1, 17, 40]), min_size=1, max_size=3),
    s_q=st.integers(1, 2),
    heads=st.sampled_from([(1, 1), (4, 2), (6, 1), (10, 1)]),
    causal=st.booleans(),
    gap=st.sampled_from([0, 1, 2, 6]),
    dtype=st.sampled_from([torch.bfloat16, torch.float16]),
    index=st.sampled_from([torch.int32, torch.int64]),
    empty_lse=st.sampled_from([math.inf, -math.inf]),
    seed=st.integers(0, 2**32),
)
def test_against_the_oracle(name, head_dim, page_size, lengths, s_q, heads, causal, gap, dtype, index, empty_lse, seed):
    gap -= gap % 2 if BACKEND == "portable" else 0
    layout = turboquant.turboquant_format(name, head_dim)
    generator = torch.Generator().manual_seed(seed)
    cache, table = paged(layout, page_size, lengths, heads[1], gap, generator, index)
    q = torch.randn(len(lengths), s_q, heads[0], head_dim, generator=generator).to(dtype)
    seqlens = torch.tensor(lengths, dtype=index)
    check(q, cache, table, seqlens, layout, causal=causal, empty_lse=empty_lse)


def test_large_and_small_queries_and_a_given_scale():
    layout = turboquant.turboquant_format("turboquant_4bit_nc", 32)
    generator = torch.Generator().manual_seed(0)
    cache, table = paged(layout, 16, [30, 12], 2, 0, generator)
    q = (torch.randn(2, 1, 4, 32, generator=generator) * torch.tensor([1e30, 1e-30, 1.0, 0.0])[:, None]).bfloat16()
    for factor, row in ((1e-30, 0), (1e30, 1), (0.1, 2), (1.0, 3)):
        row_q = torch.zeros_like(q)
        row_q[:, :, row] = q[:, :, row]
        check(row_q, cache, table, torch.tensor([30, 12]), layout, softmax_scale=factor)


def test_a_request_is_no_longer_than_its_table():
    layout = turboquant.turboquant_format("turboquant_4bit_nc", 16)
    generator = torch.Generator().manual_seed(0)
    cache, table = paged(layout, 16, [32], 1, 0, generator)
    q = torch.randn(1, 2, 1, 16, generator=generator).half()
    given = {"causal": True, "backend": BACKEND}
    expected = turboquant_decode(q, cache, table, torch.tensor([32]), **given)
    for length in (34, 2**31 - 1):
        for result, wanted in zip(
            turboquant_decode(q, cache, table, torch.tensor([length]), **given), expected, strict=True
        ):
            assert torch.equal(result, wanted)


def test_nan_in_a_key_that_is_seen_comes_out_and_no_other():
    layout = turboquant.turboquant_format("turboquant_4bit_nc", 16)
    key = torch.randn(3, 1, 16, generator=torch.Generator().manual_seed(0))
    key[1] = math.nan
    cache = layout.encode(key, key.nan_to_num()).unsqueeze(0)
    q, table = torch.ones(1, 1, 2, 16).half(), torch.zeros(1, 1, dtype=torch.int32)
    first, _ = turboquant_decode(q, cache, table, torch.tensor([1]), backend=BACKEND)
    both, _ = turboquant_decode(q, cache, table, torch.tensor([2]), backend=BACKEND)
    assert first.isfinite().all()
    assert both.isnan().all()


def test_parts_of_the_keys_merge():
    layout = turboquant.turboquant_format("turboquant_k3v4_nc", 32)
    generator = torch.Generator().manual_seed(1)
    cache, table = paged(layout, 16, [64], 2, 0, generator)
    q = torch.randn(1, 1, 4, 32, generator=generator).half()
    whole = turboquant_decode(q, cache, table, torch.tensor([64]), backend=BACKEND)
    parts = [
        turboquant_decode(q, cache, table[:, pages], torch.tensor([32]), backend=BACKEND)
        for pages in (slice(0, 2), slice(2, 4))
    ]
    outs, lses = ([part[side].float() for part in parts] for side in (0, 1))
    merged = merge_states([out[:, 0] for out in outs], [lse[:, :, 0] for lse in lses], backend="reference")
    torch.testing.assert_close(merged[0], whole[0][:, 0].float(), rtol=2e-3, atol=2e-3)
    torch.testing.assert_close(merged[1], whole[1][:, :, 0], rtol=1e-4, atol=1e-4)


LAYOUT = turboquant.turboquant_format("turboquant_3bit_nc", 16)
GIVEN: dict[str, Any] = {
    "q": torch.zeros(2, 1, 4, 16).bfloat16(),
    "cache": torch.zeros(4, 3, 2, LAYOUT.record_bytes, dtype=torch.uint8),
    "block_table": torch.zeros(2, 2, dtype=torch.int32),
    "cache_seqlens": torch.zeros(2, dtype=torch.int32),
}


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"q": GIVEN["q"][0]}, ValueError, r"^q must have shape \[b, s_q, h_q, d\]"),
        ({"q": GIVEN["q"].int()}, TypeError, "^q must be bfloat16 or float16 or float32, got int32$"),
        ({"q": torch.zeros(2, 1, 3, 16)}, ValueError, "^cache must have a number of heads that divides q's 3, got 2$"),
        ({"q": torch.zeros(2, 1, 4, 24)}, ValueError, "^head_dim must be a power of two"),
        ({"cache": GIVEN["cache"].float()}, TypeError, "^cache must be uint8, got float32$"),
        ({"cache": GIVEN["cache"][..., 1:]}, ValueError, "^cache must be 28 .* wide for head dim 16, got 17$"),
        ({"cache_format": "turboquant_k8v4"}, ValueError, "^cache of format turboquant_k8v4 must be 28 wide"),
        ({"block_table": GIVEN["block_table"][:1]}, ValueError, r"^block_table must have shape \[2, max_pages\]"),
        ({"cache_seqlens": torch.zeros(2)}, TypeError, "^cache_seqlens must be int32 or int64, got float32$"),
        ({"softmax_scale": 0.0}, ValueError, "^softmax_scale must be a finite number above 0, got 0.0$"),
        ({"causal": 1}, TypeError, "^causal must be True or False, got 1$"),
        ({"out": torch.zeros(2, 1, 4, 16)}, TypeError, "^out must be bfloat16, got float32$"),
        ({"lse": torch.zeros(2, 1, 4)}, ValueError, r"^lse must have shape \[2, 4, 1\]"),
        ({"empty_lse": 0.0}, ValueError, "^empty_lse must be float"),
        ({"backend": "hopper"}, ValueError, "has no turboquant_decode in this version"),
    ],
)
def test_errors(change, error, message):
    with pytest.raises(error, match=message):
        turboquant_decode(**(GIVEN | change))


@pytest.mark.skipif(not machine.interpreting(), reason="Triton does not run on the CPU but in its interpreter")
def test_the_kernel_refuses_records_at_odd_bytes():
    storage = torch.zeros(4, 3, 2, LAYOUT.record_bytes + 1, dtype=torch.uint8)
    change: dict[str, Any] = {"cache": storage[..., :-1]}
    with pytest.raises(ValueError, match="takes caches that begin at multiples of 4 bytes, with records at"):
        turboquant_decode(**(GIVEN | change), backend="portable")
    turboquant_decode(**(GIVEN | change))


def test_no_requests():
    change: dict[str, Any] = {"q": GIVEN["q"][:0], "block_table": GIVEN["block_table"][:0, :0]}
    change["cache_seqlens"] = torch.zeros(0).int()
    out, lse = turboquant_decode(**(GIVEN | change))
    assert out.shape == (0, 1, 4, 16)
    assert lse.shape == (0, 4, 1)


@pytest.mark.skipif(machine.interpreting(), reason="of the operation, not of an implementation")
def test_opcheck_and_compile():
    opcheck(api, "turboquant_decode", lambda: turboquant_decode(**GIVEN))
    assert_compiles(turboquant_decode, GIVEN)
