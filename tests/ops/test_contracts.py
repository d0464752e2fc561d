"""Documented behavior for arguments at their limits, on the reference and on the portable kernels."""

import math

import pytest
import torch

from flashlatte import dense_decode, dense_prefill, kv_cache
from flashlatte.kv_cache import turboquant
from flashlatte.kv_cache.fp4 import to_e2m1
from flashlatte.ops.index_convert import index_convert
from flashlatte.ops.index_logits import paged_index_logits
from flashlatte.ops.paged_attention import paged_attention
from flashlatte.ops.turboquant_decode import turboquant_decode

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
BF16 = torch.bfloat16
on_backends = pytest.mark.parametrize("backend", ["reference", pytest.param("portable", marks=pytest.mark.interpreter)])


def ints(*values):
    return torch.tensor(values, dtype=torch.int32)


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(BF16)


@on_backends
@pytest.mark.parametrize("operation", ["dense_decode", "turboquant_decode", "paged_attention"])
def test_causal_counts_from_the_clamped_length(backend, operation):
    table = ints([0, 1])

    def call(length):
        if operation == "dense_decode":
            cache = normal(2, 16, 1, 576)
            return dense_decode(normal(1, 3, 2, 576, seed=1), cache, table, length, causal=True, backend=backend)
        if operation == "paged_attention":
            kv, starts = normal(2, 16, 1, 64), ints(0, 3)
            q = normal(3, 2, 64, seed=1)
            return paged_attention(q, kv, kv, table, length, starts, causal=True, backend=backend)
        layout = turboquant.turboquant_format("turboquant_4bit_nc", 64)
        cache = layout.encode(normal(2, 16, 1, 64), normal(2, 16, 1, 64))
        return turboquant_decode(normal(1, 3, 2, 64, seed=1), cache, table, length, causal=True, backend=backend)

    for whole, beyond in zip(call(ints(32)), call(ints(35)), strict=True):
        assert beyond.equal(whole)


@on_backends
def test_index_logits_count_from_the_length_as_given(backend):
    q, cache = normal(1, 3, 8, 128), normal(2, 4, 1, 128)
    seen = [
        paged_index_logits(q, cache, torch.ones(3, 8), ints(length), ints([0, 1]), backend=backend).isfinite().sum(1)
        for length in (8, 9, 11)
    ]
    assert [keys.tolist() for keys in seen] == [[6, 7, 8], [7, 8, 8], [8, 8, 8]]


@on_backends
@pytest.mark.parametrize("empty_lse", [math.inf, -math.inf])
def test_tokens_of_no_request_get_the_empty_lse(backend, empty_lse):
    kv, out, lse = normal(2, 16, 1, 64), torch.full((5, 2, 64), torch.nan, dtype=BF16), torch.full((5, 2), torch.nan)
    arguments = (normal(5, 2, 64), kv, kv, ints([0, 1]), ints(20), ints(1, 3))
    paged_attention(*arguments, out=out, lse=lse, empty_lse=empty_lse, backend=backend)
    assert out[[0, 3, 4]].eq(0).all()
    assert lse[[0, 3, 4]].eq(empty_lse).all()
    assert lse[1:3].isfinite().all()


@on_backends
@pytest.mark.parametrize("what", ["k", "v"])
def test_nan_that_a_window_hides_from_all_queries_reaches_no_output(backend, what):
    """Queries 28 and 29 attend to keys 24 to 29. Keys 16 to 23 are in a page that is read."""
    k, v = normal(2, 16, 1, 64), normal(2, 16, 1, 64, seed=1)
    call = (ints([0, 1]), ints(30), ints(0, 2))
    expected = paged_attention(normal(2, 2, 64), k, v, *call, window=5, causal=True, backend=backend)
    {"k": k, "v": v}[what].view(32, 64)[16:24] = torch.nan
    results = paged_attention(normal(2, 2, 64), k, v, *call, window=5, causal=True, backend=backend)
    for result, wanted in zip(results, expected, strict=True):
        assert result.equal(wanted)


@on_backends
def test_tokens_of_no_request_have_no_gradient(backend):
    """Rows 0, 4 and 5 of q and 0 and 5 of k and v belong to no request; the gradients of their results are NaN."""
    q, k, v = (normal(6, 2, 64, seed=seed).requires_grad_() for seed in range(3))
    out, lse = dense_prefill(q, k, v, ints(1, 2, 4), ints(1, 3, 5), 2, 2, backend=backend)
    assert out[[0, 4, 5]].eq(0).all()
    assert lse[[0, 4, 5]].eq(-math.inf).all()
    of_out, of_lse = torch.ones_like(out), torch.ones_like(lse)
    of_out[[0, 4, 5]], of_lse[[0, 4, 5]] = torch.nan, torch.nan
    dq, dk, dv = torch.autograd.grad((out, lse), (q, k, v), (of_out, of_lse))
    assert dq[[0, 4, 5]].eq(0).all()
    assert dk[[0, 5]].eq(0).all()
    assert dv[[0, 5]].eq(0).all()
    assert all(gradient.isfinite().all() for gradient in (dq, dk, dv))


