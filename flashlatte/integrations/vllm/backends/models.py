"""vLLM's models with an indexer, which use FlashLatte's indexer where FlashLatte is selected.

On CUDA these are the models of ``vllm.models.deepseek_v32``. vLLM's fused kernels apply norms and RoPE and write both
caches; FlashLatte reads their bytes unchanged.
"""

from vllm.models.deepseek_v32 import DeepseekV32ForCausalLM, GlmMoeDsaForCausalLM

from flashlatte.integrations.vllm.backends import indexer

__all__ = ["DeepseekV32ForCausalLM", "GlmMoeDsaForCausalLM"]

indexer.install()
