"""Norms, rotation and plain cache writes: the reference compared with formulas, and Triton with the reference."""

from __future__ import annotations

import pytest
import torch

from flashlatte import kv_cache
from flashlatte.layers.rope import table
from flashlatte.layers.rope_config import Rope
from flashlatte.ops.norm_rope import latent_rows, rotate_heads
from flashlatte.ops.norm_rope.rotary import Rotary
from flashlatte.runtime import dispatch

ROPE = 8
BACKENDS = ["reference", pytest.param("portable", marks=pytest.mark.interpreter)]


def rotary(tokens, interleaved=True, rope_dim=ROPE):
    positions = torch.tensor([3, 0, 11, 1, 9, 2, 7, 15])[:tokens]
    return Rotary(table(Rope(max_position=16), rope_dim, torch.device("cpu")), positions, interleaved)


def rotated_by_complex(x, positions, interleaved):
    frequencies = 10000.0 ** (-torch.arange(0, ROPE, 2, dtype=torch.float64) / ROPE)
    angles = positions[:, None].double() * frequencies
    while angles.dim() < x.dim():
        angles = angles.unsqueeze(1)
    pairs = x.double().unflatten(-1, (-1, 2)) if interleaved else x.double().unflatten(-1, (2, -1)).mT
    turned = torch.view_as_complex(pairs.contiguous()) * torch.polar(torch.ones_like(angles), angles)
    real = torch.view_as_real(turned)
    return (real if interleaved else real.mT).flatten(-2).float()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("interleaved", [True, False])
