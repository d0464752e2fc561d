"""``flashlatte demo``: a small model by stock transformers and by FlashLatte's engine."""

from flashlatte.demo.demo import run_demo

__all__ = ["run_demo"]
