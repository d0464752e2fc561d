"""``rope_cache_write`` in plain PyTorch: the specification."""

from __future__ import annotations

from flashlatte.kernels.rope import rotate
from flashlatte.kv_cache.slots import stored_tokens, write_slots
from flashlatte.ops.rope_cache_write.params import RopeCacheWriteParams


def rope_cache_write(params: RopeCacheWriteParams) -> None:
    layout, count = params.layout, params.slot_mapping.shape[0]
    for rope in (params.k_rope, params.q_rope):
        if rope is not None:
            rotated = rotate(rope[:count].float(), params.cos_sin, params.positions[:count], params.interleaved)
            rope[:count] = rotated.to(rope.dtype)
    tokens, slots = stored_tokens(params.slot_mapping, params.cache)
    scale = params.scale_value if params.scale_tensor is None else params.scale_tensor
    planes = layout.encode(params.latent[tokens], params.k_rope[tokens], scale, "power_of_two")
    write_slots(params.cache, slots, planes, layout)
