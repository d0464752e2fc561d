"""DeepSeek-V4's attention: a window of tokens beside compressed groups of all that came before."""

from flashlatte.layers.v4.attention import V4Attention
from flashlatte.layers.v4.cache import V4Cache
from flashlatte.layers.v4.config import V4Config, V4IndexerConfig
from flashlatte.layers.v4.step import V4Step
from flashlatte.layers.v4.workspace import WorkspaceLimits

__all__ = ["V4Attention", "V4Cache", "V4Config", "V4IndexerConfig", "V4Step", "WorkspaceLimits"]
