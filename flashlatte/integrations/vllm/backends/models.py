"""vLLM's own models with an indexer, made with FlashLatte's where FlashLatte is named.

On CUDA they are ``vllm.models.deepseek_v32``: its layers norm, rotate and write both caches in fused kernels of vLLM's,
whose bytes FlashLatte reads as they are.
"""

from vllm.models.deepseek_v32 import DeepseekV32ForCausalLM, GlmMoeDsaForCausalLM

from flashlatte.integrations.vllm.backends import indexer

__all__ = ["DeepseekV32ForCausalLM", "GlmMoeDsaForCausalLM"]

indexer.install()
