"""Classes that vLLM loads by name. These modules import vLLM, and only vLLM imports them."""
