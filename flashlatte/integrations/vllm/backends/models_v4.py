"""vLLM's own DeepSeek-V4, made with FlashLatte's attention and choice of groups where FlashLatte is named."""

from vllm.models.deepseek_v4 import DeepseekV4ForCausalLM, DeepseekV4ForConditionalGeneration

from flashlatte.integrations.vllm.backends import v4, v4_indexer

__all__ = ["DeepseekV4ForCausalLM", "DeepseekV4ForConditionalGeneration"]

v4.install()
v4_indexer.install()
