"""Sparse decode in Gluon for Hopper (SM90): docs/kernels/sparse-decode.md explains the schedule."""
