"""The MLA layer: projections, absorbed decode, multi-head prefill over chunked context, in one flat batch."""

from flashlatte.layers.attention import MLAAttention
from flashlatte.layers.builder import MLAMetadataBuilder
from flashlatte.layers.config import IndexerConfig, MLAConfig, Rope, Yarn
from flashlatte.layers.indexer import Indexer
from flashlatte.layers.metadata import MLAMetadata

__all__ = ["Indexer", "IndexerConfig", "MLAAttention", "MLAConfig", "MLAMetadata", "MLAMetadataBuilder", "Rope", "Yarn"]
