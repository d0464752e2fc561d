"""``compress`` in Triton."""
