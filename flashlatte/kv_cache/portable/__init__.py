"""``write`` and ``gather`` in Triton: any GPU that Triton serves, and the CPU through Triton's interpreter."""

from flashlatte.kv_cache.portable.gather import gather
from flashlatte.kv_cache.portable.write import write

__all__ = ["gather", "write"]
