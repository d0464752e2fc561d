"""FlashLatte inside vLLM."""
