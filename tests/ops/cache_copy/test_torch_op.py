import pytest
import torch
from support.torch_op import opcheck

from flashlatte.ops.cache_copy import api, copy_blocks, swap_blocks


def test_opcheck():
    cache, other = torch.randn(4, 3, 5), torch.randn(2, 3, 5)
    opcheck(api, "copy_pages", lambda: copy_blocks(cache, [0, 1], [1, 0]), op_name="cache_copy")
    opcheck(api, "copy_pages", lambda: swap_blocks(cache, other, [3], [0]), op_name="cache_copy")


@pytest.mark.parametrize("dynamic", [False, pytest.param(True, id="symbolic sizes")])
def test_one_graph_whatever_is_symbolic(dynamic):
    cache, other = torch.randn(6, 3, 5), torch.randn(4, 3, 5)
    pages = torch.tensor([5, 0]), torch.tensor([1, 2])

    def move(cache, other, source, target):
        copy_blocks(cache, source, target)
        swap_blocks(cache, other, source, target)
        return other + 1

    expected = move(cache.clone(), other.clone(), *pages)
    compiled = torch.compile(move, fullgraph=True, dynamic=dynamic, backend="eager")
    assert compiled(cache.clone(), other.clone(), *pages).equal(expected)
