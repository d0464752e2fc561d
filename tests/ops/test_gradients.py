"""Operations without a backward pass warn once if a gradient is required; transforms of gradients."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

from flashlatte import (
    dense_decode,
    dense_prefill,
    index_logits,
    index_quantize,
    index_query,
    indexer_loss,
    kv_cache,
    merge_states,
    paged_attention,
    paged_index_logits,
    sparse_attention,
    sparse_decode,
    sparse_index_logits,
    sparse_prefill,
    topk,
)
from flashlatte.kv_cache.index_formats import index_format
from flashlatte.ops.norm_rope import latent_rows
from flashlatte.ops.norm_rope.rotary import Rotary
from flashlatte.runtime import gradients

ZERO = torch.zeros(1, 1, dtype=torch.int32)


def decode(q: torch.Tensor) -> Any:
    return dense_decode(q, torch.ones(1, 4, 1, 8), ZERO, torch.tensor([3]), head_dim_v=4)


def decode_selected(q: torch.Tensor) -> Any:
    return sparse_decode(q, torch.ones(1, 4, 1, 8), ZERO[None], head_dim_v=4)


def attend_pages(q: torch.Tensor) -> Any:
    cache = torch.ones(1, 4, 1, 8)
    return paged_attention(q[0], cache, cache, ZERO, torch.tensor([3]), torch.tensor([0, 1]))


def prefill_selected(q: torch.Tensor) -> Any:
    return sparse_prefill(q[0], torch.ones(4, 1, 8), ZERO[None], d_v=4)


def rows(q: torch.Tensor) -> Any:
    rotary = Rotary(torch.ones(2, 4), torch.zeros(1, dtype=torch.int64), True)
    return latent_rows(q[0, 0], torch.ones(4), rotary, 1e-6)


def logits_of_keys(q: torch.Tensor) -> Any:
    return index_logits(q[0].repeat(1, 1, 4), torch.ones(4, 32), torch.ones(1, 1), ZERO[0], ZERO[0] + 4)


def logits_of_pages(q: torch.Tensor) -> Any:
    cache = kv_cache.allocate(index_format("index_fp32", 32), 1, 4)
    return paged_index_logits(q.repeat(1, 1, 1, 4), cache, torch.ones(1, 1), ZERO[0] + 3, ZERO)


def logits_of_blocks(q: torch.Tensor) -> Any:
    keys, block = torch.ones(4, 32), ZERO[0].unsqueeze(1)
    return sparse_index_logits(q[0].repeat(1, 1, 4), keys, torch.ones(1, 1), block, block + 4, block_size=4)


def queries(q: torch.Tensor) -> Any:
    return index_query(q[0].repeat(1, 1, 4), q[0, :, :, 0])


def keys(q: torch.Tensor) -> Any:
    cache = kv_cache.allocate(index_format("index_fp32", 32), 1, 4)
    index_quantize(cache, ZERO[0], q[0, 0].repeat(1, 4))
    return cache


def write(q: torch.Tensor) -> Any:
    cache = kv_cache.allocate("fp32", 1, 4, head_dim=8)
    kv_cache.write(cache, ZERO[0], q[0, 0])
    return cache


def largest(q: torch.Tensor) -> Any:
    return topk(q[0, 0], 2, return_values=True)


CALLS = {
    "dense_decode": decode,
    "paged_attention": attend_pages,
    "sparse_decode": decode_selected,
    "sparse_prefill": prefill_selected,
    "latent_rows": rows,
    "index_logits": logits_of_keys,
    "paged_index_logits": logits_of_pages,
    "sparse_index_logits": logits_of_blocks,
    "index_query": queries,
    "index_quantize": keys,
    "cache_write": write,
    "topk": largest,
}


@pytest.fixture(autouse=True)
def nobody_was_warned(monkeypatch):
    monkeypatch.setattr(gradients, "_warned", set())


def warnings_of(call: Callable[[torch.Tensor], Any], q: torch.Tensor) -> list[warnings.WarningMessage]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call(q)
    return [warning for warning in caught if "has no backward" in str(warning.message)]


@pytest.mark.parametrize("operation", CALLS)
def test_warns_once_and_points_to_the_call(operation):
    q = torch.ones(1, 1, 1, 8, requires_grad=True)
    (warning,) = warnings_of(CALLS[operation], q)
    assert str(warning.message).startswith(f"{operation} has no backward: no gradient flows to its inputs")
    assert warning.filename == __file__
    assert not warnings_of(CALLS[operation], q)


@pytest.mark.filterwarnings("ignore:.*has no backward")
@pytest.mark.parametrize("operation", CALLS)
def test_none_flows_through_the_reference_either(operation):
    results = CALLS[operation](torch.ones(1, 1, 1, 8, requires_grad=True))
    for result in results if isinstance(results, tuple) else (results,):
        assert result is None or not result.requires_grad


@pytest.mark.parametrize("operation", CALLS)
def test_no_warning_without_required_gradients(operation):
    q = torch.ones(1, 1, 1, 8, requires_grad=True)
    assert not warnings_of(CALLS[operation], q.detach())
    with torch.no_grad():
        assert not warnings_of(CALLS[operation], q)
    with torch.inference_mode():
        assert not warnings_of(CALLS[operation], q)


def test_warns_about_compiled_modules():
    torch.compiler.reset()
    compiled = torch.compile(decode, backend="eager", fullgraph=True)
    assert len(warnings_of(compiled, torch.ones(1, 1, 1, 8, requires_grad=True))) == 1


def prefill(q: torch.Tensor) -> Any:
    ends = torch.tensor([0, 1])
    return dense_prefill(q[0], q[0], q[0], ends, ends, 1, 1)


def merge(q: torch.Tensor) -> Any:
    return merge_states([q, q], [q[..., 0], q[..., 0]])


# torch.func.jvp imports what PyTorch calls deprecated.
@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
@pytest.mark.parametrize("name", [*CALLS, "dense_prefill", "merge_states"])
def test_forward_mode_is_refused(name):
    call = (CALLS | {"dense_prefill": prefill, "merge_states": merge})[name]
    q = torch.ones(1, 1, 1, 8)
    with pytest.raises(RuntimeError, match=r"has no forward-mode derivative, and one of its inputs has a tangent$"):
        torch.func.jvp(call, (q,), (q,))


def attend_to_first(q: torch.Tensor) -> Any:
    return sparse_attention(q[0], q[0], torch.zeros(1, 1, 1, dtype=torch.int32), d_v=8)


def loss_of_first(q: torch.Tensor) -> Any:
    first = torch.zeros(1, 1, 1, dtype=torch.int32)
    index_q, weights = torch.ones(1, 1, 32) * q.sum(), torch.ones(1, 1)
    return indexer_loss(index_q, torch.ones(1, 32), weights, q[0], q[0], first)


@pytest.mark.parametrize(
    ("name", "call"),
    [("dense_prefill", prefill), ("sparse_attention", attend_to_first), ("indexer_loss", loss_of_first)],
)
def test_transforms_of_torch_func_are_refused(name, call):
    q = torch.ones(1, 1, 1, 8)
    assert call(q) is not None
    gradient = torch.func.grad(lambda x: call(x)[0].sum())
    for transformed in (gradient, lambda x: torch.vmap(gradient)(x[None])):
        with pytest.raises(RuntimeError, match=rf"^{name} has no gradient under torch\.func .*: use backward\(\) or"):
            transformed(q)


def test_merge_states_has_gradients_under_torch_func():
    q = torch.rand(1, 1, 1, 8)
    leaf = q.clone().requires_grad_()
    merge(leaf)[0].sum().backward()
    torch.testing.assert_close(torch.func.grad(lambda x: merge(x)[0].sum())(q), leaf.grad)
