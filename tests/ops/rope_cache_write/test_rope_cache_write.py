"""``rope_cache_write`` compared with a float64 rotation and the cache's quantizer."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.torch_op import opcheck

from flashlatte import kv_cache
from flashlatte.kv_cache import rope_write
from flashlatte.ops.rope_cache_write import api
from flashlatte.runtime import machine

BACKEND = "portable" if machine.interpreting() else "reference"
# Run both without the interpreter (reference) and with it (kernel).
pytestmark = [pytest.mark.interpreter] if machine.interpreting() else []
PLAIN = ("bf16", "fp16", "fp32", "fp8")
FORMATS = PLAIN if machine.interpreting() else (*PLAIN, "v32")


def draw(*shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def rotated(x, cosine, sine, interleaved):
    """float64 [..., rope] with each pair rotated, element by element."""
    x, width = x.double(), x.shape[-1]
    out = torch.empty_like(x)
    for i in range(width // 2):
        a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + width // 2)
        out[..., a] = x[..., a] * cosine[i] - x[..., b] * sine[i]
        out[..., b] = x[..., b] * cosine[i] + x[..., a] * sine[i]
    return out


@given(
    name=st.sampled_from(FORMATS),
    widths=st.sampled_from([(512, 64), (40, 6)]),
    slots=st.lists(st.sampled_from([-(2**40), -1, 0, 1, 5, 6, 11, 12, 2**33]), min_size=0, max_size=5, unique=True),
    padding=st.integers(0, 2),
    heads=st.sampled_from([None, 1, 17]),
    interleaved=st.booleans(),
    dtype=st.sampled_from([torch.bfloat16, torch.float16, torch.float32]),
    table_dtype=st.sampled_from([torch.bfloat16, torch.float32]),
    index_dtype=st.sampled_from([torch.int32, torch.int64]),
    seed=st.integers(0, 2**32),
)
def test_keys_and_queries(name, widths, slots, padding, heads, interleaved, dtype, table_dtype, index_dtype, seed):
    latent_dim, rope_dim = (512, 64) if name == "v32" else widths
    tokens = len(slots) + padding
    layout = kv_cache.get_format(name, latent_dim + rope_dim)
    cache = kv_cache.allocate(layout, 3, 4)
    cache.view(torch.uint8).fill_(0x3C)
    before = cache.clone()
    latent, k_rope = draw(tokens, latent_dim, seed=seed).to(dtype), draw(tokens, rope_dim + 1, seed=seed + 1).to(dtype)
    k_rope = k_rope[:, :rope_dim]
    q_rope = None if heads is None else draw(tokens, heads, rope_dim + 2, seed=seed + 2).to(dtype)[..., 2:]
    angles = draw(7, rope_dim // 2, seed=seed + 3)
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=1).to(table_dtype)
    positions = torch.randint(-2, 9, (tokens,), generator=torch.Generator().manual_seed(seed))
    given_k, given_q = k_rope.clone(), None if q_rope is None else q_rope.clone()
    scale = 0.125 if name == "fp8" else None
    rope_write(
        cache,
        torch.tensor(slots, dtype=torch.int64),
        latent,
        k_rope,
        positions.to(index_dtype),
        cos_sin,
        interleaved=interleaved,
        q_rope=q_rope,
        cache_format=layout,
        scale=scale,
        backend=BACKEND,
    )
    for token in range(tokens):
        if token >= len(slots):
            assert k_rope[token].equal(given_k[token])
            continue
        cosine, sine = cos_sin[positions[token].clamp(0, 6)].double().chunk(2)
        # Half an ulp of the larger element of a pair, and float32's own error.
        for rope, source in ((k_rope, given_k), (q_rope, given_q)):
            if rope is not None and source is not None:
                expected = rotated(source[token], cosine, sine, interleaved)
                allowed = (expected.abs() / 2 + 1e-3) * torch.finfo(dtype).eps * 1.01 + 2e-6
                assert ((rope[token].double() - expected).abs() <= allowed).all()
    # The cache has the rounded rows, and is otherwise unchanged.
    expected = before
    kv_cache.write(
        expected,
        torch.tensor(slots, dtype=torch.int64),
        latent,
        rope=k_rope,
        cache_format=layout,
        scale=scale,
        backend="reference",
    )
    assert cache.view(torch.uint8).equal(expected.view(torch.uint8))


CACHE, TABLE = torch.zeros(2, 4, 1, 48), torch.zeros(3, 8)
LATENT, K_ROPE, Q_ROPE = torch.zeros(3, 40), torch.zeros(3, 8), torch.zeros(3, 2, 8)
SLOTS = torch.arange(3)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"cache": CACHE[:, :1].expand(-1, 4, -1, -1)}, ValueError, "^cache must not be an expanded tensor"),
        ({"latent": LATENT.int()}, TypeError, "^latent must be bfloat16 or float16 or float32, got int32$"),
        ({"latent": LATENT[:, :39]}, ValueError, "^latent and k_rope must be .* wide for format fp32, got 39 and 8$"),
        ({"k_rope": K_ROPE.half()}, TypeError, "^k_rope must be float32, got float16$"),
        ({"k_rope": torch.zeros(1, 8).expand(3, 8)}, ValueError, "^k_rope must not be an expanded tensor"),
        (
            {"k_rope": K_ROPE[:, :7], "latent": torch.zeros(3, 41)},
            ValueError,
            "^k_rope must have an even width, got 7$",
        ),
        ({"q_rope": Q_ROPE[..., :6]}, ValueError, r"^q_rope must have shape \[3, h, 8\]"),
        ({"positions": SLOTS[:2]}, ValueError, r"^positions must have shape \[3\]"),
        ({"cos_sin": TABLE[:, :6]}, ValueError, r"^cos_sin must have shape \[positions, 8\]"),
        ({"cos_sin": TABLE.double()}, TypeError, "^cos_sin must be bfloat16 or float16 or float32, got float64$"),
        ({"slot_mapping": torch.arange(4)}, ValueError, r"^slot_mapping must not be longer than latent \(3 tokens\)"),
        ({"interleaved": 1}, TypeError, "^interleaved must be True or False, got 1$"),
        ({"scale": 2.0}, ValueError, "^scale must be None for format"),
        ({"backend": "hopper"}, ValueError, "^backend='hopper' cannot serve"),
    ],
)
def test_errors_name_the_argument(change, error, message):
    given = {
        "cache": CACHE,
        "slot_mapping": SLOTS,
        "latent": LATENT,
        "k_rope": K_ROPE,
        "positions": SLOTS,
        "cos_sin": TABLE,
        "interleaved": True,
    }
    with pytest.raises(error, match=message):
        rope_write(**(given | change))


@pytest.mark.skipif(machine.interpreting(), reason="the reference's")
def test_opcheck():
    def call():
        rope_write(CACHE, SLOTS, LATENT, K_ROPE, SLOTS, TABLE, interleaved=True, q_rope=Q_ROPE)

    opcheck(api, "rope_cache_write", call)
