import pytest
import torch
from support.marks import mostly_full
from support.torch_op import assert_compiles, opcheck

from flashlatte import kv_cache
from flashlatte.ops.cache_gather import api as gather_api
from flashlatte.ops.cache_write import api as write_api

SLOTS, TABLE, CU_SEQLENS = torch.tensor([4, -1, 2]), torch.tensor([[1, 0], [0, -1]]), torch.tensor([0, 4, 6])


def draw_cache(name):
    return kv_cache.pack(torch.randn(2, 3, 1, kv_cache.get_format(name).head_dim), name)


def draw_rows(name, rows=3):
    return torch.randn(rows, kv_cache.get_format(name).head_dim)


@pytest.mark.parametrize("name", ["bf16", "model1"])
def test_opcheck_write(name):
    opcheck(write_api, "cache_write", lambda: kv_cache.write(draw_cache(name), SLOTS, draw_rows(name)), "cache_write")


def test_opcheck_write_of_parts_with_a_scale_tensor():
    latent, rope = draw_rows("fp8").split((512, 64), dim=-1)
    cache = draw_cache("fp8").view(torch.uint8)  # opcheck has no arithmetic on float8
    arguments = {"rope": rope, "cache_format": "fp8", "scale": torch.ones(1)}
    opcheck(write_api, "cache_write", lambda: kv_cache.write(cache, SLOTS, latent, **arguments), "cache_write")


@pytest.mark.parametrize("name", ["bf16", "v32"])
def test_opcheck_gather(name):
    opcheck(
        gather_api,
        "cache_gather",
        lambda: kv_cache.gather(draw_cache(name), TABLE, CU_SEQLENS, seq_starts=torch.tensor([1, 0])),
        "cache_gather",
    )


@pytest.mark.parametrize("name", mostly_full(["bf16", "v32", "model1"], "v32"))
def test_compile(name):
    def write_and_gather(cache, x):
        kv_cache.write(cache, SLOTS, x)
        known = kv_cache.gather(cache, TABLE, CU_SEQLENS, total_tokens=7)
        counted = kv_cache.gather(cache, TABLE, CU_SEQLENS)
        return known, counted, kv_cache.read(cache, SLOTS)

    cache = draw_cache(name)
    assert_compiles(write_and_gather, *({"cache": cache, "x": draw_rows(name, rows)} for rows in (3, 4, 5)))


def test_gather_with_a_token_count_on_the_device_compiles_as_one_graph():
    cache = kv_cache.pack(torch.randn(8, 3, 1, 576), "bf16")
    table = torch.tensor([[1, 2, 3], [4, 5, 6]])

    def gather(cu_seqlens):
        return kv_cache.gather(cache, table, cu_seqlens) * 2

    compiled = torch.compile(gather, fullgraph=True, backend="aot_eager")
    for lengths in ((0, 5, 12), (0, 1, 3), (0, 0, 0)):
        cu_seqlens = torch.tensor(lengths, dtype=torch.int32)
        assert torch.equal(compiled(cu_seqlens), gather(cu_seqlens))
