"""FlashMLA's schedule objects. They are empty: each call splits its work from its own lengths."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from flashlatte.runtime import checks

# int32 values per CTA in FlashMLA's metadata.
_METADATA_WIDTH = 8


@dataclass
class FlashMLASchedMeta:
    """FlashMLA's schedule object. It stays empty, and may be reused with other lengths and shapes."""

    have_initialized: bool = False
    config: object | None = None
    tile_scheduler_metadata: torch.Tensor | None = None
    num_splits: torch.Tensor | None = None


def get_mla_metadata(*_args: object, **_kwargs: object) -> tuple[FlashMLASchedMeta, None]:
    """A schedule object for ``flash_mla_with_kvcache``, and None.

    The arguments of earlier FlashMLA versions (lengths, heads, …) are accepted and unused, as in FlashMLA.
    """
    return FlashMLASchedMeta(), None


def get_mla_decoding_metadata(
    seqlens_k: torch.Tensor,
    num_q_tokens_per_head_k: int,
    h_k: int,
    h_q: int | None = None,
    is_fp8_kvcache: bool = False,
    topk: int | None = None,
    use_legacy: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Zeros with the shapes of sgl-flash-mla's precomputed schedule, on the device of ``seqlens_k`` [b].

    All arguments but ``seqlens_k`` are unused.

    Returns:
        int32 [1, 8] and [b + 1], to pass as ``tile_scheduler_metadata`` and ``num_splits``, or in a
        ``FlashMLASchedMeta``.

    Raises:
        TypeError: ``seqlens_k`` is not a tensor.
    """
    device = checks.given("seqlens_k", seqlens_k).device
    metadata = torch.zeros(1, _METADATA_WIDTH, dtype=torch.int32, device=device)
    return metadata, torch.zeros(seqlens_k.numel() + 1, dtype=torch.int32, device=device)


def has_legacy() -> bool:
    """True: the cache formats of sgl-flash-mla's ``use_legacy=True`` are supported."""
    return True


def check(metadata: object, num_splits: object) -> None:
    """Accept a schedule object with None, or the two tensors of ``get_mla_decoding_metadata``; raise otherwise."""
    if isinstance(metadata, FlashMLASchedMeta):
        if num_splits is not None:
            raise ValueError(
                f"num_splits must be None with a FlashMLASchedMeta, as get_mla_metadata returned it, got "
                f"{type(num_splits).__name__}"
            )
    elif not (isinstance(metadata, torch.Tensor) and isinstance(num_splits, torch.Tensor)):
        raise TypeError(
            "tile_scheduler_metadata must be the FlashMLASchedMeta that get_mla_metadata returned, or a tensor with "
            f"num_splits, got {type(metadata).__name__} with {type(num_splits).__name__}"
        )
