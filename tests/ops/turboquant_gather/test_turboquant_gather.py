"""``turboquant_gather``: every element compared with the oracle in Python."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.torch_op import opcheck
from support.turboquant_oracle import decode_record

from flashlatte import turboquant_gather
from flashlatte.kv_cache import turboquant
from flashlatte.ops.turboquant_gather import api
from flashlatte.runtime import machine

BACKEND = "portable" if machine.interpreting() else "reference"
# Run both without the interpreter (reference) and with it (kernel).
pytestmark = [pytest.mark.interpreter] if machine.interpreting() else []
PAGES, PAGE_SIZE = 4, 3


def filled(layout, heads, gap, seed):
    """A cache with quantized random keys and values."""
    generator = torch.Generator().manual_seed(seed)
    key, value = torch.randn(2, PAGES, PAGE_SIZE, heads, layout.head_dim, generator=generator)
    storage = torch.zeros(PAGES, PAGE_SIZE, heads, layout.record_bytes + gap, dtype=torch.uint8)
    cache = storage[..., : layout.record_bytes]
    cache.copy_(layout.encode(key, value))
    return cache


@given(
    name=st.sampled_from(turboquant.TURBOQUANT_NAMES),
    dtype=st.sampled_from([torch.bfloat16, torch.float16, torch.float32]),
    head_dim=st.sampled_from([16, 32]),
    heads=st.integers(1, 3),
    gap=st.sampled_from([0, 2, 6]),
    starts=st.sampled_from([None, (0, 2, -1), (5, 1, 100)]),
    index=st.sampled_from([torch.int32, torch.int64]),
    seed=st.integers(0, 2**32),
)
def test_every_number(name, dtype, head_dim, heads, gap, starts, index, seed):
    layout = turboquant.turboquant_format(name, head_dim)
    cache = filled(layout, heads, gap, seed)
    table = torch.tensor([[2, 0], [-1, 3], [1, PAGES]], dtype=index)
    boundaries = torch.tensor([0, 5, 5, 9], dtype=index)
    first = None if starts is None else torch.tensor(starts, dtype=index)
    out: dict[str, Any] = {side: torch.full((11, heads, head_dim), 7.0, dtype=dtype) for side in ("key", "value")}
    turboquant_gather(cache, table, boundaries, 11, head_dim, seq_starts=first, dtype=dtype, **out, backend=BACKEND)
    for row in range(11):
        request = sum(row >= int(boundary) for boundary in boundaries) - 1
        position = row - int(boundaries[min(request, 2)]) + (0 if starts is None else starts[min(request, 2)])
        for head in range(heads):
            key, value = ([0.0] * head_dim for _ in range(2))
            if request == 3:
                key, value = ([7.0] * head_dim for _ in range(2))
            elif 0 <= position < 2 * PAGE_SIZE and 0 <= (page := int(table[request, position // PAGE_SIZE])) < PAGES:
                record = bytes(cache[page, position % PAGE_SIZE, head].tolist())
                key, value = decode_record(record, head_dim, layout.key_bits, layout.value_bits)
            tolerance = torch.finfo(dtype).eps / 2
            # In the kernel a rotated key is fp16.
            exact = 2e-6 if BACKEND == "reference" or machine.interpreting() else 1e-3
            worst = max(map(abs, key)) * exact
            assert out["key"][row, head].tolist() == pytest.approx(key, rel=tolerance, abs=worst)
            worst = max(map(abs, value)) * 1e-6
            assert out["value"][row, head].tolist() == pytest.approx(value, rel=tolerance, abs=worst)


LAYOUT = turboquant.turboquant_format("turboquant_3bit_nc", 16)
GIVEN: dict[str, Any] = {
    "cache": filled(LAYOUT, 2, 0, 0),
    "block_table": torch.zeros(2, 2, dtype=torch.int32),
    "cu_seqlens": torch.tensor([0, 2, 4]),
    "total_tokens": 4,
    "head_dim": 16,
}


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"cache": GIVEN["cache"].float()}, TypeError, "^cache must be uint8, got float32$"),
        ({"head_dim": 32}, ValueError, "^cache must be 52 .* wide for head dim 32, got 18$"),
        ({"head_dim": 16.0}, TypeError, "^head_dim must be an int, got float$"),
        ({"cache_format": "turboquant_4bit_nc"}, ValueError, "^cache of format turboquant_4bit_nc must be 22 wide"),
        ({"block_table": torch.zeros(2, 2)}, TypeError, "^block_table must be int32 or int64, got float32$"),
        ({"cu_seqlens": torch.tensor([0])}, ValueError, r"^cu_seqlens must have shape \[3\]"),
        ({"seq_starts": torch.tensor([0])}, ValueError, r"^seq_starts must have shape \[2\]"),
        ({"total_tokens": -1}, ValueError, "^total_tokens must be at least 0, got -1$"),
        ({"dtype": torch.int8}, TypeError, "^dtype must be bfloat16 or float16 or float32, got torch.int8$"),
        ({"key": torch.zeros(4, 2, 16)}, TypeError, "^key must be bfloat16, got float32$"),
        ({"value": torch.zeros(3, 2, 16).bfloat16()}, ValueError, r"^value must have shape \[4, 2, 16\]"),
    ],
)
def test_errors(change, error, message):
    with pytest.raises(error, match=message):
        turboquant_gather(**(GIVEN | change))


def test_no_requests():
    change: dict[str, Any] = {"block_table": torch.zeros(0, 0).int(), "cu_seqlens": torch.zeros(1).int()}
    key, value = turboquant_gather(**(GIVEN | change))
    assert not key.any()
    assert not value.any()


@pytest.mark.skipif(machine.interpreting(), reason="of the operation, not of an implementation")
def test_opcheck():
    opcheck(api, "turboquant_gather", lambda: turboquant_gather(**GIVEN))
