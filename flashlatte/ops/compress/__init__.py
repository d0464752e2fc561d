"""DeepSeek-V4's compressor: groups of tokens into one cache row each."""

from flashlatte.ops.compress.api import compress

__all__ = ["compress"]
