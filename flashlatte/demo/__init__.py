"""``flashlatte demo``: a small DeepseekV3 in transformers, with stock attention and with FlashLatte's."""

from flashlatte.demo.demo import run_demo

__all__ = ["run_demo"]
