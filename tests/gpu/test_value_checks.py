"""FLASHLATTE_CHECK=1 on a GPU: every call is checked, also one like an earlier call, and a graph is captured."""

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.gpu

CALLS = """
import torch, flashlatte
from flashlatte import kv_cache

torch.set_default_device("cuda")
cache = kv_cache.allocate("bf16", 4, 64, device="cuda")
q, lengths = torch.zeros(1, 1, 16, 576, dtype=torch.bfloat16), torch.tensor([100], dtype=torch.int32)
table = torch.tensor([[0, 3]], dtype=torch.int32)

def decode():
    return flashlatte.dense_decode(q, cache, table, lengths)[0]

def refusal():
    try:
        decode()
    except ValueError as error:
        return str(error)

assert refusal() is None and refusal() is None
table[0, 1] = 4
assert refusal() == "block_table must hold values from 0 to 3, or -1 for none, got 4 at [0, 1]", refusal()
lengths[0] = 129
assert refusal() == "cache_seqlens must hold values from 0 to 128, got 129 at [0]", refusal()
table[0, 1], lengths[0] = -1, 128
assert refusal() is None
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    out = decode()
graph.replay()
assert not out.isnan().any()
pages = torch.tensor([9])
try:
    kv_cache.copy_blocks(cache, pages, torch.tensor([0]))
except ValueError as error:
    assert str(error) == "src_pages must hold values from 0 to 3, or -1 for none, got 9 at [0]", error
else:
    raise AssertionError("a page that does not exist was copied")
"""


def test_every_call_is_checked() -> None:
    run = subprocess.run(
        [sys.executable, "-c", CALLS], env=os.environ | {"FLASHLATTE_CHECK": "1"}, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr[-2000:]
