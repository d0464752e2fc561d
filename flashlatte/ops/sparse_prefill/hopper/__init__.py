"""Sparse prefill in Gluon for Hopper (SM90): docs/kernels/sparse-prefill.md explains the schedule."""
