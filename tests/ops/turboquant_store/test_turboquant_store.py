"""``turboquant_store``: every byte compared with the oracle in Python."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.torch_op import opcheck
from support.turboquant_oracle import encode_record, key_margin

from flashlatte import turboquant_store
from flashlatte.kv_cache import turboquant
from flashlatte.ops.turboquant_store import api
from flashlatte.runtime import machine

BACKEND = "portable" if machine.interpreting() else "reference"
# Run both without the interpreter (reference) and with it (kernel).
pytestmark = [pytest.mark.interpreter] if machine.interpreting() else []


def rows(*shape, dtype=torch.float32, seed=0, factor=1.0):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=generator) * factor).to(dtype)


def check_bytes(key, value, cache, slots, layout):
    pages, page_size, heads, _ = cache.shape
    written = {slot: token for token, slot in enumerate(slots) if 0 <= slot < pages * page_size}
    for slot in range(pages * page_size):
        for head in range(heads):
            record = bytes(cache[slot // page_size, slot % page_size, head].tolist())
            if slot not in written:
                assert record == bytes([7]) * layout.record_bytes
                continue
            k, v = (x[written[slot], head].tolist() for x in (key.double(), value.double()))
            # A number within float32's rounding of a midpoint may be given either of two codes.
            if key_margin(k, layout.key_bits) > 1e-6:
                assert record == encode_record(k, v, layout.key_bits, layout.value_bits)


@given(
    name=st.sampled_from(turboquant.TURBOQUANT_NAMES),
    dtype=st.sampled_from([torch.bfloat16, torch.float16, torch.float32]),
    head_dim=st.sampled_from([16, 32]),
    heads=st.integers(1, 3),
    gap=st.sampled_from([0, 1, 2, 6]),
    slots=st.lists(st.sampled_from([-1, 0, 2, 5, 7, 11, 12, 2**31 - 1]), unique=True, max_size=6),
    slot_dtype=st.sampled_from([torch.int32, torch.int64]),
    factor=st.sampled_from([0.01, 30.0]),
    seed=st.integers(0, 2**32),
)
def test_every_byte(name, dtype, head_dim, heads, gap, slots, slot_dtype, factor, seed):
    layout = turboquant.turboquant_format(name, head_dim)
    tokens = len(slots) + 2
    key, value = (
        rows(heads, tokens, head_dim, dtype=dtype, seed=seed + n, factor=factor).transpose(0, 1) for n in (0, 1)
    )
    for padding in (key, value):
        padding[len(slots) :] = math.nan  # is not looked at
    width = layout.record_bytes
    cache = torch.full((4, 3, heads, width + gap), 7, dtype=torch.uint8)[..., :width]
    turboquant_store(key, value, cache, torch.tensor(slots, dtype=slot_dtype), backend=BACKEND)
    check_bytes(key, value, cache, slots, layout)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("name", turboquant.TURBOQUANT_NAMES)
def test_nan_infinity_and_values_that_saturate(name):
    key, value = rows(4, 1, 16), rows(4, 1, 16, seed=1)
    for one in (key, value):
        one[0, 0, 3] = math.nan
        one[1, 0, 2] = -math.inf
        one[2] *= 1e7
    layout = turboquant.turboquant_format(name, 16)
    cache = turboquant.allocate(name, 1, 4, 1, 16)
    turboquant_store(key, value, cache, torch.arange(4), backend=BACKEND)
    keys, values = (x[0, :, 0] for x in layout.decode(cache))
    assert values[:2].isnan().all()
    assert values[2:].isfinite().all()
    assert keys[0].isnan().any()
    assert keys[2:].isfinite().all()
    if layout.rotates:
        assert keys[:2].isnan().all()
        assert keys[2].norm().item() == pytest.approx(65504, rel=1e-3)


CACHE = turboquant.allocate("turboquant_4bit_nc", 4, 5, 2, 16)
GIVEN: dict[str, Any] = {
    "key": torch.zeros(3, 2, 16),
    "value": torch.zeros(3, 2, 16),
    "cache": CACHE,
    "slot_mapping": torch.arange(3),
}


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning", "ignore:overflow:RuntimeWarning")
def test_a_range_that_overflows_saturates():
    value = torch.tensor([-3e38, 3e38]).repeat(16).view(1, 1, 32)
    cache = turboquant.allocate("turboquant_3bit_nc", 1, 1, 1, 32)
    turboquant_store(torch.ones(1, 1, 32), value, cache, torch.zeros(1, dtype=torch.int64), backend=BACKEND)
    scale_and_minimum = cache[0, 0, 0, -4:].clone().view(torch.float16)
    assert scale_and_minimum.tolist() == [turboquant.LARGEST_HALF, -turboquant.LARGEST_HALF]


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"key": [1.0]}, TypeError, "^key must be a tensor, got list$"),
        ({"key": GIVEN["key"].int()}, TypeError, "^key must be bfloat16 or float16 or float32, got int32$"),
        ({"key": GIVEN["key"][0]}, ValueError, r"^key must have shape \[T, h_kv, d\]"),
        ({"key": torch.zeros(3, 2, 24)}, ValueError, r"^value must have shape \[3, 2, 24\]"),
        ({"value": GIVEN["value"].half()}, TypeError, "^value must be float32, got float16$"),
        ({"cache": CACHE.float()}, TypeError, "^cache must be uint8, got float32$"),
        ({"cache": CACHE[:, :, :1]}, ValueError, r"^cache must have shape \[pages, page_size, 2, record_bytes\]"),
        ({"cache": CACHE[..., :21]}, ValueError, r"^cache must be 28 .* wide for head dim 16, got 21$"),
        ({"cache": CACHE[:1].expand(4, 5, 2, 22)}, ValueError, "^cache must not be an expanded tensor"),
        ({"cache_format": "turboquant_k8v4"}, ValueError, "^cache of format turboquant_k8v4 must be 28 wide"),
        ({"cache_format": "v32"}, ValueError, r"^cache_format must be one of turboquant_k8v4, .*, got 'v32'$"),
        ({"slot_mapping": torch.zeros(3)}, TypeError, "^slot_mapping must be int32 or int64, got float32$"),
        ({"slot_mapping": torch.arange(4)}, ValueError, r"^slot_mapping must not .* key \(3 tokens\), got 4$"),
        ({"slot_mapping": torch.arange(3).to("meta")}, ValueError, "^slot_mapping must be on cpu like"),
        ({"backend": "hopper"}, ValueError, "has no turboquant_store in this version"),
    ],
)
def test_errors(change, error, message):
    with pytest.raises(error, match=message):
        turboquant_store(**(GIVEN | change))


def test_head_dims_that_are_no_power_of_two_are_refused():
    with pytest.raises(
        ValueError, match=r"^head_dim must be a power of two from 16 to 512 for turboquant_k8v4, got 24$"
    ):
        turboquant_store(torch.zeros(3, 2, 24), torch.zeros(3, 2, 24), CACHE, torch.arange(3))


def test_no_tokens():
    turboquant_store(torch.zeros(0, 2, 16), torch.zeros(0, 2, 16), CACHE, torch.arange(0))


@pytest.mark.skipif(machine.interpreting(), reason="of the operation, not of an implementation")
def test_opcheck():
    opcheck(api, "turboquant_store", lambda: turboquant_store(**GIVEN))
