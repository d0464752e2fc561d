"""A check when SGLang starts, because SGLang only logs the errors of a plugin's registration."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flashlatte.integrations import decode_precision

# Tokens of the pages that SGLang's backend flashmla reads.
_PAGE_SIZE = 64


def init_attention_backends(original: Callable[[Any], Any], self: Any) -> Any:
    """SGLang's own method of its model runner. Then check that ``FLASHLATTE_DECODE_PRECISION`` has an effect.

    A draft model may use another backend.

    Raises:
        ValueError: the variable has an unknown value, decode runs in another backend than flashmla, or the precision is
            not available for the cache, the model or the GPU.
    """
    result = original(self)
    if decode_precision.requested() is None or self.is_draft_worker:
        return result
    if self.decode_attention_backend_str != "flashmla":
        raise ValueError(
            decode_precision.needs_message(
                f"--attention-backend flashmla, got {self.decode_attention_backend_str} for decode"
            )
        )
    head_dim = self.model_config.kv_lora_rank + self.model_config.qk_rope_head_dim
    if reason := decode_precision.refusal(self.device, head_dim, self.dtype, self.kv_cache_dtype, _PAGE_SIZE):
        raise ValueError(reason)
    return result
