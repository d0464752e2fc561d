"""Registration of the layer's operations with PyTorch."""

from __future__ import annotations

import pytest
import torch
from support.torch_op import assert_compiles, opcheck

from flashlatte import kv_cache
from flashlatte.layers.rope import table
from flashlatte.layers.rope_config import Rope
from flashlatte.ops.norm_rope import api, latent_rows, rotate_heads
from flashlatte.ops.norm_rope.rotary import Rotary

TABLE = table(Rope(max_position=16), 8, torch.device("cpu"))


def rotary(tokens):
    return Rotary(TABLE, torch.arange(tokens), True)


def rows_arguments(tokens, with_cache=False):
    cache = {"cache": kv_cache.allocate("fp32", 2, 4, head_dim=32), "slot_mapping": torch.arange(tokens)}
    return {
        "kv_a": torch.randn(tokens, 32),
        "weight": torch.ones(24),
        "eps": 1e-6,
        "q_a": torch.randn(tokens, 40),
        "q_weight": torch.ones(40),
        **(cache if with_cache else {}),
    }


@pytest.mark.parametrize("with_cache", [True, False])
def test_opcheck_latent_rows(with_cache):
    arguments = rows_arguments(3, with_cache)
    opcheck(api, "latent_rows", lambda: latent_rows(**arguments, rotary=rotary(3)))


@pytest.mark.parametrize("in_place", [True, False])
def test_opcheck_rotate_heads(in_place):
    x = torch.randn(3, 2, 8)
    out = x if in_place else torch.empty_like(x)
    opcheck(api, "rotate_heads", lambda: rotate_heads(x, rotary(3), out))


def test_compile():
    def run(kv_a, weight, eps, q_a, q_weight):
        rotation = rotary(kv_a.shape[0])
        rows, q_out = latent_rows(kv_a, weight, rotation, eps, q_a=q_a, q_weight=q_weight)
        heads = kv_a.unflatten(1, (4, 8)).contiguous()
        out = torch.empty_like(heads)
        rotate_heads(heads, rotation, out)
        assert q_out is not None
        return rows, q_out, out

    assert_compiles(run, *(rows_arguments(tokens) for tokens in (3, 4, 5)))
