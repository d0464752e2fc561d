"""``latent_rows`` and ``rotate_heads``: arguments, checks, and choice of the implementation."""

from __future__ import annotations

import torch

from flashlatte.ops.norm_rope.reference import LatentRowsParams
from flashlatte.ops.norm_rope.rotary import Rotary
from flashlatte.runtime import checks, dispatch, gradients, refusals, value_checks
from flashlatte.runtime.torch_op import register_op

LATENT_ROWS, ROTATE_HEADS = "latent_rows", "rotate_heads"
# Maximum width of a row, which a program holds in registers.
PORTABLE_MAX_WIDTH = 8192


def _refuses_portable(call: dispatch.CallSpec) -> str | None:
    return refusals.triton(call) or refusals.head_dim_above(call, PORTABLE_MAX_WIDTH)


def latent_rows(
    kv_a: torch.Tensor,
    weight: torch.Tensor,
    rotary: Rotary,
    eps: float,
    *,
    q_a: torch.Tensor | None = None,
    q_weight: torch.Tensor | None = None,
    q_eps: float = 1e-6,
    cache: torch.Tensor | None = None,
    slot_mapping: torch.Tensor | None = None,
    backend: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Compute cache rows of new tokens from kv_a_proj's output, write them to a cache, and normalize query latents.

    It has no backward pass, and warns once if gradients are enabled and an input requires one.

    Args:
        kv_a: [T, latent + rope] as projected; bf16, fp16 or float32, last stride 1. T may be 0.
        weight: [latent], weight of the latent's RMSNorm.
        rotary: the tokens' rotation; rope is twice the number of frequencies of its table.
        eps, q_eps: epsilons of the two RMSNorms.
        q_a: [T, rank], the queries' latents; None if queries have no latent.
        q_weight: [rank], weight of its RMSNorm.
        cache: [pages, page_size, 1, latent + rope], bf16, fp16 or float32, to write the rows to; None for no write.
        slot_mapping: int32 or int64 [T], given with ``cache``; tokens whose slot is outside the cache are skipped.
        backend: "portable" or "reference"; None selects one.

    Returns:
        rows [T, latent + rope]: the normalized latent and the rotated rope; and q_a normalized, or None. Both in
        kv_a's dtype, computed in float32.

    Raises:
        TypeError, ValueError: an argument of the wrong type, dtype, shape or device; inconsistent arguments.
    """
    checks.tensor("kv_a", kv_a, ("T", "latent + rope"), checks.FLOAT_DTYPES, may_be_empty=1)
    device, dtype, tokens = kv_a.device, kv_a.dtype, kv_a.shape[0]
    rope_dim = _check_rotary(rotary, tokens, device)
    latent_dim = kv_a.shape[1] - rope_dim
    if latent_dim < 1:
        raise ValueError(f"kv_a must be wider than rotary.table's {rope_dim}, got {kv_a.shape[1]}")
    checks.tensor("weight", weight, (latent_dim,), (dtype,), device)
    eps, q_eps = checks.epsilon("eps", eps), checks.epsilon("q_eps", q_eps)
    if (q_a is None) != (q_weight is None):
        raise ValueError("q_a and q_weight must be given together, got only one")
    if q_a is not None and q_weight is not None:
        checks.tensor("q_a", q_a, (tokens, "rank"), (dtype,), device)
        checks.tensor("q_weight", q_weight, (q_a.shape[1],), (dtype,), device)
    if (cache is None) != (slot_mapping is None):
        raise ValueError("cache and slot_mapping must be given together, got only one")
    if cache is not None and slot_mapping is not None:
        shape = ("pages", "page_size", 1, latent_dim + rope_dim)
        checks.output("cache", cache, shape, checks.FLOAT_DTYPES, device)
        checks.indices("slot_mapping", slot_mapping, (tokens,), device)
        value_checks.entries("slot_mapping", slot_mapping, cache.shape[0] * cache.shape[1])
    gradients.warn_if_dropped(LATENT_ROWS, kv_a, weight, q_a, q_weight)
    width = max(latent_dim, 0 if q_a is None else q_a.shape[1])
    backend = dispatch.select(dispatch.CallSpec(LATENT_ROWS, device, dtype, head_dim=width), backend)
    rows = torch.empty(tokens, latent_dim + rope_dim, dtype=dtype, device=device)
    q_out = None if q_a is None else torch.empty(q_a.shape, dtype=dtype, device=device)
    if tokens == 0:
        return rows, q_out
    params = LatentRowsParams(
        kv_a=kv_a,
        weight=weight,
        eps=eps,
        table=rotary.table,
        positions=rotary.positions,
        interleaved=rotary.interleaved,
        q_a=q_a,
        q_weight=q_weight,
        q_eps=q_eps,
        slot_mapping=slot_mapping,
        rows=rows,
        q_out=q_out,
        cache=cache,
    )
    _latent_rows(params, backend)
    return rows, q_out


@register_op(LATENT_ROWS, mutates=("rows", "q_out", "cache"))
@dispatch.implemented(LATENT_ROWS, portable=_refuses_portable)
def _latent_rows(params: LatentRowsParams, backend: str) -> None:
    if backend == "portable":
        from flashlatte.ops.norm_rope.portable import latent_rows
    else:
        from flashlatte.ops.norm_rope.reference import latent_rows

    latent_rows(params)


def rotate_heads(x: torch.Tensor, rotary: Rotary, out: torch.Tensor, *, backend: str | None = None) -> None:
    """Rotate the rope part of queries. It has no backward pass; see ``latent_rows``.

    Args:
        x: [T, h, rope], bf16, fp16 or float32, last stride 1.
        rotary: the tokens' rotation.
        out: [T, h, rope] in a float dtype, last stride 1, to write to; it may be ``x`` itself.
        backend: "portable" or "reference"; None selects one.

    Raises:
        TypeError, ValueError: an argument of the wrong type, dtype, shape or device.
    """
    checks.tensor("x", x, ("T", "h", "rope"), checks.FLOAT_DTYPES, may_be_empty=1)
    rope_dim = _check_rotary(rotary, x.shape[0], x.device)
    if x.shape[2] != rope_dim:
        raise ValueError(f"x must be as wide as rotary.table, {rope_dim}, got {x.shape[2]}")
    checks.output("out", out, tuple(x.shape), checks.FLOAT_DTYPES, x.device)
    backend = dispatch.select(
        dispatch.CallSpec(ROTATE_HEADS, x.device, x.dtype, head_dim=x.shape[2], h_q=x.shape[1]), backend
    )
    gradients.warn_if_dropped(ROTATE_HEADS, x, out)
    if x.shape[0] == 0:
        return
    # A registered operation must not read and write the same tensor, so an in-place call passes no x.
    _rotate_heads(None if out is x else x, rotary.table, rotary.positions, rotary.interleaved, out, backend)


@register_op(ROTATE_HEADS, mutates=("out",))
def _rotate_heads(
    x: torch.Tensor | None,
    table: torch.Tensor,
    positions: torch.Tensor,
    interleaved: bool,
    out: torch.Tensor,
    backend: str,
) -> None:
    _rotate(out if x is None else x, table, positions, interleaved, out, backend)


@dispatch.implemented(ROTATE_HEADS, portable=_refuses_portable)
def _rotate(
    x: torch.Tensor, table: torch.Tensor, positions: torch.Tensor, interleaved: bool, out: torch.Tensor, backend: str
) -> None:
    if backend == "portable":
        from flashlatte.ops.norm_rope.portable import rotate_heads
    else:
        from flashlatte.ops.norm_rope.reference import rotate_heads

    rotate_heads(x, table, positions, interleaved, out)


def _check_rotary(rotary: Rotary, tokens: int, device: torch.device) -> int:
    """The width of the rotated part."""
    checks.instance("rotary", rotary, Rotary)
    table = checks.tensor("rotary.table", rotary.table, ("positions", "rope"), (torch.float32,), device)
    if table.shape[1] % 2:
        raise ValueError(f"rotary.table must have an even width, got {table.shape[1]}")
    checks.indices("rotary.positions", rotary.positions, (tokens,), device)
    return table.shape[1]
