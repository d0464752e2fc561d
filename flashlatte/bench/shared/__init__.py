"""Several processes on one GPU call kernels in loops; each result must be bitwise equal to the first, correct one.

The GPU switches between processes, so a kernel may be preempted anywhere, and its CTAs progress unevenly.
"""
