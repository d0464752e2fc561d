import torch
from support.torch_op import opcheck

from flashlatte.ops.cache_copy import api, copy_blocks, swap_blocks


def test_opcheck():
    cache, other = torch.randn(4, 3, 5), torch.randn(2, 3, 5)
    opcheck(api, "copy_pages", lambda: copy_blocks(cache, [0, 1], [1, 0]), op_name="cache_copy")
    opcheck(api, "copy_pages", lambda: swap_blocks(cache, other, [3], [0]), op_name="cache_copy")
