"""Whole engines: FlashLatte's, transformers', vLLM's and SGLang's."""
