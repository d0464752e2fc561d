"""Index logits in Gluon, for SM90: docs/kernels/index-logits.md explains the schedule."""