@on_backends
def test_a_token_of_window_and_sinks_is_selected_once(backend):
    """The window of query 3 is 0 to 3; 0 and 1 are also sinks."""
    table = ints([2, 3])
    slots = index_convert(
        ints([1, 3, 5]), table, 4, query_positions=ints(3), sinks=2, window=4, backend=backend, return_counts=True
    )
    assert slots[0].tolist() == [[8, 9, -1, -1, 10, 11, -1, -1, 13]]
    assert slots[1].tolist() == [5]


@on_backends
def test_workspaces(backend):
    """Id 1 is beyond the starts, id 0 is a workspace, -1 is none. Sharding applies only to rows that use the table."""
    indices, table = ints([0, 1, 5]).repeat(3, 1), ints([2, 3]).repeat(3, 1)
    workspace = {"workspace_ids": ints(1, 0, -1), "workspace_starts": ints(100), "backend": backend}
    assert index_convert(indices, table, 4, **workspace).tolist() == [[-1, -1, -1], [100, 101, 105], [8, 9, 13]]
    sharded = index_convert(indices, table, 4, sharding=(1, 2, 1), **workspace)
    assert sharded.tolist() == [[-1, -1, -1], [100, 101, 105], [-1, 8, 10]]


@on_backends
@pytest.mark.parametrize("name", ["v32", "model1", "v41"])
def test_the_smallest_scale_is_2_to_the_minus_13(backend, name):
    layout = kv_cache.get_format(name)
    cache, rows = kv_cache.allocate(name, 1, 2), torch.full((2, layout.head_dim), 2.0**-30)
    rows[1] = 448 * 2.0**-13
    kv_cache.write(cache, ints(0, 1), rows, cache_format=name, backend=backend)
    page = cache[0].reshape(-1)
    if name == "v32":
        scales = page.view(2, 656)[:, 512:528].contiguous().view(torch.float32)
        assert scales.eq(2.0**-13).all()
    else:
        scales = page[2 * 576 : 2 * 584].view(2, 8)[:, :7] if name == "model1" else page.view(2, 528)[:, 512:]
        assert scales.eq(127 - 13).all()


def test_e2m1_takes_the_even_code_of_two_as_near():
    midpoints = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    assert to_e2m1(midpoints).tolist() == [0, 2, 2, 4, 4, 6, 6]
    assert to_e2m1(-midpoints).tolist() == [8, 10, 10, 12, 12, 14, 14]


@pytest.mark.parametrize("name", turboquant.TURBOQUANT_NAMES)
def test_turboquant_records_by_the_documented_layout(name):
    """Codes from the lowest bit up, key before value, each followed by its fp16 values."""
    layout = turboquant.turboquant_format(name, 16)
    key, value = normal(16).float(), normal(16, seed=1).float()
    record = layout.encode(key, value)
    of_bytes = [byte >> bit & 1 for byte in record.tolist() for bit in range(8)]

    def codes(first_byte, bits):
        field = of_bytes[8 * first_byte : 8 * first_byte + 16 * bits]
        return [sum(field[bits * i + bit] << bit for bit in range(bits)) for i in range(16)]

    value_at = 2 * layout.key_bits + (2 if layout.rotates else 0)
    scale, minimum = record[-4:].clone().view(torch.float16).tolist()
    step = (value.max() - value.min()) / (2**layout.value_bits - 1)
    assert scale == pytest.approx(float(step), rel=1e-3)
    assert minimum == float(value.min().half())
    assert codes(value_at, layout.value_bits) == ((value - value.min()) / step + 0.5).floor().int().tolist()
    if layout.rotates:
        assert record[value_at - 2 : value_at].clone().view(torch.float16).item() == float(key.norm().half())
        # Centroids have the order of their codes.
        rotated = layout.decode(record)[0] @ turboquant.hadamard(16, torch.device("cpu"))
        order = torch.tensor(codes(0, layout.key_bits)).argsort(stable=True)
        assert rotated[order].diff().ge(-1e-6).all()
    else:
        assert record[:16].view(torch.float8_e4m3fn).equal(key.to(torch.float8_e4m3fn))
    assert value_at + 2 * layout.value_bits + 4 == layout.record_bytes == len(record)


def test_turboquant_key_of_zeros_stays_one():
    """1e-8 is added to the norm used as divisor, not to the stored one."""
    layout = turboquant.turboquant_format("turboquant_4bit_nc", 64)
    record = layout.encode(torch.zeros(64), torch.zeros(64))
    assert record[layout.norm_offset : layout.value_offset].tolist() == [0, 0]
    assert layout.decode(record)[0].eq(0).all()
    small = torch.full((64,), 2.0**-20)
    stored = layout.encode(small, small)[layout.norm_offset : layout.value_offset].clone().view(torch.float16)
    assert stored.item() == 2.0**-17
