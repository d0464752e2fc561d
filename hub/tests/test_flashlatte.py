"""The kernel from the Hub against attention in float64: on a GPU, or on a CPU (``TRITON_INTERPRET=1`` for Triton)."""

import os

import kernels
import pytest
import torch

flashlatte = kernels.get_kernel("flashlatte/flashlatte", version=0, trust_remote_code=True)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HAS_TRITON = DEVICE == "cuda" or os.environ.get("TRITON_INTERPRET") == "1"
BACKENDS = [None, "reference", pytest.param("portable", marks=pytest.mark.skipif(not HAS_TRITON, reason="no GPU"))]
HEADS, LATENT, ROPE, PAGE = 4, 512, 64, 16

pytestmark = pytest.mark.kernels_ci


def attention(q, keys, values, visible):
    """[h, d_v] of one query token, in float64: softmax(q · Kᵀ / √d) · V over the visible keys."""
    scores = q.double() @ keys.double().mT * q.shape[-1] ** -0.5
    return torch.softmax(scores.masked_fill(~visible, -torch.inf), dim=-1) @ values.double()


@pytest.fixture
def written():
    """A bf16 cache of four pages with 40 tokens on three of them, and these tokens' rows."""
    torch.manual_seed(0)
    cache = flashlatte.kv_cache.allocate("bf16", num_pages=4, page_size=PAGE, device=DEVICE)
    block_table = torch.tensor([[2, 0, 3]], dtype=torch.int32, device=DEVICE)
    token = torch.arange(40, device=DEVICE)
    slots = block_table[0][token // PAGE] * PAGE + token % PAGE
    latent, rope = (torch.randn(40, width, device=DEVICE).bfloat16() for width in (LATENT, ROPE))
    flashlatte.kv_cache.write(cache, slots, latent, rope=rope)
    return cache, block_table, slots, torch.cat((latent, rope), dim=-1)


@pytest.mark.parametrize("backend", BACKENDS)
def test_dense_decode(written, backend):
    cache, block_table, _, rows = written
    q = torch.randn(1, 1, HEADS, LATENT + ROPE, device=DEVICE).bfloat16()
    lengths = torch.tensor([37], dtype=torch.int32, device=DEVICE)
    out, _ = flashlatte.dense_decode(q, cache, block_table, lengths, backend=backend)
    expected = attention(q[0, 0], rows, rows[:, :LATENT], torch.arange(40, device=DEVICE) < 37)
    torch.testing.assert_close(out[0, 0].double(), expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("backend", BACKENDS)
def test_sparse_decode(written, backend):
    cache, _, slots, rows = written
    q = torch.randn(1, 1, HEADS, LATENT + ROPE, device=DEVICE).bfloat16()
    selected = torch.tensor([3, 39, 17, 20, 8], device=DEVICE)
    indices = torch.cat((slots[selected], torch.tensor([-1, 64], device=DEVICE))).int().view(1, 1, -1)
    out, _ = flashlatte.sparse_decode(q, cache, indices, backend=backend)
    visible = torch.zeros(40, dtype=torch.bool, device=DEVICE).index_fill(0, selected, True)
    expected = attention(q[0, 0], rows, rows[:, :LATENT], visible)
    torch.testing.assert_close(out[0, 0].double(), expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("backend", BACKENDS)
def test_topk(backend):
    logits = torch.randn(3, 200, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    indices = flashlatte.topk(logits, 20, backend=backend)
    assert indices.sort().values.equal(logits.topk(20).indices.sort().values.to(indices.dtype))


@pytest.mark.parametrize("causal", [False, True])
def test_flash_attn_varlen_func(causal):
    generator = torch.Generator().manual_seed(2)
    q, k = (torch.randn(12, 2, 48, generator=generator).to(DEVICE, torch.bfloat16) for _ in range(2))
    v = torch.randn(12, 2, 32, generator=generator).to(DEVICE, torch.bfloat16)
    boundaries = torch.tensor([0, 5, 12], dtype=torch.int32, device=DEVICE)
    out = flashlatte.flash_attn_varlen_func(q, k, v, boundaries, boundaries, 7, 7, causal=causal)
    for begin, end in ((0, 5), (5, 12)):
        for token in range(begin, end):
            visible = torch.arange(begin, end, device=DEVICE) <= (token if causal else end)
            for head in range(2):
                keys, values = k[begin:end, head], v[begin:end, head]
                expected = attention(q[token, head], keys, values, visible)
                torch.testing.assert_close(out[token, head].double(), expected, rtol=2e-2, atol=2e-2)


def test_flash_attn_func_is_that_of_equal_lengths():
    q, k, v = (torch.randn(2, tokens, 2, 32, device=DEVICE).bfloat16() for tokens in (3, 5, 5))
    boundaries = torch.arange(3, dtype=torch.int32, device=DEVICE)
    rows = [x.flatten(0, 1) for x in (q, k, v)]
    expected = flashlatte.flash_attn_varlen_func(*rows, boundaries * 3, boundaries * 5, 3, 5, causal=True)
    assert flashlatte.flash_attn_func(q, k, v, causal=True).flatten(0, 1).equal(expected)


@pytest.mark.parametrize("argument", [{"softcap": 30.0}, {"dropout_p": 0.1}, {"s_aux": torch.zeros(2)}])
def test_flash_attn_varlen_func_refuses_what_it_has_not(argument):
    q, boundaries = torch.zeros(4, 2, 32, dtype=torch.bfloat16), torch.tensor([0, 4])
    with pytest.raises(ValueError, match=f"^{next(iter(argument))} must be"):
        flashlatte.flash_attn_varlen_func(q, q, q, boundaries, boundaries, 4, 4, **argument)


def test_operations_are_registered_under_the_kernels_own_name():
    q = torch.randn(1, 4, 8)
    flashlatte.concat_mla_q(q, q, backend="reference")
    assert hasattr(getattr(torch.ops, flashlatte.__name__), "concat_mla_q")
