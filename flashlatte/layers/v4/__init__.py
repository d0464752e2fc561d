"""DeepSeek-V4's attention: a sliding window of tokens, and compressed groups of all earlier tokens."""

from flashlatte.layers.v4.attention import V4Attention
from flashlatte.layers.v4.cache import V4Cache
from flashlatte.layers.v4.config import V4Config, V4IndexerConfig
from flashlatte.layers.v4.step import V4Step
from flashlatte.layers.v4.workspace import WorkspaceLimits

__all__ = ["V4Attention", "V4Cache", "V4Config", "V4IndexerConfig", "V4Step", "WorkspaceLimits"]
