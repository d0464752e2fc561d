"""``vit_attention`` compared with PyTorch's attention of each image in float64."""

# Calls are put together from parts.
# pyright: reportArgumentType=false, reportCallIssue=false

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flashlatte import vit_attention
from flashlatte.runtime import machine

BACKEND = "portable" if machine.interpreting() else "reference"
# Run both without the interpreter (reference) and with it (kernel).
pytestmark = [pytest.mark.interpreter] if machine.interpreting() else []
# Patches of an image: the interpreter is slow.
LONGEST = 9 if machine.interpreting() else 40


def draw(*shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def assert_close(actual, expected):
    """Within bf16's rounding of probabilities and of the result."""
    torch.testing.assert_close(actual.double(), expected, atol=1e-2, rtol=2**-7)


def by_image(q, k, v, boundaries, scale):
    """float64 [T, h, d_v] for [T, h, d]; patches outside of every image give 0."""
    group = q.shape[1] // k.shape[1]
    out = torch.zeros(*q.shape[:2], v.shape[2], dtype=torch.float64)
    for begin, end in itertools.pairwise(boundaries):
        parts = (x[begin:end].double().transpose(0, 1) for x in (q, k, v))
        heads = (part if part.shape[0] == q.shape[1] else part.repeat_interleave(group, 0) for part in parts)
        attended = torch.nn.functional.scaled_dot_product_attention(*heads, scale=scale)
        out[begin:end] = attended.transpose(0, 1)
    return out


@given(
    lengths=st.lists(st.integers(0, LONGEST), min_size=1, max_size=3),
    beyond=st.integers(0, 2),
    dims=st.sampled_from([(72, 72), (80, 80), (96, 96), (64, 64), (16, 40)]),
    heads=st.sampled_from([(1, 1), (2, 1)]),
    packed=st.booleans(),
    scale=st.sampled_from([None, 0.2]),
    seed=st.integers(0, 2**32),
)
def test_every_image(lengths, beyond, dims, heads, packed, scale, seed):
    boundaries = [0]
    for length in lengths:
        boundaries.append(boundaries[-1] + length)
    total = boundaries[-1] + beyond
    if total == 0:
        return
    (d, d_v), (h, h_k) = dims, heads
    # Views of one tensor, as returned by a projection.
    rows = draw(total, h * d + h_k * (d + d_v), seed=seed)
    q, k, v = rows.split((h * d, h_k * d, h_k * d_v), dim=1)
    q, k, v = q.unflatten(1, (h, d)), k.unflatten(1, (h_k, d)), v.unflatten(1, (h_k, d_v))
    expected = by_image(q, k, v, boundaries, scale)
    cu_seqlens = torch.tensor(boundaries, dtype=torch.int32)
    longest = torch.tensor(max(lengths)) if packed else max(lengths)
    given = (x.unsqueeze(0) for x in (q, k, v)) if packed else (q, k, v)
    out = torch.full((1, total, h, d_v) if packed else (total, h, d_v), torch.nan, dtype=torch.bfloat16)
    result = vit_attention(*given, cu_seqlens, longest, softmax_scale=scale, out=out, backend=BACKEND)
    assert result is out
    assert_close(out.view(expected.shape)[: boundaries[-1]], expected[: boundaries[-1]])


def test_images_of_one_size_need_no_boundaries():
    q, k, v = (draw(3, 5, 2, 24, seed=seed) for seed in range(3))
    result = vit_attention(q, k, v, backend=BACKEND)
    assert result.shape == q.shape
    expected = by_image(*(x.flatten(0, 1) for x in (q, k, v)), [0, 5, 10, 15], None)
    assert_close(result.flatten(0, 1), expected)


Q = torch.zeros(1, 4, 2, 8)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"q": Q[0, 0]}, ValueError, r"^q must have shape \[T, h, d\] or \[b, s, h, d\], got \[2, 8\]$"),
        ({"k": Q[0]}, ValueError, r"^k must have 4 axes like q, got \[4, 2, 8\]$"),
        ({"v": [0]}, TypeError, "^v must be a tensor, got list$"),
        ({"k": Q[..., :4]}, ValueError, r"^k must have shape \[T_k, h_k, 8\]"),
        ({"cu_seqlens": torch.tensor([0, 9])}, ValueError, "^cu_seqlens must be between 0 and 4, the number of tokens"),
        ({"max_seqlen": torch.zeros(2).int()}, ValueError, "^max_seqlen must be an int or hold one integer"),
        ({"max_seqlen": -1}, ValueError, "^max_seqlen must be at least 0, got -1$"),
        ({"out": Q[0]}, ValueError, "^out must have 4 axes like q"),
        (
            {"out": torch.zeros(4, 2, 2, 8).transpose(0, 1)},
            ValueError,
            "^out must have its first two axes in one piece",
        ),
    ],
)
def test_errors_name_the_argument(change, error, message):
    with pytest.raises(error, match=message):
        vit_attention(**({"q": Q, "k": Q, "v": Q, "cu_seqlens": torch.tensor([0, 4])} | change))


def test_patches_need_boundaries():
    with pytest.raises(ValueError, match=r"^cu_seqlens must be given where q has shape \[T, h, d\], got None$"):
        vit_attention(Q[0], Q[0], Q[0])
