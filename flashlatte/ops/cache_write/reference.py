"""``cache_write`` in plain PyTorch: the specification."""

from __future__ import annotations

from flashlatte.kv_cache.codec import split_rows
from flashlatte.kv_cache.slots import stored_tokens, write_slots
from flashlatte.ops.cache_write.params import CacheWriteParams


def cache_write(params: CacheWriteParams) -> None:
    layout, rope = params.layout, params.rope
    tokens, slots = stored_tokens(params.slot_mapping, params.cache)
    latent, rope = split_rows(layout, params.x[tokens], None if rope is None else rope[tokens])
    scale = params.scale_value if params.scale_tensor is None else params.scale_tensor
    write_slots(params.cache, slots, layout.encode(latent, rope, scale, params.scale_rounding), layout)
