"""Attention layers: ``MLAAttention`` for MLA models (DeepSeek-V2 to V3.2), ``V4Attention`` for DeepSeek-V4,
``V41Attention`` for V4.1."""

from flashlatte.layers.attention import MLAAttention
from flashlatte.layers.builder import MLAMetadataBuilder
from flashlatte.layers.config import IndexerConfig, MLAConfig
from flashlatte.layers.indexer import Indexer
from flashlatte.layers.metadata import MLAMetadata
from flashlatte.layers.rope_config import QueryScaling, Rope, Yarn
from flashlatte.layers.v4 import V4Attention, V4Cache, V4Config, V4IndexerConfig, V4Step, WorkspaceLimits
from flashlatte.layers.v41 import CandidateConfig, SharedSelections, V41Attention, V41Config, allocate_caches

__all__ = [
    "CandidateConfig",
    "Indexer",
    "IndexerConfig",
    "MLAAttention",
    "MLAConfig",
    "MLAMetadata",
    "MLAMetadataBuilder",
    "QueryScaling",
    "Rope",
    "SharedSelections",
    "V4Attention",
    "V4Cache",
    "V4Config",
    "V4IndexerConfig",
    "V4Step",
    "V41Attention",
    "V41Config",
    "WorkspaceLimits",
    "Yarn",
    "allocate_caches",
]
