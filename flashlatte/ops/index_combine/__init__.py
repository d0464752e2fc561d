"""What DeepSeek-V4's prefill attends to: selected groups and the window, as rows of one workspace."""

from flashlatte.ops.index_combine.api import index_combine

__all__ = ["index_combine"]
