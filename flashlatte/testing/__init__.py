"""Test tools for FlashLatte's operations and for kernels of users.

``cases`` generates inputs, ``oracles`` computes results in float64, ``byte_oracles`` encodes and decodes cache bytes in
plain Python, ``compare`` checks a result.
"""
