"""transformers' padded batches over a paged cache: columns, pages, and the metadata of steps."""

from flashlatte.integrations.transformers.padded.paged_latents import PagedLatents

__all__ = ["PagedLatents"]
