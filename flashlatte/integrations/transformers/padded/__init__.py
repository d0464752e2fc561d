"""Padded batches, as transformers has them, over a paged cache: columns, pages, and the metadata of their steps."""

from flashlatte.integrations.transformers.padded.paged_latents import PagedLatents

__all__ = ["PagedLatents"]
