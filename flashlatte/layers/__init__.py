"""The MLA layer: projections, absorbed decode, multi-head prefill over chunked context, in one flat batch.

And DeepSeek-V4's (``V4Attention``), whose attention is another.
"""

from flashlatte.layers.attention import MLAAttention
from flashlatte.layers.builder import MLAMetadataBuilder
from flashlatte.layers.config import IndexerConfig, MLAConfig, QueryScaling, Rope, Yarn
from flashlatte.layers.indexer import Indexer
from flashlatte.layers.metadata import MLAMetadata
from flashlatte.layers.v4 import V4Attention, V4Cache, V4Config, V4IndexerConfig, V4Step, WorkspaceLimits

__all__ = [
    "Indexer",
    "IndexerConfig",
    "MLAAttention",
    "MLAConfig",
    "MLAMetadata",
    "MLAMetadataBuilder",
    "QueryScaling",
    "Rope",
    "V4Attention",
    "V4Cache",
    "V4Config",
    "V4IndexerConfig",
    "V4Step",
    "WorkspaceLimits",
    "Yarn",
]
