"""The k largest entries of each row."""

from flashlatte.ops.topk.api import topk

__all__ = ["topk"]
