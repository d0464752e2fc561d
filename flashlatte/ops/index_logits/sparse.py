"""``sparse_index_logits``: its arguments, the checks, and the choice of implementation."""

from __future__ import annotations

import torch

from flashlatte.kv_cache.index_formats import FORMAT_BY_KEY_DTYPE
from flashlatte.ops.index_logits.api import QUERY_DTYPES, check_cache, check_heads, check_keys, output
from flashlatte.ops.index_logits.reference import SparseIndexLogitsParams
from flashlatte.runtime import checks, dispatch, gradients, refusals, value_checks
from flashlatte.runtime.repeat import repeats_launches
from flashlatte.runtime.torch_op import register_op

SPARSE = "sparse_index_logits"


@repeats_launches
def sparse_index_logits(
    q: torch.Tensor,
    k: torch.Tensor,
    weights: torch.Tensor,
    first_key: torch.Tensor,
    num_keys: torch.Tensor,
    *,
    block_size: int,
    k_scale: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float32,
    out: torch.Tensor | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """``index_logits`` for candidate blocks of keys, a list of blocks for each query (DeepSeek-V4.1's two-level
    indexer).

    logits[i, j · block_size + o] = the score of query i and key first_key[i, j] + o, for o < num_keys[i, j]

    Args:
        q: [M, H, head_dim], float8_e4m3fn, bf16 or float32; H from 1 to 128, head_dim 32, 64 or 128. M may be 0.
        k: index keys [N, head_dim] or [N, head_dim / 2], as ``index_logits`` takes them, addressed by row; or a paged
            cache [pages, page_size, 1, width], as ``index_quantize`` wrote it, whose keys are addressed by slot:
            page · page_size + offset.
        weights: float32 [M, H].
        first_key: int32 or int64 [M, S]: the first key of each block. Blocks may overlap and repeat.
        num_keys: int32 or int64 [M, S]: number of visible keys of each block, clamped to 0 … block_size.
        block_size: keys of a block, and columns of its logits.
        k_scale: scales of contiguous keys, as for ``index_logits``; None for a cache.
        dtype: dtype of the logits, float32 or bf16, if ``out`` is None.
        out: [M, S · block_size], float32 or bf16 with last stride 1, to write into.
        backend: "portable" or "reference"; None selects one.

    Returns:
        logits [M, S · block_size]; -inf for keys that are not visible or not in ``k``.

    Raises:
        TypeError, ValueError: an argument of the wrong type, dtype, shape or device; inconsistent arguments.
    """
    checks.tensor("q", q, ("M", "H", "head_dim"), QUERY_DTYPES, may_be_empty=1)
    num_rows, heads, head_dim = q.shape
    device = q.device
    check_heads(heads, head_dim)
    page_size = None
    if isinstance(k, torch.Tensor) and k.dim() == 4:
        if k_scale is not None:
            raise ValueError("k_scale must be None for a paged cache, which holds its scales")
        k, layout = check_cache("k", k, q)
        cache_format, page_size = layout.name, k.shape[1]
    else:
        check_keys(q, k, k_scale)
        cache_format = FORMAT_BY_KEY_DTYPE.get(k.dtype)
    checks.tensor("weights", weights, (num_rows, heads), (torch.float32,), device)
    checks.indices("first_key", first_key, (num_rows, "S"), device, may_be_empty=1)
    num_blocks = first_key.shape[1]
    checks.indices("num_keys", num_keys, (num_rows, num_blocks), device, may_be_empty=1)
    block_size = checks.positive_int("block_size", block_size)
    out = output(out, num_rows, num_blocks * block_size, dtype, device)
    if value_checks.ENABLED:
        value_checks.lengths("num_keys", num_keys, block_size)
        value_checks.entries("first_key", first_key, k.shape[0] * (page_size or 1), num_keys > 0)
    gradients.warn_if_dropped(SPARSE, q, k, k_scale, weights)
    call = dispatch.CallSpec(SPARSE, device, q.dtype, cache_format, page_size, head_dim=head_dim, h_q=heads)
    backend = dispatch.select(call, backend)
    if num_rows and k.shape[0] == 0:
        return out.fill_(-torch.inf)
    if num_rows:
        params = SparseIndexLogitsParams(q, k, k_scale, weights, first_key, num_keys, block_size, out)
        _sparse_index_logits(params, backend)
    return out


@register_op(SPARSE, mutates=("logits",))
@dispatch.implemented(SPARSE, portable=refusals.triton)
def _sparse_index_logits(params: SparseIndexLogitsParams, backend: str) -> None:
    if backend == "portable":
        from flashlatte.ops.index_logits.portable.sparse import sparse
    else:
        from flashlatte.ops.index_logits.reference import sparse

    sparse(params)
