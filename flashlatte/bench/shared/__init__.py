"""Several processes on one GPU call kernels in loops: each call must give the first one's bits, and the reference's
values.

The GPU switches between processes, so a kernel is stopped and goes on at any place, and its CTAs drift apart.
"""
