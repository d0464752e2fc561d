"""What stands between DeepSeek-V4's layers: streams of hidden states are mixed into one, and its result into them."""

from flashlatte.ops.mhc.api import mhc_post, mhc_pre

__all__ = ["mhc_post", "mhc_pre"]
