"""What tests and benchmarks of FlashLatte's operations are made of, for users with kernels of their own too.

``cases`` draws inputs, ``oracles`` computes results in float64, ``byte_oracles`` writes and reads cache bytes in plain
Python, ``compare`` judges a result.
"""
