"""vLLM's operations on paged caches of keys and values: writing new tokens, copying blocks."""

from __future__ import annotations

from typing import Any

import torch

from flashlatte.integrations.vllm.ops.dtypes import ONE_BYTE, as_stored_dtype, cache_scale, quant_mode, without_scales
from flashlatte.ops.cache_copy import copy_blocks as copy_pages
from flashlatte.ops.cache_copy import swap_blocks as swap_pages
from flashlatte.ops.reshape_and_cache import reshape_and_cache as write_pages
from flashlatte.runtime import checks

_NAMES = {"k_cache": "key_cache", "v_cache": "value_cache"}


def reshape_and_cache(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    kv_cache_dtype: str,
    k_scale: torch.Tensor,
    v_scale: torch.Tensor,
    interleaved_v: bool = False,
) -> None:
    """Write keys and values into pages in head-major layout: ``flashlatte.reshape_and_cache``.

    Args:
        key, value: [T, h_kv, d] and [T, h_kv, d_v], bf16, fp16 or float32; T ≥ n, and tokens from n on are padding.
        key_cache: [pages, h_kv, d / x, page_size, x], written.
        value_cache: [pages, h_kv, d_v, page_size], written.
        slot_mapping: int32 or int64 [n], page · page_size + offset; a slot outside the cache skips its token.
        kv_cache_dtype: "auto" or the float dtype of ``key``; "fp8", "fp8_e4m3" or "fp8_e5m2".
        k_scale, v_scale: for fp8 caches, float32 with one element or [h_kv]. Unused otherwise.
        interleaved_v: must be False: the layout of AMD's kernels is not supported.

    Raises:
        TypeError, ValueError: an argument of the wrong type, dtype, shape or device; inconsistent arguments.
    """
    if checks.flag("interleaved_v", interleaved_v):
        raise ValueError("interleaved_v must be False: the value layout of AMD's kernels is not supported")
    for name, cache, axes in (("key_cache", key_cache, 5), ("value_cache", value_cache, 4)):
        _check_axes(name, cache, axes)
    keys, values = key_cache.permute(0, 3, 1, 2, 4), value_cache.permute(0, 3, 1, 2)
    reshape_and_cache_flash(key, value, keys, values, slot_mapping, kv_cache_dtype, k_scale, v_scale)


def reshape_and_cache_flash(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    kv_cache_dtype: str,
    k_scale: torch.Tensor,
    v_scale: torch.Tensor,
) -> None:
    """``reshape_and_cache`` for pages [pages, page_size, h_kv, d] of any strides."""
    with checks.naming(**_NAMES):
        write_pages(
            key,
            value,
            as_stored_dtype(kv_cache_dtype, key_cache, "key_cache"),
            as_stored_dtype(kv_cache_dtype, value_cache, "value_cache"),
            slot_mapping,
            k_scale=cache_scale(kv_cache_dtype, k_scale),
            v_scale=cache_scale(kv_cache_dtype, v_scale),
        )


def triton_reshape_and_cache_flash(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    kv_cache_dtype: str,
    k_scale: torch.Tensor,
    v_scale: torch.Tensor,
    interleaved_v_pack_factor: int = 0,
) -> None:
    """``reshape_and_cache`` if key_cache has five axes, else ``reshape_and_cache_flash``.

    "fp8_e5m2" stores e4m3, as vLLM's function does: vLLM's readers of these pages support no other fp8 dtype.
    """
    if interleaved_v_pack_factor:
        raise ValueError(
            "interleaved_v_pack_factor must be 0: the value layout of AMD's kernels is not supported, "
            f"got {interleaved_v_pack_factor}"
        )
    five = isinstance(key_cache, torch.Tensor) and key_cache.dim() == 5
    write = reshape_and_cache if five else reshape_and_cache_flash
    kv_cache_dtype = "fp8" if kv_cache_dtype in ONE_BYTE else kv_cache_dtype
    write(key, value, key_cache, value_cache, slot_mapping, kv_cache_dtype, k_scale, v_scale)


