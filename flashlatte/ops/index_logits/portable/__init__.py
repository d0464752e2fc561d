"""Index logits in Triton."""
