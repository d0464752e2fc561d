"""The launch of a call."""

from __future__ import annotations

import math

from flashlatte.kernels.triton.cache_address import slots_of
from flashlatte.kernels.triton.cache_layout import cdiv, row_alignment
from flashlatte.kernels.triton.fp8 import converts_e4m3
from flashlatte.kernels.triton.online_softmax import NVIDIA, gpu_class
from flashlatte.kernels.triton.rows import head_rows
from flashlatte.kernels.triton.turboquant import records_of
from flashlatte.kv_cache.lloyd_max import midpoints
from flashlatte.ops.turboquant_store.portable.kernel import StoreStep, StoreTiles, turboquant_store_kernel
from flashlatte.ops.turboquant_store.reference import TurboQuantStoreParams
from flashlatte.runtime import machine

BLOCK_R = 64
NUM_WARPS = 4
# Programs per SM (each builds the matrix), and the resulting registers per thread.
PROGRAMS = 4
REGISTERS = 128


def turboquant_store(params: TurboQuantStoreParams) -> None:
    key, value, cache, layout = params.key, params.value, params.cache, params.layout
    heads, head_dim = key.shape[1:]
    device = key.device
    block = 16 if machine.interpreting() else BLOCK_R
    # A tile has the same heads of some tokens. Its number of heads is the largest power of two that divides h_kv.
    tile_heads = min(heads & -heads, block)
    tiles = cdiv(params.slot_mapping.shape[0], block // tile_heads) * (heads // tile_heads)
    align = min(row_alignment(rows, 0, 1) for rows in (key, value))
    # Records have an even number of bytes, so fp16 values are aligned if heads are.
    records, form = records_of(cache, layout, 8, native=converts_e4m3(device))
    slots = slots_of(params.slot_mapping, cache)
    is_nvidia = gpu_class(device) in NVIDIA
    in_order = key.element_size() == 4
    entry = 2.0 ** -math.ceil(math.log2(head_dim) / 2)
    step = StoreStep(
        midpoints=tuple(middle for middle in midpoints(layout.key_bits) if middle > 0) if layout.rotates else (),
        entry=entry,
        inverse_entry=1 / entry,
        length_factor=1 / (head_dim * entry**2),
        wide=slots.num_slots >= 2**31,
        in_order=in_order,
        shifted=layout.value_bits == 4 and layout.value_offset % 4 == 2 and form.align >= 4 and not in_order,
        ptx=is_nvidia,
        block=block,
    )
    turboquant_store_kernel[(min(tiles, machine.num_sms(device) * PROGRAMS // 2), 2)](
        head_rows(key, align),
        head_rows(value, align),
        records,
        slots,
        StoreTiles(tiles, tile_heads, heads // tile_heads),
        FORM=form,
        STEP=step,
        # float32 MMAs need more registers.
        num_warps=2 * NUM_WARPS if in_order else NUM_WARPS,
        **({"maxnreg": REGISTERS} if is_nvidia else {}),
    )
