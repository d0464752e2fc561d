"""``reshape_and_cache``: every byte compared with an oracle in Python, for the reference and the kernel."""

import math
import struct
from bisect import bisect_left
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flashlatte import paged_attention, reshape_and_cache
from flashlatte.runtime import machine

E4M3, E5M2, INT8 = torch.float8_e4m3fn, torch.float8_e5m2, torch.int8
QUANTIZED = (E4M3, E5M2, INT8)
FLOATS = (torch.bfloat16, torch.float16, torch.float32)
BACKEND = "portable" if machine.interpreting() else "reference"
# Run both without the interpreter (reference) and with it (kernel).
pytestmark = [pytest.mark.interpreter] if machine.interpreting() else []

# The numbers from 0 up, in the order of their codes. An e5m2 number is the upper byte of an fp16 one.
POSITIVE = {
    E4M3: [(8 + code % 8 if code >= 8 else code % 8) * 2.0 ** (max(code // 8, 1) - 10) for code in range(0x7F)],
    E5M2: [struct.unpack("<e", bytes([0, code]))[0] for code in range(0x7C)],
    INT8: [float(code) for code in range(128)],
}


def nearest(x, dtype):
    """The value of ``dtype`` nearest to x, ties to the even code; saturating."""
    if math.isnan(x):
        return 0.0 if dtype == INT8 else math.nan
    values = POSITIVE[dtype]
    magnitude = min(abs(x), values[-1])
    above = bisect_left(values, magnitude)
    if above and magnitude - values[above - 1] <= values[above] - magnitude:
        tie = magnitude - values[above - 1] == values[above] - magnitude
        above -= not (tie and above % 2 == 0)
    return math.copysign(values[above], x)


def float32(x):
    return struct.unpack("<f", struct.pack("<f", x))[0]


def expected_row(row, dtype, scale):
    """The stored elements of a row, and the scale: the given one, or if None the computed one."""
    if scale is None:
        amax = math.nan if any(map(math.isnan, row)) else max(map(abs, row))
        scale = float32(amax / POSITIVE[dtype][-1])
        scale = float32(1e-6) if scale < float32(1e-6) else scale
    return [nearest(float32(x / scale) if not math.isnan(scale) else math.nan, dtype) for x in row], scale


def draw(*shape, dtype=torch.float32, seed=0, factor=1.0):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=generator) * factor).to(dtype)


def paged(pages, page_size, heads, width, dtype, layout, fill=7):
    """An empty cache in one of the layouts: [pages, page_size, heads, width], or split into pieces of x elements."""
    if layout == "pieces":
        x = math.gcd(width, 16 // dtype.itemsize)
        return torch.full((pages, heads, width // x, page_size, x), fill).to(dtype).permute(0, 3, 1, 2, 4)
    if layout == "numbers apart":
        return torch.full((pages, heads, width, page_size), fill).to(dtype).permute(0, 3, 1, 2)
    if layout == "heads first":
        return torch.full((pages, heads, page_size, width), fill).to(dtype).transpose(1, 2)
    return torch.full((pages, page_size, heads, width + 3), fill).to(dtype)[..., :width]


LAYOUTS = ("tokens first", "heads first", "numbers apart")
SCALES = ("none", "number", "tensor", "heads", "tokens")


def make_scale(kind, pages, page_size, heads, seed):
    if kind == "none":
        return None
    if kind == "number":
        return 0.3
    if kind == "tokens":
        return torch.full((heads, pages, page_size), -1.0).permute(1, 2, 0)
    return draw(1 if kind == "tensor" else heads, seed=seed).abs() + 0.1


def check_side(rows, cache, slots, kind, scale, before_scale):
    flat = cache.flatten(3) if cache.dim() == 5 else cache
    page_size, heads = flat.shape[1:3]
    written = set()
    for token, slot in enumerate(slots):
        if not 0 <= slot < flat.shape[0] * page_size:
            continue
        page, offset = divmod(slot, page_size)
        written.add((page, offset))
        for head in range(heads):
            row = rows[token, head].float().tolist()
            actual = flat[page, offset, head].float().tolist()
            if cache.dtype not in QUANTIZED:
                assert actual == row
                continue
            given = {"none": 1.0, "number": float32(0.3)}.get(kind)
            if kind in ("tensor", "heads"):
                given = scale[head % len(scale)].item()
            numbers, used = expected_row(row, cache.dtype, given)
            if kind == "tokens":
                assert scale[page, offset, head].item() == pytest.approx(used, rel=0, abs=0, nan_ok=True)
            assert actual == pytest.approx(numbers, rel=0, abs=0, nan_ok=True)
    for page in range(flat.shape[0]):
        for offset in range(page_size):
            if (page, offset) not in written:
                assert flat[page, offset].float().eq(7).all()
                assert kind != "tokens" or scale[page, offset].equal(before_scale[page, offset])


@given(
    dtype=st.sampled_from([*QUANTIZED, *FLOATS]),
    source=st.sampled_from(FLOATS),
    layouts=st.tuples(st.sampled_from([*LAYOUTS, "pieces"]), st.sampled_from(LAYOUTS)),
    kinds=st.tuples(st.sampled_from(SCALES), st.sampled_from(SCALES)),
    heads=st.integers(1, 3),
    widths=st.sampled_from([(16, 16), (32, 8), (5, 12), (64, 1)]),
    slots=st.lists(st.sampled_from([-1, 0, 2, 5, 7, 11, 12, 2**31 - 1]), unique=True, max_size=6),
    slot_dtype=st.sampled_from([torch.int32, torch.int64]),
    seed=st.integers(0, 2**32),
)
def test_every_number_and_scale(dtype, source, layouts, kinds, heads, widths, slots, slot_dtype, seed):
    if dtype not in QUANTIZED:
        source, kinds = dtype, ("none", "none")
    tokens = len(slots) + 2
    sides = []
    for number, (width, layout, kind) in enumerate(zip(widths, layouts, kinds, strict=True)):
        rows = draw(heads, tokens, width, dtype=source, seed=seed + number, factor=30.0).transpose(0, 1)
        rows[len(slots) :] = math.nan  # padding is not looked at
        cache = paged(4, 3, heads, width, dtype, layout)
        scale = make_scale(kind, 4, 3, heads, seed + number)
        sides.append((rows, cache, scale, kind))
    (key, k_cache, k_scale, _), (value, v_cache, v_scale, _) = sides
    before = [scale.clone() if isinstance(scale, torch.Tensor) else None for _, _, scale, _ in sides]
    mapping = torch.tensor(slots, dtype=slot_dtype)
    reshape_and_cache(key, value, k_cache, v_cache, mapping, k_scale=k_scale, v_scale=v_scale, backend=BACKEND)
    for (rows, cache, scale, kind), before_scale in zip(sides, before, strict=True):
        check_side(rows, cache, slots, kind, scale, before_scale)


SPECIAL = [0.0, -0.0, 2**-9, 2**-10, 3 * 2**-10, 2.0**-16, 2.0**-17, 0.5, 1.5, -2.5, 127.5, 447.9, 464.0, 61440.0]
SPECIAL += [1e30, -1e30]


@pytest.mark.parametrize("dtype", QUANTIZED)
@pytest.mark.parametrize("kind", ["none", "tokens"])
def test_ties_ends_and_nan(dtype, kind):
    rows = torch.tensor([SPECIAL, [*SPECIAL[:15], math.nan], [0.0] * 16, [1e-8] * 16]).unsqueeze(1)
    scale = make_scale(kind, 2, 3, 1, 0)
    cache, other = (paged(2, 3, 1, 16, dtype, "tokens first") for _ in range(2))
    slots = [0, 1, 3, 4]
    before = scale.clone() if isinstance(scale, torch.Tensor) else None
    reshape_and_cache(rows, rows, cache, other, torch.tensor(slots), k_scale=scale, backend=BACKEND)
    check_side(rows, cache, slots, kind, scale, before)


def test_vllms_two_layouts_hold_the_same_bytes():
    key, value = draw(5, 2, 16), draw(5, 2, 16, seed=1)
    slots = torch.tensor([4, 0, 7, 2, 5])
    flash = torch.zeros(2, 4, 2, 16, dtype=E4M3), torch.zeros(2, 4, 2, 16, dtype=E4M3)
    reshape_and_cache(key, value, *flash, slots, backend=BACKEND)
    k_pieces, v_apart = torch.zeros(2, 2, 1, 4, 16, dtype=E4M3), torch.zeros(2, 2, 16, 4, dtype=E4M3)
    views = (k_pieces.permute(0, 3, 1, 2, 4), v_apart.permute(0, 3, 1, 2))
    reshape_and_cache(key, value, *views, slots, backend=BACKEND)
    assert views[0].flatten(3).float().equal(flash[0].float())
    assert views[1].float().equal(flash[1].float())
    # By the definition of vLLM's layout: page 1, head 1, numbers in pieces of 16, token 0 of the page.
    assert k_pieces[1, 1, 0, 0].float().equal(flash[0][1, 0, 1].float())


@pytest.mark.parametrize(("dtype", "worst"), [(E4M3, 0.05), (E5M2, 0.1), (INT8, 0.02)])
def test_paged_attention_reads_what_was_written(dtype, worst):
    tokens, shape = 8, (4, 2, 2)
    q, key, value = draw(1, 4, 32), draw(tokens, 2, 32, seed=1, factor=20.0), draw(tokens, 2, 16, seed=2)
    k_cache, v_cache = torch.zeros(*shape, 32, dtype=dtype), torch.zeros(*shape, 16, dtype=dtype)
    scales: dict[str, Any] = {"k_scale": torch.zeros(shape), "v_scale": torch.zeros(shape)}
    reshape_and_cache(key, value, k_cache, v_cache, torch.arange(tokens), **scales, backend=BACKEND)
    where = (torch.arange(4).unsqueeze(0), torch.tensor([tokens]), torch.tensor([0, 1]))
    out, _ = paged_attention(q, k_cache, v_cache, *where, softmax_scale=1e-2, **scales)
    exact, _ = paged_attention(q, key.view(*shape, 32), value.view(*shape, 16), *where, softmax_scale=1e-2)
    assert (out - exact).norm() / exact.norm() < worst
