"""Attention layers: ``MLAAttention`` for MLA models (DeepSeek-V2 to V3.2), ``V4Attention`` for DeepSeek-V4,
``V41Attention`` for V4.1."""

from typing import TYPE_CHECKING

from flashlatte.runtime import lazy

if TYPE_CHECKING:
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

lazy.declare(
    __name__,
    {
        "CandidateConfig": "flashlatte.layers.v41:CandidateConfig",
        "Indexer": "flashlatte.layers.indexer:Indexer",
        "IndexerConfig": "flashlatte.layers.config:IndexerConfig",
        "MLAAttention": "flashlatte.layers.attention:MLAAttention",
        "MLAConfig": "flashlatte.layers.config:MLAConfig",
        "MLAMetadata": "flashlatte.layers.metadata:MLAMetadata",
        "MLAMetadataBuilder": "flashlatte.layers.builder:MLAMetadataBuilder",
        "QueryScaling": "flashlatte.layers.rope_config:QueryScaling",
        "Rope": "flashlatte.layers.rope_config:Rope",
        "SharedSelections": "flashlatte.layers.v41:SharedSelections",
        "V4Attention": "flashlatte.layers.v4:V4Attention",
        "V4Cache": "flashlatte.layers.v4:V4Cache",
        "V4Config": "flashlatte.layers.v4:V4Config",
        "V4IndexerConfig": "flashlatte.layers.v4:V4IndexerConfig",
        "V4Step": "flashlatte.layers.v4:V4Step",
        "V41Attention": "flashlatte.layers.v41:V41Attention",
        "V41Config": "flashlatte.layers.v41:V41Config",
        "WorkspaceLimits": "flashlatte.layers.v4:WorkspaceLimits",
        "Yarn": "flashlatte.layers.rope_config:Yarn",
        "allocate_caches": "flashlatte.layers.v41:allocate_caches",
    },
)
__getattr__, __dir__ = lazy.attach(__name__)
