"""``pack_seq`` and ``unpack_seq`` in plain PyTorch: the specification."""

from __future__ import annotations

import torch


def pack_seq(x: torch.Tensor, cu_seqlens: torch.Tensor, pad: int, out: torch.Tensor) -> None:
    """Copy x [T, width] to out [b, max_seqlen, width]; ``pad`` is four bytes of padding."""
    begin, end = cu_seqlens[:-1].long().unsqueeze(1), cu_seqlens[1:].long().unsqueeze(1)
    token = begin + torch.arange(out.shape[1], device=x.device)  # [b, max_seqlen]
    found = (token >= 0) & (token < end) & (token < x.shape[0])
    bits = torch.tensor([pad], dtype=torch.int32, device=x.device)
    out.copy_(bits.view(torch.uint8)[: x.element_size()].view(x.dtype).expand(out.shape))
    out[found] = x[token[found]]


def unpack_seq(packed: torch.Tensor, cu_seqlens: torch.Tensor, out: torch.Tensor) -> None:
    """Copy packed [b, max_seqlen, width] to out [T, width]."""
    token = torch.arange(out.shape[0], device=packed.device)
    request = torch.searchsorted(cu_seqlens.long(), token, right=True) - 1
    inside = (request >= 0) & (request < packed.shape[0])
    request = request.clamp(0, packed.shape[0] - 1)
    position = token - cu_seqlens.long()[request]
    found = inside & (position < packed.shape[1])
    out[found] = packed[request[found], position[found]]
