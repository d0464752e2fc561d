"""``turboquant_store`` in Triton."""
