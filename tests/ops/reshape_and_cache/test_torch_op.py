from typing import Any

import torch
from support.torch_op import opcheck

from flashlatte import reshape_and_cache
from flashlatte.ops.reshape_and_cache import api


def test_opcheck():
    key, value = torch.randn(3, 2, 16), torch.randn(3, 2, 8)
    caches = torch.zeros(4, 5, 2, 16, dtype=torch.int8), torch.zeros(4, 5, 2, 8, dtype=torch.int8)
    scales: dict[str, Any] = {"k_scale": torch.zeros(4, 5, 2), "v_scale": torch.ones(2)}
    opcheck(api, "reshape_and_cache", lambda: reshape_and_cache(key, value, *caches, torch.arange(3), **scales))


def test_compiles_as_one_graph():
    def write(key, value, scale):
        cache, other = torch.zeros(2, 4, 2, 8, dtype=torch.int8), torch.zeros(2, 4, 2, 8, dtype=torch.int8)
        reshape_and_cache(key, value, cache, other, torch.arange(3), k_scale=scale)
        return cache.float() * scale.unsqueeze(-1), other

    key, value = torch.randn(3, 2, 8), torch.randn(3, 2, 8)
    expected = write(key, value, torch.zeros(2, 4, 2))
    torch.compiler.reset()
    actual = torch.compile(write, backend="aot_eager", fullgraph=True)(key, value, torch.zeros(2, 4, 2))
    assert actual[0].equal(expected[0])
    assert actual[1].equal(expected[1])
