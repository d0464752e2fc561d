"""vLLM's own DeepSeek-V4, made with FlashLatte's attention where FlashLatte is named."""

from vllm.models.deepseek_v4 import DeepseekV4ForCausalLM, DeepseekV4ForConditionalGeneration

from flashlatte.integrations.vllm.backends import v4

__all__ = ["DeepseekV4ForCausalLM", "DeepseekV4ForConditionalGeneration"]

v4.install()
