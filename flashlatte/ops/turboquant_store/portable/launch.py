"""The launch of a call."""

from __future__ import annotations

import math

import torch

from flashlatte.kernels.triton.cache_layout import alignment_bytes, alignment_elements, cdiv
from flashlatte.kernels.triton.fp8 import converts_e4m3
from flashlatte.kernels.triton.online_softmax import NVIDIA, gpu_class
from flashlatte.kv_cache.lloyd_max import midpoints
from flashlatte.kv_cache.turboquant import TurboQuantFormat
from flashlatte.ops.turboquant_store.portable.kernel import StoreForm, turboquant_store_kernel
from flashlatte.runtime import machine
from flashlatte.runtime.arguments import by_name
from flashlatte.runtime.strides import stride_in_use

BLOCK_R = 64
NUM_WARPS = 4
# Programs per SM (each builds the matrix), and the resulting registers per thread.
PROGRAMS = 4
REGISTERS = 128


def turboquant_store(
    key: torch.Tensor, value: torch.Tensor, cache: torch.Tensor, slot_mapping: torch.Tensor, layout: TurboQuantFormat
) -> None:
    num_pages, page_size, heads = cache.shape[:3]
    head_dim, num_tokens = key.shape[2], slot_mapping.shape[0]
    num_slots = num_pages * page_size
    block = BLOCK_R if not machine.interpreting() else 16
    # A tile has the same heads of some tokens. Its number of heads is the largest power of two that divides h_kv.
    tile_heads = min(heads & -heads, block)
    tiles = cdiv(num_tokens, block // tile_heads) * (heads // tile_heads)
    k_strides, v_strides = ([stride_in_use(rows, axis) for axis in (0, 1)] for rows in (key, value))
    cache_strides = [stride_in_use(cache, axis) for axis in range(3)]
    align = min(alignment_elements(rows, *strides) for rows, strides in ((key, k_strides), (value, v_strides)))
    # Records have an even number of bytes, so fp16 values are aligned if heads are.
    cache_align = min(alignment_bytes(cache, *cache_strides), 8)
    is_nvidia = gpu_class(key.device) in NVIDIA
    in_order = key.element_size() == 4
    entry = 2.0 ** -math.ceil(math.log2(head_dim) / 2)
    form = StoreForm(
        head_dim=head_dim,
        key_bits=layout.key_bits,
        value_bits=layout.value_bits,
        norm_offset=layout.norm_offset,
        value_offset=layout.value_offset,
        scale_offset=layout.scale_offset,
        midpoints=tuple(middle for middle in midpoints(layout.key_bits) if middle > 0) if layout.rotates else (),
        entry=entry,
        inverse_entry=1 / entry,
        length_factor=1 / (head_dim * entry**2),
        align=align,
        cache_align=cache_align,
        wide=num_slots >= 2**31,
        native=converts_e4m3(key.device),
        in_order=in_order,
        shifted=layout.value_bits == 4 and layout.value_offset % 4 == 2 and cache_align >= 4 and not in_order,
        ptx=is_nvidia,
        interpreted=machine.interpreting(),
        block=block,
    )
    turboquant_store_kernel[(min(tiles, machine.num_sms(key.device) * PROGRAMS // 2), 2)](
        *by_name(
            turboquant_store_kernel,
            key=key,
            k_token_stride=k_strides[0] // align,
            k_head_stride=k_strides[1] // align,
            value=value,
            v_token_stride=v_strides[0] // align,
            v_head_stride=v_strides[1] // align,
            cache=cache,
            page_stride=cache_strides[0] // cache_align,
            slot_stride=cache_strides[1] // cache_align,
            cache_head_stride=cache_strides[2] // cache_align,
            slot_mapping=slot_mapping,
            mapping_stride=slot_mapping.stride(0),
            num_tokens=num_tokens,
            num_slots=num_slots,
            page_size=page_size,
            num_tiles=tiles,
            tile_heads=tile_heads,
            head_groups=heads // tile_heads,
        ),
        FORM=form,
        # float32 MMAs need more registers.
        num_warps=2 * NUM_WARPS if in_order else NUM_WARPS,
        **({"maxnreg": REGISTERS} if is_nvidia else {}),
    )
