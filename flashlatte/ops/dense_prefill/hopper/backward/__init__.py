"""Backward of dense prefill in Gluon for Hopper (SM90): docs/kernels/dense-prefill-backward.md has the schedule."""
