"""``inverse_rope_quantize``: arguments, checks, and choice of the implementation."""

from __future__ import annotations

import torch

from flashlatte.kernels import rope
from flashlatte.runtime import checks, dispatch, gradients, refusals
from flashlatte.runtime.repeat import repeats_launches
from flashlatte.runtime.torch_op import register_op

OPERATION = "inverse_rope_quantize"
TILE = 128
# TMA requires rows of scales to be aligned to 16 bytes.
SCALE_ALIGNMENT = 4


def _refuses_portable(call: dispatch.CallSpec) -> str | None:
    width = call.head_dim
    if width is not None and width & (width - 1):
        return f"takes heads of a power of two, not {width}"
    return refusals.triton(call) or refusals.head_dim_above(call, 2048)


@repeats_launches
def inverse_rope_quantize(
    o: torch.Tensor,
    cos_sin: torch.Tensor,
    positions: torch.Tensor,
    groups: int,
    *,
    packed_scales: bool = False,
    backend: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Undo the rotation of the last elements of attention outputs by their tokens' positions, and quantize to e4m3.

    In DeepSeek-V4 the value is the rotated key, so the output is rotated too. A matmul per group of heads follows;
    values and scales have the layout that DeepGEMM requires. A scale is max(amax, 1e-10) / 448 of 128 elements, rounded
    up to a power of two.

    Args:
        o: [T, H, head_dim], bf16, fp16 or float32; head_dim a multiple of 128. T may be 0.
        cos_sin: float32 [n, rope_dim], the cosines, then the sines of each frequency of the last rope_dim elements, in
            pairs (2i, 2i + 1).
        positions: int32 or int64 [T], the table's row of each token. Positions outside the table are clamped.
        groups: number of groups of H / groups consecutive heads.
        packed_scales: pack the E8M0 bytes of four scales in an int32 (SM100) instead of float32 scales (SM90).
        backend: "portable" or "reference"; None selects one.

    Returns:
        float8_e4m3fn [T, groups, d] with d = H / groups · head_dim, with strides (d, T · d, 1). And scales, float32 [T,
        groups, d / 128] or int32 [T, groups, d / 512], with strides (1, columns · Ta, Ta), where Ta is T rounded up to
        a multiple of 4; the padding is 0.

    Raises:
        TypeError, ValueError: an argument of the wrong type, dtype, shape or device; inconsistent arguments.
    """
    checks.tensor("o", o, ("T", "H", "head_dim"), checks.FLOAT_DTYPES, may_be_empty=1)
    tokens, heads, head_dim = o.shape
    if head_dim % TILE:
        raise ValueError(f"o must have a head dim that is a multiple of {TILE}, got {head_dim}")
    rope.check_rotation(cos_sin, positions, tokens, head_dim, o.device)
    if heads % checks.positive_int("groups", groups):
        raise ValueError(f"groups must divide o's {heads} heads, got {groups}")
    checks.flag("packed_scales", packed_scales)
    if packed_scales and head_dim % (4 * TILE):
        raise ValueError(f"o must have a head dim that is a multiple of {4 * TILE} for packed_scales, got {head_dim}")
    gradients.warn_if_dropped(OPERATION, o)
    width = heads // groups * head_dim
    columns = width // TILE // (4 if packed_scales else 1)
    padded = -(-tokens // SCALE_ALIGNMENT) * SCALE_ALIGNMENT
    values = torch.empty(groups, tokens, width, dtype=torch.uint8, device=o.device)
    dtype = torch.int32 if packed_scales else torch.float32
    scales = torch.empty(groups, columns, padded, dtype=dtype, device=o.device)
    call = dispatch.CallSpec(OPERATION, o.device, o.dtype, head_dim=head_dim, h_q=heads)
    backend = dispatch.select(call, backend)
    if tokens:
        _inverse_rope_quantize(o, cos_sin, positions, values, scales, backend)
    return values.view(torch.float8_e4m3fn).transpose(0, 1), scales[:, :, :tokens].permute(2, 0, 1)


@register_op(OPERATION, mutates=("values", "scales"))
@dispatch.implemented(OPERATION, portable=_refuses_portable)
def _inverse_rope_quantize(
    o: torch.Tensor,
    cos_sin: torch.Tensor,
    positions: torch.Tensor,
    values: torch.Tensor,
    scales: torch.Tensor,
    backend: str,
) -> None:
    if backend == "portable":
        from flashlatte.ops.inverse_rope_quantize.portable import inverse_rope_quantize
    else:
        from flashlatte.ops.inverse_rope_quantize.reference import inverse_rope_quantize

    inverse_rope_quantize(o, cos_sin, positions, values, scales)