def triton_reshape_and_cache_flash_per_token_head_quant(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    k_scale_cache: torch.Tensor,
    v_scale_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    kv_quant_mode: Any,
) -> None:
    """Write keys and values with a scale for each token and head, into [pages, page_size, h_kv, d] of any strides.

    Args:
        key, value: as ``reshape_and_cache``.
        key_cache, value_cache: int8, float8_e4m3fn or float8_e5m2, written. Rows may be 4 bytes wider than those of
            key and value, as in vLLM, where a row ends with its scale: these bytes stay unchanged.
        k_scale_cache, v_scale_cache: float32 [pages, page_size, h_kv], written.
        slot_mapping: as ``reshape_and_cache``.
        kv_quant_mode: vLLM's KVQuantMode; the dtype of the caches must match. 4-bit modes are not supported.

    Raises:
        TypeError, ValueError: an argument of the wrong type, dtype, shape or device; inconsistent arguments.
    """
    if "INT4" in (mode := quant_mode(kv_quant_mode)):
        raise ValueError(f"kv_quant_mode must be an 8-bit mode, got {mode}")
    for name, scales in (("k_scale_cache", k_scale_cache), ("v_scale_cache", v_scale_cache)):
        _check_axes(name, scales, 3)
    keys, values = without_scales(key_cache, key), without_scales(value_cache, value)
    with checks.naming(k_scale="k_scale_cache", v_scale="v_scale_cache", **_NAMES):
        write_pages(key, value, keys, values, slot_mapping, k_scale=k_scale_cache, v_scale=v_scale_cache)


def swap_blocks(src: torch.Tensor, dst: torch.Tensor, block_size_in_bytes: int, block_mapping: torch.Tensor) -> None:
    """Copy blocks of bytes between two tensors, on the same device or different ones: ``kv_cache.swap_blocks``.

    If both tensors share their memory, every block is read before any is written: ``kv_cache.copy_blocks``.

    Args:
        src, dst: any dtype and shape; dense in memory, in any order of axes.
        block_size_in_bytes: divides the byte size of both tensors.
        block_mapping: int64 [n, 2] on the CPU: block block_mapping[i, 0] of src goes to block block_mapping[i, 1] of
            dst.

    Raises:
        TypeError, ValueError: an argument of the wrong type, dtype, shape or device, or a block that a tensor lacks.
    """
    checks.positive_int("block_size_in_bytes", block_size_in_bytes)
    if checks.given("block_mapping", block_mapping).dim() != 2 or block_mapping.shape[1] != 2:
        raise ValueError(f"block_mapping must have shape [n, 2], got {list(block_mapping.shape)}")
    if block_mapping.device.type != "cpu":
        raise ValueError(f"block_mapping must be on the CPU, got {block_mapping.device}")
    names = {"src_cache": "src", "dst_cache": "dst", "src_pages": "block_mapping[:, 0]"}
    with checks.naming(dst_pages="block_mapping[:, 1]", **names):
        source, target = _blocks("src", src, block_size_in_bytes), _blocks("dst", dst, block_size_in_bytes)
        if source.device == target.device and (source.data_ptr(), len(source)) == (target.data_ptr(), len(target)):
            copy_pages(target, block_mapping[:, 0], block_mapping[:, 1])
        else:
            swap_pages(source, target, block_mapping[:, 0], block_mapping[:, 1])


def _blocks(name: str, x: torch.Tensor, block_bytes: int) -> torch.Tensor:
    """View a tensor's memory as uint8 [blocks, 1, block_bytes]."""
    x = checks.given(name, x)
    in_memory = x.permute(sorted(range(x.dim()), key=lambda axis: (-x.stride(axis), -x.shape[axis])))
    if not in_memory.is_contiguous():
        raise ValueError(f"{name} must be dense in memory, got shape {list(x.shape)}, strides {x.stride()}")
    if x.numel() * x.element_size() % block_bytes:
        raise ValueError(
            f"block_size_in_bytes must divide the {x.numel() * x.element_size()} bytes of {name}, got {block_bytes}"
        )
    return in_memory.reshape(-1).view(torch.uint8).view(-1, 1, block_bytes)


def _check_axes(name: str, cache: torch.Tensor, axes: int) -> None:
    cache = checks.given(name, cache)
    if cache.dim() != axes:
        raise ValueError(f"{name} must have {axes} axes, got shape {list(cache.shape)}")
