"""What DeepSeek-V4's prefill attends to: selected groups and the window, as rows of one workspace."""

from flashlatte.ops.index_workspace.api import index_workspace

__all__ = ["index_workspace"]
