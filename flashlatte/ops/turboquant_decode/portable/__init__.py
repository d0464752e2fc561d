"""``turboquant_decode`` in Triton."""
