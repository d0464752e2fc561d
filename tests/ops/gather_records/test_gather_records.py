"""``gather_records`` compared with records written one by one, for the reference and the kernel."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.torch_op import opcheck

from flashlatte import kv_cache
from flashlatte.kv_cache import gather_records
from flashlatte.ops.gather_records import api
from flashlatte.runtime import machine

BACKEND = "portable" if machine.interpreting() else "reference"
# Run both without the interpreter (reference) and with it (kernel).
pytestmark = [pytest.mark.interpreter] if machine.interpreting() else []


def bits(x):
    return x.contiguous().view(torch.uint8)


def draw_cache(name, pages, page_size, head_dim, seed):
    """A random cache, and the record of each of its slots."""
    layout = kv_cache.get_format(name, head_dim)
    rows = torch.randn(pages * page_size, layout.head_dim, generator=torch.Generator().manual_seed(seed))
    cache = kv_cache.allocate(layout, pages, page_size)
    kv_cache.write(cache, torch.arange(pages * page_size), rows, cache_format=layout, backend="reference")
    return cache, layout, kv_cache.quantize(rows, cache_format=layout)


@given(
    name=st.sampled_from(kv_cache.FORMAT_NAMES),
    width=st.sampled_from([17, 40]),
    page_size=st.integers(1, 5),
    lengths=st.lists(st.integers(0, 7), min_size=1, max_size=3),
    starts=st.sampled_from([None, torch.int32, torch.int64]),
    padding=st.integers(0, 3),
    open_end=st.booleans(),
    gap=st.sampled_from([0, 3, 16]),
    index_dtype=st.sampled_from([torch.int32, torch.int64]),
    seed=st.integers(0, 2**32),
)
def test_every_byte(name, width, page_size, lengths, starts, padding, open_end, gap, index_dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    plain = kv_cache.get_format(name).plain
    cache, layout, records = draw_cache(name, 4, page_size, width if plain else None, seed)
    table = torch.tensor([0, 1, 2, 3, -1, 4, 2**31 - 1])[torch.randint(0, 7, (len(lengths), 3), generator=generator)]
    firsts = (
        [0] * len(lengths) if starts is None else torch.randint(-1, 9, (len(lengths),), generator=generator).tolist()
    )
    total = sum(lengths) + padding
    out = torch.full((total, layout.record_width + gap), 3).to(cache.dtype)[:, : layout.record_width]
    expected = out.clone()
    boundaries = torch.tensor([0, *lengths]).cumsum(0).to(index_dtype)
    if open_end:
        boundaries, lengths = boundaries[:-1], [*lengths[:-1], lengths[-1] + padding]
    row = 0
    for request, length in enumerate(lengths):
        for position in range(firsts[request], firsts[request] + length):
            expected[row] = 0
            if 0 <= position < 3 * page_size and 0 <= table[request, position // page_size] < 4:
                slot = int(table[request, position // page_size]) * page_size + position % page_size
                expected.view(torch.uint8)[row] = bits(records[slot])
            row += 1
    given = gather_records(
        cache,
        table.to(index_dtype),
        boundaries,
        total,
        cache_format=layout,
        seq_starts=None if starts is None else torch.tensor(firsts, dtype=starts),
        out=out,
        backend=BACKEND,
    )
    assert given is out
    assert bits(out).equal(bits(expected))


@pytest.mark.parametrize("name", ["v32", "model1", "bf16"])
def test_records_can_be_dequantized(name):
    cache, layout, _ = draw_cache(name, 3, 4, None, 0)
    where = torch.tensor([[2, 0]]), torch.tensor([0, 7])
    records = gather_records(cache, *where, 7, backend=BACKEND)
    rows = kv_cache.gather(cache, *where, total_tokens=7, backend="reference")
    assert records.shape == (7, layout.record_width)
    assert kv_cache.dequantize(records, cache_format=layout).bfloat16().equal(rows)


def test_no_rows_and_no_requests():
    cache, _, _ = draw_cache("v32", 2, 4, None, 0)
    none = torch.zeros(0, 0, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    assert gather_records(cache, *none, 0).shape == (0, 656)
    assert gather_records(cache, *none, 3).eq(0).all()


CACHE, TABLE, CU_SEQLENS = kv_cache.allocate("v32", 2, 4), torch.zeros(1, 2, dtype=torch.int32), torch.tensor([0, 3])


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"cache": [0]}, TypeError, "^cache must be a tensor, got list$"),
        ({"block_table": TABLE.float()}, TypeError, "^block_table must be int32 or int64, got float32$"),
        ({"cu_seqlens": CU_SEQLENS.repeat(2)}, ValueError, r"^cu_seqlens must have shape \[2\]"),
        ({"seq_starts": torch.zeros(2, dtype=torch.int32)}, ValueError, r"^seq_starts must have shape \[1\]"),
        ({"total_tokens": -1}, ValueError, "^total_tokens must be at least 0, got -1$"),
        ({"out": torch.zeros(3, 656)}, TypeError, "^out must be uint8, got float32$"),
        ({"out": torch.zeros(2, 656, dtype=torch.uint8)}, ValueError, r"^out must have shape \[3, 656\]"),
    ],
)
def test_errors_name_the_argument(change, error, message):
    given = {"cache": CACHE, "block_table": TABLE, "cu_seqlens": CU_SEQLENS, "total_tokens": 3}
    with pytest.raises(error, match=message):
        gather_records(**(given | change))


@pytest.mark.skipif(machine.interpreting(), reason="the reference's")
def test_opcheck():
    opcheck(api, "gather_records", lambda: gather_records(CACHE, TABLE, CU_SEQLENS, 3))
