"""Paged attention of long requests in Gluon, for SM90: docs/kernels/paged-attention.md explains the schedule."""
