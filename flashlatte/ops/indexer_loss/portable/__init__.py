"""The indexer's loss and its gradients in Triton."""
