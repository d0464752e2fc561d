"""Sparse decode in Triton."""
