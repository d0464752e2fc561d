"""Random rows in the formats of vLLM's caches of latents and of index keys."""

from __future__ import annotations

import torch

from flashlatte.kv_cache.model1 import Model1Format
from flashlatte.kv_cache.registry import as_format
from flashlatte.kv_cache.v32 import V32Format
from flashlatte.ops.cache_write import cache_write
from flashlatte.ops.index_quantize import index_quantize

# By bytes of a token: latents of V3.2 and keys of V4.
PACKED = {layout.bytes_per_token: layout for layout in map(as_format, (V32Format.name, Model1Format.name))}
# DeepSeek's index keys: e4m3 values and one float32 scale.
INDEX_DIM = 128
INDEX_BYTES = INDEX_DIM + 4


def fill_pages(cache: torch.Tensor, blocks: list[int], generator: torch.Generator) -> None:
    """Overwrite pages of a cache with normally distributed values, in the cache's format.

    The values depend on the generator and on the number of pages alone.

    Args:
        cache: [pages, page_size, width], of 16-bit or 32-bit values, or of bytes. Pages may have gaps between them. The
            width of bytes determines their format: 656 and 584 (``fp8_ds_mla`` of V3.2 and of V4), 132 (index keys),
            another one (e4m3 values without a scale).
        blocks: the pages to overwrite.
        generator: on the cache's device.
    """
    page_size, width = cache.shape[1:]

    def drawn(columns: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        rows = torch.empty(len(blocks) * page_size, columns, dtype=dtype, device=cache.device)
        return rows.normal_(generator=generator)

    if cache.dtype.itemsize > 1:
        cache[blocks] = drawn(width, cache.dtype).unflatten(0, (-1, page_size))
    elif width == INDEX_BYTES:
        index_quantize(cache, _slots(cache, blocks), drawn(INDEX_DIM), scale_rounding="power_of_two")
    elif layout := PACKED.get(width):
        cache_write(cache.unsqueeze(2), _slots(cache, blocks), drawn(layout.head_dim), cache_format=layout)
    else:
        values = drawn(width).to(torch.float8_e4m3fn).view(cache.dtype)
        cache[blocks] = values.unflatten(0, (-1, page_size))


def _slots(cache: torch.Tensor, blocks: list[int]) -> torch.Tensor:
    """int64 [pages · page_size]: the slots of all rows of these pages."""
    pages = torch.tensor(blocks, device=cache.device)
    return (pages[:, None] * cache.shape[1] + torch.arange(cache.shape[1], device=cache.device)).flatten()
