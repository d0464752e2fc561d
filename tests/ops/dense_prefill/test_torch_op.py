from typing import Any
from unittest import mock

import pytest
import torch
from support.torch_op import assert_compiles, opcheck
from torch.fx.experimental.proxy_tensor import make_fx

from flashlatte import dense_prefill
from flashlatte.ops.dense_prefill import api


def arguments(requires_grad: bool = False) -> dict:
    generator = torch.Generator().manual_seed(0)
    shapes = {"q": (9, 4, 24), "k": (10, 2, 24), "v": (10, 2, 16)}
    rows = {
        name: torch.randn(shape, generator=generator).requires_grad_(requires_grad) for name, shape in shapes.items()
    }
    return rows | {
        "cu_seqlens_q": torch.tensor([0, 5, 9], dtype=torch.int32),
        "cu_seqlens_k": torch.tensor([0, 4, 10], dtype=torch.int32),
        "max_seqlen_q": 5,
        "max_seqlen_k": 6,
        "causal": True,
    }


def visible_sum(out: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
    return out.square().sum() + torch.where(lse.isinf(), 0.0, lse).sum()


@pytest.mark.parametrize("requires_grad", [False, True])
def test_opcheck(requires_grad):
    opcheck(api, "dense_prefill", lambda: dense_prefill(**arguments(requires_grad)))


def test_opcheck_with_out():
    with mock.patch.object(api, "_dense_prefill_out") as operation:
        dense_prefill(**arguments(), out=torch.empty(9, 4, 16))
    params, *others = operation.call_args.args
    torch.library.opcheck(torch.ops.flashlatte.dense_prefill_out.default, (*params, *others))


@pytest.mark.parametrize("with_dlse", [False, True])
def test_opcheck_backward(with_dlse):
    given = arguments(requires_grad=True)
    out, lse = dense_prefill(**given)
    loss = visible_sum(out, lse) if with_dlse else out.sum()
    with mock.patch.object(api, "_dense_prefill_backward", wraps=api._dense_prefill_backward) as operation:
        loss.backward()
    call = [x.detach() if isinstance(x, torch.Tensor) else x for x in operation.call_args.args]
    *_, dlse, _, _ = call
    assert (dlse is not None) == with_dlse
    torch.library.opcheck(torch.ops.flashlatte.dense_prefill_backward.default, tuple(call))


def test_compile():
    given = arguments()
    assert_compiles(dense_prefill, given, given | {"out": torch.empty(9, 4, 16)}, given | {"window": (2, -1)})


class LongestIsAll(torch.nn.Module):
    def forward(self, q: torch.Tensor, k: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
        window = (k.shape[0], -1)
        return dense_prefill(q, k, k, cu_seqlens, cu_seqlens, q.shape[0], k.shape[0], window=window)[0]


@pytest.mark.parametrize("strict", [False, True])
def test_export_with_sizes_that_are_not_known(strict):
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(7, heads, 16, generator=generator) for heads in (4, 2))
    tokens = torch.export.Dim("tokens", min=2, max=64)
    shapes = {"q": {0: tokens}, "k": {0: tokens}, "cu_seqlens": None}
    given = q, k, torch.tensor([0, 3, 7])
    exported = torch.export.export(LongestIsAll(), given, strict=strict, dynamic_shapes=shapes).module()
    assert exported(*given).equal(LongestIsAll()(*given))
    longer = torch.cat((q, q)), torch.cat((k, k)), torch.tensor([0, 3, 14])
    assert exported(*longer).equal(LongestIsAll()(*longer))


@pytest.mark.parametrize("tracing_mode", ["real", "fake", "symbolic"])
def test_traced_without_values(tracing_mode):
    numbers = arguments()
    tensors = [numbers.pop(name) for name in ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k")]

    def prefill(*tensors: Any) -> torch.Tensor:
        return dense_prefill(*tensors, **numbers)[0]

    traced = make_fx(prefill, tracing_mode=tracing_mode)(*tensors)
    assert traced(*tensors).equal(prefill(*tensors))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compile_with_gradients(backend):
    torch.compiler.reset()
    compiled = torch.compile(dense_prefill, backend=backend, fullgraph=True)
    actual, expected = arguments(requires_grad=True), arguments(requires_grad=True)
    visible_sum(*compiled(**actual)).backward()
    visible_sum(*dense_prefill(**expected)).backward()
    for name in ("q", "k", "v"):
        assert actual[name].grad.equal(expected[name].grad)


def test_no_second_derivative():
    given = arguments(requires_grad=True)
    out, _ = dense_prefill(**given)
    (dq,) = torch.autograd.grad(out.sum(), given["q"], create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        dq.sum().backward()
