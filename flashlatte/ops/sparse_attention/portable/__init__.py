"""The backward pass of sparse attention in Triton."""
