"""The indexer's loss in Gluon for Hopper (SM90): docs/kernels/indexer-loss.md has the schedules."""

from flashlatte.ops.indexer_loss.hopper.launch import loss_and_gradients

__all__ = ["loss_and_gradients"]
