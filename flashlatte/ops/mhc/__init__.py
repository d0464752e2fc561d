"""DeepSeek-V4's hyper-connections: mix the streams of hidden states to a layer's input, and its result into the
streams."""

from flashlatte.ops.mhc.api import mhc_post, mhc_pre

__all__ = ["mhc_post", "mhc_pre"]
