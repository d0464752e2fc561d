"""DeepSeek-V4.1's attention: DeepSeek-V4's, with groups and selections that layers share, and a two-level indexer."""

from flashlatte.layers.v41.attention import V41Attention
from flashlatte.layers.v41.cache import allocate_caches
from flashlatte.layers.v41.config import CandidateConfig, V41Config
from flashlatte.layers.v41.selection import SharedSelections

__all__ = ["CandidateConfig", "SharedSelections", "V41Attention", "V41Config", "allocate_caches"]
