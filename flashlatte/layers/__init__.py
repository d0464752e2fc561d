"""The MLA layer: projections, absorbed decode, multi-head prefill over chunked context, in one flat batch."""

from flashlatte.layers.attention import MLAAttention
from flashlatte.layers.builder import MLAMetadataBuilder
from flashlatte.layers.config import MLAConfig, Rope, Yarn
from flashlatte.layers.metadata import MLAMetadata

__all__ = ["MLAAttention", "MLAConfig", "MLAMetadata", "MLAMetadataBuilder", "Rope", "Yarn"]
