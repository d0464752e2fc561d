"""DeepSeek-V4's attention: a sliding window of tokens, and compressed groups of all earlier tokens."""

from typing import TYPE_CHECKING

from flashlatte.runtime import lazy

if TYPE_CHECKING:
    from flashlatte.layers.v4.attention import V4Attention
    from flashlatte.layers.v4.cache import V4Cache
    from flashlatte.layers.v4.config import V4Config, V4IndexerConfig
    from flashlatte.layers.v4.step import V4Step
    from flashlatte.layers.v4.workspace import WorkspaceLimits

__all__ = ["V4Attention", "V4Cache", "V4Config", "V4IndexerConfig", "V4Step", "WorkspaceLimits"]

lazy.declare(
    __name__,
    {
        "V4Attention": "flashlatte.layers.v4.attention:V4Attention",
        "V4Cache": "flashlatte.layers.v4.cache:V4Cache",
        "V4Config": "flashlatte.layers.v4.config:V4Config",
        "V4IndexerConfig": "flashlatte.layers.v4.config:V4IndexerConfig",
        "V4Step": "flashlatte.layers.v4.step:V4Step",
        "WorkspaceLimits": "flashlatte.layers.v4.workspace:WorkspaceLimits",
    },
)
__getattr__, __dir__ = lazy.attach(__name__)
