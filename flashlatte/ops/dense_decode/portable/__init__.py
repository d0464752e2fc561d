"""Dense decode in Triton."""
