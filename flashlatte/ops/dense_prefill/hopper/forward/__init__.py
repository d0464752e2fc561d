"""Forward of variable-length attention in Gluon, for SM90: docs/kernels/dense-prefill.md explains the schedule."""
