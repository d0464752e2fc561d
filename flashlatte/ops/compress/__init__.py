"""DeepSeek-V4's compressor: each group of tokens becomes one cache row."""

from flashlatte.ops.compress.api import compress

__all__ = ["compress"]
