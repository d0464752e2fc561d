"""Whole engines: FlashLatte's, transformers' and vLLM's."""
