"""``flashlatte demo``: a small model in stock transformers and in FlashLatte's engine."""

from flashlatte.demo.demo import run_demo

__all__ = ["run_demo"]
