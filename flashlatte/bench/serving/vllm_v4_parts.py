"""Stand-ins for parts of vLLM's DeepSeek-V4 on CUDA whose packages are missing, equal in all engines of a comparison.

vLLM computes hyper-connections with TileLang, and compresses keys with CUTLASS's Python package.
``FLASHLATTE_BENCH_V4_PARTS`` replaces parts although their packages are installed.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import types
from typing import Any

import torch

from flashlatte.ops.mhc import mhc_post, mhc_pre

VARIABLE = "FLASHLATTE_BENCH_V4_PARTS"
# Each part, and the package that computes it in vLLM.
PACKAGES = {"mhc": "tilelang", "compressor": "cutlass"}
MHC = "vllm.model_executor.kernels.mhc.tilelang"
COMPRESSOR = "vllm.models.deepseek_v4.nvidia.ops.sparse_attn_compress_cutedsl"
TRITON_COMPRESSOR = "vllm.models.deepseek_v4.common.ops.fused_compress_quant_cache"
TRITON_KERNEL = "_fused_kv_compress_norm_rope_insert_sparse_attn"
# The kernel holds a group's keys and scores, 512 elements a token, in registers: 1,024 a thread for 128 tokens with
# vLLM's 4 warps.
WARPS_OF_LARGE_GROUPS = 16


def replace_missing_parts() -> dict[str, str]:
    """Replace the parts whose package is missing. Call it before vLLM imports the model.

    Returns:
        each replaced part and the library that computes it.

    Raises:
        ValueError: ``FLASHLATTE_BENCH_V4_PARTS`` names an unknown part.
    """
    asked = [part for part in os.environ.get(VARIABLE, "").split(",") if part]
    if unknown := [part for part in asked if part not in PACKAGES]:
        raise ValueError(f"{VARIABLE} must be some of {','.join(PACKAGES)}, got {unknown[0]!r}")
    replaced = [part for part, package in PACKAGES.items() if part in asked or not importlib.util.find_spec(package)]
    if "mhc" in replaced:
        replace_mhc()
    if "compressor" in replaced:
        replace_compressor()
    libraries = {"mhc": "flashlatte", "compressor": "vllm_triton"}
    return {part: libraries[part] for part in replaced}


def replace_mhc() -> None:
    """Hyper-connections by FlashLatte's operations, their projection and the norm by PyTorch."""
    module = importlib.import_module(MHC)
    for function in (
        mhc_pre_broadcast_tilelang,
        mhc_pre_tilelang,
        mhc_fused_post_pre_tilelang,
        mhc_post_tilelang,
        hc_head_fused_kernel_tilelang,
    ):
        setattr(module, function.__name__, function)


def replace_compressor() -> None:
    """The compressor of 512 elements by the Triton kernel that vLLM has for other GPUs."""
    # The layers import the module at their first call.
    module: Any = types.ModuleType(COMPRESSOR)
    module._SPARSE_ATTN_COMPRESSOR_CUTEDSL_KERNEL = compress
    sys.modules[COMPRESSOR] = module


def compress(*, store_full_kv: bool, store_full_fp8: bool, fp8_scale: float | None, **arguments: Any) -> None:
    """vLLM's Triton kernel, which writes rows of ``fp8_ds_mla`` only."""
    if store_full_kv or store_full_fp8:
        raise NotImplementedError("the stand-in of V4's compressor writes caches of fp8_ds_mla only")
    module: Any = importlib.import_module(TRITON_COMPRESSOR)
    if not isinstance(kernel := getattr(module, TRITON_KERNEL), LargeGroupsKernel):
        setattr(module, TRITON_KERNEL, LargeGroupsKernel(kernel))
    module.compress_norm_rope_store_triton(**arguments)


