"""What holds for every operation that ``torch_op`` registers."""

import pytest
import torch

from flashlatte import dense_decode, dense_prefill, sparse_decode, sparse_prefill
from flashlatte.testing.cases import DenseDecodeCase, DensePrefillCase, SparseDecodeCase, SparsePrefillCase

F32 = torch.float32


@pytest.mark.parametrize(
    ("operation", "case"),
    [
        (dense_decode, DenseDecodeCase(2, 2, 70, 4, dtype=F32)),
        (sparse_decode, SparseDecodeCase(2, 2, 70, 4, 20, dtype=F32)),
        (sparse_prefill, SparsePrefillCase(5, 70, 4, 20, dtype=F32)),
        (dense_prefill, DensePrefillCase(2, 30, 40, 4, 2, dtype=F32)),
    ],
    ids=["dense_decode", "sparse_decode", "sparse_prefill", "dense_prefill"],
)
def test_autocast_takes_no_precision_from_an_operation(operation, case):
    inputs = case.inputs()
    expected = operation(**inputs)
    with torch.autocast("cpu", torch.bfloat16):
        results = operation(**inputs)
        assert torch.is_autocast_enabled("cpu")
    for result, wanted in zip(results, expected, strict=True):
        assert result.equal(wanted)


def test_autocast_takes_no_precision_from_a_gradient():
    inputs = DensePrefillCase(2, 30, 40, 4, 2, dtype=F32).inputs()

    def gradient() -> torch.Tensor:
        q = inputs["q"].clone().requires_grad_()
        out, _ = dense_prefill(**inputs | {"q": q})
        return torch.autograd.grad(out.sum(), q)[0]

    expected = gradient()
    with torch.autocast("cpu", torch.bfloat16):
        assert gradient().equal(expected)
