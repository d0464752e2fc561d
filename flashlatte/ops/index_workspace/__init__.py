"""The selection for DeepSeek-V4's prefill: selected groups and the window, as rows of a workspace."""

from flashlatte.ops.index_workspace.api import index_workspace

__all__ = ["index_workspace"]
