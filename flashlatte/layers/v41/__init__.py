"""DeepSeek-V4.1's attention: DeepSeek-V4's, with groups and selections that layers share, and a two-level indexer."""

from typing import TYPE_CHECKING

from flashlatte.runtime import lazy

if TYPE_CHECKING:
    from flashlatte.layers.v41.attention import V41Attention
    from flashlatte.layers.v41.cache import allocate_caches
    from flashlatte.layers.v41.config import CandidateConfig, V41Config
    from flashlatte.layers.v41.selection import SharedSelections

__all__ = ["CandidateConfig", "SharedSelections", "V41Attention", "V41Config", "allocate_caches"]

lazy.declare(
    __name__,
    {
        "CandidateConfig": "flashlatte.layers.v41.config:CandidateConfig",
        "SharedSelections": "flashlatte.layers.v41.selection:SharedSelections",
        "V41Attention": "flashlatte.layers.v41.attention:V41Attention",
        "V41Config": "flashlatte.layers.v41.config:V41Config",
        "allocate_caches": "flashlatte.layers.v41.cache:allocate_caches",
    },
)
__getattr__, __dir__ = lazy.attach(__name__)
