"""Queries and cached keys compared with norms and complex rotations in float64; bytes compared with the formats'."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.torch_op import opcheck

from flashlatte import kv_cache, rotate_and_cache
from flashlatte.kv_cache.registry import as_format
from flashlatte.ops.rotate_and_cache import api
from flashlatte.runtime import machine
from flashlatte.testing.byte_oracles import model1_decode_page, model1_encode_page, v41_encode, v41_fp4_encode

BACKEND = "portable" if machine.interpreting() else "reference"
# Run both without the interpreter (reference) and with it (kernel).
pytestmark = [pytest.mark.interpreter] if machine.interpreting() else []


def turn(row: list[float], table: torch.Tensor, position: int) -> list[float]:
    entry = table[min(max(position, 0), len(table) - 1)].tolist()
    pairs, result = len(entry) // 2, list(row)
    for pair in range(pairs):
        at = len(row) - 2 * pairs + 2 * pair
        turned = complex(row[at], row[at + 1]) * complex(entry[pair], entry[pairs + pair])
        result[at : at + 2] = turned.real, turned.imag
    return result


def draw(tokens, heads, head_dim, rope, dtype, seed) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    angles = torch.rand(9, rope // 2, generator=generator) * 6
    return {
        "q": torch.randn(tokens, heads, head_dim + 8, generator=generator).to(dtype)[..., :head_dim],
        "kv": torch.randn(tokens, head_dim + 8, generator=generator).to(dtype)[:, :head_dim],
        "cos_sin": torch.cat((angles.cos(), angles.sin()), dim=-1),
        "positions": torch.randint(-2, 12, (tokens,), generator=generator),
        "slot_mapping": torch.randperm(12, generator=generator)[:tokens] - 1,
    }


@given(
    tokens=st.integers(0, 5),
    heads=st.sampled_from([1, 3, 20]),
    shape=st.sampled_from([(16, 4), (32, 32), (64, 16)]),
    dtype=st.sampled_from([torch.bfloat16, torch.float16, torch.float32]),
    q_eps=st.sampled_from([None, 1e-6, 0.1]),
    in_place=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_against_float64(tokens, heads, shape, dtype, q_eps, in_place, seed):
    arguments = draw(tokens, heads, *shape, dtype=dtype, seed=seed)
    q, table, head_dim = arguments["q"].clone(), arguments["cos_sin"], shape[0]
    # Ten slots: the largest index is outside.
    cache = torch.zeros(5, 2, 1, head_dim)
    given_out = arguments["q"] if in_place else None
    out = rotate_and_cache(**arguments, cache=cache, q_eps=q_eps, out=given_out, backend=BACKEND)
    assert (out is arguments["q"]) == in_place
    eps = torch.finfo(dtype).eps + 1e-6  # what float32 rounds before the result is rounded
    expected_cache = torch.zeros(10, head_dim)
    for token in range(tokens):
        position, slot = int(arguments["positions"][token]), int(arguments["slot_mapping"][token])
        if 0 <= slot < 10:
            expected_cache[slot] = torch.tensor(turn(arguments["kv"][token].tolist(), table, position))
        for head, row in enumerate(q[token].tolist()):
            length = 1.0 if q_eps is None else math.sqrt(math.fsum(x * x for x in row) / head_dim + q_eps)
            exact = torch.tensor(turn([x / length for x in row], table, position))
            torch.testing.assert_close(out[token, head].float(), exact, rtol=eps, atol=eps)
    torch.testing.assert_close(cache.view(10, head_dim), expected_cache, rtol=1e-6, atol=1e-6)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_an_infinity_that_is_not_turned_leaves_its_neighbor_alone():
    arguments = draw(2, 3, 16, 4, torch.float32, 1)
    arguments["slot_mapping"] = torch.tensor([0, 1])
    arguments["q"][:, 1, 6], arguments["kv"][:, 3] = math.inf, -math.inf
    cache = torch.zeros(2, 1, 1, 16)
    out = rotate_and_cache(**arguments, cache=cache, q_eps=None, backend=BACKEND)
    assert out[..., :12].equal(arguments["q"][..., :12])
    assert cache[:, 0, 0, :12].equal(arguments["kv"][:, :12])
    assert not out[..., 12:].isnan().any()


def test_model1_bytes():
    arguments = draw(4, 2, 512, 64, torch.bfloat16, 5)
    arguments["slot_mapping"] = torch.tensor([1, 0, 3, 2])
    rows, cache = torch.zeros(1, 4, 1, 512), kv_cache.allocate("model1", 1, 4)
    rotate_and_cache(**arguments, cache=rows, backend=BACKEND)
    rotate_and_cache(**arguments, cache=cache, backend=BACKEND)
    written = bytes(cache.flatten().tolist())
    assert written == model1_encode_page(rows[0, :, 0].tolist())
    assert model1_decode_page(written, 4)[1] == kv_cache.unpack(cache, dtype=torch.float32)[0, 1, 0].tolist()


@pytest.mark.parametrize(("form", "encode"), [("v41", v41_encode), ("v41_fp4", v41_fp4_encode)])
def test_block_scaled_bytes(form, encode):
    arguments = draw(4, 2, 512, 64, torch.bfloat16, 5)
    arguments["slot_mapping"] = torch.tensor([1, 0, 9, 2])
    rows, cache = torch.zeros(1, 4, 1, 512), kv_cache.allocate(form, 1, 4).fill_(7)
    rotate_and_cache(**arguments, cache=rows, backend=BACKEND)
    rotate_and_cache(**arguments, cache=cache, cache_format=form, backend=BACKEND)
    for slot in range(3):
        assert bytes(cache[0, slot, 0].tolist()) == encode(rows[0, slot, 0].tolist())
    assert cache[0, 3].eq(7).all()


@pytest.mark.parametrize("form", ["bf16", "fp16"])
def test_plain_caches(form):
    arguments = draw(4, 2, 64, 16, torch.bfloat16, 5)
    rows, cache = torch.zeros(6, 2, 1, 64), kv_cache.allocate(as_format(form, 64), 6, 2)
    rotate_and_cache(**arguments, cache=rows, backend=BACKEND)
    rotate_and_cache(**arguments, cache=cache, backend=BACKEND)
    assert cache.equal(rows.to(cache.dtype))


def call(**change):
    arguments: dict[str, Any] = {
        "q": torch.zeros(3, 2, 16),
        "kv": torch.zeros(3, 16),
        "cos_sin": torch.ones(5, 8),
        "positions": torch.arange(3),
        "cache": torch.zeros(2, 4, 1, 16),
        "slot_mapping": torch.arange(3),
    }
    return rotate_and_cache(**(arguments | change))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"kv": torch.zeros(3, 8)}, ValueError, r"^kv must have shape \[3, 16\]"),
        (
            {"cos_sin": torch.ones(5, 18)},
            ValueError,
            "^cos_sin must be contiguous and have an even width of at most 16",
        ),
        ({"positions": torch.arange(2)}, ValueError, r"^positions must have shape \[3\]"),
        ({"slot_mapping": torch.zeros(3)}, TypeError, "^slot_mapping must be int32 or int64"),
        ({"cache": torch.zeros(2, 4, 1, 8)}, ValueError, "^cache of format fp32 must take rows of 16, got 8$"),
        (
            {"cache": torch.zeros(1, 4, 1, 16).expand(2, -1, -1, -1)},
            ValueError,
            "^cache must not be an expanded tensor",
        ),
        ({"q_eps": "1"}, TypeError, "^q_eps must be a number"),
        ({"out": torch.zeros(3, 2, 8)}, ValueError, r"^out must have shape \[3, 2, 16\]"),
    ],
)
def test_errors_name_the_argument(change, error, message):
    with pytest.raises(error, match=message):
        call(**change)


@pytest.mark.skipif(machine.interpreting(), reason="the reference's")
@pytest.mark.parametrize("in_place", [False, True])
def test_opcheck(in_place):
    q = torch.zeros(3, 2, 16)
    opcheck(api, "rotate_and_cache", lambda: call(q=q, out=q if in_place else None))
