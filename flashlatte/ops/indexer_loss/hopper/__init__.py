"""The indexer's loss with its target computed in Gluon for Hopper (SM90): docs/kernels/indexer-loss.md."""

from flashlatte.ops.indexer_loss.hopper.launch import loss_and_gradients

__all__ = ["loss_and_gradients"]
