from dataclasses import replace
from unittest import mock

import pytest
import torch
from support.torch_op import assert_compiles, opcheck

from flashlatte import sparse_attention
from flashlatte.ops.sparse_attention import api
from flashlatte.testing.cases import SparsePrefillCase

CASE = SparsePrefillCase(5, 20, 4, 8, head_dim=24, d_v=16, dtype=torch.float32)
CASES = {"all": replace(CASE, topk_lengths=True, empty_rows=0.3), "plain": replace(CASE, attn_sink=False)}


def arguments(case, requires_grad=True):
    given = case.inputs()
    for name in ("q", "kv", "attn_sink"):
        if given[name] is not None:
            given[name].requires_grad_(requires_grad)
    return given


def finite_sum(out, lse):
    return out.square().sum() + torch.where(lse.isinf(), 0.0, lse).sum()


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_opcheck(name, requires_grad):
    opcheck(api, "sparse_attention", lambda: sparse_attention(**arguments(CASES[name], requires_grad)))


@pytest.mark.parametrize("name", CASES)
def test_opcheck_backward(name):
    out, lse = sparse_attention(**arguments(CASES[name]))
    loss = finite_sum(out, lse) if name == "all" else out.sum()
    with mock.patch.object(api, "_sparse_attention_backward", wraps=api._sparse_attention_backward) as operation:
        loss.backward()
    call = [x.detach() if isinstance(x, torch.Tensor) else x for x in operation.call_args.args]
    assert (call[1] is not None) == (name == "all")
    torch.library.opcheck(torch.ops.flashlatte.sparse_attention_backward.default, tuple(call))


def test_compile():
    assert_compiles(sparse_attention, *(arguments(case, False) for case in CASES.values()))


@pytest.mark.full
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compile_with_gradients(backend):
    torch.compiler.reset()
    compiled = torch.compile(sparse_attention, backend=backend, fullgraph=True)
    actual, expected = arguments(CASES["all"]), arguments(CASES["all"])
    finite_sum(*compiled(**actual)).backward()
    finite_sum(*sparse_attention(**expected)).backward()
    for name in ("q", "kv", "attn_sink"):
        assert actual[name].grad.equal(expected[name].grad)


def test_only_inputs_that_require_gradients_get_them():
    given = arguments(CASES["all"], False)
    given["attn_sink"].requires_grad_()
    finite_sum(*sparse_attention(**given)).backward()
    assert given["attn_sink"].grad.shape == (4,)
    assert given["q"].grad is None
    assert given["kv"].grad is None


def test_no_second_derivative():
    given = arguments(CASES["all"])
    out, _ = sparse_attention(**given)
    (dq,) = torch.autograd.grad(out.sum(), given["q"], create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        dq.sum().backward()