class LargeGroupsKernel:
    """A Triton kernel that is launched with more warps for groups of 128 tokens."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel

    def __getitem__(self, grid: Any) -> Any:
        def launch(*arguments: Any, num_warps: int, **options: Any) -> Any:
            warps = WARPS_OF_LARGE_GROUPS if options["COMPRESS_RATIO"] == 128 else num_warps
            return self.kernel[grid](*arguments, num_warps=warps, **options)

        return launch


# From here on, functions with the names, arguments and results of vLLM's.


def mhc_pre_tilelang(
    residual: torch.Tensor,
    fn: torch.Tensor,
    hc_scale: torch.Tensor,
    hc_base: torch.Tensor,
    rms_eps: float,
    hc_pre_eps: float,
    hc_sinkhorn_eps: float,
    hc_post_mult_value: float,
    sinkhorn_repeat: int,
    n_splits: int = 1,
    norm_weight: torch.Tensor | None = None,
    norm_eps: float = 1e-6,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Shares [T, n, 1], mixture [T, n, n] and the layer's input [T, hidden_size] of streams [T, n, hidden_size]."""
    if hc_pre_eps != hc_sinkhorn_eps or hc_post_mult_value != 2.0:
        raise NotImplementedError("FlashLatte's hyper-connections have one eps, and shares of at most 2")
    options = {"rms_eps": rms_eps, "eps": hc_pre_eps, "iterations": sinkhorn_repeat}
    shares, mixture, result = mhc_pre(residual, projected(residual, fn), hc_base, hc_scale, **options)
    if norm_weight is not None:
        result = torch.nn.functional.rms_norm(result, norm_weight.shape, norm_weight, norm_eps)
    return shares.unsqueeze(-1), mixture, result


def mhc_pre_broadcast_tilelang(
    residual: torch.Tensor, fn: torch.Tensor, *arguments: Any, fn_broadcast: torch.Tensor | None = None, **options: Any
) -> tuple[torch.Tensor, ...]:
    """The first layer, whose streams are all the embedding [T, hidden_size]: streams, shares, mixture and input."""
    streams = fn.shape[1] // residual.shape[-1]
    residual = residual.unsqueeze(1).expand(-1, streams, -1).contiguous()
    return residual, *mhc_pre_tilelang(residual, fn, *arguments, **options)


def mhc_post_tilelang(
    x: torch.Tensor, residual: torch.Tensor, post_layer_mix: torch.Tensor, comb_res_mix: torch.Tensor
) -> torch.Tensor:
    """Streams [T, n, hidden_size] after a layer's result ``x``."""
    return mhc_post(x, residual, post_layer_mix.squeeze(-1), comb_res_mix)


def mhc_fused_post_pre_tilelang(
    x: torch.Tensor,
    residual: torch.Tensor,
    post_layer_mix: torch.Tensor,
    comb_res_mix: torch.Tensor,
    *arguments: Any,
    tile_n: int = 1,
    **options: Any,
) -> tuple[torch.Tensor, ...]:
    """The streams after a layer's result ``x``, and the shares, mixture and input of the next layer."""
    residual = mhc_post_tilelang(x, residual, post_layer_mix, comb_res_mix)
    return residual, *mhc_pre_tilelang(residual, *arguments, **options)


def hc_head_fused_kernel_tilelang(
    hs_flat: torch.Tensor,
    fn: torch.Tensor,
    hc_scale: torch.Tensor,
    hc_base: torch.Tensor,
    rms_eps: float,
    hc_eps: float,
) -> torch.Tensor:
    """The sum of the last layer's streams [T, n, hidden_size], each times a gate that depends on all of them."""
    scale = hs_flat.flatten(1).float().square().mean(1, keepdim=True).add(rms_eps).rsqrt()
    gates = (projected(hs_flat, fn) * scale * hc_scale + hc_base).sigmoid() + hc_eps
    return torch.bmm(gates.unsqueeze(1), hs_flat.float()).squeeze(1).to(hs_flat.dtype)


def projected(streams: torch.Tensor, fn: torch.Tensor) -> torch.Tensor:
    """float32 [T, outputs]: all elements of a token's streams times ``fn`` [outputs, n · hidden_size]."""
    return streams.flatten(1).float() @ fn.T
