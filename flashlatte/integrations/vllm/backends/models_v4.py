"""vLLM's DeepSeek-V4, which uses FlashLatte's attention and group selection if the configuration selects FlashLatte."""

from vllm.models.deepseek_v4 import DeepseekV4ForCausalLM, DeepseekV4ForConditionalGeneration

from flashlatte.integrations.vllm.backends import v4, v4_indexer

__all__ = ["DeepseekV4ForCausalLM", "DeepseekV4ForConditionalGeneration"]

v4.install()
v4_indexer.install()
