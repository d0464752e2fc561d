import pytest
import torch

from flashlatte import kv_cache
from flashlatte.kv_cache.slots import stored_tokens

LARGEST = 2**31 - 1


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("pages", [2**31, 2**32 + 3])
def test_a_cache_of_more_slots_than_int32_holds(pages, dtype):
    cache = torch.ones(1, 1, 1, 8).expand(pages, -1, -1, -1)
    slots = torch.tensor([5, -1, LARGEST, -LARGEST - 1], dtype=dtype)
    rows = kv_cache.read(cache, slots, dtype=torch.float32)
    assert rows[:, 0].tolist() == [1, 0, 1, 0]
    tokens, kept = stored_tokens(slots, cache)
    assert (tokens.tolist(), kept.tolist()) == ([0, 2], [5, LARGEST])
    assert kept.dtype == torch.int64


def test_slots_beyond_the_cache_are_invalid():
    slots = torch.tensor([[5, 6], [7, 2**40]])
    assert kv_cache.read(torch.ones(2, 3, 1, 8), slots)[..., 0].tolist() == [[1, 0], [0, 0]]
