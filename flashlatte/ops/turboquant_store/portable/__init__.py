"""``turboquant_store`` in Triton."""

from flashlatte.ops.turboquant_store.portable.launch import turboquant_store

__all__ = ["turboquant_store"]