def test_rotation_of_heads_is_a_complex_product(backend, interleaved):
    rotation = rotary(5, interleaved)
    packed = torch.randn(5, 35, 12, generator=torch.Generator().manual_seed(0))
    x = packed[..., 3:11]
    out = torch.full((5, 35, 20), torch.nan)
    rotate_heads(x, rotation, out[..., 12:], backend=backend)
    expected = rotated_by_complex(x, rotation.positions, interleaved)
    torch.testing.assert_close(out[..., 12:], expected, rtol=1e-5, atol=1e-6)
    assert out[..., :12].isnan().all()
    rotate_heads(x, rotation, x, backend=backend)
    torch.testing.assert_close(x, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("with_query", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rows_are_normalized_latents_and_rotated_rope(backend, with_query, dtype):
    generator = torch.Generator().manual_seed(1)
    rotation = rotary(6)
    fused = torch.randn(6, 24 + ROPE + 40, generator=generator).to(dtype)
    kv_a, q_a = fused[:, : 24 + ROPE], fused[:, 24 + ROPE :]
    weight, q_weight = (torch.randn(n, generator=generator).to(dtype) for n in (24, 40))
    query = {"q_a": q_a, "q_weight": q_weight, "q_eps": 1e-5} if with_query else {}
    rows, q_out = latent_rows(kv_a, weight, rotation, 1e-6, **query, backend=backend)
    latent = torch.nn.functional.rms_norm(kv_a[:, :24].float(), (24,), weight.float(), 1e-6)
    rope = rotated_by_complex(kv_a[:, 24:], rotation.positions, True)
    torch.testing.assert_close(
        rows, torch.cat((latent, rope), dim=1).to(dtype), rtol=1e-2 if dtype != torch.float32 else 1e-5, atol=1e-5
    )
    if with_query:
        expected = torch.nn.functional.rms_norm(q_a.float(), (40,), q_weight.float(), 1e-5).to(dtype)
        torch.testing.assert_close(q_out, expected, rtol=1e-2 if dtype != torch.float32 else 1e-5, atol=1e-5)
    else:
        assert q_out is None


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("cache_format", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_go_to_their_slots_as_kv_cache_writes_them(backend, cache_format, dtype):
    generator = torch.Generator().manual_seed(2)
    rotation = rotary(8)
    kv_a = torch.randn(8, 24 + ROPE, generator=generator).to(dtype)
    slots = torch.tensor([5, -1, 0, 11, 12, 3, -7, 10**12])
    caches = [kv_cache.allocate(cache_format, 3, 4, head_dim=32).fill_(torch.nan) for _ in range(2)]
    rows, _ = latent_rows(
        kv_a,
        torch.ones(24, dtype=dtype),
        rotation,
        1e-6,
        cache=caches[0],
        slot_mapping=slots,
        backend=backend,
    )
    kv_cache.write(caches[1], slots, rows, backend="reference")
    torch.testing.assert_close(caches[0], caches[1], rtol=0, atol=0, equal_nan=True)
    assert int((~caches[0].isnan()).all(dim=-1).sum()) == 4


@pytest.mark.parametrize("backend", BACKENDS)
def test_tables_and_positions_may_have_strides(backend):
    rotation = rotary(3)
    strided = Rotary(rotation.table.repeat(1, 2)[:, :ROPE], rotation.positions.repeat_interleave(2)[::2], True)
    x = torch.randn(3, 2, ROPE, generator=torch.Generator().manual_seed(3))
    out = torch.empty_like(x)
    rotate_heads(x, strided, out, backend=backend)
    torch.testing.assert_close(out, rotated_by_complex(x, rotation.positions, True), rtol=1e-5, atol=1e-6)
    kv_a, weight = torch.cat((x[:, 0], x[:, 1]), dim=1), torch.ones(ROPE)
    rows, _ = latent_rows(kv_a, weight, strided, 1e-6, backend=backend)
    torch.testing.assert_close(rows[:, ROPE:], out[:, 1])


@pytest.mark.interpreter
def test_positions_outside_the_table_read_nothing_beyond_it():
    rotation = Rotary(table(Rope(max_position=16), ROPE, torch.device("cpu")), torch.tensor([-5, 99, 2**40]), True)
    x = torch.randn(3, 2, ROPE)
    outs = [torch.empty_like(x) for _ in range(2)]
    for out, backend in zip(outs, ("portable", "reference"), strict=True):
        rotate_heads(x, rotation, out, backend=backend)
    torch.testing.assert_close(*outs)


ODD = Rotary(torch.ones(9, 7), torch.arange(4), True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kv_a": torch.ones(24 + ROPE)}, r"kv_a must have shape \[T, latent \+ rope\]"),
        ({"eps": -1e-6}, "eps must be a finite number of at least 0 in float32, got -1e-06"),
        ({"weight": torch.ones(23)}, r"weight must have shape \[24\]"),
        ({"q_a": torch.ones(4, 9)}, "q_a and q_weight must be given together"),
        ({"slot_mapping": torch.zeros(4, dtype=torch.int64)}, "cache and slot_mapping must be given together"),
        ({"rotary": rotary(3)}, r"rotary.positions must have shape \[4\]"),
        ({"rotary": ODD}, "rotary.table must have an even width, got 7"),
        ({"kv_a": torch.ones(4, ROPE)}, f"kv_a must be wider than rotary.table's {ROPE}, got {ROPE}"),
    ],
)
def test_bad_arguments_are_named(changes, message):
    arguments = {"kv_a": torch.ones(4, 24 + ROPE), "weight": torch.ones(24), "rotary": rotary(4), "eps": 1e-6}
    with pytest.raises(ValueError, match=message):
        latent_rows(**arguments | changes)


@pytest.mark.parametrize(
    ("rotation", "error", "message"),
    [
        (None, TypeError, "rotary must be of type Rotary, got NoneType"),
        (ODD, ValueError, "rotary.table must have an even width, got 7"),
        (Rotary(ODD.table[:, :6], ODD.positions, True), ValueError, "x must be as wide as rotary.table, 6, got 7"),
    ],
)
def test_bad_rotations_are_named(rotation, error, message):
    x = torch.ones(4, 2, 7)
    with pytest.raises(error, match=message):
        rotate_heads(x, rotation, x)


def test_dispatch_has_both_operations():
    assert {"latent_rows", "rotate_heads"} <= set(dispatch.operations())
