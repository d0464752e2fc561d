import torch
from support.torch_op import assert_compiles, opcheck

from flashlatte import merge_states
from flashlatte.ops.merge_states import api

OUTS, LSES = torch.randn(3, 5, 4, 8), torch.randn(3, 5, 4)


def test_opcheck():
    opcheck(api, "merge_states", lambda: merge_states(OUTS, list(LSES)))
    opcheck(api, "merge_states", lambda: merge_states(OUTS, list(LSES), context_tokens=3))


def test_compile():
    outputs = {"out": torch.empty(5, 4, 8), "lse": torch.empty(4, 5).T}
    stacked = {"outs": OUTS, "lses": LSES}
    assert_compiles(
        merge_states,
        stacked,
        stacked | {"context_tokens": 2},
        {"outs": list(OUTS[:, :2]), "lses": list(LSES[:, :2])},
        stacked | outputs,
    )


def test_compile_with_gradients():
    outs, lses = OUTS.clone().requires_grad_(), LSES.clone().requires_grad_()
    assert_compiles(merge_states, {"outs": outs, "lses": lses})
    compiled = torch.compile(merge_states, backend="eager", fullgraph=True)
    compiled(outs, lses)[0].sum().backward()
    expected = torch.autograd.grad(merge_states(outs, lses)[0].sum(), (outs, lses))
    for actual, wanted in zip((outs.grad, lses.grad), expected, strict=True):
        assert actual is not None
        assert actual.equal(wanted)
