"""``BatchPrefillWithRaggedKVCacheWrapper``: prefill of multi-head attention, such as MLA's of 192 and 128 dims."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from flashlatte.flashinfer.conventions import LOG2_E, own_backend, refuse
from flashlatte.ops.dense_prefill import dense_prefill
from flashlatte.runtime import checks

BACKENDS = ("auto", "fa2", "fa3", "cudnn", "cutlass", "cute-dsl")


class BatchPrefillWithRaggedKVCacheWrapper:
    """Attention of packed requests of variable length, with FlashInfer's arguments: ``flashlatte.dense_prefill``.

    Args:
        float_workspace_buffer: its device is that of the inputs; it is not written to.
        kv_layout: "NHD", or "HND" for k and v [heads, T, d].
        use_cuda_graph: ``plan`` copies its boundaries to the following two buffers, which a captured ``run`` reads.
        qo_indptr_buf, kv_indptr_buf: int32 or int64 [b + 1], with ``use_cuda_graph``.
        custom_mask_buf, mask_indptr_buf: must be None.
        backend: one of FlashInfer's, of which any means FlashLatte's choice; or "hopper", "portable" or "reference".
        jit_args, jit_kwargs, variant_owns_mask: must be None, None and False.

    Raises:
        TypeError, ValueError: an argument of the wrong type, dtype, shape or device, or one that must be left out.
    """

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: torch.Tensor | None = None,
        kv_indptr_buf: torch.Tensor | None = None,
        custom_mask_buf: torch.Tensor | None = None,
        mask_indptr_buf: torch.Tensor | None = None,
        backend: str = "auto",
        jit_args: Sequence[Any] | None = None,
        jit_kwargs: Mapping[str, Any] | None = None,
        variant_owns_mask: bool = False,
    ) -> None:
        self._device = checks.given("float_workspace_buffer", float_workspace_buffer).device
        checks.choice("kv_layout", kv_layout, ("NHD", "HND"))
        self._heads_first = kv_layout == "HND"
        self._use_cuda_graph = checks.flag("use_cuda_graph", use_cuda_graph)
        self._backend = own_backend(backend, BACKENDS)
        refuse("masks are causal, windows, or none", custom_mask_buf=custom_mask_buf, mask_indptr_buf=mask_indptr_buf)
        refuse(
            "kernels cannot be extended", jit_args=jit_args, jit_kwargs=jit_kwargs, variant_owns_mask=variant_owns_mask
        )
        self._boundaries: tuple[torch.Tensor, ...] = ()
        if use_cuda_graph:
            qo_indptr_buf = checks.indices("qo_indptr_buf", qo_indptr_buf, ("b + 1",), self._device)
            shape = tuple(qo_indptr_buf.shape)
            self._boundaries = (qo_indptr_buf, checks.indices("kv_indptr_buf", kv_indptr_buf, shape, self._device))
        self._options: dict[str, Any] | None = None

    @property
    def is_cuda_graph_enabled(self) -> bool:
        return self._use_cuda_graph

    def plan(
        self,
        qo_indptr: torch.Tensor,
        kv_indptr: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        head_dim_vo: int | None = None,
        custom_mask: torch.Tensor | None = None,
        packed_custom_mask: torch.Tensor | None = None,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        q_data_type: str | torch.dtype = "float16",
        kv_data_type: str | torch.dtype | None = None,
        o_data_type: str | torch.dtype | None = None,
        non_blocking: bool = True,
        prefix_len_ptr: torch.Tensor | None = None,
        token_pos_in_items_ptr: torch.Tensor | None = None,
        token_pos_in_items_len: int = 0,
        max_item_len_ptr: torch.Tensor | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
        seq_lens: torch.Tensor | None = None,
        seq_lens_q: torch.Tensor | None = None,
        max_token_per_sequence: int | None = None,
        max_sequence_kv: int | None = None,
        v_indptr: torch.Tensor | None = None,
        o_indptr: torch.Tensor | None = None,
        qo_indptr_cpu: torch.Tensor | None = None,
        kv_indptr_cpu: torch.Tensor | None = None,
        uniform_q_len: int | None = None,
        use_token_head_sf: bool = False,
    ) -> None:
        """Set what the following calls of ``run`` compute. It reads no values of tensors on a GPU.

        Args:
            qo_indptr, kv_indptr: int32 or int64 [b + 1], boundaries of the requests, on any device.
            num_qo_heads, num_kv_heads, head_dim_qk, head_dim_vo: shapes of q, k and v; head_dim_vo None: head_dim_qk.
            causal: bottom-right: the last query of a request attends to all of its keys.
            window_left: a query attends to this number of keys before its position; -1 for all.
            sm_scale: above 0; head_dim_qk^-0.5 if None.
            q_data_type, kv_data_type, o_data_type: dtype of q, or its name; the others must be equal or None.
            non_blocking: as for ``Tensor.copy_``, for boundaries on another device.
            custom_mask, packed_custom_mask, prefix_len_ptr, token_pos_in_items_ptr, max_item_len_ptr, v_indptr,
                o_indptr: must be None.
            pos_encoding_mode, logits_soft_cap, token_pos_in_items_len, use_token_head_sf: must be "NONE", 0 or None, 0,
                and False.
            use_fp16_qk_reduction, rope_scale, rope_theta, fixed_split_size, disable_split_kv, seq_lens, seq_lens_q,
                max_token_per_sequence, max_sequence_kv, qo_indptr_cpu, kv_indptr_cpu, uniform_q_len: unused. Results
                are bitwise the same from run to run.

        Raises:
            TypeError, ValueError: an argument of the wrong type, dtype, shape or device, or one that must be left out.
        """
        refuse(
            "masks are causal, windows, or none",
            custom_mask=custom_mask,
            packed_custom_mask=packed_custom_mask,
            prefix_len_ptr=prefix_len_ptr,
            token_pos_in_items_ptr=token_pos_in_items_ptr,
            token_pos_in_items_len=token_pos_in_items_len or None,
            max_item_len_ptr=max_item_len_ptr,
        )
        refuse("keys have no scales", use_token_head_sf=use_token_head_sf)
        refuse("v and out have the boundaries of k and q", v_indptr=v_indptr, o_indptr=o_indptr)
        refuse("dense_prefill has no soft cap", logits_soft_cap=logits_soft_cap or None)
        checks.choice("pos_encoding_mode", pos_encoding_mode, ("NONE",))
        num_qo_heads = checks.positive_int("num_qo_heads", num_qo_heads)
        num_kv_heads = checks.positive_int("num_kv_heads", num_kv_heads)
        head_dim_qk = checks.positive_int("head_dim_qk", head_dim_qk)
        head_dim_vo = checks.positive_int("head_dim_vo", head_dim_qk if head_dim_vo is None else head_dim_vo)
        dtype = _dtype("q_data_type", q_data_type)
        for name, other in (("kv_data_type", kv_data_type), ("o_data_type", o_data_type)):
            if other is not None and _dtype(name, other) != dtype:
                raise ValueError(f"{name} must be q_data_type {dtype} or None, got {other}")
        checks.indices("qo_indptr", qo_indptr, ("b + 1",))
        checks.indices("kv_indptr", kv_indptr, tuple(qo_indptr.shape))
        checks.host_readable(qo_indptr=qo_indptr, kv_indptr=kv_indptr)
        if self._use_cuda_graph:
            for buffer, values in zip(self._boundaries, (qo_indptr, kv_indptr), strict=True):
                if buffer.shape != values.shape:
                    raise ValueError(
                        f"qo_indptr must have the {len(buffer) - 1} requests of qo_indptr_buf, got {len(values) - 1}"
                    )
                buffer.copy_(values, non_blocking=non_blocking)
        else:
            self._boundaries = tuple(
                values.to(self._device, non_blocking=non_blocking) for values in (qo_indptr, kv_indptr)
            )
        # Known without a synchronization only on the CPU.
        self._tokens = int(qo_indptr[-1]) if checks.has_values(qo_indptr) else None
        self._shapes = ((num_qo_heads, head_dim_qk), (num_kv_heads, head_dim_qk), (num_kv_heads, head_dim_vo))
        self._dtype = dtype
        self._options = {
            "softmax_scale": checks.softmax_scale(sm_scale, head_dim_qk, "sm_scale"),
            "causal": checks.flag("causal", causal),
            "window": None if checks.integer("window_left", window_left) < 0 else (window_left, -1),
        }

    begin_forward = plan

    def run(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *args: Any,
        q_scale: float | None = None,
        k_scale: float | None = None,
        v_scale: float | None = None,
        o_scale: float | None = None,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
        lse_base: str = "log2",
        lse_layout: str = "NH",
        enable_pdl: bool | None = None,
        kv_cache_sf: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Attention of the planned requests.

        Args:
            q: [T_q, num_qo_heads, head_dim_qk] in the planned dtype.
            k, v: [T_k, num_kv_heads, head_dim_qk] and [T_k, num_kv_heads, head_dim_vo]; with layout "HND" the first two
                axes are exchanged.
            args, kv_cache_sf: must be left out.
            q_scale, k_scale, v_scale, o_scale: must be None or 1.
            out: [T_q, num_qo_heads, head_dim_vo] to write to.
            lse: float32 [T_q, num_qo_heads] to write to, with or without ``return_lse``; [num_qo_heads, T_q] with
                lse_layout "HN".
            return_lse: also return lse.
            lse_base: "log2", the base-2 logarithm, or "ln", the natural logarithm.
            lse_layout: "NH", or "HN" for a transposed lse.
            enable_pdl: unused.

        Returns:
            out, or (out, lse). A row without visible keys has out 0 and lse -inf.

        Raises:
            TypeError, ValueError: as ``flashlatte.dense_prefill``; an argument that must be left out; no plan.
        """
        if self._options is None:
            raise ValueError("plan must be called before run")
        refuse("kernels cannot be extended", args=args or None)
        checks.flag("return_lse", return_lse)
        checks.choice("lse_base", lse_base, ("log2", "ln"))
        checks.choice("lse_layout", lse_layout, ("NH", "HN"))
        refuse("keys have no scales", kv_cache_sf=kv_cache_sf)
        scales = {"q_scale": q_scale, "k_scale": k_scale, "v_scale": v_scale, "o_scale": o_scale}
        # To compare a tensor would synchronize.
        given = {name: scale for name, scale in scales.items() if isinstance(scale, torch.Tensor) or scale != 1}
        refuse("inputs have no scales", **given)
        if self._heads_first:
            k, v = (checks.given(name, x).transpose(0, 1) for name, x in (("k", k), ("v", v)))
        for name, x, (heads, width) in zip("qkv", (q, k, v), self._shapes, strict=True):
            checks.tensor(name, x, ("T", heads, width), (self._dtype,), self._device, may_be_empty=1)
        if self._tokens is not None and q.shape[0] != self._tokens:
            raise ValueError(f"q must have the {self._tokens} tokens of qo_indptr, got {q.shape[0]}")
        qo_indptr, kv_indptr = self._boundaries
        mean = -(-k.shape[0] // max(kv_indptr.shape[0] - 1, 1))
        with checks.naming(cu_seqlens_q="qo_indptr", cu_seqlens_k="kv_indptr"):
            # The length of the longest request is unknown here, and only affects the order of work.
            out, natural = dense_prefill(
                q, k, v, qo_indptr, kv_indptr, q.shape[0], mean, out=out, backend=self._backend, **self._options
            )
        if not return_lse and lse is None:
            return out
        if lse_layout == "HN":
            natural = natural.T
        lse = checks.output_or_new("lse", lse, natural.shape, torch.float32, q.device, unit_last_stride=False)
        torch.mul(natural, LOG2_E if lse_base == "log2" else 1.0, out=lse)
        return (out, lse) if return_lse else out

    run_return_lse = functools.partialmethod(run, return_lse=True)

    def end_forward(self) -> None:
        """Nothing, as in FlashInfer."""


def _dtype(name: str, value: str | torch.dtype) -> torch.dtype:
    """A dtype, or the one of this name."""
    dtype: Any = getattr(torch, value, value) if isinstance(value, str) else value
    checks.dtype(name, dtype, checks.FLOAT_DTYPES)
    return dtype
