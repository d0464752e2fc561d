"""The indexer's loss and its gradients in Triton."""

from flashlatte.ops.indexer_loss.portable.launch import loss_and_gradients

__all__ = ["loss_and_gradients"]
