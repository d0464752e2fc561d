"""Kernels in Triton's interpreter compute addresses in 64 bits, as compiled ones do."""

# pyright: reportInvalidTypeForm=false

import pytest
import torch
from support.threads import at_the_same_time

tl = pytest.importorskip("triton.language")

from flashlatte import dense_decode, index_logits, kv_cache, sparse_decode, sparse_prefill  # noqa: E402
from flashlatte.runtime.triton_kernel import kernel  # noqa: E402

pytestmark = [pytest.mark.interpreter, pytest.mark.filterwarnings("ignore::RuntimeWarning")]

BF16 = torch.bfloat16
# Numbers from row to row: the third row begins beyond 2^31.
FAR = 2**30 + 64


@kernel
def _offsets_kernel(out, stride: tl.int64, count: tl.int32, BLOCK: tl.constexpr):
    row = tl.arange(0, BLOCK)
    tl.store(out + row, row * stride, mask=row < count)


def test_a_product_with_an_int64_argument_has_64_bits():
    out = torch.zeros(4, dtype=torch.int64)
    _offsets_kernel[(1,)](out, 2**30, 3, BLOCK=4)
    assert out.tolist() == [0, 2**30, 2**31, 0]
    _offsets_kernel[(1,)](out, count=4, stride=-5, BLOCK=4)
    assert out.tolist() == [0, -5, -10, -15]


@kernel
def _scalar_conditions_kernel(out, x, limit: tl.int32, BLOCK: tl.constexpr):
    """Comparisons of scalars as a mask and beside a block, and a loop over a loaded number of steps."""
    cols = tl.arange(0, BLOCK)
    values = tl.load(x + cols, mask=limit > 0, other=5.0)
    total = tl.sum(values, axis=0)
    count = tl.load(x + 1).to(tl.int32)
    for _ in range(0, count):
        values = tl.where((values == 0.0) | (total == 0.0), -1.0, values + 1.0)
    tl.store(out + cols, values, mask=limit > -2)


def test_comparisons_of_scalars_are_conditions():
    out, x = torch.zeros(4), torch.tensor([0.0, 1.0, 2.0, 3.0])
    _scalar_conditions_kernel[(1,)](out, x, 1, BLOCK=4)
    assert out.tolist() == [-1, 2, 3, 4]
    _scalar_conditions_kernel[(1,)](out, x, -1, BLOCK=4)
    assert out.tolist() == [6, 6, 6, 6]
    _scalar_conditions_kernel[(1,)](out, x - x.mean(), -2, BLOCK=4)
    assert out.tolist() == [6, 6, 6, 6]
    _scalar_conditions_kernel[(1,)](out, torch.tensor([1.0, 1.0, 1.0, -3.0]), 1, BLOCK=4)
    assert out.tolist() == [-1, -1, -1, -1]


@kernel
def _programs_kernel(out, factor: tl.int64, BLOCK: tl.constexpr):
    row, cols = tl.program_id(0), tl.arange(0, BLOCK)
    tl.store(out + row * BLOCK + cols, row * factor + cols)


def test_threads_launch_at_the_same_time():
    def launch(number: int) -> list[int]:
        out = torch.zeros(8, 4, dtype=torch.int64)
        for _ in range(3):
            _programs_kernel[(8,)](out, 100 * number, BLOCK=4)
        return out.flatten().tolist()

    for number, result in enumerate(at_the_same_time(launch)):
        assert result == [100 * number * row + col for row in range(8) for col in range(4)]


def far_apart(x: torch.Tensor) -> torch.Tensor:
    """x with a row stride of FAR elements; most of its memory is never touched."""
    storage = torch.empty((len(x) - 1) * FAR + x[0].numel(), dtype=x.dtype)
    return storage.as_strided(x.shape, (FAR, *x.stride()[1:])).copy_(x)


def prefill_keys() -> tuple:
    q, indices = torch.ones(1, 4, 576, dtype=BF16), torch.arange(3, dtype=torch.int32).view(1, 1, 3)
    return torch.randn(3, 1, 576).to(BF16), lambda kv: sparse_prefill(q, kv, indices, backend="portable")[0]


def _cache() -> torch.Tensor:
    return kv_cache.allocate("bf16", 1, 64).copy_(torch.randn(64, 576)[None, :, None])


def dense_queries() -> tuple:
    cache, zeros = _cache(), torch.zeros(3, 1, dtype=torch.int32)
    lengths = torch.full((3,), 9, dtype=torch.int32)
    return torch.randn(3, 1, 4, 576).to(BF16), lambda q: dense_decode(q, cache, zeros, lengths, backend="portable")[0]


def sparse_queries() -> tuple:
    cache, indices = _cache(), torch.arange(9, dtype=torch.int32).repeat(3, 1, 1)
    return torch.randn(3, 1, 4, 576).to(BF16), lambda q: sparse_decode(q, cache, indices, backend="portable")[0]


def index_keys() -> tuple:
    q, weights = torch.ones(3, 8, 128, dtype=BF16), torch.ones(3, 8)
    start, end = torch.zeros(3, dtype=torch.int32), torch.full((3,), 3, dtype=torch.int32)
    return torch.randn(3, 128).to(BF16), lambda k: index_logits(q, k, weights, start, end, backend="portable")


@pytest.mark.parametrize("case", [prefill_keys, dense_queries, sparse_queries, index_keys])
def test_rows_beyond_2_31_numbers(case):
    torch.manual_seed(0)
    x, call = case()
    assert call(far_apart(x)).equal(call(x))
